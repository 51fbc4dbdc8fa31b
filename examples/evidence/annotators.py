"""Whom to trust: accuracy with equal, true and estimated weights of simulated annotators.

The labels are those of `people.py`. Five simulated annotators judge them in its place, three of
them every pair: two say what people said, two say at random in 40 % of pairs (so 80 % are right),
and one always says the opposite. `rlhf train-reward` weighs their judgments equally, by their true
reliability, or by what `--annotator-weights auto` estimates from their agreement. The head alone is
what `--head fitted` finds on frozen features, before all weights are trained.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import combinations, cycle, islice
from pathlib import Path

import numpy as np
from experiment import Config, Table, flags, interval, run, signed, stage, write_dataset
from people import as_records, draw_test, is_bare, read_pairs

from policies.evaluate.measures.statistics import bootstrap_interval
from reward.data.reliability import Reliability, collect_votes, weights_of
from rlhf.records.schema import RankedPrompt, Ranking

WEIGHTS = ("equal", "true", "auto")


def measure(config: Config, out: Path) -> Config:
    """Train with all three kinds of weights for every seed."""
    pairs = read_pairs(config["data"])
    full = [pair for pair in pairs["A"] if not is_bare(pair)]
    test = draw_test(config, pairs["heldout"], full)
    runs = [train_all(config, full, test, seed, out) for seed in config["seeds"]]
    return {"runs": runs, "gained": differ([one["counts"] for one in runs])}


def train_all(
    config: Config, pairs: Sequence[Config], test: list[RankedPrompt], seed: int, out: Path
) -> Config:
    """Reward models of one seed's pairs and judgments, and how reliable the annotators were."""
    dice = np.random.default_rng(seed)
    drawn = dice.permutation(len(pairs))[: config["pairs"]]
    real = as_records(config, (pairs[place] for place in drawn), "train")
    train = simulate(real, config["annotators"], config["judges"], dice)
    data = write_dataset(out / f"judgments-{seed}", [*train, *test])
    true = count_right(real, train)
    known = weights_of({name: Reliability(value, None, None, 0) for name, value in true.items()})
    given = {
        "equal": [],
        "true": flags({f"annotator-weights.{name}": value for name, value in known.items()}),
        "auto": ["--annotator-weights", "auto"],
    }
    base = ["--rankings", data, "--model", config["model"], "--seed", seed]
    base += flags(config["reward"])
    reports = {
        name: stage(out / f"reward-{name}-{seed}", "train-reward", *base, *given[name])
        for name in WEIGHTS
    }
    counts = {name: report["held_out_counts"] for name, report in reports.items()}
    estimated = reports["auto"]["annotators"]
    return {
        "seed": seed,
        "accuracy": {name: report["accuracy"] for name, report in reports.items()},
        "head": {name: report["accuracy_before_training"] for name, report in reports.items()},
        "gained": differ([counts]),
        "counts": counts,
        "reliability": {
            name: {
                "true": share,
                "estimated": estimated[name]["reliability"],
                "weight": {"true": known[name], "auto": estimated[name]["weight"]},
            }
            for name, share in true.items()
        },
    }


def simulate(
    records: Sequence[RankedPrompt],
    annotators: Mapping[str, float],
    judges: int,
    dice: np.random.Generator,
) -> list[RankedPrompt]:
    """The same records, every ranking of two judged by `judges` simulated annotators.

    Args:
        records: with the real labels.
        annotators: the probability that each gives the real label.
        judges: of every pair; every group of as many has equally many pairs.
        dice: of groups and errors.
    """
    groups = cycle(dice.permutation(list(combinations(annotators, judges))).tolist())

    def judge(ranking: Ranking, name: str) -> Ranking:
        is_right = dice.random() < annotators[name]
        tiers = ranking.tiers if is_right else ranking.tiers[::-1]
        id_ = f"{ranking.id}-{name}"
        return replace(ranking, id=id_, annotator=name, kind="signal", tiers=tiers)

    judged = []
    for record in records:
        chosen = islice(groups, len(record.rankings))
        named = zip(record.rankings, chosen, strict=True)
        rankings = tuple(judge(one, name) for one, group in named for name in group)
        judged.append(replace(record, rankings=rankings))
    return judged


def count_right(real: Sequence[RankedPrompt], judged: Sequence[RankedPrompt]) -> dict[str, float]:
    """Each annotator's share of real labels, under the prior that `--annotator-weights auto` has.

    One right and one wrong judgment are added to everybody's count.
    """
    truth = {vote.item: vote.first_wins for vote in collect_votes(real)}
    right: dict[str, list[bool]] = {}
    for vote in collect_votes(judged):
        right.setdefault(vote.annotator, []).append(vote.first_wins == truth[vote.item])
    return {name: (1 + sum(all_)) / (2 + len(all_)) for name, all_ in sorted(right.items())}


def differ(runs: Sequence[Mapping[str, Mapping[str, Sequence[float]]]]) -> Config:
    """Accuracy above that with equal weights, by weights; the mean over runs and held-out prompts.

    Args:
        runs: for each kind of weights and each held-out prompt (pairs right, pairs).
    """
    found = {}
    for name in WEIGHTS[1:]:
        rows = [
            [(one[name][prompt][0] - count[0]) / count[1] for prompt, count in one["equal"].items()]
            for one in runs
        ]
        found[name] = bootstrap_interval(np.mean(rows, axis=0), seed=0).to_json()
    return found


def tabulate(result: Config) -> Table:
    """Two rows for each seed, the head alone and all weights, and the mean gain."""
    names = list(result["runs"][0]["reliability"])
    header = ["seed", "trained", *(f"{name} weights (95 %)" for name in WEIGHTS)]
    header += ["auto above equal (95 %)", *(f"{name}: estimated (true)" for name in names)]
    rows = [header]
    for one in result["runs"]:
        seed, blank = str(one["seed"]), [""] * len(names)
        rows.append([seed, "the head", *(interval(one["head"][n]) for n in WEIGHTS), "", *blank])
        found = [interval(one["accuracy"][name]) for name in WEIGHTS]
        people = [
            f"{100 * who['estimated']['value']:.0f} % ({100 * who['true']:.0f} %)"
            for who in one["reliability"].values()
        ]
        rows.append([seed, "all weights", *found, signed(one["gained"]["auto"]), *people])
    mean = ["mean", "all weights", *[""] * len(WEIGHTS), signed(result["gained"]["auto"])]
    return [*rows, [*mean, *[""] * len(names)]]


if __name__ == "__main__":
    run("annotators", measure, tabulate)
