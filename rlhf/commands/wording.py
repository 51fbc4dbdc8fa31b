"""Small pieces of the sentences that commands end with."""

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def counted(number: int, noun: str) -> str:
    """A number with its noun: 1 → "1 prompt", 2301 → "2,301 prompts"."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def listed(parts: list[str]) -> str:
    """Parts in one phrase: "a", "a and b", "a, b and c"."""
    return " and ".join([", ".join(parts[:-1]), parts[-1]] if parts[1:] else parts)


def command_line(name: str, **flags: str | Path) -> str:
    """A command to type, with values quoted for the shell."""
    words = [f"--{flag.replace('_', '-')} {shlex.quote(str(v))}" for flag, v in flags.items()]
    return " ".join(["rlhf", name, *words])


def next_command(name: str, **flags: str | Path) -> str:
    """The line that says what to type next."""
    return f"Next: {command_line(name, **flags)}"


def described_kl(kl: Mapping[str, Any]) -> str:
    """A KL divergence with its standard error, and whether it can be told from 0."""
    error = kl["standard_error"]
    words = f"{kl['nats']:z.2f} nats per response"
    if error is None:
        return f"{words}, of {kl['sequences']} responses"
    unclear = ", which cannot be told from 0" * (abs(kl["nats"]) < 2 * error)
    return f"{words} ± {error:.2f} (standard error, {kl['sequences']} responses){unclear}"


def columns(rows: Mapping[str, object]) -> str:
    """Names and values, one pair a line, the values below each other."""
    width = max(map(len, rows), default=0)
    return "\n".join(f"{name:{width}}  {value}" for name, value in rows.items())
