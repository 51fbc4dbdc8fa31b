"""transformers' continuous batching: a response that ends makes room in the batch for the next.

Keys and values are in pages, requests are concatenated without padding, and on CUDA the steps are
captured as graphs. It runs in another thread, where autocast has no effect: so the weights
themselves are rounded while it samples.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn
from transformers import ContinuousBatchingConfig, GenerationConfig, PreTrainedModel

from policies.sampling.generate import OnBatch, TokensAndLogProbs
from rlhf.errors import InputError

PAGE = 256  # tokens
REMEDY = "Use --engine generate, which samples from every model."


@dataclass(frozen=True)
class ContinuousSampler:
    """Continuous batching; a call samples all its prompts in one run of the engine.

    `accelerator`: device and precision.
    """

    accelerator: Accelerator

    def __call__(
        self,
        model: PreTrainedModel | None,
        prompts: Sequence[list[int]],
        config: GenerationConfig,
        batch_size: int,
        on_batch: OnBatch,
    ) -> list[TokensAndLogProbs]:
        """See `Sampler`."""
        assert model is not None
        sampled = _run_engine(self.accelerator, model, prompts, config, batch_size)
        on_batch(len(prompts))
        return sampled


def _run_engine(
    accelerator: Accelerator,
    model: PreTrainedModel,
    prompts: Sequence[list[int]],
    config: GenerationConfig,
    requests: int,
) -> list[TokensAndLogProbs]:
    batching = batching_config(
        accelerator.device, requests, max(map(len, prompts)) + int(config.max_new_tokens)
    )
    dtype = torch.bfloat16 if accelerator.mixed_precision == "bf16" else torch.float32
    try:
        with attending_by(model, "sdpa"), rounded(model, dtype):
            generate: Any = model.generate_batch  # torch's types take it for a tensor
            outputs = generate(
                inputs=list(prompts), generation_config=config, continuous_batching_config=batching
            )
    except (ValueError, NotImplementedError) as error:
        raise InputError(
            f"Continuous batching cannot run {type(model).__name__} ({error})", REMEDY
        ) from None
    if len(outputs) < len(prompts) or any(output.error for output in outputs.values()):
        errors = {output.error for output in outputs.values() if output.error} or {"see above"}
        raise InputError(
            f"Continuous batching gave {len(outputs)} of {len(prompts)} responses "
            f"({', '.join(sorted(errors))})",
            REMEDY,
        )
    return [(list(output.generated_tokens), list(output.logprobs)) for output in outputs.values()]


def batching_config(device: torch.device, requests: int, longest: int) -> ContinuousBatchingConfig:
    """Pages for `requests` sequences of the longest length; on CUDA with graphs.

    Transformers would switch graphs off here: where attention needs a mask, it expects their
    padding to cost more than they save.
    """
    return ContinuousBatchingConfig(
        page_size=PAGE,
        num_blocks=requests * math.ceil(longest / PAGE),
        max_batch_tokens=max(longest, requests),
        max_requests_per_batch=requests,
        return_logprobs=True,
        use_cuda_graph=device.type == "cuda",
    )


@contextmanager
def attending_by(model: PreTrainedModel, attention: str) -> Iterator[None]:
    """Use another attention implementation within the block."""
    before = model.config._attn_implementation
    model.set_attn_implementation(attention)
    try:
        yield
    finally:
        model.set_attn_implementation(before)


@contextmanager
def rounded(model: nn.Module, dtype: torch.dtype) -> Iterator[None]:
    """Round a model's float32 weights within the block; afterwards they are as before."""
    originals = {
        weight: weight.data for weight in model.parameters() if weight.dtype == torch.float32
    }
    try:
        for weight, data in originals.items():
            weight.data = data.to(dtype)
        yield
    finally:
        for weight, data in originals.items():
            weight.data = data
