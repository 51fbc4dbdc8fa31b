"""Clocks and memory of one model at work: answering for policies, scoring for reward models.

The work is random tokens of fixed lengths: prompts that share no beginning, and responses that no
end token closes, so that every model does the same.
"""

import ctypes
import gc
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from transformers import PreTrainedTokenizerBase

from policies.deployment.settings import BenchmarkSettings
from policies.sampling.engines import FrozenModel, frozen_model
from reward.scoring.scorer import load_scorer
from rlhf.errors import InputError
from rlhf.modeling.chat_template import end_token_ids, set_end_tokens
from rlhf.modeling.models import context_length, load_config
from rlhf.modeling.pairs import is_for_pairs
from rlhf.modeling.tokens import TokenBatch, load_tokenizer, pad_right
from rlhf.parallel.distributed import seed_all
from rlhf.records.schema import Sampling

CLEAR, STATUS = Path("/proc/self/clear_refs"), Path("/proc/self/status")
RESET_PEAK = "5"  # written to clear_refs: the peak becomes what is in memory now
Row = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class BenchmarkCase:
    """The sequences that are measured at once: how many, and how long their two parts are."""

    batch_size: int
    prompt_tokens: int
    answer_tokens: int


@dataclass(frozen=True, kw_only=True)
class Batch:
    """One measured batch, in seconds on a monotonic clock."""

    case: BenchmarkCase
    seconds: float


def all_cases(settings: BenchmarkSettings) -> list[BenchmarkCase]:
    """Every combination of the sizes, the smallest batch first."""
    sizes = product(settings.prompt_tokens, settings.answer_tokens, sorted(settings.batch_sizes))
    return [
        BenchmarkCase(batch_size=batch, prompt_tokens=prompt, answer_tokens=response)
        for prompt, response, batch in sizes
    ]


def require_context(folder: str, settings: BenchmarkSettings) -> None:
    """Refuse lengths that a model cannot read.

    Raises:
        InputError: the longest prompt and response together exceed its context.
    """
    context = context_length(load_config(folder))
    longest = max(all_cases(settings), key=lambda case: case.prompt_tokens + case.answer_tokens)
    total = longest.prompt_tokens + longest.answer_tokens
    if context is not None and total > context:
        raise InputError(
            f"--prompt-tokens {longest.prompt_tokens} and --answer-tokens {longest.answer_tokens} "
            f"exceed the context of {folder}, {context} tokens",
            "Lower one of them.",
        )


def measure_policy(
    folder: str,
    accelerator: Accelerator,
    settings: BenchmarkSettings,
    on_batch: Callable[[Batch], None],
) -> list[Row]:
    """A row for each case: first token, latency, tokens a second, memory.

    Raises:
        InputError: the model cannot be loaded.
    """
    cases = all_cases(settings)
    tokenizer = load_tokenizer(folder)
    usable = _usable_ids(tokenizer)
    vocabulary = load_config(folder).get_text_config().vocab_size
    set_end_tokens(tokenizer, [vocabulary])  # an id that no model draws
    longest = max(case.prompt_tokens + case.answer_tokens for case in cases)
    # as `rlhf generate` loads it
    dtype = torch.bfloat16 if accelerator.mixed_precision == "bf16" else torch.float32
    most = max(settings.batch_sizes)
    loaded = frozen_model(
        settings.engine, folder, accelerator, tokenizer, longest, most, dtype=dtype
    )
    rows = []
    with loaded as model:
        seed_all(settings.seed)
        for case in cases:
            sampler = replace(model, batch_size=case.batch_size)
            prompts = _random_rows(usable, case.batch_size, case.prompt_tokens, settings.seed)
            rows.append(_time_responses(sampler, prompts, case, settings, on_batch))
    return rows


def _time_responses(
    model: FrozenModel,
    prompts: Sequence[list[int]],
    case: BenchmarkCase,
    settings: BenchmarkSettings,
    on_batch: Callable[[Batch], None],
) -> Row:
    def respond(tokens: int) -> None:
        sampling = Sampling(
            temperature=1.0, top_p=1.0, top_k=0, max_new_tokens=tokens, seed=settings.seed
        )
        samples = model.sample(prompts, sampling)
        assert all(len(sample.token_ids) == tokens for sample in samples)

    respond(case.answer_tokens)  # not counted
    firsts = [_seconds(lambda: respond(1)) for _ in range(settings.repeats)]
    with peak_memory() as memory:
        seconds = _repeat(lambda: respond(case.answer_tokens), case, settings.repeats, on_batch)
    return {
        **vars(case),
        "first_token_seconds": float(np.median(firsts)),
        "latency": latencies(seconds),
        "tokens_per_second": case.batch_size * case.answer_tokens * len(seconds) / sum(seconds),
        "peak_memory_bytes": memory.bytes,
    }


