"""`rlhf evaluate`: is the policy better than what the original model said to the same prompts?

The responses y* are sampled now, with the settings that the stored originals y0 were sampled with;
every y* meets every y0 of its prompt, a tie counting half. Another model may answer the same
prompts and be compared with the policy too. Intervals resample prompts, because responses to one
prompt resemble each other.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from accelerate import Accelerator
from jaxtyping import Float
from numpy import ndarray
from transformers import PreTrainedTokenizerBase

from policies.evaluate.judges import AIJudge, score_with_gold, score_with_reward, try_judge
from policies.evaluate.measures.likelihood import (
    LikelihoodInputs,
    encode_texts,
    measure_likelihoods,
    read_texts,
)
from policies.evaluate.measures.statistics import compare
from policies.evaluate.report import ReportSample, headline, write_report
from policies.evaluate.responses import (
    ModelResponses,
    SamplingSetup,
    as_records,
    read_sampled,
    reference_responses,
    sample_responses,
    sample_rival,
)
from policies.evaluate.settings import EvaluateSettings
from policies.evaluate.summary import (
    best_of_n_curve,
    describe_student,
    length_groups,
    measure_responses,
    win_rates,
    win_rates_within,
)
from policies.reference.loading import open_store_and_find_model
from policies.reference.rewards import is_scored_by
from policies.reference.store import ReferenceRow, ReferenceStore
from policies.rewards import describe_reward, describe_rewards, is_model, load_reward
from reward.scoring.scorer import TOKENS_PER_BATCH
from reward.scoring.texts import SIGNAL, load_text_reward
from rlhf.config import read_text
from rlhf.endpoints.judge import Endpoint
from rlhf.endpoints.signals import load_signal, with_prefix
from rlhf.errors import InputError
from rlhf.modeling.models import (
    context_length,
    describe_model,
    load_config,
    policy_folder,
    require_same_tokenizer,
)
from rlhf.modeling.readers import described_kwargs
from rlhf.parallel.distributed import precision_of, start_alone
from rlhf.planning.price import cost_of_chain
from rlhf.records.fingerprints import file_hash
from rlhf.records.jsonl import write_jsonl
from rlhf.records.schema import Prompt
from rlhf.run.metrics import read_metrics
from rlhf.run.rundir import RunDir, open_stage, require_done, stage_status, watching_stage

Scores = dict[str, dict[str, Float[ndarray, "P N"]]]
Wins = dict[str, Float[ndarray, " P"]]

RIVAL_SEED_STRIDE = 1  # a rival that is the policy itself must not repeat its responses


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """The validated inputs of an evaluation."""

    settings: EvaluateSettings
    store: ReferenceStore
    groups: list[tuple[ReferenceRow, ...]]
    policy: dict[str, str]
    reward: dict[str, str]
    rival: dict[str, str] | None
    gold: dict[str, str] | None
    rubric: str
    texts: list[str]

    @property
    def prompts(self) -> list[Prompt]:
        """The prompts to answer."""
        return [group[0].prompt for group in self.groups]

    @property
    def inputs(self) -> dict[str, dict[str, str]]:
        """Path and hash of every input."""
        store = {"path": str(self.settings.reference), "hash": self.store.content_hash}
        given = {"policy": self.policy, "reward": self.reward, "reference": store}
        if self.rival:
            given["against"] = self.rival
        if self.gold and is_model(self.gold["path"]):
            given["gold"] = self.gold
        if path := self.settings.retain:
            given["retain"] = {"path": str(path), "hash": file_hash(path)}
        return given


def evaluate_policy(
    settings: EvaluateSettings, before_done: Callable[[], None] = lambda: None
) -> dict[str, Any]:
    """Run the stage and return the main numbers of its report.

    Args:
        settings: of the command.
        before_done: called when the report is written and the stage is not marked done yet, so
            that an evaluation which is killed in between calls it again. A finished stage calls it,
            too: it must be safe to repeat.

    Raises:
        InputError: an input is missing or unfinished, belongs to another model, or the split is
            empty.
    """
    began = time.monotonic()
    accelerator = start_alone(settings.precision, settings.seed)
    comparison = prepare(settings)
    run = open_stage(settings.out, "evaluate", settings, comparison.inputs, resume=settings.resume)
    if run.is_done:
        before_done()
        return headline(run.read_report())
    with stage_status(run), watching_stage(run, None):
        tokenizer = comparison.store.load_tokenizer(comparison.policy["path"])
        context = context_length(load_config(comparison.policy["path"]))
        texts = encode_texts(tokenizer, comparison.texts, context)
        by_model = answer(accelerator, tokenizer, comparison, run.answers)
        scores = score(accelerator, tokenizer, by_model, comparison)
        wins = {
            name: judge(by_model, name, scores, comparison, run)
            for name in by_model
            if name != "policy"
        }
        read = LikelihoodInputs(
            store=comparison.store,
            groups=comparison.groups,
            responses={name: of.token_ids for name, of in by_model.items() if name != "reference"},
            texts=texts,
            batch_size=settings.batch_size,
            seed=settings.seed,
        )
        report = {
            "judges": describe_judges(settings, comparison),
            **count_verdicts(wins),
            **summarize(by_model, scores, wins, comparison),
            **measure_likelihoods(accelerator, tokenizer, comparison.policy["path"], read),
            "seed": settings.seed,
            "split": settings.split,
            "samples_per_prompt": settings.samples,
            "inputs": comparison.inputs,
            "seconds": round(time.monotonic() - began, 1),
        }
        report["cost"] = cost_of_chain(run, settings.price_per_hour, report["win_rate"])
        metrics = read_metrics(RunDir(Path(settings.policy)).metrics_file)
        shown = report_samples(comparison.prompts, by_model, scores, wins["reference"])
        write_report(report, shown, metrics, run.report_json, run.report_html)
        before_done()
    return headline(run.read_report())


def prepare(settings: EvaluateSettings) -> Comparison:
    """Read and check the inputs, and the judge before responses are sampled; no weights yet.

    Raises:
        InputError: one is missing or unfinished, or belongs to another model; or the judge's server
            refuses a question.
        InterruptedRunError: nobody answers there.
    """
    rubric = read_text(settings.judge_rubric, "--judge-rubric")
    texts = read_texts(settings.retain)
    given = settings.chat_template_kwargs
    policy = describe_model(policy_folder(settings.policy, "--policy"), given)
    outputs = require_done(settings.reference, "reference", "outputs").outputs
    store = open_store_and_find_model(outputs, policy["path"])
    reward = describe_rewards([settings.reward], policy)["reward"]
    gold = settings.gold and describe_reward(with_prefix(settings.gold), described_kwargs(policy))
    if gold and gold["path"].startswith(SIGNAL):
        load_signal(gold["path"])
    require_same_tokenizer(store.manifest["model"], policy)
    against = settings.against and policy_folder(settings.against, "--against")
    rival = against and describe_model(against, given)
    groups = store.by_prompt(settings.split)
    if not groups:
        raise InputError(
            f"The store {settings.reference} has no prompts of the split {settings.split!r}",
            "Import prompts of that split (`rlhf import --split test`), or give --split train.",
        )
    if settings.judge_endpoint and not RunDir(settings.out).answers.is_file():
        try_judge(Endpoint(url=settings.judge_endpoint, model=settings.judge_model))
    return Comparison(
        settings=settings,
        store=store,
        groups=list(groups),
        policy=policy,
        reward=reward,
        rival=rival or None,
        gold=gold or None,
        rubric=rubric,
        texts=texts,
    )


def answer(
    accelerator: Accelerator,
    tokenizer: PreTrainedTokenizerBase,
    comparison: Comparison,
    file: Path,
) -> dict[str, ModelResponses]:
    """The stored responses, the policy's, and the rival's if there is one.

    They are sampled once and saved to `file`, which a resumed evaluation reads.
    """
    settings = comparison.settings
    stored = {"reference": reference_responses(comparison.groups, comparison.store)}
    if file.is_file():
        has_rival = comparison.rival is not None
        return stored | read_sampled(file, settings.samples, has_rival=has_rival)
    setup = SamplingSetup(
        engine=settings.engine, samples=settings.samples, batch_size=settings.batch_size
    )
    sampling = replace(comparison.store.sampling, seed=settings.seed)
    encoded = [group[0].prompt_ids for group in comparison.groups]
    policy = sample_responses(accelerator, tokenizer, comparison.policy, encoded, sampling, setup)
    by_model = stored | {"policy": policy}
    if comparison.rival:
        sampling = replace(sampling, seed=settings.seed + RIVAL_SEED_STRIDE)
        by_model["rival"] = sample_rival(
            accelerator, comparison.rival, comparison.prompts, tokenizer, sampling, setup
        )
    records = as_records(comparison.prompts, list(by_model.values()))
    write_jsonl(file, (record.to_json() for record in records))
    return by_model


def score(
    accelerator: Accelerator,
    tokenizer: PreTrainedTokenizerBase,
    by_model: Mapping[str, ModelResponses],
    comparison: Comparison,
) -> Scores:
    """Score every response with the reward and the gold judge, one after the other in memory."""
    scores = {"reward": _by_reward(accelerator, tokenizer, by_model, comparison)}
    if comparison.gold is not None:
        given = described_kwargs(comparison.policy)
        name = comparison.gold["path"]
        gold = load_text_reward(name, accelerator, TOKENS_PER_BATCH, given=given)
        scores["gold"] = score_with_gold(comparison.prompts, by_model, gold)
    return scores


def _by_reward(
    accelerator: Accelerator,
    tokenizer: PreTrainedTokenizerBase,
    by_model: Mapping[str, ModelResponses],
    comparison: Comparison,
) -> dict[str, Float[ndarray, "P N"]]:
    given = described_kwargs(comparison.policy)
    name = comparison.reward["path"]
    reward = load_reward([name], accelerator, given=given)
    is_stored = is_scored_by(comparison.store, reward, precision_of(accelerator))
    pad_id = int(tokenizer.pad_token_id)
    return score_with_reward(comparison.groups, by_model, reward, pad_id, is_stored=is_stored)


def judge(
    by_model: Mapping[str, ModelResponses],
    opponent: str,
    scores: Scores,
    comparison: Comparison,
    run: RunDir,
) -> Wins:
    """Per judge, each prompt's fraction of comparisons that the policy won against `opponent`."""
    settings = comparison.settings
    wins = {name: compare(of["policy"], of[opponent]) for name, of in scores.items()}
    if settings.judge_endpoint:
        ai_judge = AIJudge(
            endpoint=Endpoint(url=settings.judge_endpoint, model=settings.judge_model),
            rubric=comparison.rubric,
            parallel=settings.judge_parallel,
            log=run.judge_log,
        )
        wins["ai"] = ai_judge.wins(comparison.prompts, by_model["policy"], by_model[opponent])
    return wins


