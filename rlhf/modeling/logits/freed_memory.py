"""Memory of large tensors on a CPU: what is freed is kept for the next one.

glibc maps every large block anew, and the system fills it with zeros page by page. Both functions
last as long as the process, and leave other C libraries as they are.
"""

import ctypes

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_MMAP_MAX = -1, -3, -4  # glibc's malloc.h; man 3 mallopt
LARGEST_KEPT = 32 * 2**20  # bytes of a block; glibc takes no larger threshold
KEPT = 256 * 2**20  # bytes at the end of the heap


def keep_freed_memory() -> bool:
    """Keep all memory that is freed.

    trl computes the log-probs of whole texts from logits of several hundred MB, several times in a
    step, and of a DPO step of SmolLM2-135M on a CPU nearly half went into mapping memory
    (`examples/benchmarks/RESULTS.md`).

    Returns:
        Whether this C library can do it.
    """
    return _set(M_MMAP_MAX, 0) and _set(M_TRIM_THRESHOLD, -1)


def keep_freed_blocks() -> bool:
    """Keep freed blocks of up to 32 MiB, and at most 256 MiB at the end of the heap.

    To draw a token from 32 rows of a vocabulary of 49,152, five tensors of 6 MiB come and go, which
    takes six times as long with new memory for each.

    Returns:
        Whether this C library can do it.
    """
    return _set(M_MMAP_THRESHOLD, LARGEST_KEPT) and _set(M_TRIM_THRESHOLD, KEPT)


def _set(parameter: int, value: int) -> bool:
    try:
        return bool(ctypes.CDLL(None).mallopt(parameter, value))
    except AttributeError:  # musl, macOS
        return False
