"""The loss of quantization, measured on held-out prompts with both models loaded from disk."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from policies.deployment.settings import QuantizeSettings
from policies.evaluate.judges import score_with_gold
from policies.evaluate.measures.statistics import compare, judge_wins
from policies.evaluate.responses import ModelResponses, as_records
from policies.reference.audit import score_responses
from policies.sampling.engines import frozen_model
from policies.sampling.generate import encode_prompts
from reward.scoring.scorer import TOKENS_PER_BATCH
from reward.scoring.texts import load_text_reward
from rlhf.endpoints.signals import with_prefix
from rlhf.modeling.models import load_config
from rlhf.modeling.readers import described_kwargs, tokenizer_of
from rlhf.modeling.tokens import decode_response
from rlhf.parallel.distributed import seed_all
from rlhf.records.jsonl import JsonObject
from rlhf.records.schema import Prompt, RankedPrompt, Sampling
from rlhf.run.metrics import progress
from rlhf.run.rundir import RunDir

Description = dict[str, str]


@dataclass(frozen=True, kw_only=True)
class SamplingJob:
    """The held-out prompts, as text and token ids, and how answers to them are sampled."""

    prompts: Sequence[Prompt]
    encoded: list[list[int]]
    tokenizer: PreTrainedTokenizerBase
    sampling: Sampling
    samples: int
    batch_size: int

    @property
    def repeated(self) -> list[list[int]]:
        """The token ids of each prompt as often as it is answered."""
        return [ids for ids in self.encoded for _ in range(self.samples)]


def compare_policies(
    accelerator: Accelerator,
    original: Description,
    quantized: Description,
    prompts: Sequence[Prompt],
    settings: QuantizeSettings,
) -> tuple[dict[str, Any], Iterator[JsonObject]]:
    """`log_prob`, and with a reward `win_rate`, as report.json holds them; and the responses.

    The log-probs are those of the original's responses.

    Raises:
        InputError: a prompt is too long, or the reward cannot be used.
    """
    tokenizer, limit = tokenizer_of(original), settings.max_new_tokens
    job = SamplingJob(
        prompts=prompts,
        encoded=encode_prompts(tokenizer, load_config(original["path"]), prompts, limit),
        tokenizer=tokenizer,
        sampling=Sampling(
            temperature=settings.temperature,
            top_p=1.0,
            top_k=0,
            max_new_tokens=limit,
            seed=settings.seed,
        ),
        samples=settings.samples,
        batch_size=settings.batch_size,
    )
    theirs, before = _sample_and_score(accelerator, original, job)
    ours, after = _sample_and_score(accelerator, quantized, job, theirs)
    lasting = {**quantized, "path": str(RunDir(settings.out).policy)}  # it moves there when done
    both = [theirs, replace(ours, model=lasting)]
    responses = (record.to_json() for record in as_records(prompts, both))
    report: dict[str, Any] = {"log_prob": describe_changes(before, after)}
    if settings.reward is None:
        return report, responses
    given = described_kwargs(original)
    name = with_prefix(settings.reward)
    reward = load_text_reward(name, accelerator, TOKENS_PER_BATCH, given=given)
    scores = score_with_gold(prompts, {"original": theirs, "quantized": ours}, reward)
    wins = compare(scores["quantized"], scores["original"])
    rate = judge_wins(wins, seed=settings.seed)
    bounds = {name: None for name in ("low", "high") if math.isnan(rate[name])}  # of few prompts
    return report | {"win_rate": rate | bounds}, responses


def _sample_and_score(
    accelerator: Accelerator,
    description: Description,
    job: SamplingJob,
    scored: ModelResponses | None = None,
) -> tuple[ModelResponses, list[Tensor]]:
    """A model's responses, and its log-probs of the tokens of `scored`, by default of its own."""
    longest = max(map(len, job.encoded)) + job.sampling.max_new_tokens
    loaded = frozen_model(
        "generate",
        description["path"],
        accelerator,
        job.tokenizer,
        longest,
        job.batch_size,
    )
    prompts, size = job.repeated, job.samples
    with loaded as model, progress("sampling responses", total=len(prompts)) as bar:
        seed_all(job.sampling.seed)
        samples = model.sample(prompts, job.sampling, bar.advance)
        texts = [
            decode_response(job.tokenizer, sample.token_ids, ids)
            for ids, sample in zip(prompts, samples, strict=True)
        ]
        firsts = range(0, len(samples), size)
        responses = ModelResponses(
            description,
            [samples[first : first + size] for first in firsts],
            [texts[first : first + size] for first in firsts],
            job.sampling,
        )
        assert model.model is not None
        read = [ids for row in (scored or responses).token_ids for ids in row]
        log_probs = score_responses(
            accelerator, model.model, job.tokenizer, prompts, read, 1.0, job.batch_size
        )
    return responses, log_probs


def describe_changes(before: Sequence[Tensor], after: Sequence[Tensor]) -> dict[str, float | int]:
    """The largest and the mean |Δ log-prob| of a token in nats, and how many tokens there are."""
    changes = (torch.cat(list(after)) - torch.cat(list(before))).abs()
    return {
        "max": float(changes.max()),
        "mean": float(changes.mean()),
        "tokens": changes.numel(),
    }


def compare_reward_models(
    accelerator: Accelerator,
    original: Description,
    quantized: Description,
    records: Sequence[RankedPrompt],
) -> dict[str, Any]:
    """`reward` and `pairs`, as report.json holds them.

    Raises:
        InputError: a response is too long for the model.
    """
    responses = [(record.prompt, record.responses) for record in records]
    before, after = (
        load_text_reward(
            description["path"], accelerator, TOKENS_PER_BATCH, given=described_kwargs(original)
        )(responses)
        for description in (original, quantized)
    )
    changes = np.abs(np.concatenate(after) - np.concatenate(before))
    return {
        "reward": {
            "max": float(changes.max()),
            "mean": float(changes.mean()),
            "spread": float(np.concatenate(before).std()),
            "responses": changes.size,
        },
        "pairs": count_agreement(before, after),
    }


def count_agreement(
    before: Sequence[Sequence[float]], after: Sequence[Sequence[float]]
) -> dict[str, float | int | None]:
    """The share of pairs of responses to one prompt that two models order in the same way.

    Worked example: (1, 2, 3) and (1, 3, 2) agree on two of three pairs. Pairs that the first model
    ties are left out; a tie of the second alone is a different order. Without pairs, the share is
    None.
    """
    same = [
        np.sign(new[i] - new[j]) == np.sign(old[i] - old[j])
        for old, new in zip(before, after, strict=True)
        for i, j in combinations(range(len(old)), 2)
        if old[i] != old[j]
    ]
    return {"agreement": float(np.mean(same)) if same else None, "pairs": len(same)}
