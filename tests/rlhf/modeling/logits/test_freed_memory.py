"""Freed memory of large tensors is used again, without the system's filling it anew."""

import platform
from pathlib import Path

import pytest

from tests.servers.commands import Command

PROGRAM = """
import resource, sys
import torch
from policies.sampling.engines import new_sampler
from policies.sampling.generate import SampleAndRecord
from rlhf.modeling.logits.freed_memory import keep_freed_memory
from rlhf.parallel.distributed import start

def large_tensors():
    for megabytes in (40, 36, 32, 28):
        torch.full((megabytes, 2**18), 1.0)

def draw_tokens():
    draw(torch.empty(0), logits.clone())

torch.set_num_threads(1)
logits, draw = torch.randn(32, 49152), SampleAndRecord()
how, work = sys.argv[1:]
if how == "trl":
    assert keep_freed_memory()
if how == "sampler":
    new_sampler("generate", "", start("fp32", 0), longest=1, requests=1)
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(30):
    globals()[work]()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def page_faults(how: str, work: str, folder: Path) -> int:
    """Those of thirty times the same work."""
    program = folder / "program.py"
    program.write_text(PROGRAM)
    out, errors = Command(str(program), how, work).communicate()
    assert out, errors
    return int(out)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries are left alone")
@pytest.mark.parametrize(("how", "work"), [("trl", "large_tensors"), ("sampler", "draw_tokens")])
def test_the_system_fills_less_memory_with_zeros(how: str, work: str, tmp_path: Path) -> None:
    kept, plain = (page_faults(one, work, tmp_path) for one in (how, "plain"))
    assert kept < plain / 2
