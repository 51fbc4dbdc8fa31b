"""Signals: Python functions that score responses, as annotators, rewards or gold scores.

A signal is named `package.module:function`, takes (prompt text, response text) and returns a
number; higher is better. Modules in the current folder can be imported, as with `python -m`.
Redactions, which take a text and return what is stored of it, are named alike.
"""

import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from numbers import Real
from pathlib import Path
from traceback import extract_tb
from typing import Any

from rlhf.diagnose import diagnose
from rlhf.errors import InputError, RlhfError

Signal = Callable[[str, str], float]
Redaction = Callable[[str], str]
PREFIX = "signal:"
TEXT_ONLY = "It must return a text for every text; fix the function and start again."
NUMBERS_ONLY = "It must return a finite number for every text; fix the function and run again."


def with_prefix(name: str) -> str:
    """The name of a reward, with `signal:` added to a bare `package.module:function`."""
    is_function = ":" in name and not name.startswith((PREFIX, "http://", "https://"))
    return f"{PREFIX}{name}" if is_function and not Path(name).exists() else name


def load_signal(name: str) -> Signal:
    """Import `package.module:function`, and check that it returns finite numbers.

    The prefix `signal:`, which distinguishes functions from models, is optional.

    Raises:
        InputError: no colon in the name, no such module, an error in it, or no such function.
    """
    function = _load_function(name)

    def signal(prompt: str, response: str) -> float:
        at = f"for the response {response[:60]!r} to {prompt[:60]!r}"
        with _users_code(f"{name} failed {at}", NUMBERS_ONLY):
            value = function(prompt, response)
        if not isinstance(value, Real) or isinstance(value, bool) or not math.isfinite(value):
            raise InputError(f"{name} returned {value!r} {at}", NUMBERS_ONLY)
        return float(value)

    return signal


def load_redaction(name: str) -> Redaction:
    """Import `package.module:function`, and check that it returns text.

    Errors don't show the text that was to be redacted.

    Raises:
        InputError: no colon in the name, no such module, an error in it, or no such function.
    """
    function = _load_function(name)

    def redact(text: str) -> str:
        try:
            value = function(text)
        except Exception as error:  # of any kind, and its message may quote the text
            frame = extract_tb(error.__traceback__)[-1]
            raise InputError(
                f"{name} failed: {type(error).__name__} ({frame.filename}, line {frame.lineno})",
                TEXT_ONLY,
            ) from None
        if not isinstance(value, str):
            raise InputError(f"{name} returned a {type(value).__name__}", TEXT_ONLY)
        return value

    return redact


def _load_function(name: str) -> Callable[..., Any]:
    """Import `package.module:function`.

    Raises:
        InputError: no colon in the name, no such module, an error in it, or no such function.
    """
    module_name, colon, function_name = name.removeprefix(PREFIX).partition(":")
    if not colon or not module_name or not function_name:
        raise InputError(
            f"{name!r} does not name a function",
            "Write it as package.module:function, for example examples.quickstart.sentiment:score",
        )
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    with _users_code(f"{module_name} cannot be imported", "Fix the module."):
        try:
            module = import_module(module_name)
        except ImportError as error:
            raise InputError(
                f"Cannot import {module_name} ({error})",
                "Run from the folder that holds it, or install the package it needs.",
            ) from error
    function: Callable[..., Any] | None = getattr(module, function_name, None)
    if function is None or not callable(function):
        raise InputError(
            f"{module_name} has no function {function_name}",
            f"Check the name after the colon in {name!r}.",
        )
    return function


@contextmanager
def _users_code(failure: str, remedy: str) -> Iterator[None]:
    """Around the user's own code: reports its errors as input errors.

    Raises:
        InputError: names what failed, and the line.
    """
    try:
        yield
    except Exception as error:  # of any kind
        if isinstance(error, RlhfError) or diagnose(error):
            raise
        raise InputError(f"{failure}: {_what_and_where(error)}", remedy) from error


def _what_and_where(error: Exception) -> str:
    if isinstance(error, SyntaxError):
        return f"{type(error).__name__}: {error}"  # which has the line
    frame = extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {error} ({frame.filename}, line {frame.lineno})"
