"""Reward accuracy on human rankings against the number of rankings, with the ceiling people set.

The data (QA-Feedback, 400 prompts with four answers and all six judgments of each) hold one
judgment a pair, so how often people agree with each other is not in them. The ceiling here is how
many of a prompt's judgments the best single order of its answers satisfies: with no two alike, no
reward model does better. Every seed draws its own test prompts and its own training prompts.
"""

import gzip
import json
from itertools import permutations
from pathlib import Path

import numpy as np

from examples.evidence.experiment import Config, Table, flags, interval, run, stage, write_dataset
from rlhf.errors import InputError
from rlhf.records.schema import Message, Prompt, RankedPrompt, Ranking, Response

Judgments = list[tuple[int, int, str]]


def measure(config: Config, out: Path) -> Config:
    """Accuracy on a seed's test prompts for every number of its training rankings."""
    lines = read(Path(config["data"]))
    num_test = config["test"]
    rows = []
    for seed in config["seeds"]:
        mixed = [lines[place] for place in np.random.default_rng(seed).permutation(len(lines))]
        test = [record(line, "test") for line in mixed[:num_test]]
        for number in config["rankings"]:
            train = [record(line, "train") for line in mixed[num_test : num_test + number]]
            data = write_dataset(out / f"rankings-{number}-{seed}", [*train, *test])
            trained = stage(
                out / f"reward-{number}-{seed}",
                *("train-reward", "--rankings", data, "--model", config["model"]),
                *("--seed", seed, *flags(config["reward"])),
            )
            found = {name: trained[name] for name in ("accuracy", "likelier_wins")}
            rows.append({"rankings": number, "seed": seed, **found})
    return {"ceiling": ceiling([line["pairs"] for line in lines]), "runs": rows}


def read(path: Path) -> list[Config]:
    """The lines of the data.

    Raises:
        InputError: the file is not there.
    """
    if not path.is_file():
        raise InputError(f"No such data: {path}", "Give its path as `data` in a --config file.")
    with gzip.open(path, "rt", encoding="utf-8") as stream:
        return [json.loads(line) for line in stream]


def record(line: Config, split: str) -> RankedPrompt:
    """One prompt with its answers; every judgment of a pair is a ranking of two."""
    prompt = Prompt.create((Message(role="user", content=line["prompt"]),), split, "qa-feedback")
    responses = tuple(
        Response(id=f"{prompt.id}-{n}", prompt_id=prompt.id, text=text, model="unknown")
        for n, text in enumerate(line["responses"])
    )
    rankings = []
    for first, second, said in line["pairs"]:
        better, worse = (first, second) if said == "first" else (second, first)
        pair = (responses[better].id, responses[worse].id)
        tiers = (pair,) if said == "tie" else ((pair[0],), (pair[1],))
        id_ = f"{prompt.id}-{first}-{second}"
        rankings.append(
            Ranking(id=id_, prompt_id=prompt.id, annotator="people", kind="human", tiers=tiers)
        )
    return RankedPrompt(prompt=prompt, responses=responses, rankings=tuple(rankings))


def ceiling(prompts: list[Judgments]) -> float:
    """The largest share of judgments, ties left out, that one order of the answers satisfies."""
    right = total = 0
    for pairs in prompts:
        strict = [(i, j) if said == "first" else (j, i) for i, j, said in pairs if said != "tie"]
        answers = {answer for pair in pairs for answer in pair[:2]}
        total += len(strict)
        right += max(
            sum(order.index(better) < order.index(worse) for better, worse in strict)
            for order in permutations(answers)
        )
    return right / total


def tabulate(result: Config) -> Table:
    """One row for each run, and the ceiling."""
    rows = [["rankings", "seed", "held-out accuracy (95 %)", "the likelier answer wins (95 %)"]]
    for one in sorted(result["runs"], key=lambda one: one["rankings"]):
        found = [interval(one[name]) for name in ("accuracy", "likelier_wins")]
        rows.append([str(one["rankings"]), str(one["seed"]), *found])
    best = f"{100 * result['ceiling']:.0f} %"
    return [*rows, ["best order of each prompt's answers", "", best, ""]]


if __name__ == "__main__":
    run("human", measure, tabulate)