def measure_scorer(
    name: str,
    folder: str,
    accelerator: Accelerator,
    settings: BenchmarkSettings,
    on_batch: Callable[[Batch], None],
) -> list[Row]:
    """A row for each case: latency, scores a second, memory. All members of an ensemble score.

    Raises:
        InputError: the model cannot be loaded.
    """
    cases = all_cases(settings)
    tokenizer = load_tokenizer(folder)
    scorer = load_scorer(name, accelerator)
    rows = []
    for case in cases:
        batch = _sequences(tokenizer, case, settings.seed).to(accelerator.device)

        def score(batch: TokenBatch = batch) -> None:
            scorer(batch).cpu()  # waits for the device

        score()  # not counted
        with peak_memory() as memory:
            seconds = _repeat(score, case, settings.repeats, on_batch)
        rows.append(
            {
                **vars(case),
                "latency": latencies(seconds),
                "scores_per_second": case.batch_size * len(seconds) / sum(seconds),
                "peak_memory_bytes": memory.bytes,
            }
        )
    return rows


def latencies(seconds: Sequence[float]) -> dict[str, float]:
    """The median and the 99th percentile; all sequences of a batch end together."""
    return {"p50": float(np.percentile(seconds, 50)), "p99": float(np.percentile(seconds, 99))}


@dataclass
class Memory:
    """The peak of a block in bytes: of the device, on CPUs of the process; None if unknown."""

    bytes: int | None = None


@contextmanager
def peak_memory() -> Iterator[Memory]:
    """Measure the peak of memory in use within the block, the weights included.

    On CPUs, what was freed before goes back to the system first: the C library keeps pages of
    earlier models and larger batches, and they would count.
    """
    memory = Memory()
    on_gpu = torch.cuda.is_available()
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    is_reset = not on_gpu and _reset_peak()
    yield memory
    if on_gpu:
        memory.bytes = torch.cuda.max_memory_allocated()
    elif is_reset:
        [peak] = [line for line in STATUS.read_text().splitlines() if line.startswith("VmHWM:")]
        memory.bytes = 1024 * int(peak.split()[1])


def _reset_peak() -> bool:
    """Whether the system could be told to forget this process's peak so far."""
    gc.collect()  # a model may be part of a cycle
    _return_freed_pages()
    try:
        CLEAR.write_text(RESET_PEAK)
    except OSError:  # not Linux, or not allowed
        return False
    return True


def _return_freed_pages() -> None:
    try:
        ctypes.CDLL(None).malloc_trim(0)
    except AttributeError:  # musl, macOS
        return


def _repeat(
    do: Callable[[], None], case: BenchmarkCase, repeats: int, on_batch: Callable[[Batch], None]
) -> list[float]:
    seconds = []
    for _ in range(repeats):
        seconds.append(_seconds(do))
        on_batch(Batch(case=case, seconds=seconds[-1]))
    return seconds


def _seconds(do: Callable[[], None]) -> float:
    began = time.monotonic()
    do()
    return time.monotonic() - began


def _usable_ids(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    special = {*tokenizer.all_special_ids, *end_token_ids(tokenizer)}
    return [token_id for token_id in range(tokenizer.vocab_size) if token_id not in special]


def _random_rows(usable: Sequence[int], rows: int, tokens: int, seed: int) -> list[list[int]]:
    drawn = np.random.default_rng(seed).choice(usable, (rows, tokens))
    token_ids: list[list[int]] = drawn.tolist()
    return token_ids


def _sequences(tokenizer: PreTrainedTokenizerBase, case: BenchmarkCase, seed: int) -> TokenBatch:
    """Random prompts with responses that end as a reward model expects it."""
    end = end_token_ids(tokenizer)[0]
    length = case.prompt_tokens + case.answer_tokens
    rows = _random_rows(_usable_ids(tokenizer), case.batch_size, length, seed)
    for row in rows:
        row[-1] = end
        if is_for_pairs(tokenizer):
            row[case.prompt_tokens - 1] = end
    return pad_right(rows, int(tokenizer.pad_token_id))
