"""`rlhf generate`, and samples as records of responses."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from policies.sampling.engines import frozen_model
from policies.sampling.generate import Sample, encode_prompts
from policies.sampling.settings import GenerateSettings
from rlhf.modeling.log_probs import batches_by_length
from rlhf.modeling.models import describe_model, load_config
from rlhf.modeling.readers import tokenizer_of
from rlhf.modeling.tokens import decode_response
from rlhf.parallel.distributed import start_alone
from rlhf.records.schema import Prompt, Response, Sampling, content_id
from rlhf.records.wording import EMPTY_TEXT
from rlhf.run.metrics import progress

MORE_SEED_STRIDE = 1_000_003


def generate_responses(
    settings: GenerateSettings,
    lacking: Callable[[str], Sequence[tuple[Prompt, int]]],
    add: Callable[[Iterable[Response]], int],
) -> dict[str, Any]:
    """Sample until every prompt has `k` responses of the model, saving after each batch.

    Args:
        settings: model, k and sampling.
        lacking: for a model fingerprint, the prompts with fewer than k responses, each with the
            number that it has.
        add: stores responses.

    Raises:
        InputError: the model cannot be loaded, or a prompt is too long for it.
    """
    description = describe_model(settings.model, settings.chat_template_kwargs)
    todo = lacking(description["hash"])
    slots = [(prompt, index) for prompt, have in todo for index in range(have, settings.k)]
    if not slots:
        return {"responses": 0, "prompts": 0, "model": settings.model}
    tokenizer, config = tokenizer_of(description), load_config(settings.model)
    limit = settings.max_new_tokens
    encoded = encode_prompts(tokenizer, config, [prompt for prompt, _ in slots], limit)
    most = max(have for _, have in todo)  # a second call with this seed must not repeat responses
    accelerator = start_alone(settings.precision, settings.seed + MORE_SEED_STRIDE * most)
    sampling = Sampling(
        temperature=settings.temperature,
        top_p=settings.top_p,
        top_k=settings.top_k,
        max_new_tokens=settings.max_new_tokens,
        seed=settings.seed,
    )
    # weights in the precision of the products need no casts; nothing is trained here
    dtype = torch.bfloat16 if accelerator.mixed_precision == "bf16" else torch.float32
    longest, size = max(map(len, encoded)) + limit, settings.batch_size
    loaded = frozen_model(
        settings.engine, settings.model, accelerator, tokenizer, longest, size, dtype=dtype
    )
    with loaded as model, progress("sampling responses", len(slots), is_stage=True) as bar:
        for rows in batches_by_length([len(ids) for ids in encoded], model.at_once):
            samples = model.sample([encoded[row] for row in rows], sampling)
            add(
                as_response(
                    *slots[row],
                    sample,
                    decode_response(tokenizer, sample.token_ids, encoded[row]),
                    description,
                    sampling,
                )
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
    """A sample as a record of the response, its model and its sampling settings."""
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
