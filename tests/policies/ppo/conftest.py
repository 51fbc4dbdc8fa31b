from collections.abc import Iterator
from pathlib import Path

import pytest
from accelerate.state import AcceleratorState
from torch import distributed as dist


@pytest.fixture
def group(tmp_path: Path) -> Iterator[None]:
    """A group of one process."""
    AcceleratorState._reset_state(True)
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1)
    yield
    dist.destroy_process_group()
    AcceleratorState._reset_state(True)
