"""`rlhf evaluate`: is the policy better than what the original model said to the same prompts?

The answers y* are sampled now, with the settings that the stored originals y0 were sampled with;
every y* meets every y0 of its prompt, a tie counting half. Intervals resample prompts, because
answers to one prompt resemble each other.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from accelerate import Accelerator
from jaxtyping import Float
from numpy import ndarray
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from policies.audit import audit_reverse_kl, load_reference_model, measure_forward_kl
from policies.generate import Sample, decode, sample_responses
from policies.reference_store import ReferenceRow, ReferenceStore, open_store
from policies.report import Pair, write_report
from policies.report import Sample as ShownSample
from policies.settings import EvaluateSettings
from policies.statistics import compare, distinct_n, judge_wins, spread
from reward.scoring import Scorer, load_scorer
from rlhf.distributed import start
from rlhf.errors import InputError
from rlhf.metrics import progress, read_metrics
from rlhf.models import describe_model, load_causal_lm, model_folder, require_same_tokenizer
from rlhf.rundir import RunDir, open_stage, require_done, stage_status
from rlhf.signals import Signal, load_signal
from rlhf.tokens import load_tokenizer, pad_right

Scores = Float[ndarray, "P N"]


@dataclass(frozen=True)
class Answers:
    """For every prompt its stored originals (M each) and the policy's answers (S each)."""

    groups: Sequence[tuple[ReferenceRow, ...]]
    samples: Sequence[Sequence[Sample]]
    texts: Sequence[Sequence[str]]


def evaluate_policy(settings: EvaluateSettings) -> dict[str, Any]:
    """Run the stage and return its report.

    Raises:
        InputError: an input is missing or unfinished, belongs to another model, or the split is
            empty.
    """
    began = time.monotonic()
    gold = load_signal(settings.gold) if settings.gold else None
    store = open_store(require_done(settings.reference, "reference", "outputs").outputs)
    policy_path = model_folder(settings.policy, "ppo", "policy")
    policy = describe_model(policy_path)
    reward = describe_model(model_folder(settings.reward, "reward", "model"))
    require_same_tokenizer(reward, policy)
    require_same_tokenizer(store.manifest["model"], policy)
    groups = store.by_prompt(settings.split)
    if not groups:
        raise InputError(
            f"The store {settings.reference} has no prompts of the split {settings.split!r}",
            "Import prompts of that split (`rlhf import --split test`), or give --split train.",
        )
    inputs = {
        "policy": policy,
        "reward": reward,
        "reference": {"path": str(settings.reference), "hash": store.content_hash},
    }
    accelerator = start(settings.precision, settings.seed)
    run = open_stage(settings.out, "evaluate", settings, inputs, resume=settings.resume)
    if run.is_done:
        return brief(run.read_report())
    with stage_status(run):
        tokenizer = load_tokenizer(policy_path)
        model = load_causal_lm(policy_path).to(accelerator.device)
        model.eval()
        answers = answer(accelerator, model, tokenizer, groups, store, settings)
        scorer = load_scorer(reward["path"], accelerator)
        judged = {"reward": score_with_model(answers, scorer, tokenizer)}
        if gold is not None:
            judged["gold"] = score_with_signal(answers, gold)
        report = {
            "judges": {
                "reward": {"kind": "reward model", "name": reward["path"]},
                **({"gold": {"kind": "signal", "name": settings.gold}} if gold else {}),
            },
            **summarise(answers, judged, settings.seed),
            "kl": measure_kls(accelerator, model, tokenizer, answers, store),
            "seed": settings.seed,
            "split": settings.split,
            "samples_per_prompt": settings.samples,
            "inputs": inputs,
            "seconds": round(time.monotonic() - began, 1),
        }
        metrics = read_metrics(RunDir(Path(settings.policy)).metrics_file)
        shown = side_by_side(answers, judged)
        write_report(report, shown, metrics, run.report_json, run.report_html)
    return brief(run.read_report())


def answer(
    accelerator: Accelerator,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    groups: Sequence[tuple[ReferenceRow, ...]],
    store: ReferenceStore,
    settings: EvaluateSettings,
) -> Answers:
    """Sample the policy's answers, `settings.samples` to each prompt."""
    prompts = [group[0].prompt_ids for group in groups for _ in range(settings.samples)]
    with progress("answers", total=len(prompts)) as bar:
        samples = sample_responses(
            accelerator,
            model,
            tokenizer,
            prompts,
            store.sampling,
            settings.batch_size,
            bar.advance,
        )
    grouped = [
        samples[first : first + settings.samples]
        for first in range(0, len(samples), settings.samples)
    ]
    texts = [[decode(tokenizer, sample) for sample in part] for part in grouped]
    return Answers(groups, grouped, texts)


