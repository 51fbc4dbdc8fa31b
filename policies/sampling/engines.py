"""The engines that sample responses: transformers' `generate`, its continuous batching, or vLLM."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from accelerate import Accelerator
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from policies.sampling.continuous import ContinuousSampler
from policies.sampling.generate import GenerateSampler, OnBatch, Sample, Sampler, sample_responses
from policies.sampling.settings import Engine
from policies.sampling.vllm_engine import VLLM, shut_down
from rlhf.modeling.logits.freed_memory import keep_freed_blocks
from rlhf.modeling.models import in_memory, load_causal_lm
from rlhf.parallel.distributed import global_max
from rlhf.records.schema import Sampling
from rlhf.run.watchdog import beat

BATCHES_PER_CALL = 4  # of engines that show no progress within a call


def new_sampler(
    engine: Engine,
    model: str,
    accelerator: Accelerator,
    longest: int,
    requests: int,
    *,
    lora_rank: int | None = None,
    tensor_parallel: int = 1,
) -> Sampler:
    """The sampler of an engine.

    Args:
        engine: by its name in settings.
        model: folder or hub name.
        accelerator: device, precision and processes.
        longest: tokens of the longest prompt and response together.
        requests: maximum number of responses sampled at once.
        lora_rank: of the adapters that a policy has on the weights of `model`; 0: it is `model`
            itself; None: all weights come with every call.
        tensor_parallel: neighboring ranks that share one vLLM; they sample at the same time.

    Raises:
        InputError: vLLM does not start with this model.
    """
    if accelerator.device.type == "cpu" and engine != "vllm":
        keep_freed_blocks()
    if engine == "continuous":
        return ContinuousSampler(accelerator)
    if engine == "vllm":
        return VLLM(
            model,
            accelerator,
            longest,
            requests,
            lora_rank=lora_rank,
            tensor_parallel=tensor_parallel,
        )
    return GenerateSampler(accelerator)


@dataclass(frozen=True)
class FrozenModel:
    """A model that samples and is not trained.

    Args:
        accelerator: device and precision.
        tokenizer: for padding and end tokens.
        model: not wrapped; None where the sampler has the weights.
        sampler: what samples.
        batch_size: sequences sampled at once.
    """

    accelerator: Accelerator
    tokenizer: PreTrainedTokenizerBase
    model: PreTrainedModel | None
    sampler: Sampler
    batch_size: int

    @property
    def at_once(self) -> int:
        """Prompts that are done before there is a sign of progress."""
        return self.batch_size * (1 if self._reports_batches else BATCHES_PER_CALL)

    @property
    def _reports_batches(self) -> bool:
        """Whether the sampler calls `on_batch` before the end of a call."""
        return isinstance(self.sampler, GenerateSampler)

    def sample(
        self,
        prompts: Sequence[list[int]],
        sampling: Sampling,
        on_batch: OnBatch = lambda count: None,
    ) -> list[Sample]:
        """Sample one response to each prompt, in the order given.

        Args:
            prompts: token ids; repeat a prompt to sample it several times.
            sampling: temperature, truncation and length; the caller sets the random seed.
            on_batch: called after each batch with the number of its responses.

        Raises:
            InputError: the engine cannot run this model.
        """
        tokenizer, size = self.tokenizer, self.batch_size
        samples: list[Sample] = []
        per_call = max(1, len(prompts)) if self._reports_batches else self.at_once
        firsts = list(range(0, len(prompts), per_call))
        if isinstance(self.sampler, VLLM) and self.sampler.tensor_parallel > 1:
            # the ranks that share it call it equally often, some at last without prompts
            calls = int(global_max(self.accelerator, len(firsts)))
            firsts += [len(prompts)] * (calls - len(firsts))
        for first in firsts:
            beat()
            part = prompts[first : first + per_call]
            samples += sample_responses(
                self.sampler, self.model, tokenizer, part, sampling, size, on_batch
            )
        return samples


@contextmanager
def frozen_model(
    engine: Engine,
    path: str,
    accelerator: Accelerator,
    tokenizer: PreTrainedTokenizerBase,
    longest: int,
    batch_size: int,
    *,
    dtype: torch.dtype = torch.float32,
) -> Iterator[FrozenModel]:
    """Load a model to sample from it within the block; only vLLM loads it where that samples.

    Args:
        engine: what samples.
        path: folder or hub name of the model.
        accelerator: device and precision.
        tokenizer: for padding and end tokens.
        longest: tokens of the longest prompt and response together.
        batch_size: sequences sampled at once.
        dtype: of the weights; vLLM's have the precision of the products.

    Raises:
        InputError: the model cannot be loaded, or vLLM does not start with it.
    """
    sampler = new_sampler(engine, path, accelerator, longest, batch_size, lora_rank=0)
    if engine == "vllm":
        try:
            yield FrozenModel(accelerator, tokenizer, None, sampler, batch_size)
        finally:
            shut_down()
        return
    with in_memory(load_causal_lm(path, dtype).to(accelerator.device).eval()) as model:
        yield FrozenModel(accelerator, tokenizer, model, sampler, batch_size)
