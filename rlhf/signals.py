"""Functions of prompt and response that stand in for a judge: signal annotators and gold scores.

A signal is named `package.module:function`, takes (prompt text, response text) and returns a number, higher is
better. The current folder is importable, as with `python -m`.
"""

import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

from rlhf.errors import InputError

Signal = Callable[[str, str], float]


def load_signal(name: str) -> Signal:
    """Import `package.module:function`.

    Raises:
        InputError: the name has no colon, the module cannot be imported, or it has no such function.
    """
    module_name, colon, function_name = name.partition(":")
    if not colon or not module_name or not function_name:
        raise InputError(
            f"{name!r} does not name a function",
            "Write it as package.module:function, for example examples.quickstart.sentiment:score",
        )
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        module = import_module(module_name)
    except ImportError as error:
        raise InputError(
            f"Cannot import {module_name} ({error})",
            "Run from the folder that holds it, or install the package it needs.",
        ) from error
    function = getattr(module, function_name, None)
    if not callable(function):
        raise InputError(
            f"{module_name} has no function {function_name}",
            f"Check the name after the colon in {name!r}.",
        )
    signal: Signal = function
    return signal
