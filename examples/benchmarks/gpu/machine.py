"""This device's memory, and how fast it multiplies matrices."""

import gc
import resource
import time
from functools import lru_cache

import torch

GIB = 2**30
REPEATS = 20
ROOM = 0.92  # of the device's memory: CUDA's context and fragmentation take the rest


def name() -> str:
    """Where tensors go: cuda or cpu."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def memory_gib() -> float:
    """How much a stage may plan to use."""
    if name() == "cpu":
        return float("inf")
    return ROOM * torch.cuda.mem_get_info()[1] / GIB


def peak_gib() -> float:
    """The most that was allocated since `forget_peak`; on a CPU, of this process."""
    if name() == "cuda":
        return torch.cuda.max_memory_allocated() / GIB
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def forget_peak() -> None:
    """Give back what is not used and count peaks from here on."""
    gc.collect()
    if name() == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def now() -> float:
    """Seconds, when all that was given to the device is done."""
    if name() == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


@lru_cache
def matmul_rate() -> float:
    """Floating-point operations per second of a large bf16 matrix product of random numbers."""
    size = 8192 if name() == "cuda" else 128
    left, right = (torch.randn(size, size, dtype=torch.bfloat16, device=name()) for _ in range(2))
    for _ in range(3):
        left @ right
    began = now()
    for _ in range(REPEATS):
        left @ right
    return REPEATS * 2 * size**3 / (now() - began)
