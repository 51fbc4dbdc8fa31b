"""Explains a library's error to the user: one message with the cause and the flag that helps.

Errors are recognized by the name of their type, else by words in their message. Any other error
counts as a bug of this project and keeps its traceback.
"""

import errno
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from rlhf.config.paths import flag_of, setting_names
from rlhf.errors import InputError, InterruptedRunError, LostPeerError, RlhfError
from rlhf.ranks import rank, world_size

BATCH_SETTINGS = (  # which bound the memory that activations and logits need
    "micro_batch_size",
    "batch.micro_batch_size",
    "batch.micro_tokens",
    "micro_tokens",
    "sampling.batch_size",
    "tokens_per_batch",
    "batch_size",
)


@dataclass(frozen=True)
class _Rule:
    """The message for errors whose type has one of `names` or whose text has one of `phrases`."""

    kind: type[RlhfError]
    problem: str
    remedy: str
    phrases: tuple[str, ...] = ()
    names: tuple[str, ...] = ()

    def matches(self, error: BaseException) -> bool:
        """Whether this rule explains the error; only a group of processes has lost peers."""
        if self.kind is LostPeerError and world_size() == 1:
            return False
        text = str(error).lower()
        names = (kind.__name__ for kind in type(error).__mro__)
        return any(phrase in text for phrase in self.phrases) or any(n in self.names for n in names)

    def explain(self, error: BaseException, remedy: str = "") -> RlhfError:
        """The user's message; names this process if there are several."""
        here = f" on rank {rank()} ({socket.gethostname()})" if world_size() > 1 else ""
        return self.kind(f"{self.problem}{here}: {_first_line(error)}", remedy or self.remedy)


OUT_OF_MEMORY = _Rule(
    InputError,
    "Memory ran out",
    "Use a smaller model, or a device with more memory.",
    ("out of memory", "can't allocate memory", "cannot allocate memory"),
    ("OutOfMemoryError", "MemoryError"),
)
DISK_FULL = _Rule(
    InterruptedRunError,
    "The disk is full",
    "Free some space, or keep fewer checkpoints; then run the same command with --resume.",
    (
        *("no space left on device", "disk quota exceeded", "failed writing file"),
        "database or disk is full",
    ),
)
LOST_PEER = _Rule(
    LostPeerError,
    "Another process of the group has ended",
    "Read its own message for the cause; then run the same command with --resume.",
    (
        *("connection closed by peer", "connection reset by peer", "broken pipe", "socket closed"),
        *("connection was likely closed", "remote process exited", "closed by remote peer"),
    ),
    ("DistNetworkError",),
)
NCCL = (  # before others: some of their words stand in NCCL's messages, too
    _Rule(
        InputError,
        "Shared memory is too small",
        "Give the container more of it: docker run --shm-size 8g, in Kubernetes an emptyDir of "
        "medium Memory at /dev/shm.",
        ("shared memory segment",),
    ),
    _Rule(
        InputError,
        "Two processes use one GPU",
        "Start at most one process per GPU: --processes, and CUDA_VISIBLE_DEVICES if it is set.",
        ("duplicate gpu detected",),
    ),
    _Rule(
        InputError,
        "The processes have different versions of NCCL",
        "Install the same torch on every machine; rlhf doctor shows the versions.",
        ("mismatched nccl version",),
    ),
    _Rule(
        InterruptedRunError,
        "A process cannot be reached over the network",
        "Name the network interface that all machines share, NCCL_SOCKET_IFNAME=eth0 for example, "
        "and check firewalls: rlhf doctor --canary tests the network. Then run the same command "
        "with --resume.",
        ("no socket interface found", "no route to host", "socketstartconnect"),
    ),
)
RULES = (
    *NCCL,
    OUT_OF_MEMORY,
    DISK_FULL,
    LOST_PEER,
    _Rule(
        InterruptedRunError,
        "A collective operation timed out",
        "A process or the network is stuck: rlhf doctor --canary tests both. Then run the same "
        "command with --resume.",
        ("collective operation timeout", "timed out waiting", "wait timeout"),
    ),
    _Rule(
        InputError,
        "The processes do not hold the same model",
        "Give --model a path that holds the same files on every machine.",
        ("same model across all ranks", "not to match sizes of the same param"),
    ),
    _Rule(
        InterruptedRunError,
        "A device failed",
        "Run rlhf doctor --canary there, leave the machine out if it fails, and go on with "
        "--resume.",
        (
            *("uncorrectable ecc", "illegal memory access", "unspecified launch failure"),
            *("uncorrectable nvlink", "fallen off the bus", "hardware stack error"),
        ),
    ),
    _Rule(
        InterruptedRunError,
        "The processes cannot exchange tensors",
        "Run rlhf doctor --canary, which tests devices and network; NCCL_DEBUG=INFO before the "
        "command prints what NCCL does. Then run the same command with --resume.",
        names=("DistBackendError",),
    ),
    _Rule(
        InterruptedRunError,
        "Another program has been writing to the database for a long time",
        "Wait until it is done, a large import perhaps; then run the same command again.",
        ("database is locked",),
    ),
    _Rule(
        InputError,
        "The database that --db names cannot be written",
        "Put its file back, or give the path of another; then run the same command again.",
        names=("LostDatabaseError",),  # of the labeling app
    ),
    _Rule(
        InputError,
        "This device cannot do what the model asks",
        "Install a torch that is built for it (rlhf doctor shows the versions), or try "
        "--precision fp32.",
        ("no kernel image is available", "could not run '", "not implemented for '"),
    ),
)


