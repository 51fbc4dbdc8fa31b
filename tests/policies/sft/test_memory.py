"""Freed memory of large tensors is used again, without the system's filling it anew."""

import platform
from pathlib import Path

import pytest

from tests.servers.commands import Command

PROGRAM = """
import resource, sys
import torch
from policies.trl_training.memory import keep_freed_memory

if sys.argv[1] == "keep":
    assert keep_freed_memory()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(4):
    for megabytes in (40, 36, 32, 28):
        torch.full((megabytes, 2**18), 1.0)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def page_faults(how: str, folder: Path) -> int:
    """Those of sixteen tensors that come and go."""
    program = folder / "program.py"
    program.write_text(PROGRAM)
    out, errors = Command(str(program), how).communicate()
    assert out, errors
    return int(out)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries are left alone")
def test_the_system_fills_less_memory_with_zeros(tmp_path: Path) -> None:
    assert page_faults("keep", tmp_path) < page_faults("plain", tmp_path) / 2
