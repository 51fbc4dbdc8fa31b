import errno
import resource
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from rlhf.diagnose import diagnose
from rlhf.errors import InputError, InterruptedRunError, LostPeerError

REPOSITORY = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("error", "kind", "problem", "remedy"),
    [
        (
            torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
            InputError,
            "Memory ran out: CUDA out of memory. Tried to allocate 2.00 GiB.",
            "--gradient-checkpointing",
        ),
        (MemoryError(), InputError, "Memory ran out: MemoryError", "--sharding fsdp"),
        (
            OSError(errno.ENOSPC, "No space left on device"),
            InterruptedRunError,
            "The disk is full: [Errno 28] No space left on device",
            "--keep-checkpoints 1",
        ),
        (
            RuntimeError("[enforce fail at inline_container.cc] PytorchStreamWriter failed "
                         "writing file data/0: file write failed"),
            InterruptedRunError,
            "The disk is full: ",
            "--resume",
        ),
        (
            RuntimeError("[../gloo/transport/tcp/pair.cc] Connection closed by peer [127.0.0.1]"),
            LostPeerError,
            "Another process of the group has ended: ",
            "Its own message says why",
        ),
        (
            RuntimeError("Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7)"),
            InterruptedRunError,
            "A collective operation timed out: ",
            "rlhf doctor --canary",
        ),
        (
            RuntimeError("DDP expects same model across all ranks, but Rank 0 has 20 params"),
            InputError,
            "The processes do not hold the same model: ",
            "--model",
        ),
        (
            RuntimeError("CUDA error: no kernel image is available for execution on the device"),
            InputError,
            "This device cannot do what the model asks: ",
            "rlhf doctor",
        ),
        (
            RuntimeError("CUDA error: uncorrectable ECC error encountered"),
            InterruptedRunError,
            "A device failed: ",
            "--resume",
        ),
    ],
)  # fmt: skip
def test_causes_and_what_helps(error, kind, problem: str, remedy: str, monkeypatch) -> None:
    if kind is LostPeerError:  # only a group has others
        assert diagnose(error) is None
        monkeypatch.setenv("WORLD_SIZE", "2")
        problem = problem.removesuffix(": ")
    found = diagnose(error)
    assert type(found) is kind
    assert found.problem.startswith(problem)
    assert remedy in found.remedy


def test_anything_else_is_a_bug() -> None:
    assert diagnose(KeyError("x")) is None
    assert diagnose(RuntimeError("mat1 and mat2 shapes cannot be multiplied")) is None


def test_a_pipe_of_a_single_process_is_no_lost_peer(monkeypatch) -> None:
    assert diagnose(BrokenPipeError(errno.EPIPE, "Broken pipe")) is None
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert type(diagnose(BrokenPipeError(errno.EPIPE, "Broken pipe"))) is LostPeerError


def test_the_rank_is_named_in_a_group(monkeypatch) -> None:
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "8")
    found = diagnose(MemoryError("no room"))
    assert found is not None
    assert found.problem.startswith("Memory ran out on rank 3 (")


SMALL = """
import resource, sys
from rlhf.cli import main
code = main(["plan", "--help"])  # everything that is imported is there
import torch
resource.setrlimit(resource.RLIMIT_AS, (2**31, 2**31))
import rlhf.commands.plan as plan
plan.run = lambda settings: torch.empty(2**34)
sys.exit(main(["plan", "--model", "m"]))
"""


@pytest.mark.skipif(not hasattr(resource, "RLIMIT_AS"), reason="needs Linux")
def test_memory_that_really_runs_out_is_one_message() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SMALL], capture_output=True, text=True, check=False, cwd=REPOSITORY
    )
    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith("error Memory ran out: ")
    assert "Traceback" not in done.stderr
