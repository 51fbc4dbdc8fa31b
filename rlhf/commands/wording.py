"""Small pieces of the sentences that commands end with."""

import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rlhf.planning.price import cost_in_words
from rlhf.records.wording import counted
from rlhf.run.intervals import in_words

CHANCE = 0.5


def listed(parts: list[str]) -> str:
    """Parts in one phrase: "a", "a and b", "a, b and c"."""
    return " and ".join([", ".join(parts[:-1]), parts[-1]] if parts[1:] else parts)


def command_line(name: str, **flags: str | Path) -> str:
    """A command to type, with values quoted for the shell."""
    options = [f"--{flag.replace('_', '-')} {shlex.quote(str(v))}" for flag, v in flags.items()]
    return " ".join(["rlhf", name, *options])


def next_command(name: str, **flags: str | Path) -> str:
    """The line that says what to type next."""
    return f"Next: {command_line(name, **flags)}"


def judge_name(judge: Mapping[str, str]) -> str:
    """A judge of an evaluation, by its kind and name: "signal my.module:score"."""
    return f"{judge['kind']} {judge['name']}".strip()


def described_kl(kl: Mapping[str, Any]) -> str:
    """A KL divergence with its standard error, and whether it can be told from 0."""
    error = kl["standard_error"]
    divergence = f"{kl['nats']:z.2f} nats per response"
    if error is None:
        return f"{divergence}, of {counted(kl['sequences'], 'response')}"
    unclear = ", which cannot be told from 0" if abs(kl["nats"]) < 2 * error else ""
    return f"{divergence} ± {error:.2f} (standard error, {kl['sequences']} responses){unclear}"


def columns(rows: Mapping[str, object]) -> str:
    """Names and values, one pair a line, the values below each other."""
    width = max(map(len, rows), default=0)
    return "\n".join(f"{name:{width}}  {value}" for name, value in rows.items())


def doubt(accuracy: Mapping[str, Any]) -> str:
    """A sentence where an accuracy is not proven better than chance, else nothing."""
    low = accuracy["value"] if accuracy["low"] is None else accuracy["low"]
    warning = " That is not proven better than chance: read the report before you go on."
    return warning if low <= CHANCE else ""


def accuracy_of_longer(
    accuracy: Mapping[str, Any] | None, longer: Mapping[str, Any] | None
) -> Iterator[str]:
    """How accurate choosing the longer response would be, and whether the model is no better."""
    if not longer:
        return
    no_better = accuracy is not None and accuracy["value"] <= longer["value"]
    verdict = " The model is not better." if no_better else ""
    yield f"Accuracy of choosing the longer response: {in_words(longer)}.{verdict}"


def cost_sentence(cost: Mapping[str, Any] | None) -> Iterator[str]:
    """A sentence on the cost, where a price or annotators' hours are known."""
    if not cost or "device_hours" not in cost:
        return
    if cost["price"] is not None or cost["annotator_hours"]:
        yield cost_in_words(cost)


def advice_on_speed(report: Mapping[str, Any]) -> list[str]:
    """The sentence of a report that says why little of the device was used, if it has one."""
    advice = (report.get("use") or {}).get("advice")
    return [advice[0].upper() + advice[1:]] if advice else []
