import errno
import resource
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

from rlhf.cli import COMMANDS, main
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
            "Use a smaller model",
        ),
        (MemoryError(), InputError, "Memory ran out: MemoryError", "a device with more memory"),
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


CHECKPOINTED = "or add --gradient-checkpointing"
DIVIDED = "or divide the model: --sharding fsdp, with --offload where that is not enough"
PLANNED = "(--dry-run prints what takes how much)"
RESUMED = "; then run the same command with --resume."


@pytest.mark.parametrize(
    ("arguments", "remedy"),
    [
        (
            "train-reward --rankings r --model m --out OUT",
            f"Lower --tokens-per-batch, {CHECKPOINTED}, {DIVIDED} {PLANNED}{RESUMED}",
        ),
        (
            "ppo --model m --reward r --reference f --out OUT",
            "Lower --micro-batch-size or --micro-tokens or --sample-batch-size, "
            f"{CHECKPOINTED}, {DIVIDED} {PLANNED}{RESUMED}",
        ),
        (
            "sft --demonstrations d --model m --out OUT",
            f"Lower --micro-batch-size, {CHECKPOINTED} {PLANNED}{RESUMED}",
        ),
        (
            "reference --prompts p --model m --out OUT",
            f"Lower --batch-size, {DIVIDED} {PLANNED}{RESUMED}",
        ),
        (
            "evaluate --policy p --reference f --reward r --out OUT",
            f"Lower --batch-size{RESUMED}",
        ),
        ("round --db d --policy p --reference f --reward r", "Lower --batch-size."),
        ("generate --db d --model m", "Lower --batch-size."),
        ("score f --reward r --out OUT", "Lower --tokens-per-batch."),
        ("chat --policy p --reference f", "Use a smaller model, or a device with more memory."),
    ],
)
def test_memory_is_saved_with_flags_of_the_command_at_hand(
    arguments: str, remedy: str, monkeypatch, capsys
) -> None:
    def run_out_of_memory(settings: Any) -> None:
        raise MemoryError

    command, *rest = arguments.split()
    module = import_module(f"rlhf.commands.{COMMANDS[command]}")
    monkeypatch.setattr(module, "run", run_out_of_memory)
    assert main([command, *rest]) == 2
    assert capsys.readouterr().err == f"error Memory ran out: MemoryError\n  {remedy}\n"


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