def score_with_model(
    answers: Answers, scorer: Scorer, tokenizer: PreTrainedTokenizerBase
) -> tuple[Scores, Scores]:
    """The reward model's scores of the policy's answers (P, S) and of the originals (P, M)."""
    pad_id = int(tokenizer.pad_token_id)

    def score(pairs: Sequence[tuple[list[int], list[int]]]) -> list[float]:
        batch = pad_right([prompt + response for prompt, response in pairs], pad_id)
        return scorer(batch).tolist()

    ours = [
        (group[0].prompt_ids, sample.token_ids)
        for group, samples in zip(answers.groups, answers.samples, strict=True)
        for sample in samples
    ]
    theirs = [(row.prompt_ids, row.response_ids) for group in answers.groups for row in group]
    shape = (len(answers.groups), -1)
    return np.array(score(ours)).reshape(shape), np.array(score(theirs)).reshape(shape)


def score_with_signal(answers: Answers, signal: Signal) -> tuple[Scores, Scores]:
    """A function's scores of the policy's answers (P, S) and of the originals (P, M)."""
    ours = [
        [signal(group[0].prompt.text, text) for text in texts]
        for group, texts in zip(answers.groups, answers.texts, strict=True)
    ]
    theirs = [[signal(row.prompt.text, row.text) for row in group] for group in answers.groups]
    return np.array(ours), np.array(theirs)


def summarise(
    answers: Answers, judged: dict[str, tuple[Scores, Scores]], seed: int
) -> dict[str, Any]:
    """Win rates, scores, lengths, endings and variety of both sides, as report.json holds them."""
    sources = np.array([group[0].prompt.source for group in answers.groups])
    win_rate, by_source = {}, {}
    for judge, (ours, theirs) in judged.items():
        wins = compare(ours, theirs)
        win_rate[judge] = judge_wins(wins, seed=seed).to_json()
        by_source[judge] = {
            str(source): judge_wins(wins[sources == source], seed=seed).to_json()
            for source in sorted(set(sources))
        }
    scores = {
        judge: {"policy": ours.ravel().tolist(), "reference": theirs.ravel().tolist()}
        for judge, (ours, theirs) in judged.items()
    }
    samples = [sample for part in answers.samples for sample in part]
    rows = [row for group in answers.groups for row in group]
    return {
        "win_rate": win_rate,
        "win_rate_by_source": by_source,
        "scores": scores,
        **{
            judge: {
                "policy": spread(ours.ravel()).to_json(),
                "reference": spread(theirs.ravel()).to_json(),
            }
            for judge, (ours, theirs) in judged.items()
        },
        "length": {
            "policy": float(np.mean([len(sample.token_ids) for sample in samples])),
            "reference": float(np.mean([len(row.response_ids) for row in rows])),
        },
        "eos_rate": {
            "policy": float(np.mean([sample.finished for sample in samples])),
            "reference": float(np.mean([row.finished for row in rows])),
        },
        "distinct": distinct(answers),
    }


def distinct(answers: Answers) -> dict[str, dict[str, float]]:
    """Distinct-1 and distinct-2 of one answer per prompt on each side: sets of equal size."""
    ours = [texts[0] for texts in answers.texts]
    theirs = [group[0].text for group in answers.groups]
    return {
        side: {f"distinct_{n}": distinct_n(texts, n) for n in (1, 2)}
        for side, texts in (("policy", ours), ("reference", theirs))
    }


def measure_kls(
    accelerator: Accelerator,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    answers: Answers,
    store: ReferenceStore,
) -> dict[str, Any]:
    """Forward KL from the store; reverse KL of the policy's answers with the reference loaded."""
    temperature = store.sampling.temperature
    rows = [row for group in answers.groups for row in group]
    samples = [sample for part in answers.samples for sample in part]
    prompts = [
        group[0].prompt_ids
        for group, part in zip(answers.groups, answers.samples, strict=True)
        for _ in part
    ]
    forward = measure_forward_kl(accelerator, model, tokenizer, rows, temperature)
    reference = load_reference_model(store, accelerator)
    reverse = audit_reverse_kl(
        accelerator, model, reference, tokenizer, prompts, samples, temperature
    )
    return {"forward": forward, "reverse": reverse}


def side_by_side(answers: Answers, judged: dict[str, tuple[Scores, Scores]]) -> list[ShownSample]:
    """The first answer and the first original of every prompt, and what the judges say of both."""

    def pair(judge: str, row: int) -> Pair:
        ours, theirs = judged[judge]
        return Pair(reference=float(theirs[row, 0]), policy=float(ours[row, 0]))

    return [
        ShownSample(
            prompt=group[0].prompt.text,
            reference=group[0].text,
            policy=texts[0],
            rewards=pair("reward", row),
            golds=pair("gold", row) if "gold" in judged else None,
        )
        for row, (group, texts) in enumerate(zip(answers.groups, answers.texts, strict=True))
    ]


def brief(report: dict[str, Any]) -> dict[str, Any]:
    """The part of a report that fits on a terminal."""
    names = ("win_rate", "kl", "length", "eos_rate", "distinct", "reward", "gold", "seconds")
    return {name: report[name] for name in names if name in report}
