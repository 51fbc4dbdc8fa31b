"""Small pieces of the sentences that commands end with."""

import shlex
from collections.abc import Mapping
from pathlib import Path


def counted(number: int, noun: str) -> str:
    """A number with its noun: 1 → "1 prompt", 2301 → "2,301 prompts"."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def listed(parts: list[str]) -> str:
    """Parts in one phrase: "a", "a and b", "a, b and c"."""
    return " and ".join([", ".join(parts[:-1]), parts[-1]] if parts[1:] else parts)


def next_command(name: str, **flags: str | Path) -> str:
    """What to type next, with values quoted for the shell."""
    words = [f"--{flag.replace('_', '-')} {shlex.quote(str(v))}" for flag, v in flags.items()]
    return " ".join(["Next: rlhf", name, *words])


def columns(rows: Mapping[str, object]) -> str:
    """Names and values, one pair a line, the values below each other."""
    width = max(map(len, rows), default=0)
    return "\n".join(f"{name:{width}}  {value}" for name, value in rows.items())
