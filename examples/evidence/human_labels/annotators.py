"""Whom to trust: accuracy with equal, true and estimated weights of simulated annotators.

The labels are those of `people.py`. Five simulated annotators judge them in its place, three of
them every pair: two say what people said, two say at random in 40 % of pairs (so 80 % are right),
and one always says the opposite. `rlhf train-reward` weighs their judgments equally, by their true
reliability, or by what `--annotator-weights auto` estimates from their agreement. A head on the
frozen model costs little, so that many draws of pairs and of errors are measured with it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import combinations, cycle, islice
from pathlib import Path

import numpy as np

from examples.evidence.commands import Config, flags, stage
from examples.evidence.experiment import Table, interval, run, signed_points, write_dataset
from examples.evidence.human_labels.ethics import as_records, draw_test, is_bare, read_pairs
from examples.evidence.human_labels.heads import (
    Features,
    fit_head,
    one_a_prefix,
    read_features,
    share_right,
)
from policies.evaluate.measures.statistics import bootstrap_interval
from reward.data.annotators import estimate_weights
from reward.data.reliability import collect_labels, weights_of
from rlhf.records.reliability import Reliability
from rlhf.records.schema import RankedPrompt, Ranking

WEIGHTS = ("equal", "true", "auto")
RELIABILITY = ("true", "estimated")


def measure(config: Config, out: Path) -> Config:
    """Train with all three kinds of weights for every seed, and fit heads for more seeds."""
    pairs = read_pairs(config["data"])
    full = [pair for pair in pairs["A"] if not is_bare(pair)]
    test = draw_test(config, pairs["heldout"], full)
    trained = [train_all(config, full, test, seed, out) for seed in config["seeds"]]
    pool = as_records(config, one_a_prefix(pairs["A"]), "train")
    test = draw_test(config | config["heads"], pairs["heldout"], full)
    features = read_features(config, [*pool, *test])
    fitted = [
        fit_heads(config, pool, test, features, seed) for seed in range(config["heads"]["seeds"])
    ]
    return {"all weights": summarize(trained), "the head": summarize(fitted)}


def train_all(
    config: Config, pairs: Sequence[Config], test: list[RankedPrompt], seed: int, out: Path
) -> Config:
    """Reward models of one seed's pairs and judgments, and how reliable the annotators were."""
    generator = np.random.default_rng(seed)
    drawn = generator.permutation(len(pairs))[: config["pairs"]]
    real = as_records(config, (pairs[index] for index in drawn), "train")
    train = simulate(real, config["annotators"], config["judges"], generator)
    data = write_dataset(out / f"judgments-{seed}", [*train, *test])
    true = count_right(real, train)
    named = {f"annotator-weights.{name}": value for name, value in true_weights(true).items()}
    given = {"equal": [], "true": flags(named), "auto": ["--annotator-weights", "auto"]}
    base = ["--rankings", data, "--model", config["model"], "--seed", seed]
    base += flags(config["reward"])
    reports = {
        name: stage(out / f"reward-{name}-{seed}", "train-reward", *base, *given[name])
        for name in WEIGHTS
    }
    counts = {name: report["held_out_counts"] for name, report in reports.items()}
    annotators = reports["auto"]["annotators"]
    return {
        "right": {
            name: [
                prompt_counts[record.prompt.id][0] / prompt_counts[record.prompt.id][1]
                for record in test
            ]
            for name, prompt_counts in counts.items()
        },
        "true": true,
        "estimated": {name: annotators[name]["reliability"]["value"] for name in true},
    }


def fit_heads(
    config: Config,
    pool: Sequence[RankedPrompt],
    test: Sequence[RankedPrompt],
    features: Features,
    seed: int,
) -> Config:
    """The same of heads on frozen features."""
    generator = np.random.default_rng(seed)
    real = [pool[index] for index in generator.permutation(len(pool))[: config["pairs"]]]
    train = simulate(real, config["annotators"], config["judges"], generator)
    true, estimate = count_right(real, train), estimate_weights(train)
    weights = {"equal": {}, "true": true_weights(true), "auto": estimate.weights}
    heads = {name: fit_head(train, features, given) for name, given in weights.items()}
    return {
        "right": {
            name: [share_right(record, features, head) for record in test]
            for name, head in heads.items()
        },
        "true": true,
        "estimated": {name: estimate.reliability[name].value for name in true},
    }


