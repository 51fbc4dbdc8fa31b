"""The responses that an evaluation compares: stored ones, and ones sampled now.

Letters: P prompts, N responses of one model to each.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from accelerate import Accelerator
from transformers import PreTrainedTokenizerBase

from policies.evaluate.answer_order import split_by_model
from policies.reference.store import ReferenceRow, ReferenceStore
from policies.sampling.engines import frozen_model
from policies.sampling.generate import Sample, encode_prompts
from policies.sampling.responses import as_response
from policies.sampling.settings import Engine
from rlhf.modeling.chat_template import end_token_ids, opens_thinking
from rlhf.modeling.models import load_config
from rlhf.modeling.readers import tokenizer_of
from rlhf.modeling.thinking import after_opening_tag
from rlhf.modeling.tokens import decode_response, encode_prompt, tokenizer_fingerprint
from rlhf.parallel.distributed import seed_all
from rlhf.records.ranked import read_ranked_file
from rlhf.records.schema import Prompt, RankedPrompt, Response, Sampling
from rlhf.records.wording import EMPTY_TEXT
from rlhf.run.metrics import progress


@dataclass(frozen=True)
class ModelResponses:
    """One model and its responses to all prompts.

    Args:
        model: path, hash and tokenizer fingerprint, as `describe_model` gives them.
        samples: (P, N) token ids in the policy's tokenizer.
        texts: (P, N) the same as text.
        sampling: how they were sampled.
    """

    model: dict[str, str]
    samples: Sequence[Sequence[Sample]]
    texts: Sequence[Sequence[str]]
    sampling: Sampling

    @property
    def token_ids(self) -> list[list[list[int]]]:
        """(P, N) the token ids of every response."""
        return [[sample.token_ids for sample in row] for row in self.samples]

    def responses(self, prompts: Sequence[Prompt]) -> list[list[Response]]:
        """The responses as records, which know the model that gave them."""
        return [
            [
                as_response(prompt, index, sample, text, self.model, self.sampling)
                for index, (sample, text) in enumerate(zip(samples, texts, strict=True))
            ]
            for prompt, samples, texts in zip(prompts, self.samples, self.texts, strict=True)
        ]


def reference_responses(
    groups: Sequence[tuple[ReferenceRow, ...]], store: ReferenceStore
) -> ModelResponses:
    """The reference outputs of each prompt."""
    return ModelResponses(
        store.manifest["model"],
        [[Sample(row.response_ids, row.finished) for row in group] for group in groups],
        [[row.text for row in group] for group in groups],
        store.sampling,
    )


@dataclass(frozen=True, kw_only=True)
class SamplingSetup:
    """How a model is sampled: by which engine, how often per prompt, and in what batches."""

    engine: Engine
    samples: int
    batch_size: int


def sample_responses(
    accelerator: Accelerator,
    tokenizer: PreTrainedTokenizerBase,
    description: dict[str, str],
    prompts: Sequence[list[int]],
    sampling: Sampling,
    setup: SamplingSetup,
) -> ModelResponses:
    """Load a model and sample several responses to every prompt, given as token ids."""
    repeated = [ids for ids in prompts for _ in range(setup.samples)]
    longest = max(map(len, prompts)) + sampling.max_new_tokens
    path, size = description["path"], setup.batch_size
    loaded = frozen_model(setup.engine, path, accelerator, tokenizer, longest, size)
    with loaded as model, progress("sampling responses", total=len(repeated)) as bar:
        seed_all(sampling.seed)
        flat = model.sample(repeated, sampling, bar.advance)
    grouped = [flat[first : first + setup.samples] for first in range(0, len(flat), setup.samples)]
    texts = [
        [decode_response(tokenizer, sample.token_ids, ids) for sample in group]
        for ids, group in zip(prompts, grouped, strict=True)
    ]
    return ModelResponses(description, grouped, texts, sampling)


def sample_rival(
    accelerator: Accelerator,
    description: dict[str, str],
    prompts: Sequence[Prompt],
    policy_tokenizer: PreTrainedTokenizerBase,
    sampling: Sampling,
    setup: SamplingSetup,
) -> ModelResponses:
    """Load another model with its own tokenizer and sample responses to the same prompts.

    Its responses are re-encoded with the policy's tokenizer, so that lengths are comparable and the
    reward model can score them; what is returned records that tokenizer.
    """
    tokenizer, config = tokenizer_of(description), load_config(description["path"])
    encoded = encode_prompts(tokenizer, config, prompts, sampling.max_new_tokens)
    responses = sample_responses(accelerator, tokenizer, description, encoded, sampling, setup)
    if description["tokenizer"] == tokenizer_fingerprint(policy_tokenizer):
        return responses
    rewritten = [
        [
            _rewrite(policy_tokenizer, sample, text, opened=opened)
            for sample, text in zip(samples_of, texts, strict=True)
        ]
        for opened, samples_of, texts in zip(
            (opens_thinking(policy_tokenizer, encode_prompt(policy_tokenizer, p)) for p in prompts),
            responses.samples,
            responses.texts,
            strict=True,
        )
    ]
    theirs = {**description, "tokenizer": tokenizer_fingerprint(policy_tokenizer)}
    return ModelResponses(theirs, rewritten, responses.texts, sampling)


def _rewrite(
    tokenizer: PreTrainedTokenizerBase, sample: Sample, text: str, *, opened: bool
) -> Sample:
    text = after_opening_tag(text) if opened else text
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    end = [end_token_ids(tokenizer)[0]] if sample.finished or not ids else []
    return Sample([*ids, *end], sample.finished)


def as_records(prompts: Sequence[Prompt], models: Sequence[ModelResponses]) -> list[RankedPrompt]:
    """Every prompt with the responses of all models, in their order."""
    by_model = [model.responses(prompts) for model in models]
    return [
        RankedPrompt(
            prompt=prompt, responses=tuple(r for of in by_model for r in of[row]), rankings=()
        )
        for row, prompt in enumerate(prompts)
    ]


def read_sampled(file: Path, samples: int, *, has_rival: bool) -> dict[str, ModelResponses]:
    """Read the policy's and the rival's responses of an interrupted evaluation."""
    rows = [
        split_by_model(record.responses, samples, has_rival=has_rival)
        for record in read_ranked_file(file)
    ]
    return {
        name: _as_model_responses([row[name] for row in rows])
        for name in rows[0]
        if name != "reference"
    }


def _as_model_responses(rows: Sequence[Sequence[Response]]) -> ModelResponses:
    response = rows[0][0]
    return ModelResponses(
        {
            "path": response.model,
            "hash": str(response.model_fingerprint),
            "tokenizer": str(response.tokenizer_fingerprint),
        },
        [[Sample(list(r.token_ids or ()), bool(r.finished)) for r in row] for row in rows],
        [["" if r.text == EMPTY_TEXT else r.text for r in row] for row in rows],
        response.sampling or Sampling(),
    )
