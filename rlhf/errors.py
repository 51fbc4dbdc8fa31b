"""Errors with a message for the user.

    RlhfError
    ├── InputError        exit 2   the user's input is wrong
    │   ├── UnusableContentError   a valid record with nothing to judge
    │   ├── MisreadError           a record shows that its whole file is read wrongly
    │   ├── ConfigError            a setting is out of range or unknown
    │   └── MismatchError          processes of a group differ
    ├── LostPeerError     exit 1   another process of the group has ended, and says why
    ├── GuardError        exit 3   a guard stopped the run: NaN, broken invariant, KL ceiling
    └── InterruptedRunError  exit 75  stopped, resumable
        └── KilledGroupError          a process of a group was killed

Every message says what is wrong, the value, and what to type next. `rlhf.cli` prints it and sets
the exit code. Servers turn these errors into responses, and readers of files add the file and line.
Any other exception is a bug: exit code 1 and a traceback.
"""

from collections.abc import Iterable
from difflib import get_close_matches
from typing import Any


class RlhfError(Exception):
    """A failure with a message for the user.

    Args:
        problem: what is wrong, with the value.
        remedy: what to type or change next.
    """

    exit_code = 1

    def __init__(self, problem: str, remedy: str) -> None:
        super().__init__(f"{problem}\n  {remedy}")
        self.problem = problem
        self.remedy = remedy

    def __reduce__(self) -> tuple[Any, ...]:
        """Pass to another process: `args` holds the message, not what `__init__` takes."""
        return _made_of, (type(self), *self.args), self.__dict__


def _made_of(kind: type[RlhfError], *args: str) -> RlhfError:
    return kind.__new__(kind, *args)


class InputError(RlhfError):
    """A file, path or value given by the user cannot be used."""

    exit_code = 2


class UnusableContentError(InputError):
    """A valid record with nothing to judge: an empty text, or no common conversation.

    Public datasets have some of these; any other bad line means that the file is misread.
    """


class MisreadError(InputError):
    """A record that shows that others of its file are read wrongly: leaving it out is no help."""


class ConfigError(InputError):
    """A setting is unknown or out of range."""


class GuardError(RlhfError):
    """A run was stopped because its results could not be trusted."""

    exit_code = 3


class InterruptedRunError(RlhfError):
    """A run was stopped from outside and can be resumed."""

    exit_code = 75


class KilledGroupError(InterruptedRunError):
    """A process of a group was killed, which ends the group."""


class LostPeerError(RlhfError):
    """Another process of the group has ended, which itself reports why."""


class MismatchError(InputError):
    """Processes of a group differ; all of them detect it, the main one reports it."""


def did_you_mean(word: str, known: Iterable[str], prefix: str = "") -> str:
    """`Did you mean …? ` for the known word that begins so, or is most like it; else empty."""
    match = closest(word, known)
    return f"Did you mean {prefix}{match}? " if match else ""


def closest(word: str, known: Iterable[str]) -> str:
    """The known word that begins so, or is most like it; empty if none is."""
    known = list(known)
    begun = [name for name in known if word and name.startswith(word)]
    bare, query = {name.lstrip("-"): name for name in known}, word.lstrip("-")
    # those that begin with the same word
    alike = [name for name in bare if name.split("-")[0] == query.split("-")[0]]
    like = get_close_matches(query, bare, n=1) or get_close_matches(query, alike, n=1, cutoff=0.4)
    return next(iter([*begun, *(bare[name] for name in like)]), "")
