"""Freed memory of large tensors is used again, without the system's filling it anew."""

import platform
import subprocess
import sys

import pytest

PROGRAM = """
import resource, sys
import torch
from policies.trl_training.memory import keep_freed_memory

if sys.argv[1] == "keep":
    assert keep_freed_memory()
torch.full((72, 2**20), 1.0)
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(4):
    torch.full((64, 2**20), 1.0)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults_of_four_tensors(how: str) -> int:
    """Page faults while four tensors of 256 MiB come and go after a larger one."""
    command = [sys.executable, "-c", PROGRAM, how]
    found = subprocess.run(command, check=True, capture_output=True, text=True)
    return int(found.stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries are left alone")
def test_large_tensors_are_filled_with_zeros_once() -> None:
    pages = 4 * 2**28 // 4096
    assert faults_of_four_tensors("keep") < pages / 100
    assert faults_of_four_tensors("plain") > pages / 2
