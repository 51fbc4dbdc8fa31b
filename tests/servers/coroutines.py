"""Coroutines in tests that are not coroutines themselves."""

import asyncio
from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

Value = TypeVar("Value")


def run_alone(work: Coroutine[Any, Any, Value]) -> Value:
    """Run it in a thread of its own: a browser of earlier tests keeps a loop in this one."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(asyncio.run, work).result()
