"""Checks on the fields of a line: no misspelled keys, and not too many fields or values."""

from difflib import get_close_matches
from functools import lru_cache

from rlhf.errors import InputError
from rlhf.records.schema import JsonObject

MAX_FIELDS = 200
MAX_VALUES = 10_000  # all pairs of 140 responses
NEARLY = 0.85  # one letter of a short word, two of a long one
KEYS = (
    *("prompt", "messages", "responses", "models", "tiers", "strengths", "scores", "pairs"),
    *("split", "source", "annotator", "kind", "purpose", "explanation", "chosen", "rejected"),
    "thumbs",
)


def require_bounded(value: JsonObject) -> None:
    """Check that a line has few enough fields and values to be read quickly.

    Raises:
        InputError: it has more.
    """
    if len(value) > MAX_FIELDS:
        raise InputError(
            f"The line has {len(value):,} fields", f"Keep at most {MAX_FIELDS} of them."
        )
    for name, found in value.items():
        if isinstance(found, list | dict) and len(found) > MAX_VALUES:
            raise InputError(
                f"{name:.80} holds {len(found):,} values",
                f"Spread them over several lines, at most {MAX_VALUES:,} on each.",
            )


def refuse_misspelled(value: JsonObject) -> None:
    """Check that no key is nearly one of ours: it would be ignored without notice.

    Other people's files have columns in the singular, such as `model`: those are left out.

    Raises:
        InputError: there is such a key.
    """
    absent = tuple(key for key in KEYS if key not in value)
    for key in sorted(set(value) - set(KEYS)):
        meant = _nearest(key, absent)
        if meant and meant != f"{key}s":
            raise InputError(f"Unknown key {key!r}", f"Did you mean {meant!r}? Rename it.")


@lru_cache(maxsize=1024)  # the rows of a table have the same columns
def _nearest(key: str, absent: tuple[str, ...]) -> str:
    return next(iter(get_close_matches(key, absent, n=1, cutoff=NEARLY)), "")