def diagnose(error: BaseException, settings: type[Any] | None = None) -> RlhfError | None:
    """The user's message for a library's error; None when it must be a bug.

    Args:
        error: any exception.
        settings: the settings class of the command that failed; its flags are named as remedies.
    """
    rule = next((candidate for candidate in RULES if candidate.matches(error)), None)
    if rule is OUT_OF_MEMORY and settings:
        return rule.explain(error, _memory_remedy(set(setting_names(settings))))
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        rule = rule or DISK_FULL
    return rule.explain(error) if rule else None


@contextmanager
def as_input_error(problem: str, remedy: str) -> Iterator[None]:
    """Around a library that reads a user's file: reports its errors as errors of the file.

    Args:
        problem: what could not be read; the library's own message follows in parentheses.
        remedy: what to type or change next.

    Raises:
        InputError: the library failed in a way that `diagnose` does not know better.
    """
    try:
        yield
    except RlhfError:
        raise
    except Exception as error:  # parsers raise all kinds; `tokenizers` raises Exception itself
        if diagnose(error):
            raise
        raise InputError(f"{problem} ({_reason(error)})", remedy) from None


def _reason(error: Exception) -> str:
    """A library's error in a few words; a single word, such as a KeyError's, gets its type."""
    if "trust_remote_code" in str(error):
        return "it needs its own code, which is never run"
    if "Weights only load failed" in str(error):  # the rest explains how to load it anyway
        return "it holds something other than tensors and numbers"
    line = _first_line(error)
    return line if " " in line else f"{type(error).__name__}: {line}"


def _first_line(error: BaseException) -> str:
    """The first line of a message; of NCCL's, the line that says what failed."""
    _, _, last = str(error).rpartition("Last error:\n")
    return (last.strip().splitlines() or [type(error).__name__])[0][:300]


def _memory_remedy(names: set[str]) -> str:
    """How a command with these settings can run with less memory."""
    if "micro_batch_size" in names:
        names = names - {"batch_size"}  # that of an optimizer step
    flags = [flag_of(name) for name in BATCH_SETTINGS if name in names]
    ways = [f"lower {' or '.join(flags)}"] if flags else []
    for name in ("gradient_checkpointing", "batch.gradient_checkpointing"):
        if name in names:
            ways.append(f"add {flag_of(name)}")
    if "sharding" in names:
        ways.append(
            "shard the model: --sharding fsdp, with --parallel.offload where that is not enough"
        )
    remedy = ", or ".join(ways) or OUT_OF_MEMORY.remedy.rstrip(".")
    if len(ways) > 1:
        remedy += " (--dry-run prints the memory plan)"
    return f"{remedy[0].upper()}{remedy[1:]}" + (
        "; then run the same command with --resume." if "resume" in names else "."
    )
