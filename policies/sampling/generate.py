"""Sampling responses from a model, batch by batch in order of length."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from accelerate import Accelerator
from jaxtyping import Float, Int
from torch import Tensor
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from policies.sampling.prefill import prefill
from rlhf.errors import InputError
from rlhf.modeling.chat_template import end_token_ids
from rlhf.modeling.log_probs import batches_by_length
from rlhf.modeling.logits.projection import float32_logits
from rlhf.modeling.models import context_length
from rlhf.modeling.tokens import encode_prompt
from rlhf.records.schema import Prompt, Sampling
from rlhf.run.watchdog import beat

VOCABULARY_BLOCK = 256  # tokens whose probabilities are summed first

TokensAndLogProbs = tuple[list[int], list[float]]
OnBatch = Callable[[int], None]


class Sampler(Protocol):
    """Samples a response to each prompt: its token ids and their log-probs, in the order given."""

    def __call__(
        self,
        model: PreTrainedModel | None,
        prompts: Sequence[list[int]],
        config: GenerationConfig,
        batch_size: int,
        on_batch: OnBatch,
    ) -> list[TokensAndLogProbs]:
        """Sample; what follows an end token may be left in.

        Args:
            model: the language model, not wrapped and in evaluation mode; None where the sampler
                has the weights.
            prompts: token ids.
            config: temperature, truncation and length, end tokens and padding.
            batch_size: maximum number of responses sampled at once.
            on_batch: called with the number of responses whenever some are done.

        Raises:
            InputError: the sampler cannot run this model.
        """
        ...


@dataclass(frozen=True)
class Sample:
    """The token ids of a sampled response; `finished`: it ends with an end token.

    `log_probs` are the sampler's own of its tokens; None where unknown.
    """

    token_ids: list[int]
    finished: bool
    log_probs: list[float] | None = None


def encode_prompts(
    tokenizer: PreTrainedTokenizerBase,
    config: PreTrainedConfig,
    prompts: Sequence[Prompt],
    max_new_tokens: int,
) -> list[list[int]]:
    """Token ids of prompts, each short enough for a full-length response in the model's context.

    Raises:
        InputError: a prompt and a full-length response together exceed the context.
    """
    encoded = [encode_prompt(tokenizer, prompt) for prompt in prompts]
    context = context_length(config)
    for prompt, ids in zip(prompts, encoded, strict=True):
        if context is not None and len(ids) + max_new_tokens > context:
            raise InputError(
                f"Prompt {prompt.id} has {len(ids)} tokens; with {max_new_tokens} new ones it "
                f"exceeds the model's context of {context}",
                "Shorten or remove the prompt, or lower --max-new-tokens.",
            )
    return encoded


@torch.no_grad()
def sample_responses(
    sampler: Sampler,
    model: PreTrainedModel | None,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[list[int]],
    sampling: Sampling,
    batch_size: int,
    on_batch: OnBatch = lambda count: None,
) -> list[Sample]:
    """Sample one response to each prompt, in the order given.

    Args:
        sampler: what samples.
        model: the language model, not wrapped; None where the sampler has the weights.
        tokenizer: for padding and end tokens.
        prompts: token ids; repeat a prompt to sample it several times.
        sampling: temperature, truncation and length; the caller sets the random seed.
        batch_size: maximum number of responses sampled at once.
        on_batch: called with the number of responses whenever some are done.

    Raises:
        InputError: the sampler cannot run this model.
    """
    config = generation_config(tokenizer, sampling)
    with _evaluating(model):
        sampled = sampler(model, prompts, config, batch_size, on_batch)
    end_tokens = end_token_ids(tokenizer)
    return [cut_at_end_token(ids, end_tokens, log_probs) for ids, log_probs in sampled]


@contextmanager
def _evaluating(model: PreTrainedModel | None) -> Iterator[None]:
    """Switch dropout off within the block."""
    if model is None:
        yield
        return
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)


@dataclass(frozen=True)
class GenerateSampler:
    """Transformers' plain `generate`: batches of prompts of similar length.

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
        sampled: dict[int, TokensAndLogProbs] = {}
        for rows in batches_by_length([len(ids) for ids in prompts], batch_size):
            part = [prompts[row] for row in rows]
            responses = _sample_batch(self.accelerator, model, part, config)
            sampled.update(zip(rows, responses, strict=True))
            on_batch(len(rows))
        return [sampled[row] for row in range(len(prompts))]


