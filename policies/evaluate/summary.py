"""The numbers of an evaluation, as report.json holds them.

Letters: P prompts, S responses of the policy, M of the other model.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float
from numpy import ndarray

from policies.evaluate.measures.length_control import length_controlled_rate
from policies.evaluate.measures.statistics import (
    best_of_n,
    best_of_n_nats,
    bootstrap_interval,
    commonest_phrase,
    distinct_n,
    judge_wins,
    repeating_fraction,
    self_bleu,
    share_of_gain,
    spread,
)
from policies.evaluate.responses import ModelResponses
from rlhf.run.rundir import RunDir

DISTILL = "distill"  # a stage
Wins = Mapping[str, Float[ndarray, " P"]]
Scores = Mapping[str, Mapping[str, Float[ndarray, "P N"]]]

READ_FIRST_RESPONSES = ("ai",)  # judges that see one response of each model
MAX_LENGTH_GROUPS = 4
PROMPTS_PER_LENGTH_GROUP = 4


def describe_student(
    policy: Mapping[str, str], rival: Mapping[str, str], scores: Scores, seed: int
) -> dict[str, Any]:
    """`student`: how much of its teacher's gain it has kept by each judge, and both sizes.

    Args:
        policy: the description of the policy.
        rival: of the model that it is compared with.
        scores: by judge, of every model's responses.
        seed: of the bootstrap.

    Returns:
        {} unless the policy was distilled from the rival.
    """
    run = RunDir(Path(policy["path"]).parent)
    stage = run.read_stage()
    taught_by = stage.get("inputs", {}).get("teacher", {}).get("hash")
    if stage.get("stage") != DISTILL or taught_by != rival["hash"]:
        return {}
    gains = {
        judge: {
            "kept": share_of_gain(of["policy"], of["rival"], of["reference"], seed=seed).to_json(),
            "teacher": bootstrap_interval(
                of["rival"].mean(axis=1) - of["reference"].mean(axis=1), seed=seed
            ).to_json(),
        }
        for judge, of in scores.items()
    }
    return {"student": {"gain": gains, "parameters": run.read_report()["parameters"]}}


def win_rates(
    wins: Wins, ours: ModelResponses, theirs: ModelResponses, seed: int
) -> dict[str, dict[str, Any]]:
    """For every judge the win rate with interval and sign test, and the one at equal length.

    Args:
        wins: by judge, each prompt's fraction of comparisons won; NaN where the judge was unclear.
        ours: the policy's responses.
        theirs: the responses they were compared with.
        seed: of the bootstrap.
    """
    every, first = (of(ours) - of(theirs) for of in (mean_lengths, _first_lengths))
    rates = {}
    for judge, shares in wins.items():
        clear = ~np.isnan(shares)
        if not clear.any():
            continue
        longer = first if judge in READ_FIRST_RESPONSES else every
        at_equal_length = length_controlled_rate(shares[clear], longer[clear], seed=seed)
        rates[judge] = {
            **judge_wins(shares[clear], seed=seed),
            "unclear": int((~clear).sum()),
            "length_controlled": at_equal_length.to_json(),
        }
    return rates


def win_rates_within(
    wins: Wins, groups: Sequence[str], order: Iterable[str], seed: int
) -> dict[str, dict[str, dict[str, Any]]]:
    """For every judge the win rate within each group of prompts.

    Args:
        wins: as in `win_rates`.
        groups: the group of each prompt.
        order: all groups, in the order that the result has.
        seed: of the bootstrap.
    """
    names = np.array(groups)
    order = list(order)
    return {
        judge: {
            group: judge_wins(shares[chosen], seed=seed)
            for group in order
            if (chosen := (names == group) & ~np.isnan(shares)).any()
        }
        for judge, shares in wins.items()
    }


def length_groups(lengths: Sequence[int]) -> list[str]:
    """A name for each prompt's quarter of the lengths, such as `9–14 tokens`.

    Fewer groups where there are few prompts, or few different lengths.
    """
    num_groups = max(1, min(MAX_LENGTH_GROUPS, len(lengths) // PROMPTS_PER_LENGTH_GROUP))
    cuts = np.unique(np.quantile(lengths, np.arange(1, num_groups) / num_groups, method="lower"))
    groups = np.searchsorted(cuts, lengths, side="left")  # a length equal to a cut stands below it
    names = {}
    for group in np.unique(groups):
        inside = np.array(lengths)[groups == group]
        low, high = int(inside.min()), int(inside.max())
        names[group] = f"{low} tokens" if low == high else f"{low}–{high} tokens"
    return [names[group] for group in groups]


def measure_responses(
    by_model: Mapping[str, ModelResponses], scores: Scores, questions: Sequence[str]
) -> dict[str, Any]:
    """Lengths, endings, variety and scores of every model.

    Args:
        by_model: the responses.
        scores: by judge and model.
        questions: the last turn of each prompt.
    """

    def of_each(measure: Callable[[ModelResponses], Any]) -> dict[str, Any]:
        return {name: measure(responses) for name, responses in by_model.items()}

    return {
        "length": of_each(lambda responses: float(mean_lengths(responses).mean())),
        "eos_rate": of_each(
            lambda responses: float(np.mean([s.finished for row in responses.samples for s in row]))
        ),
        # one response to each prompt: these measures compare sets of equal size only
        "distinct": of_each(
            lambda responses: {f"distinct_{n}": distinct_n(_first(responses), n) for n in (1, 2)}
        ),
        "self_bleu": of_each(lambda responses: self_bleu(_first(responses))),
        "template": of_each(
            lambda responses: dict(
                zip(("words", "share"), commonest_phrase(_first(responses), questions), strict=True)
            )
        ),
        "repeats": of_each(lambda responses: repeating_fraction(_first(responses))),
        **{
            judge: {name: spread(values.ravel()) for name, values in of.items()}
            for judge, of in scores.items()
        },
        "scores": {
            judge: {name: values.ravel().tolist() for name, values in of.items()}
            for judge, of in scores.items()
        },
    }


def best_of_n_curve(scores: Scores) -> list[dict[str, float]]:
    """The scores of choosing among n stored responses by their reward, for every possible n.

    Each point has n, the nats that this choice stands away from the original model, and the mean
    score by every judge of scores.
    """
    rewards = scores["reward"]["reference"]
    return [
        {
            "n": n,
            "nats": best_of_n_nats(n),
            **{
                judge: float(best_of_n(rewards, of["reference"], n).mean())
                for judge, of in scores.items()
            },
        }
        for n in range(1, rewards.shape[1] + 1)
    ]


def mean_lengths(responses: ModelResponses) -> Float[ndarray, " P"]:
    """Mean tokens of the responses to each prompt."""
    return np.array([np.mean([len(s.token_ids) for s in row]) for row in responses.samples])


def _first_lengths(responses: ModelResponses) -> Float[ndarray, " P"]:
    """Tokens of the first response to each prompt."""
    return np.array([len(row[0].token_ids) for row in responses.samples])


def _first(responses: ModelResponses) -> list[str]:
    return [texts[0] for texts in responses.texts]
