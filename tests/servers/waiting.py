"""Waiting for what another process or thread does."""

import time
from collections.abc import Callable


def wait_until(is_so: Callable[[], object], seconds: float = 300) -> None:
    """Wait until a condition holds, or fail: the limit is long, since the machine may be busy."""
    limit = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < limit, f"not so after {seconds} s"
        time.sleep(0.02)
