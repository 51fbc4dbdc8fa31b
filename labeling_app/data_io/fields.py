"""The fields of a line: none misspelled, not too many, and those that are not read are counted."""

from collections.abc import Collection, Mapping
from difflib import get_close_matches
from functools import lru_cache
from typing import Any

from rlhf.errors import InputError
from rlhf.records.schema import JsonObject
from rlhf.records.wording import counted

MAX_FIELDS = 200
MAX_VALUES = 10_000  # all pairs of 140 responses
NEARLY = 0.85  # one letter of a short word, two of a long one
KEYS = (
    *("prompt", "messages", "responses", "models", "tiers", "strengths", "scores", "pairs"),
    *("split", "source", "annotator", "kind", "purpose", "explanation", "chosen", "rejected"),
    "thumbs",
)

_OF_ALL = frozenset(
    ("prompt", "messages", "split", "source", "annotator", "kind", "purpose", "explanation")
)
# What each format reads.
OF_OUR_LINES = _OF_ALL | {
    *("responses", "models", "tiers", "strengths", "scores", "pairs"),
    *("thumbs", "response", "completion", "label"),
}
OF_PREFERENCES = _OF_ALL - {"messages"} | {
    *("chosen", "rejected", "chosen_model", "rejected_model", "margin", "thumbs"),
}
OF_ULTRAFEEDBACK = _OF_ALL - {"prompt", "messages"} | {"instruction", "completions", "thumbs"}
SHOWN_NAMES = 8
MAX_NAMES = 200  # that are counted: every line of a hostile file could have others


def ignored_fields(value: JsonObject, read: Collection[str]) -> tuple[str, ...]:
    """The fields of a line that hold something and are not read, in alphabetical order.

    Args:
        value: the line; a table has every column in every row, with None where there is nothing.
        read: the fields that its format reads.
    """
    return tuple(sorted(key for key in value if key not in read and value[key] is not None))


def ignored_in_words(counts: Mapping[str, int]) -> str:
    """One sentence, or "": "Fields that were not read: lang (3 lines), topic (1 line)."."""
    return f"Fields that were not read: {_in_words(counts, 'line')}." if counts else ""


def read_in_words(report: Mapping[str, Any]) -> str:
    """The fields and judgments that were read of another tool's records; "" for other files.

    Example: "Fields that were read: prompt (3 lines), response_1 (3 lines), response_2 (3 lines).
    Judgments: preference (3 lines), by argilla-u1 (3 judgments). Drafts, discarded and skipped
    answers left out: 2."

    Args:
        report: the fields of a `Report`.
    """
    if not report["read_fields"]:
        return ""
    sentences = [f"Fields that were read: {_in_words(report['read_fields'], 'line')}."]
    annotators = _in_words(report["judgments_by"], "judgment")
    questions = _in_words(report["questions"], "line")
    sentences.append(
        f"Judgments: {questions}, by {annotators}." if annotators else "Nobody has judged them."
    )
    if report["unfinished"]:
        unfinished = report["unfinished"]
        sentences.append(f"Drafts, discarded and skipped answers left out: {unfinished:,}.")
    return " ".join(sentences)


def unnamed_in_words(number: int, remedy: str) -> str:
    """How many rankings without an annotator are there already, and what to add if they are new."""
    were = "was" if number == 1 else "were"
    return (
        f"{counted(number, 'ranking')} of an unnamed person {were} there already. If somebody else "
        f"made these, add {remedy}."
    )


def _in_words(counts: Mapping[str, int], noun: str) -> str:
    """The names with the largest counts: "lang (3 lines), topic (1 line)"."""
    ordered = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    shown = [f"{_on_screen(name)} ({counted(n, noun)})" for name, n in ordered[:SHOWN_NAMES]]
    more = len(ordered) - len(shown)
    return f"{', '.join(shown)} and {more} more" if more else ", ".join(shown)


def _on_screen(name: str) -> str:
    """A name out of a file, without characters that control a terminal."""
    return "".join(character if character.isprintable() else "?" for character in name[:40])


def require_bounded(value: JsonObject) -> None:
    """Check that a line has few enough fields and values to be read quickly.

    Raises:
        InputError: it has more.
    """
    if len(value) > MAX_FIELDS:
        raise InputError(
            f"The line has {len(value):,} fields", f"Keep at most {MAX_FIELDS} of them."
        )
    for name, content in value.items():
        if isinstance(content, list | dict) and len(content) > MAX_VALUES:
            raise InputError(
                f"{name:.80} holds {len(content):,} values",
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
        if meant and meant != f"{key.lower()}s":
            raise InputError(f"Unknown key {key!r}", f"Did you mean {meant!r}? Rename it.")


@lru_cache(maxsize=1024)  # the rows of a table have the same columns
def _nearest(key: str, absent: tuple[str, ...]) -> str:
    """The key that is meant, if one is near: other capitals, swapped letters or a letter or two."""
    low = key.lower()
    same_letters = [candidate for candidate in absent if sorted(candidate) == sorted(low)]
    return next(iter(same_letters or get_close_matches(low, absent, n=1, cutoff=NEARLY)), "")
