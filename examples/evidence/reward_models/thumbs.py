"""What thumbs alone teach a reward model, beside the same number of pairs.

Users of a product give a thumb on the one response they see. Here the signal does: up where it
scores a response above the median of all. The other reward model learns from one pair on each of as
many prompts, of two responses that the signal scores clearly apart. Both are measured on the same
held-out pairs. A thumb judges one response and a pair two, so the pairs read twice as many
responses. Each trains a head on the frozen model, which has one best solution, and all weights from
there.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import combinations
from pathlib import Path

import numpy as np

from examples.evidence.commands import Config, flags, stage
from examples.evidence.experiment import (
    Table,
    gold_of,
    interval,
    rank_by_signal,
    run,
    sampled_prompts,
    write_dataset,
)
from rlhf.endpoints.signals import Signal
from rlhf.errors import InputError
from rlhf.records.schema import RankedPrompt, Ranking, Response

PARTS = {"head": "the head", "reward": "all weights"}  # names of their settings
Form = Callable[[RankedPrompt, np.random.Generator], RankedPrompt | None]


def measure(config: Config, out: Path) -> Config:
    """Held-out pair accuracy from thumbs and from pairs, for every seed."""
    records, gold = sampled_prompts(config), gold_of(config)
    train = [record for record in records if record.prompt.split == "train"]
    tests = [record for record in records if record.prompt.split == "test"]
    held_out = rank_by_signal(
        tests, gold, size=config["ranking_size"], tie_within=config["tie_within"]
    )
    good_above = median_score(train, gold)
    forms: dict[str, Form] = {
        "thumbs": lambda record, dice: thumb(record, gold, good_above, dice),
        "pairs": lambda record, dice: pair(record, gold, config["tie_within"], dice),
    }
    rows = []
    for name, form in forms.items():
        for seed in config["seeds"]:
            judged = judge(train, config["judgements"], form, seed)
            data = write_dataset(out / f"{name}-{seed}", judged + held_out)
            up = sum("thumbs-up" in record.rankings[0].flags for record in judged)
            for part in PARTS:
                trained = stage(
                    out / f"{part}-{name}-{seed}",
                    *("train-reward", "--rankings", data, "--model", config["model"]),
                    *("--seed", seed, *flags(config[part])),
                )
                row = {"trained": part, "form": name, "judgements": len(judged), "seed": seed}
                rows.append({**row, "up": up, "accuracy": trained["accuracy"]})
    return {"good_above": good_above, "runs": rows}


def median_score(records: Sequence[RankedPrompt], gold: Signal) -> float:
    """The median of what the signal says of all responses."""
    scores = [gold(record.prompt.text, r.text) for record in records for r in record.responses]
    return float(np.median(scores))


def judge(
    records: Sequence[RankedPrompt], number: int, form: Form, seed: int
) -> list[RankedPrompt]:
    """One judgement on each of `number` prompts, in an order that is drawn at random.

    Raises:
        InputError: fewer prompts can be judged so.
    """
    dice = np.random.default_rng(seed)
    judgements: list[RankedPrompt] = []
    for index in dice.permutation(len(records)):
        if len(judgements) == number:
            break
        if judgement := form(records[index], dice):
            judgements.append(judgement)
    if len(judgements) < number:
        raise InputError(
            f"{number} judgements are wanted and {len(judgements)} prompts can be judged",
            "Lower judgements in the configuration.",
        )
    return judgements


def thumb(
    record: RankedPrompt, gold: Signal, good_above: float, dice: np.random.Generator
) -> RankedPrompt:
    """One response of a prompt, drawn at random, with a thumb."""
    response = record.responses[dice.integers(len(record.responses))]
    is_good = gold(record.prompt.text, response.text) > good_above
    return _judged(record, [response], "thumbs-up" if is_good else "thumbs-down")


def pair(
    record: RankedPrompt, gold: Signal, tie_within: float, dice: np.random.Generator
) -> RankedPrompt | None:
    """Two responses of a prompt that are clearly apart, drawn at random, the better one first."""
    scores = {response.id: gold(record.prompt.text, response.text) for response in record.responses}
    apart = [
        sorted(two, key=lambda response: -scores[response.id])
        for two in combinations(record.responses, 2)
        if abs(scores[two[0].id] - scores[two[1].id]) > tie_within
    ]
    return _judged(record, apart[dice.integers(len(apart))]) if apart else None


def _judged(record: RankedPrompt, responses: Sequence[Response], *flags: str) -> RankedPrompt:
    ranking = Ranking(
        id=record.prompt.id,
        prompt_id=record.prompt.id,
        annotator="signal",
        kind="signal",
        tiers=tuple((response.id,) for response in responses),
        flags=flags,
    )
    return replace(record, responses=tuple(responses), rankings=(ranking,))


def tabulate(result: Config) -> Table:
    """One row for each run."""
    rows = [["trained", "on", "seed", "thumbs up", "held-out pair accuracy (95 %)"]]
    order = list(PARTS)
    for run_result in sorted(
        result["runs"], key=lambda run_result: order.index(run_result["trained"])
    ):
        up = (
            f"{100 * run_result['up'] / run_result['judgements']:.0f} %"
            if run_result["form"] == "thumbs"
            else "–"
        )
        learned = f"{run_result['judgements']} {run_result['form']}"
        seed = str(run_result["seed"])
        rows.append(
            [PARTS[run_result["trained"]], learned, seed, up, interval(run_result["accuracy"])]
        )
    return rows


if __name__ == "__main__":
    run("thumbs", measure, tabulate)
