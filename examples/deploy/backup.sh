#!/usr/bin/env bash
# backup.sh DATABASE FOLDER: one more checked copy of the label database; the oldest ones go.
# KEEP (48): how many copies stay. RLHF: the command.
set -euo pipefail
database=$1 folder=$2
copy="$folder/labels-$(date -u +%Y%m%dT%H%M%SZ).db"
"${RLHF:-/opt/rlhf/current/bin/rlhf}" backup --db "$database" --out "$copy"
mapfile -t old < <(ls -1 "$folder"/labels-*.db | head -n "-${KEEP:-48}")
if ((${#old[@]})); then rm -- "${old[@]}"; fi