def describe_judges(
    settings: EvaluateSettings, comparison: Comparison
) -> dict[str, dict[str, str | bool]]:
    """Kind and name of every judge, and whether the policy was trained against it."""
    trained = RunDir(Path(comparison.policy["path"]).parent).read_stage().get("inputs", {})
    objectives = {given["hash"] for role, given in trained.items() if role.startswith("reward")}
    name = comparison.reward["path"]
    kind = "reward model" if is_model(name) else "reward function"
    is_objective = comparison.reward["hash"] in objectives
    judges: dict[str, dict[str, str | bool]] = {
        "reward": {"kind": kind, "name": name, "is_objective": is_objective}
    }
    if gold := comparison.gold:
        name = gold["path"]
        if name.startswith(SIGNAL):
            judges["gold"] = {"kind": "signal", "name": name.removeprefix(SIGNAL)}
        else:
            kind = "gold reward model" if is_model(name) else "gold reward function"
            is_objective = gold["hash"] in objectives
            judges["gold"] = {"kind": kind, "name": name, "is_objective": is_objective}
    if settings.judge_endpoint:
        judges["ai"] = {"kind": "AI judge", "name": settings.judge_model}
    return judges


def count_verdicts(wins: Mapping[str, Wins]) -> dict[str, dict[str, int]]:
    """How many verdicts an AI judge was asked for, and how many are unclear; {} without one."""
    ai_wins = [of["ai"] for of in wins.values() if "ai" in of]
    if not ai_wins:
        return {}
    every = np.concatenate(ai_wins)
    return {"verdicts": {"asked": every.size, "unclear": int(np.isnan(every).sum())}}


