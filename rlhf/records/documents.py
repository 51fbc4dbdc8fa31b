"""JSON documents of runs and exports; errors name the file and the key."""

from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from types import UnionType
from typing import Any, Self, final

from rlhf.errors import InputError
from rlhf.records.jsonl import BadLineError, parse_line

MAX_BYTES = 200_000_000
REMEDY = "Restore the file from a copy, or make it again with the command that wrote it."
Kinds = Mapping[str, type | UnionType]
STAGE_KINDS: Kinds = {
    "stage": str,
    "status": str,
    "inputs": dict,
    "error": str | None,
    "started_at": str | None,
    "finished_at": str | None,
    "versions": dict,
    "hardware": dict,
    "seed": int | None,
}


@final
class Document(dict[str, Any]):
    """An object of a document, for which a missing key is an InputError that names the file."""

    location = "A document"

    @classmethod
    def of(cls, content: Mapping[str, Any], location: str) -> Self:
        """A JSON object, and all objects in it, as documents; `location` is for errors."""
        document = cls({key: cls._within(value, location) for key, value in content.items()})
        document.location = location
        return document

    @classmethod
    def _within(cls, value: Any, location: str) -> Any:
        if isinstance(value, list):
            return [cls._within(item, location) for item in value]
        return cls.of(value, location) if isinstance(value, dict) else value

    def __missing__(self, key: str) -> Any:
        """Raise an InputError that names the file and the missing key."""
        raise InputError(f"{self.location} has no {key!r}", REMEDY)


def read_document(path: Path, kinds: Kinds | None = None) -> Document:
    """Read a file that holds one JSON object.

    `kinds` are the types of values that may be absent, by key.

    Raises:
        InputError: the file cannot be read, is not a JSON object, or has values of other types.
    """
    try:
        if path.stat().st_size > MAX_BYTES:
            raise ValueError(f"more than {MAX_BYTES:,} bytes")
        value = parse_line(path.read_text(encoding="utf-8"), str(path))
    except BadLineError as error:
        raise InputError(error.problem, REMEDY) from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise InputError(f"{path} cannot be read ({reason})", REMEDY) from None
    require_kinds(value, kinds or {}, str(path))
    return Document.of(value, str(path))


def read_stage_document(path: Path) -> Document:
    """Read the stage.json of a run.

    Raises:
        InputError: it cannot be read, or its values have other types than a stage writes.
    """
    content = read_document(path, STAGE_KINDS)
    for name in ("started_at", "finished_at"):
        _require_date(content.get(name), str(path))
    for name, value in content.get("inputs", {}).items():
        location = f"{path} (input {name[:80]})"
        require_kinds({name: value}, {name: dict}, location)
        require_kinds(value, {"path": str, "hash": str}, location)
    return content


def require_kinds(value: Mapping[str, Any], kinds: Kinds, location: str) -> None:
    """Refuse an object with values of other types; keys may be absent.

    Raises:
        InputError: names the location, the key and the value.
    """
    for key, kind in kinds.items():
        if key in value and not isinstance(value[key], kind):
            expected = getattr(kind, "__name__", str(kind))
            raise InputError(
                f"{location} has {key!r} as {str(value[key])[:80]!r}, not as {expected}", REMEDY
            )


def _require_date(text: str | None, location: str) -> None:
    """Refuse text that is not a date with a time zone."""
    try:
        valid = text is None or datetime.fromisoformat(text).tzinfo is not None
    except ValueError:
        valid = False
    if not valid:
        raise InputError(f"{location} has {str(text)[:80]!r} in place of a date", REMEDY)