def simulate(
    records: Sequence[RankedPrompt],
    annotators: Mapping[str, float],
    judges: int,
    generator: np.random.Generator,
) -> list[RankedPrompt]:
    """The same records, every ranking of two judged by `judges` simulated annotators.

    Args:
        records: with the real labels.
        annotators: the probability that each gives the real label.
        judges: of every pair; every group of as many has equally many pairs.
        generator: of groups and errors.
    """
    groups = cycle(generator.permutation(list(combinations(annotators, judges))).tolist())

    def judge(ranking: Ranking, name: str) -> Ranking:
        is_right = generator.random() < annotators[name]
        tiers = ranking.tiers if is_right else ranking.tiers[::-1]
        id_ = f"{ranking.id}-{name}"
        return replace(ranking, id=id_, annotator=name, kind="signal", tiers=tiers)

    judged = []
    for record in records:
        chosen = islice(groups, len(record.rankings))
        named = zip(record.rankings, chosen, strict=True)
        rankings = tuple(judge(ranking, name) for ranking, group in named for name in group)
        judged.append(replace(record, rankings=rankings))
    return judged


def count_right(real: Sequence[RankedPrompt], judged: Sequence[RankedPrompt]) -> dict[str, float]:
    """Each annotator's share of real labels, under the prior that `--annotator-weights auto` has.

    One right and one wrong judgment are added to everybody's count.
    """
    truth = {label.item: label.first_wins for label in collect_labels(real)}
    right: dict[str, list[bool]] = {}
    for label in collect_labels(judged):
        right.setdefault(label.annotator, []).append(label.first_wins == truth[label.item])
    return {name: (1 + sum(all_)) / (2 + len(all_)) for name, all_ in sorted(right.items())}


def true_weights(true: Mapping[str, float]) -> dict[str, float]:
    """The weights that `--annotator-weights auto` would give, had it estimated without error."""
    return weights_of({name: Reliability(value, None, None, 0) for name, value in true.items()})


def summarize(runs: Sequence[Config]) -> Config:
    """Means over runs, with 95 % intervals over held-out prompts, the same for all runs.

    Args:
        runs: with the share `right` of each held-out prompt's judgments for each kind of weights,
            and the `true` and `estimated` reliability of each annotator.
    """
    right = {
        name: np.array([run_result["right"][name] for run_result in runs]) for name in WEIGHTS
    }  # (R, P)
    above = {name: right[name] - right["equal"] for name in WEIGHTS[1:]}
    errors = [
        abs(run_result["estimated"][who] - run_result["true"][who])
        for run_result in runs
        for who in run_result["true"]
    ]
    return {
        "seeds": len(runs),
        "accuracy": {name: mean(values) for name, values in right.items()},
        "above_equal": {name: mean(values) for name, values in above.items()},
        "of_seeds": {name: values.mean(axis=1).tolist() for name, values in right.items()},
        "reliability": {
            who: {
                name: float(np.mean([run_result[name][who] for run_result in runs]))
                for name in RELIABILITY
            }
            for who in runs[0]["true"]
        },
        "largest_error": max(errors),
    }


def mean(values: np.ndarray) -> Config:
    """The mean of (R, P) values with its interval over the P prompts."""
    return bootstrap_interval(values.mean(axis=0), seed=0).to_json()


def tabulate(result: Config) -> Table:
    """One row for the heads and one for all weights."""
    parts = {name: result[name] for name in ("the head", "all weights")}
    annotators = list(result["the head"]["reliability"])
    header = ["trained", "seeds", *(f"{name} weights (95 %)" for name in WEIGHTS)]
    header += [f"{name} above equal, points (95 %)" for name in WEIGHTS[1:]]
    rows = [[*header, *(f"{name}: estimated (true)" for name in annotators)]]
    for name, part in parts.items():
        cells = [interval(part["accuracy"][kind]) for kind in WEIGHTS]
        cells += [signed_points(part["above_equal"][kind]) for kind in WEIGHTS[1:]]
        known = part["reliability"]
        cells += [
            f"{100 * known[annotator]['estimated']:.0f} % ({100 * known[annotator]['true']:.0f} %)"
            for annotator in annotators
        ]
        rows.append([name, str(part["seeds"]), *cells])
    return rows


if __name__ == "__main__":
    run("annotators", measure, tabulate)
