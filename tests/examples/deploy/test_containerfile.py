"""The Containerfile: all that it copies is there, what it runs exists, and its steps work."""

import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest

from rlhf.cli import COMMANDS, main
from rlhf.commands.labels import label
from tests.examples.deploy.conftest import PACKAGES, SOURCES
from tests.examples.deploy.containerfile import Builder, Stage, parse, split_copy
from tests.servers.commands import REPOSITORY

FILE = REPOSITORY / "examples" / "deploy" / "Containerfile"
UNSHARED = ["unshare", "--mount", "--net", "ip", "link", "set", "lo", "up"]
SERVE = """
set -e
echo '{"prompt": "How was the trip?", "responses": ["Fine.", "Bad."]}' >pairs.jsonl
rlhf import pairs.jsonl --db /data/labels.db
rlhf users add ann --role lead --db /data/labels.db
rlhf COMMAND >log 2>&1 &
trap "kill $!" EXIT
for second in $(seq 180); do
    if HEALTH 2>/dev/null; then echo "HEALTHY as $(id -un)"; ls -l /data; exit 0; fi
    sleep 1
done
cat log
exit 1
"""


@pytest.fixture(scope="module")
def stages() -> list[Stage]:
    return parse(FILE)


def test_it_copies_what_is_there_and_all_that_a_wheel_needs(stages: list[Stage]) -> None:
    names = {stage.name for stage in stages}
    copied = set()
    for stage in stages:
        for origin, sources, _ in map(split_copy, stage.all("COPY")):
            assert not origin or origin in names
            if not origin:
                missing = [one for one in sources if not (REPOSITORY / one).exists()]
                assert not missing
                copied |= set(sources)
    assert copied == {*PACKAGES, *SOURCES, "constraints.txt"}


def test_it_runs_a_command_that_there_is_on_the_port_that_it_names(
    stages: list[Stage], capsys: pytest.CaptureFixture[str]
) -> None:
    last = stages[-1]
    assert last.words("ENTRYPOINT") == ["rlhf"]
    command = last.words("CMD")
    assert command[0] in COMMANDS
    assert main([*command, "--dry-run"]) == 0
    assert "host: 0.0.0.0" in capsys.readouterr().out
    assert last.all("EXPOSE") == [str(label.Settings(db=Path("d")).port)]
    assert f"127.0.0.1:{last.all('EXPOSE')[0]}/healthz" in last.health[-1]
    compile(last.health[-1], "HEALTHCHECK", "exec")


def test_it_writes_as_a_user_of_its_own_into_the_volume(stages: list[Stage]) -> None:
    last = stages[-1]
    [user], [volume] = last.all("USER"), last.all("VOLUME")
    made = " ".join(last.all("RUN"))
    assert re.search(rf"useradd .*--uid [1-9]\d* .*\b{user}\b", made)
    assert f"--owner {user}" in made
    command = last.words("CMD")
    assert Path(command[command.index("--db") + 1]).parent == Path(volume)
    assert last.all("WORKDIR") == [volume]
    kinds = [kind for kind, _ in last.steps]
    assert kinds.index("USER") > max(n for n, kind in enumerate(kinds) if kind == "RUN")


def test_its_readme_names_it_and_gives_commands_that_there_are() -> None:
    text = (FILE.parent / "README.md").read_text(encoding="utf-8")
    [build] = re.findall(r"^    podman build (.+)$", text, re.MULTILINE)
    assert f"--file {FILE.relative_to(REPOSITORY)}" in build
    assert f"podman build {build}" in FILE.read_text(encoding="utf-8")
    runs = [shlex.split(one) for one in re.findall(r"^    podman run (.+)$", text, re.MULTILINE)]
    assert len(runs) == 4
    for words in runs:
        inside = words[words.index("rlhf") + 1 :]
        assert not inside or main([*inside, "--dry-run"]) == 0
        assert f"rlhf:{parse(FILE)[-1].all('VOLUME')[0]}" in words


@pytest.mark.slow
def test_its_steps_build_a_root_that_serves(stages: list[Stage], tmp_path: Path) -> None:
    if os.geteuid() or subprocess.run(UNSHARED, capture_output=True, check=False).returncode:
        pytest.skip("needs root and `ip`, to mount folders and have a network of its own")
    builder = Builder(tmp_path, REPOSITORY)
    root = builder.build(stages)
    last = stages[-1]
    [path] = last.all("ENV")
    variables = {"PATH": f"{path.removeprefix('PATH=')}:{builder.python}/bin"}
    where = "import rlhf, torch; print(rlhf.__file__, torch.__version__)"
    shown = builder.run(root, f"python -c {shlex.quote(where)}", variables, "/data", "rlhf")
    assert shown.startswith("/opt/rlhf/lib/")
    assert builder.run(root, "rlhf --version", variables, "/data", "rlhf")
    script = SERVE.replace("COMMAND", shlex.join(last.words("CMD")))
    script = script.replace("HEALTH", shlex.join(last.health), 1)
    shown = builder.run(root, script, variables, last.all("WORKDIR")[0], last.all("USER")[0])
    assert "HEALTHY as rlhf" in shown
    assert re.search(r"^-rw\S+ 1 rlhf rlhf .*labels\.db$", shown, re.MULTILINE)
    with pytest.raises(AssertionError, match="Permission denied"):
        builder.run(root, "touch /opt/rlhf/one", variables, "/data", "rlhf")
