"""Reward accuracy on human rankings against the number of rankings, with the ceiling people set.

The data (QA-Feedback, 400 prompts with four answers and all six judgements of each) hold one
judgement a pair, so people's agreement with each other is not in them. The ceiling is how many of
a prompt's judgements any single order of its answers can satisfy: no reward model does better.
"""

import gzip
import json
from itertools import permutations
from pathlib import Path

import numpy as np
from experiment import Config, Table, flags, interval, run, stage, write_dataset

from rlhf.errors import InputError
from rlhf.records import Message, Prompt, RankedPrompt, Ranking, Response

Judgements = list[tuple[int, int, str]]


def measure(config: Config, out: Path) -> Config:
    """Accuracy on the same test prompts for every seed and number of its training rankings."""
    lines = read(Path(config["data"]))
    order = np.random.default_rng(config["split_seed"]).permutation(len(lines))
    num_test = config["test"]
    test = [record(lines[place], "test") for place in order[:num_test]]
    train = [record(lines[place], "train") for place in order[num_test:]]
    rows = []
    for seed in config["seeds"]:
        mixed = np.random.default_rng(seed).permutation(len(train))
        for number in config["rankings"]:
            chosen = [train[place] for place in mixed[:number]]
            data = write_dataset(out / f"rankings-{number}-{seed}", [*chosen, *test])
            trained = stage(
                out / f"reward-{number}-{seed}",
                *("train-reward", "--rankings", data, "--model", config["model"]),
                *("--seed", seed, *flags(config["reward"])),
            )
            found = {name: trained[name] for name in ("accuracy", "likelier_wins")}
            rows.append({"rankings": number, "seed": seed, **found})
    return {"ceiling": ceiling([lines[place]["pairs"] for place in order[:num_test]]), "runs": rows}


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
    """One prompt with its answers; every judgement of a pair is a ranking of two."""
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


def ceiling(prompts: list[Judgements]) -> float:
    """The largest share of judgements, ties left out, that one order of the answers satisfies."""
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
    """One row for each run."""
    rows = [["rankings", "seed", "held-out accuracy (95 %)", "likelier wins", "ceiling"]]
    for one in result["runs"]:
        likelier = one["likelier_wins"]
        rows.append(
            [
                str(one["rankings"]),
                str(one["seed"]),
                interval(one["accuracy"]),
                f"{100 * likelier['value']:.0f} %" if likelier else "–",
                f"{100 * result['ceiling']:.0f} %",
            ]
        )
    return rows


if __name__ == "__main__":
    run("human", measure, tabulate)
