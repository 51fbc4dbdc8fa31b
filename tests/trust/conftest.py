"""A folder in memory: on a disk, half of the time of a fuzz test goes into waiting for it."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

MEMORY = Path("/dev/shm")


@pytest.fixture
def in_memory() -> Iterator[Path]:
    """An empty folder in memory, or on disk where there is no `/dev/shm`."""
    with tempfile.TemporaryDirectory(dir=MEMORY if MEMORY.is_dir() else None) as folder:
        yield Path(folder)
