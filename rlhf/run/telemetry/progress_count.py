"""What a running command counts, such as steps or answers: how many are done, and the time left."""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rlhf.errors import InputError
from rlhf.records.documents import REMEDY, Kinds, require_kinds
from rlhf.records.schema import is_finite_number

MOST = 10**15
KINDS: Kinds = {"title": str, "done": int, "total": int, "is_stage": bool}


@dataclass(frozen=True, kw_only=True)
class ProgressCount:
    """Something that a command counts while it does it.

    Args:
        title: what is done.
        done: how many are done, from 0 to `total`.
        total: how many there are.
        seconds_left: as estimated at `at`; None before there is a measure.
        at: when it was counted, in seconds since 1970.
        is_stage: whether the command does little else, so that its time left is the command's.
    """

    title: str
    done: int
    total: int
    seconds_left: float | None
    at: float
    is_stage: bool

    @classmethod
    def of(cls, content: Mapping[str, Any], location: str) -> "ProgressCount":
        """Read the count in a heartbeat.

        Raises:
            InputError: names the location, and a value that cannot be.
        """
        require_kinds(content, KINDS, location)
        numbers = {name: content[name] for name in ("done", "total", "seconds_left", "at")}
        for name, value in numbers.items():
            if not (is_finite_number(value) or (name == "seconds_left" and value is None)):
                raise InputError(f"{location} has {name!r} as {str(value)[:80]!r}", REMEDY)
        if not 0 <= numbers["done"] <= numbers["total"] <= MOST:
            counted = f"{numbers['done']} of {numbers['total']}"
            raise InputError(f"{location} counts {counted[:80]}", REMEDY)
        return cls(title=content["title"], is_stage=content["is_stage"], **numbers)

    @property
    def share(self) -> float:
        """The part that is done, from 0 to 1."""
        return self.done / self.total if self.total else 1.0

    def left(self) -> float | None:
        """Estimate of the seconds that are left now; None without a measure, or if it is used up.

        The estimate was made when the last one was done, and the time since then has passed.
        """
        if self.seconds_left is None:
            return None
        left = self.seconds_left - max(0.0, time.time() - self.at)
        return left if left > 0 else None


def duration(seconds: float | None) -> str:
    """A duration in words: 40 s, 12 min, 3 h 20 min; empty for None."""
    if seconds is None:
        return ""
    if seconds < 90:
        return f"{seconds:.0f} s"
    hours, minutes = divmod(round(seconds / 60), 60)
    return f"{hours} h {minutes:02} min" if hours else f"{minutes} min"
