"""Freed memory of large tensors is used again, without the system's filling it anew."""

import platform
from pathlib import Path

import pytest

from tests.servers.commands import Command

PROGRAM = """
import resource, sys
import torch
from policies.sampling.engines import new_sampler
from rlhf.modeling.logits.freed_memory import keep_freed_memory
from rlhf.parallel.distributed import start

def large_tensors():
    for megabytes in (40, 36, 32, 28):
        torch.full((megabytes, 2**18), 1.0)

def larger_tensor():
    # larger than all before, which glibc therefore maps anew
    global floats
    floats += 2 * 1024
    torch.full((floats,), 1.0)

floats = 6 * 2**18
how, work = sys.argv[1:]
if how == "trl":
    assert keep_freed_memory()
if how == "sampler":
    new_sampler("generate", "", start("fp32", 0), longest=1, requests=1)
for _ in range(3):  # so that the kept memory exists
    globals()[work]()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(30):
    globals()[work]()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def page_faults(how: str, work: str, folder: Path) -> int:
    """Those of thirty times the same work, after the first three."""
    program = folder / "program.py"
    program.write_text(PROGRAM)
    out, errors = Command(str(program), how, work).communicate()
    assert out, errors
    return int(out)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries are left alone")
@pytest.mark.parametrize(("how", "work"), [("trl", "large_tensors"), ("sampler", "larger_tensor")])
def test_the_system_fills_less_memory_with_zeros(how: str, work: str, tmp_path: Path) -> None:
    kept, plain = (page_faults(one, work, tmp_path) for one in (how, "plain"))
    assert kept < plain / 10
