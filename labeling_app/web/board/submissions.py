"""Checks what a browser sends, field by field.

A field that is missing, of the wrong type or too large is an `InputError` with a message for the
annotator. Messages contain no ids of responses or tasks.
"""

from collections.abc import Collection
from typing import Any

from labeling_app.db.queue import Submission
from labeling_app.rankings.flags import OF_RANKINGS
from rlhf.errors import InputError

MAX_ID = 64
MAX_NOTE_CHARACTERS = 10_000
MAX_REASON = 200
MAX_RUBRIC = 16
MAX_DURATION_MS = 7 * 24 * 3600 * 1000  # a page may stay open for weeks
STRENGTHS = range(4)
SHOWN_CHARACTERS = 60

Payload = dict[str, Any]


def read_submission(payload: Payload, task_id: int, offered: Collection[str]) -> Submission:
    """A ranking.

    Args:
        payload: what the browser sent.
        task_id: the task that it names.
        offered: the flags a response can get.

    Raises:
        InputError: a field cannot be used.
    """
    return Submission(
        id=read_id(payload),
        task_id=task_id,
        tiers=tuple(tuple(_whole_numbers(tier, "tiers")) for tier in _list(payload, "tiers")),
        strengths=_strengths(payload),
        flags=_flags(_list(payload, "flags", []), OF_RANKINGS),
        response_flags=_response_flags(payload, offered),
        note=read_text(payload, "note", MAX_NOTE_CHARACTERS),
        duration_ms=min(MAX_DURATION_MS, max(0, read_whole_number(payload, "duration_ms", 0))),
        rubric=read_text(payload, "rubric", MAX_RUBRIC),
    )


def read_id(payload: Payload) -> str:
    """The browser's own id of a submission; a repeated submission has the same id.

    Raises:
        InputError: it is empty or too long.
    """
    value = read_text(payload, "id", MAX_ID)
    if not value.strip():
        raise InputError("The id is empty", "Reload the page.")
    return value


def read_text(payload: Payload, name: str, limit: int) -> str:
    """A text field; "" if it is missing.

    Raises:
        InputError: it is not text, or longer than `limit` characters.
    """
    value = payload.get(name, "")
    if not isinstance(value, str) or len(value) > limit:
        raise InputError(f"The {name} must be text of at most {limit} characters", "Shorten it.")
    return value


def read_ticket(payload: Payload) -> str:
    """The ticket of a task (pages loaded before an upgrade send `task_id`).

    Pages opened before tasks had tickets send a number.

    Raises:
        InputError: it is missing, or neither text nor a whole number.
    """
    value = payload.get("ticket", payload.get("task_id"))
    if not isinstance(value, str | int) or isinstance(value, bool):
        raise _malformed("ticket")
    return str(value)


def read_state(payload: Payload) -> Payload:
    """A draft; empty if there is none.

    Raises:
        InputError: it is not a JSON object.
    """
    state = payload.get("state") or {}
    if not isinstance(state, dict):
        raise _malformed("state")
    return state


def read_whole_number(payload: Payload, name: str, default: int | None = None) -> int:
    """A field that is a whole number.

    Raises:
        InputError: it is missing and has no default, or is something else.
    """
    [number] = _whole_numbers([payload.get(name, default)], name)
    return number


def _whole_numbers(values: Any, name: str) -> list[int]:
    if not isinstance(values, list):
        raise _malformed(name)
    for value in values:
        if not isinstance(value, int) or isinstance(value, bool):
            raise _malformed(name)
    return values


def _list(payload: Payload, name: str, default: list[Any] | None = None) -> list[Any]:
    value = payload.get(name, default)
    if not isinstance(value, list):
        raise _malformed(name)
    return value


def _strengths(payload: Payload) -> tuple[int, ...]:
    strengths = _whole_numbers(payload.get("strengths", []), "strengths")
    unknown = [strength for strength in strengths if strength not in STRENGTHS]
    if unknown:
        raise InputError(f"Unknown strength {_shown(unknown[0])}", "Reload the page.")
    return tuple(strengths)


def _flags(values: list[Any], allowed: Collection[str]) -> tuple[str, ...]:
    """Each flag once, all of them allowed."""
    for value in values:
        if not isinstance(value, str) or value not in allowed:
            raise InputError(
                f"{_shown(value)} is not a flag here",
                f"Use {', '.join(allowed) or 'none'}, or reload the page.",
            )
    return tuple(dict.fromkeys(values))


def _response_flags(payload: Payload, offered: Collection[str]) -> tuple[tuple[int, str], ...]:
    flags: dict[tuple[int, str], None] = {}
    for pair in _list(payload, "response_flags", []):
        if not isinstance(pair, list) or len(pair) != 2:
            raise _malformed("response_flags")
        [position] = _whole_numbers(pair[:1], "response_flags")
        [flag] = _flags(pair[1:], offered)
        flags[position, flag] = None
    return tuple(flags)


def _malformed(name: str) -> InputError:
    return InputError(f"The request is malformed: its {name} cannot be used", "Reload the page.")


def _shown(value: Any) -> str:
    return f"{value!r:.{SHOWN_CHARACTERS}}"