def _sample_batch(
    accelerator: Accelerator,
    model: PreTrainedModel,
    prompts: Sequence[list[int]],
    config: GenerationConfig,
) -> list[TokensAndLogProbs]:
    """Token ids, up to the longest response of the batch, and their log-probs."""
    drawing = SampleAndRecord()
    generate: Any = model.generate
    pad_id = int(config.pad_token_id)
    with accelerator.autocast(), float32_logits(model, frozen=True):
        new_tokens = int(config.max_new_tokens)
        batch, cache = prefill(model, prompts, pad_id, accelerator.device, new_tokens)
        output = generate(
            input_ids=batch.ids,
            attention_mask=batch.mask.long(),
            past_key_values=cache,
            generation_config=config_for_drawing_processor(config),
            logits_processor=LogitsProcessorList([*warpers(config), drawing]),
        )
    new_ids = output[:, batch.ids.shape[1] :].tolist()
    log_probs = torch.stack(drawing.log_probs, dim=1).tolist()
    return list(zip(new_ids, log_probs, strict=True))


class SampleAndRecord(LogitsProcessor):
    """Draws the next token, masks all others for `generate`, and records its log-probability.

    `generate` itself would use `torch.multinomial`, which draws a random number for every token of
    the vocabulary: on CPUs a fifth of a small model's time per token.
    """

    def __init__(self) -> None:
        self.log_probs: list[Tensor] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Scores that are 0 at the drawn token and −∞ at all others."""
        beat()
        probabilities = scores.float().softmax(dim=1)
        ids = draw(probabilities)
        self.log_probs.append(probabilities.gather(1, ids).log().squeeze(1))
        return scores.fill_(-torch.inf).scatter_(1, ids, 0.0)  # `generate` reads nothing else


def draw(probabilities: Float[Tensor, "B V"]) -> Int[Tensor, "B 1"]:
    """Draw a token from each row: where a uniform number falls in the row's cumulative sum.

    Short parts of the row are summed first, and then the one that is hit token by token. What adds
    up the parts is float64: float32 would lose the tail of a large vocabulary.
    """
    vocabulary = probabilities.shape[1]
    padded = torch.nn.functional.pad(probabilities, (0, -vocabulary % VOCABULARY_BLOCK))
    parts = padded.view(len(padded), -1, VOCABULARY_BLOCK)
    sums = parts.sum(dim=2).cumsum(dim=1, dtype=torch.float64)
    uniform = torch.rand(len(sums), 1, dtype=torch.float64, device=sums.device)
    threshold = uniform * sums[:, -1:]
    part = torch.searchsorted(sums, threshold, right=True).clamp(max=sums.shape[1] - 1)
    chosen = parts.gather(1, part[:, :, None].expand(-1, -1, VOCABULARY_BLOCK)).squeeze(1)
    inner = chosen.double().cumsum(dim=1)
    before = sums.gather(1, part) - inner[:, -1:]
    # a part's float32 sum may miss its float64 one: below 0, token 0 would be drawn, even at odds 0
    token = torch.searchsorted(inner, (threshold - before).clamp(min=0), right=True)
    return (part * VOCABULARY_BLOCK + token).clamp(max=vocabulary - 1)


def warpers(config: GenerationConfig) -> list[LogitsProcessor]:
    """Temperature and truncation, in the order in which `generate` applies them."""
    processors: list[LogitsProcessor] = []
    if config.temperature != 1:
        processors.append(TemperatureLogitsWarper(config.temperature))
    if config.top_k:
        processors.append(TopKLogitsWarper(config.top_k))
    if config.top_p < 1:
        processors.append(TopPLogitsWarper(config.top_p))
    return processors


def config_for_drawing_processor(config: GenerationConfig) -> GenerationConfig:
    """The configuration of `generate` where `SampleAndRecord` draws the tokens.

    `generate` itself then takes the most likely token, which is the drawn one, and warps nothing.
    """
    return GenerationConfig(
        do_sample=False,
        temperature=1.0,
        top_p=1.0,
        top_k=50,  # unused; left unset, it would come from the model's own config
        repetition_penalty=1.0,
        max_new_tokens=config.max_new_tokens,
        use_cache=True,  # configs of models trained with checkpointing often switch it off
        pad_token_id=config.pad_token_id,
        eos_token_id=config.eos_token_id,
    )


def generation_config(tokenizer: PreTrainedTokenizerBase, sampling: Sampling) -> GenerationConfig:
    """How to sample, as samplers take it."""
    # top_k and top_p are set even when off: unset, they would come from the model's own config
    return GenerationConfig(
        do_sample=True,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        repetition_penalty=1.0,
        max_new_tokens=sampling.max_new_tokens,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=list(end_token_ids(tokenizer)),
    )


def cut_at_end_token(
    ids: list[int], end_tokens: Sequence[int], log_probs: list[float] | None = None
) -> Sample:
    """Drop what follows the first end token, which belongs to the response itself."""
    end = next((i for i, token in enumerate(ids) if token in end_tokens), None)
    length = len(ids) if end is None else end + 1
    kept_log_probs = None if log_probs is None else log_probs[:length]
    return Sample(ids[:length], end is not None, kept_log_probs)
