"""How long this process waits: for data to be prepared, and for other processes."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import torch

from rlhf.ranks import world_size

Cause = Literal["data", "ranks"]

_seconds: dict[Cause, float] = {"data": 0.0, "ranks": 0.0}


@contextmanager
def waiting(cause: Cause) -> Iterator[None]:
    """Count the seconds of the block; waits for other processes only where there are any.

    On CUDA work is queued, so the wait for other processes begins when this one's work is done.
    """
    if cause == "ranks" and world_size() == 1:
        yield
        return
    on_cuda = cause == "ranks" and torch.cuda.is_available()
    if on_cuda:
        torch.cuda.synchronize()
    began = time.perf_counter()
    try:
        yield
        if on_cuda:
            torch.cuda.synchronize()
    finally:
        _seconds[cause] += time.perf_counter() - began


def take_waits() -> dict[Cause, float]:
    """The seconds since the last call, by cause."""
    seconds = dict(_seconds)
    for cause in _seconds:
        _seconds[cause] = 0.0
    return seconds
