#!/usr/bin/env bash
# upgrade.sh WHEEL: install a new version beside the old one, back up, switch, and check.
# The app brings the database to its schema when it starts. If it does not answer within WAIT
# seconds, the old version and the database as it was are put back, and the exit code is 1.
set -euo pipefail
wheel=$(realpath "$1")
root=${ROOT:-/opt/rlhf} database=${DB:-/var/lib/rlhf/labels.db} backups=${BACKUPS:-/var/backups/rlhf}
service=${SERVICE:-rlhf-label} url=${URL:-http://127.0.0.1:7860/healthz} wait=${WAIT:-60}
stamp=$(date -u +%Y%m%dT%H%M%SZ)
new="$root/$(basename "$wheel" .whl)-$stamp"
copy="$backups/before-$stamp.db"
old=$(readlink "$root/current")

switch_to() { # in one step: there is always a version at `current`
    ln -sfn "$1" "$root/current.new"
    mv -T "$root/current.new" "$root/current"
}

answers() {
    local end=$((SECONDS + wait))
    while ((SECONDS < end)); do
        if curl --silent --fail --max-time 5 --output /dev/null "$url"; then return 0; fi
        sleep 1
    done
    return 1
}

roll_back() {
    echo "The new version does not answer at $url: back to $old" >&2
    systemctl stop "$service" || true
    switch_to "$old"
    for part in "" -wal -shm; do # what was stored meanwhile is kept aside
        if [ -e "$database$part" ]; then cp -p "$database$part" "$database.failed-$stamp$part"; fi
    done
    rm -f "$database-wal" "$database-shm"
    cp "$copy" "$database" # into the same file: its owner and mode stay
    systemctl start "$service"
    answers || echo "The old version does not answer either: see journalctl -u $service" >&2
    exit 1
}

as_owner() { # of the database, or files beside it would belong to root
    if [ "$(id -u)" = 0 ]; then runuser -u "$(stat -c %U "$database")" -- "$@"; else "$@"; fi
}

command -v curl >/dev/null || {
    echo "upgrade.sh needs curl, to see whether the app answers: apt-get install curl" >&2
    exit 1
}
python3 -m venv "$new"
"$new/bin/python" -m pip install --quiet "$wheel"
"$new/bin/rlhf" --version

systemctl stop "$service"
as_owner "$root/current/bin/rlhf" backup --db "$database" --out "$copy" || {
    systemctl start "$service"
    echo "There is no backup, so nothing was changed." >&2
    exit 1
}
switch_to "$new"
systemctl start "$service" || roll_back
answers || roll_back
echo "$(basename "$new") answers. To go back: systemctl stop $service; ln -sfn $old $root/current;" \
    "rm -f $database-wal $database-shm; cp $copy $database; systemctl start $service"
