"""Memory of large tensors on a CPU: what is freed is kept for the next one."""

import ctypes

M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4  # glibc's malloc.h; man 3 mallopt


def keep_freed_memory() -> bool:
    """Let the process keep the memory that it frees, instead of handing it back to the system.

    glibc maps every large block anew, and the system fills it with zeros page by page. trl
    computes the log-probs of whole texts from logits of several hundred MB, several times in a
    step, and of a DPO step of SmolLM2-135M on a CPU nearly half went into that
    (`examples/benchmarks/RESULTS.md`). Lasts as long as the process.

    Returns:
        Whether this C library can do it; others are left as they are.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except AttributeError:  # musl, macOS
        return False
    return bool(mallopt(M_MMAP_MAX, 0)) and bool(mallopt(M_TRIM_THRESHOLD, -1))
