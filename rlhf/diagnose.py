"""What a library's error means for the user: one message with the cause and the flag that helps.

Errors are told apart by type where they have one, else by the words PyTorch uses. What is not
recognised stays a bug of ours, with its traceback.
"""

import errno
import socket
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any

from rlhf.config.paths import flag_of, setting_names
from rlhf.errors import InputError, InterruptedRunError, LostPeerError, RlhfError
from rlhf.ranks import rank, world_size

OUT_OF_MEMORY = ("out of memory", "can't allocate memory", "cannot allocate memory")
DISK_FULL = (
    *("no space left on device", "disk quota exceeded", "failed writing file"),
    "database or disk is full",
)
LOST_PEER = (
    "connection closed by peer",
    "connection reset by peer",
    "connection was likely closed",
    "broken pipe",
    "socket closed",
)
TIMED_OUT = ("collective operation timeout", "timed out waiting", "wait timeout")
MISMATCH = ("same model across all ranks", "not to match sizes of the same param")
NO_KERNEL = ("no kernel image is available", "could not run '", "not implemented for '")
BROKEN_DEVICE = ("uncorrectable ecc", "illegal memory access", "unspecified launch failure")
BUSY_DATABASE = ("database is locked",)
LOST_DATABASE = "LostDatabaseError"  # of the labeling app
AT_ONCE = (  # settings that say how much is in memory at once
    "micro_batch_size",
    "batch.micro_batch_size",
    "batch.micro_tokens",
    "micro_tokens",
    "sampling.batch_size",
    "tokens_per_batch",
    "batch_size",
)


def diagnose(error: BaseException, settings: type[Any] | None = None) -> RlhfError | None:
    """The user's message for a library's error; None when it must be a bug.

    Args:
        error: any exception.
        settings: the settings class of the command that failed; its flags are named as remedies.
    """
    words = str(error).lower()
    for name, phrases, explain in RULES:
        if explain is _lost_peer and world_size() == 1:
            continue  # a pipe or a download of its own
        if name in _names(error) or any(phrase in words for phrase in phrases):
            if explain is _out_of_memory and settings:
                return _out_of_memory(error, list(setting_names(settings)))
            return explain(error)
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return _disk_full(error)
    return None


@contextmanager
def as_input_error(problem: str, remedy: str) -> Iterator[None]:
    """Around a library that reads a user's file: whatever it raises says something about the file.

    Args:
        problem: what could not be read; the library's own words follow in parentheses.
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
    """A library's error in a few words; one word alone, as a KeyError's, is told with its type."""
    if "trust_remote_code" in str(error):
        return "it needs code of its own, which is never run"
    if "Weights only load failed" in str(error):  # what follows tells how to load it all the same
        return "it holds something else than tensors and numbers"
    words = _first_line(error)
    return words if " " in words else f"{type(error).__name__}: {words}"


def _names(error: BaseException) -> tuple[str, ...]:
    return tuple(kind.__name__ for kind in type(error).__mro__)


def _here() -> str:
    """Where this process is, when there are several."""
    return f" on rank {rank()} ({socket.gethostname()})" if world_size() > 1 else ""


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]


def _out_of_memory(error: BaseException, names: Collection[str] = ()) -> RlhfError:
    return InputError(f"Memory ran out{_here()}: {_first_line(error)}", _lighter(set(names)))


def _lighter(names: set[str]) -> str:
    """What a command with these settings can do with less memory."""
    if "micro_batch_size" in names:
        names = names - {"batch_size"}  # that of an optimizer step
    flags = [flag_of(name) for name in AT_ONCE if name in names]
    ways = [f"lower {' or '.join(flags)}"] if flags else []
    for name in ("gradient_checkpointing", "batch.gradient_checkpointing"):
        if name in names:
            ways.append(f"add {flag_of(name)}")
    if "sharding" in names:
        ways.append(
            "shard the model: --sharding fsdp, with --parallel.offload where that is not enough"
        )
    words = ", or ".join(ways) or "use a smaller model, or a device with more memory"
    if len(ways) > 1:
        words += " (--dry-run prints what takes how much)"
    return f"{words[0].upper()}{words[1:]}" + (
        "; then run the same command with --resume." if "resume" in names else "."
    )


def _disk_full(error: BaseException) -> RlhfError:
    return InterruptedRunError(
        f"The disk is full{_here()}: {_first_line(error)}",
        "Free some space, or keep fewer checkpoints; then run the same command with --resume.",
    )


def _lost_peer(error: BaseException) -> RlhfError:
    return LostPeerError(
        f"Another process of the group has ended{_here()}: {_first_line(error)}",
        "Its own message says why; then run the same command with --resume.",
    )


def _timed_out(error: BaseException) -> RlhfError:
    return InterruptedRunError(
        f"A collective operation timed out{_here()}: {_first_line(error)}",
        "A process or the network is stuck: rlhf doctor --canary tests both. Then run the same "
        "command with --resume.",
    )


def _mismatch(error: BaseException) -> RlhfError:
    return InputError(
        f"The processes do not hold the same model{_here()}: {_first_line(error)}",
        "Give --model a path that holds the same files on every machine.",
    )


def _no_kernel(error: BaseException) -> RlhfError:
    return InputError(
        f"This device cannot do what the model asks{_here()}: {_first_line(error)}",
        "Install a torch that is built for it (rlhf doctor shows the versions), or try "
        "--precision fp32.",
    )


def _broken_device(error: BaseException) -> RlhfError:
    return InterruptedRunError(
        f"A device failed{_here()}: {_first_line(error)}",
        "Run rlhf doctor --canary there, leave the machine out if it fails, and go on with "
        "--resume.",
    )


def _busy_database(error: BaseException) -> RlhfError:
    return InterruptedRunError(
        f"Another program has been writing to the database for a long time: {_first_line(error)}",
        "Wait until it is done, a large import perhaps; then run the same command again.",
    )


def _lost_database(error: BaseException) -> RlhfError:
    return InputError(
        f"The database that --db names cannot be written: {_first_line(error)}",
        "Put its file back, or give the path of another; then run the same command again.",
    )


RULES: tuple[tuple[str, tuple[str, ...], Callable[[BaseException], RlhfError]], ...] = (
    ("OutOfMemoryError", OUT_OF_MEMORY, _out_of_memory),
    ("MemoryError", (), _out_of_memory),
    ("", DISK_FULL, _disk_full),
    ("DistNetworkError", LOST_PEER, _lost_peer),
    ("", TIMED_OUT, _timed_out),
    ("DistBackendError", (), _lost_peer),
    ("", MISMATCH, _mismatch),
    ("", BROKEN_DEVICE, _broken_device),
    ("", BUSY_DATABASE, _busy_database),
    (LOST_DATABASE, (), _lost_database),
    ("", NO_KERNEL, _no_kernel),
)
