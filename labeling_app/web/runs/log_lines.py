"""The newest lines that a loop has said, for people without a shell."""

import re
from pathlib import Path

MAX_BYTES = 12_000
MAX_LINES = 24
# A sentence that ends with a command to type: "Next: rlhf …". Not what runs: "Round 0: rlhf …".
_HINT = re.compile(r"(?:^|(?<=\. ))(?!Round \d+:)[^.:]*: rlhf .*$")
_LOOP_AGAIN = "the command of the loop again"


def newest_lines(file: Path) -> list[str]:
    """The last lines of a log without the hints for a shell; empty if there is no log."""
    if not file.is_file():
        return []
    with file.open("rb") as stream:
        size = stream.seek(0, 2)
        stream.seek(max(0, size - MAX_BYTES))
        text = stream.read().decode("utf-8", errors="replace")
    lines = text.splitlines()[1 if size > MAX_BYTES else 0 :]
    stripped = [_HINT.sub("", line).rstrip() for line in lines if _LOOP_AGAIN not in line]
    return [line for line in stripped if line][-MAX_LINES:]
