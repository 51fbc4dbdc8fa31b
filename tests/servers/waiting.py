"""Waiting for what another process or thread does."""

import time
from collections.abc import Callable


def wait_until(is_so: Callable[[], object], seconds: float = 300) -> None:
    """Fail if it is not so within some seconds: many, for a machine that is busy."""
    limit = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < limit, f"not so after {seconds} s"
        time.sleep(0.02)