def summarize(
    by_model: Mapping[str, ModelResponses],
    scores: Scores,
    wins: Mapping[str, Wins],
    comparison: Comparison,
) -> dict[str, Any]:
    """Win rates and the measures of every model, as report.json holds them."""
    seed = comparison.settings.seed
    sources = [group[0].prompt.source for group in comparison.groups]
    lengths = [len(group[0].prompt_ids) for group in comparison.groups]
    groups = length_groups(lengths)
    by_length = dict.fromkeys(name for _, name in sorted(zip(lengths, groups, strict=True)))
    rates = {
        name: win_rates(of, by_model["policy"], by_model[name], seed) for name, of in wins.items()
    }
    first = wins["reference"]
    report = {
        "win_rate": rates["reference"],
        "win_rate_by_source": win_rates_within(first, sources, sorted(set(sources)), seed),
        "win_rate_by_length": win_rates_within(first, groups, by_length, seed),
        "best_of_n": best_of_n_curve(scores),
        **measure_responses(
            by_model, scores, [prompt.messages[-1].content for prompt in comparison.prompts]
        ),
    }
    if comparison.rival:
        report["rival"] = {"name": comparison.settings.against, "win_rate": rates["rival"]}
        report |= describe_student(comparison.policy, comparison.rival, scores, seed)
    return report


def report_samples(
    prompts: Sequence[Prompt], by_model: Mapping[str, ModelResponses], scores: Scores, wins: Wins
) -> list[ReportSample]:
    """Every model's first response to every prompt, and what the judges say of them."""

    def verdict(row: int) -> dict[str, float]:
        return {"policy": float(wins["ai"][row]), "reference": 1 - float(wins["ai"][row])}

    return [
        ReportSample(
            turns=prompt.chat,
            answers={name: of.texts[row][0] for name, of in by_model.items()},
            scores={
                judge: {name: float(values[row, 0]) for name, values in of.items()}
                for judge, of in scores.items()
            }
            | ({"ai": verdict(row)} if "ai" in wins else {}),
        )
        for row, prompt in enumerate(prompts)
    ]
