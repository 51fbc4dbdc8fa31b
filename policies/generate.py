"""Sampling responses from a model, batch by batch in order of length; and `rlhf generate`."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from accelerate import Accelerator
from transformers import (
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from policies.settings import GenerateSettings
from rlhf.distributed import start
from rlhf.errors import InputError
from rlhf.metrics import progress
from rlhf.models import describe_model, load_causal_lm, load_config
from rlhf.records import Prompt, Response, Sampling, content_id
from rlhf.tokens import encode_prompt, load_tokenizer, pad_left

EMPTY_TEXT = "(no answer)"  # people must see that a model said nothing; the token ids stay exact


@dataclass(frozen=True)
class Sample:
    """The token ids of a sampled response; `finished` tells whether it has its end token."""

    token_ids: list[int]
    finished: bool


def encode_prompts(
    tokenizer: PreTrainedTokenizerBase,
    config: PreTrainedConfig,
    prompts: Sequence[Prompt],
    max_new_tokens: int,
) -> list[list[int]]:
    """Token ids of prompts that leave room for an answer in the model's context.

    Raises:
        InputError: a prompt and an answer of full length do not fit together.
    """
    encoded = [encode_prompt(tokenizer, prompt) for prompt in prompts]
    context = getattr(config.get_text_config(), "max_position_embeddings", None)
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
    accelerator: Accelerator,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[list[int]],
    sampling: Sampling,
    batch_size: int,
    on_batch: Callable[[int], None] = lambda count: None,
) -> list[Sample]:
    """Sample one response for every row of prompt token ids, in the order given.

    Args:
        accelerator: device and precision.
        model: the language model, not wrapped.
        tokenizer: for padding and end tokens.
        prompts: token ids; repeat a prompt to sample it several times.
        sampling: temperature, truncation and length; its seed is not used: the caller seeds.
        batch_size: sequences sampled at once.
        on_batch: told how many responses each batch has added.
    """
    config = generation_config(tokenizer, sampling)
    order = sorted(range(len(prompts)), key=lambda row: len(prompts[row]))
    samples: dict[int, Sample] = {}
    was_training = model.training
    model.eval()
    for first in range(0, len(order), batch_size):
        rows = order[first : first + batch_size]
        batch = pad_left([prompts[row] for row in rows], int(config.pad_token_id)).to(
            accelerator.device
        )
        with accelerator.autocast():
            generate: Any = model.generate
            output = generate(
                input_ids=batch.ids, attention_mask=batch.mask.long(), generation_config=config
            )
        new_ids = output[:, batch.ids.shape[1] :].tolist()
        samples |= {
            row: cut(ids, int(tokenizer.eos_token_id))
            for row, ids in zip(rows, new_ids, strict=True)
        }
        on_batch(len(rows))
    model.train(was_training)
    return [samples[row] for row in range(len(prompts))]


def generation_config(tokenizer: PreTrainedTokenizerBase, sampling: Sampling) -> GenerationConfig:
    """How `generate` samples."""
    # top_k and top_p stand here even when off: unset ones would come from the model's own config
    return GenerationConfig(
        do_sample=True,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        repetition_penalty=1.0,
        max_new_tokens=sampling.max_new_tokens,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )


def cut(ids: list[int], eos_id: int) -> Sample:
    """Drop what follows the first end token; the end token itself belongs to the response."""
    if eos_id in ids:
        return Sample(ids[: ids.index(eos_id) + 1], finished=True)
    return Sample(ids, finished=False)


def decode(tokenizer: PreTrainedTokenizerBase, sample: Sample) -> str:
    """The text of a sample, without special tokens."""
    return str(tokenizer.decode(sample.token_ids, skip_special_tokens=True)).strip()


def generate_responses(
    settings: GenerateSettings,
    lacking: Callable[[str], Sequence[tuple[Prompt, int]]],
    add: Callable[[Iterable[Response]], int],
) -> dict[str, Any]:
    """Sample until every prompt has `k` responses of the model, saving after each batch.

    Args:
        settings: model, k and sampling.
        lacking: for a model fingerprint, the prompts with fewer than k responses, and how many
            they have.
        add: stores responses.

    Raises:
        InputError: the model cannot be loaded, or a prompt is too long for it.
    """
    description = describe_model(settings.model)
    todo = lacking(description["hash"])
    slots = [(prompt, index) for prompt, have in todo for index in range(have, settings.k)]
    if not slots:
        return {"responses": 0, "prompts": 0, "model": settings.model}
    tokenizer = load_tokenizer(settings.model)
    encoded = encode_prompts(
        tokenizer, load_config(settings.model), [p for p, _ in slots], settings.max_new_tokens
    )
    accelerator = start(settings.precision, settings.seed)
    # nothing is trained here: weights in the precision they are multiplied in need no casts
    dtype = torch.bfloat16 if accelerator.mixed_precision == "bf16" else torch.float32
    model = load_causal_lm(settings.model, dtype).to(accelerator.device).eval()
    sampling = Sampling(
        temperature=settings.temperature,
        top_p=settings.top_p,
        top_k=settings.top_k,
        max_new_tokens=settings.max_new_tokens,
        seed=settings.seed,
    )
    order = sorted(range(len(slots)), key=lambda slot: len(encoded[slot]))
    with progress("responses", total=len(slots)) as bar:
        for first in range(0, len(order), settings.batch_size):
            rows = order[first : first + settings.batch_size]
            samples = sample_responses(
                accelerator,
                model,
                tokenizer,
                [encoded[row] for row in rows],
                sampling,
                settings.batch_size,
            )
            add(
                as_response(*slots[row], sample, decode(tokenizer, sample), description, sampling)
                for row, sample in zip(rows, samples, strict=True)
            )
            bar.advance(len(rows))
    return {"responses": len(slots), "prompts": len(todo), "model": settings.model}


def as_response(
    prompt: Prompt,
    index: int,
    sample: Sample,
    text: str,
    description: dict[str, str],
    sampling: Sampling,
) -> Response:
    """A sample as a record, which knows the model and the settings that gave it."""
    return Response(
        id=content_id(prompt.id, description["hash"], index, sample.token_ids),
        prompt_id=prompt.id,
        text=text or EMPTY_TEXT,
        model=description["path"],
        model_fingerprint=description["hash"],
        tokenizer_fingerprint=description["tokenizer"],
        sampling=sampling,
        sample_index=index,
        token_ids=tuple(sample.token_ids),
        finished=sample.finished,
    )
