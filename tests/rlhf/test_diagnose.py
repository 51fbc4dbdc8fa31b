import errno
import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest
import torch
from torch.distributed import DistBackendError

from rlhf.cli import COMMANDS
from rlhf.diagnose import diagnose
from rlhf.errors import InputError, InterruptedRunError, LostPeerError
from tests.pipeline.loop import SHORT, write_prompts

REPOSITORY = Path(__file__).parents[2]


def nccl(words: str, kind: str, last: str) -> DistBackendError:
    """An error as torch reports it for NCCL."""
    return DistBackendError(
        f"NCCL error in: ../torch/csrc/distributed/c10d/NCCLUtils.hpp:268, {words} (run with "
        f"NCCL_DEBUG=INFO for details), NCCL version 2.27.3\nnccl{kind}: A general sentence.\n"
        f"Last error:\n{last}\n"
    )


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
            "keep fewer checkpoints",
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
            "Read its own message",
        ),
        (
            RuntimeError("Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7)"),
            InterruptedRunError,
            "A collective operation timed out: ",
            "rlhf doctor --canary",
        ),
        (
            nccl("unhandled cuda error", "UnhandledCudaError", "Cuda failure 2 'out of memory'"),
            InputError,
            "Memory ran out: Cuda failure 2 'out of memory'",
            "Use a smaller model",
        ),
        (
            nccl(
                "remote process exited or there was a network error",
                "RemoteError",
                "socketProgressOpt: Call to recv from 10.0.0.2<33759> failed : Connection reset",
            ),
            LostPeerError,
            "Another process of the group has ended: ",
            "Read its own message",
        ),
        (
            nccl(
                "invalid usage",
                "InvalidUsage",
                "Duplicate GPU detected : rank 0 and rank 1 both on CUDA device 1000",
            ),
            InputError,
            "Two processes use one GPU: Duplicate GPU detected",
            "at most one process per GPU",
        ),
        (
            nccl(
                "internal error",
                "InternalError",
                "Mismatched NCCL version detected : rank 0 version 22105 rank 1 version 21805",
            ),
            InputError,
            "The processes have different versions of NCCL: Mismatched NCCL",
            "the same torch on every machine",
        ),
        (
            nccl(
                "unhandled system error",
                "SystemError",
                "socketStartConnect: Connect to 10.0.0.2<43236> failed : No route to host",
            ),
            InterruptedRunError,
            "A process cannot be reached over the network: socketStartConnect",
            "NCCL_SOCKET_IFNAME=eth0",
        ),
        (
            nccl(
                "unhandled system error",
                "SystemError",
                "Error while creating shared memory segment /dev/shm/nccl-a1B2c3 (size 9637888), "
                "error: No space left on device (28)",
            ),
            InputError,
            "Shared memory is too small: Error while creating",
            "--shm-size",
        ),
        (
            nccl("internal error", "InternalError", "Attribute busid of node nic not found"),
            InterruptedRunError,
            "The processes cannot exchange tensors: Attribute busid",
            "NCCL_DEBUG=INFO",
        ),
        (
            RuntimeError("CUDA error: uncorrectable NVLink error detected during the execution"),
            InterruptedRunError,
            "A device failed",
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
        assert diagnose(error) is None or isinstance(error, DistBackendError)
        monkeypatch.setenv("WORLD_SIZE", "2")
        problem = problem.removesuffix(": ")
    found = diagnose(error)
    assert type(found) is kind
    assert found.problem.startswith(problem)
    assert remedy in found.remedy


CHECKPOINTED = "or add --gradient-checkpointing"
SHARDED = "or shard the model: --sharding fsdp, with --parallel.offload where that is not enough"
PLANNED = "(--dry-run prints the memory plan)"
RESUMED = "; then run the same command with --resume."


@pytest.mark.parametrize(
    ("command", "remedy"),
    [
        (
            "train-reward",
            "Lower --batch.micro-tokens, or add --batch.gradient-checkpointing, "
            f"{SHARDED} {PLANNED}{RESUMED}",
        ),
        (
            "ppo",
            "Lower --batch.micro-batch-size or --batch.micro-tokens or --sampling.batch-size, or "
            f"add --batch.gradient-checkpointing, {SHARDED} {PLANNED}{RESUMED}",
        ),
        ("sft", f"Lower --micro-batch-size, {CHECKPOINTED} {PLANNED}{RESUMED}"),
        ("dpo", f"Lower --micro-batch-size, {CHECKPOINTED} {PLANNED}{RESUMED}"),
        ("reference", f"Lower --batch-size, {SHARDED} {PLANNED}{RESUMED}"),
        ("evaluate", f"Lower --batch-size{RESUMED}"),
        ("round", "Lower --batch-size."),
        ("generate", "Lower --batch-size."),
        ("score", "Lower --micro-tokens."),
        ("chat", "Use a smaller model, or a device with more memory."),
    ],
)
def test_memory_is_saved_with_flags_of_the_command_at_hand(command: str, remedy: str) -> None:
    found = diagnose(MemoryError(), import_module(f"rlhf.commands.{COMMANDS[command]}").Settings)
    assert found is not None
    assert found.remedy == remedy


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
from pathlib import Path
from rlhf.cli import main

arguments = sys.argv[1:]
assert main([*arguments, "--out", "first"]) == 0  # everything that is imported is there
pages = int(Path("/proc/self/statm").read_text().split()[0])
room = pages * resource.getpagesize() + 2**26
resource.setrlimit(resource.RLIMIT_AS, (room, room))
sys.exit(main([*arguments, "--out", "second", "--batch-size", "4096", "--samples", "4096"]))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux")
def test_memory_that_really_runs_out_is_one_message(tiny_model: Path, tmp_path: Path) -> None:
    prompts = write_prompts(tmp_path / "prompts.jsonl")
    arguments = ["reference", "--prompts", prompts, "--model", tiny_model, *SHORT]
    done = subprocess.run(
        [sys.executable, "-c", SMALL, *arguments],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 2, done.stderr
    assert "\nerror Memory ran out: " in done.stderr
    assert "Lower --batch-size" in done.stderr
    assert "Traceback" not in done.stderr
