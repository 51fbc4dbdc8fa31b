"""Real chat is harder: how often a reward model of 135M parameters agrees with people there.

Two sets of people's judgments: which of two assistant's replies helps more (the helpful part of
Anthropic's HH, arXiv 2204.05862), and which of four long answers follows a text better
(QA-Feedback, arXiv 2306.01693). For each, a head on the frozen model and all weights, beside what
choosing the longer and the likelier response reaches. Every seed draws its own prompts.
"""

import gzip
import json
import re
from functools import partial
from itertools import permutations
from pathlib import Path

import numpy as np

from examples.evidence.commands import Config, at_once, flags, stage
from examples.evidence.experiment import Table, interval, run, write_dataset
from rlhf.errors import InputError
from rlhf.records.schema import Message, Prompt, RankedPrompt, Ranking, Response

Judgments = list[tuple[int, int, str]]
TURN = re.compile(r"(?:^|\n\n)(Human|Assistant): ?")
ROLES = {"Human": "user", "Assistant": "assistant"}


def measure(config: Config, out: Path) -> Config:
    """Accuracy on a seed's test prompts, for each set of judgments and each form of training."""
    sets, parts = {}, []
    for name, of in config["sets"].items():
        limit = of.get("max_characters")
        lines = [line for line in read(Path(of["data"])) if is_usable(line, limit)]
        judged = [line["pairs"] for line in lines]
        sets[name] = {"prompts": len(lines), "ceiling": ceiling(judged)}
        folder = out / name.replace(" ", "-")
        parts += [partial(measure_seed, config, of, lines, folder, s) for s in config["seeds"]]
    runs = iter(at_once(*parts))
    return {
        "sets": {
            name: {**of, "runs": [next(runs) for _ in config["seeds"]]} for name, of in sets.items()
        }
    }


def measure_seed(config: Config, of: Config, lines: list[Config], out: Path, seed: int) -> Config:
    """Both forms of training on one draw of prompts."""
    needed = of["test"] + of["train"]
    if needed > len(lines):
        raise InputError(
            f"{of['data']} has {len(lines)} prompts, and {needed} are asked for",
            "Lower `train` or `test` in the configuration.",
        )
    mixed = [lines[index] for index in np.random.default_rng(seed).permutation(len(lines))]
    records = [record(line, "test") for line in mixed[: of["test"]]]
    records += [record(line, "train") for line in mixed[of["test"] : needed]]
    data = write_dataset(out / f"rankings-{seed}", records)
    result: Config = {"seed": seed, "trained": {}}
    for trained, settings in config["trained"].items():
        report = stage(
            out / f"{trained.replace(' ', '-')}-{seed}",
            *("train-reward", "--rankings", data, "--model", config["model"]),
            *("--seed", seed, *flags(settings)),
        )
        result["trained"][trained] = report["accuracy"]
        result["likelier_wins"] = report["likelier_wins"]
        result["longer_wins"] = report["health"]["longer_wins"]
    return result


def read(path: Path) -> list[Config]:
    """The lines of the data: turns, responses and judged pairs.

    Raises:
        InputError: the file is not there.
    """
    if not path.is_file():
        raise InputError(f"No such data: {path}", "Give its path as `data` in a --config file.")
    with gzip.open(path, "rt", encoding="utf-8") as stream:
        return [as_judged(json.loads(line)) for line in stream]


def as_judged(line: Config) -> Config:
    """A line of either file in one form; a chosen and a rejected reply are one judged pair."""
    if "chosen" in line:
        responses = [line["chosen"], line["rejected"]]
        return {"turns": turns(line["prompt"]), "responses": responses, "pairs": [[0, 1, "first"]]}
    return {**line, "turns": [["user", line["prompt"]]]}


def turns(dialogue: str) -> list[list[str]]:
    """The turns of a dialogue as role and content."""
    pieces = TURN.split(dialogue)[1:]
    return [
        [ROLES[name], content.strip()]
        for name, content in zip(pieces[::2], pieces[1::2], strict=True)
    ]


def is_usable(line: Config, max_characters: int | None) -> bool:
    """Whether a dialogue ends with the user, no text is empty, and all have so many characters."""
    texts = [*(content for _, content in line["turns"]), *line["responses"]]
    fits = max_characters is None or sum(map(len, texts)) <= max_characters
    return fits and all(text.strip() for text in texts) and line["turns"][-1][0] == "user"


def record(line: Config, split: str) -> RankedPrompt:
    """One prompt with its responses; every judgment of a pair is a ranking of two."""
    messages = tuple(Message(role=role, content=content) for role, content in line["turns"])
    prompt = Prompt.create(messages, split, "people")
    responses = tuple(
        Response(id=f"{prompt.id}-{n}", prompt_id=prompt.id, text=text, model="unknown")
        for n, text in enumerate(line["responses"])
    )
    rankings = []
    for first, second, verdict in line["pairs"]:
        better, worse = (first, second) if verdict == "first" else (second, first)
        pair = (responses[better].id, responses[worse].id)
        tiers = (pair,) if verdict == "tie" else ((pair[0],), (pair[1],))
        id_ = f"{prompt.id}-{first}-{second}"
        rankings.append(
            Ranking(id=id_, prompt_id=prompt.id, annotator="people", kind="human", tiers=tiers)
        )
    return RankedPrompt(prompt=prompt, responses=responses, rankings=tuple(rankings))


def ceiling(prompts: list[Judgments]) -> float:
    """The largest share of judgments, ties left out, that one order of the responses satisfies."""
    right = total = 0
    for pairs in prompts:
        strict = [
            (i, j) if verdict == "first" else (j, i) for i, j, verdict in pairs if verdict != "tie"
        ]
        answers = {answer for pair in pairs for answer in pair[:2]}
        total += len(strict)
        right += max(
            sum(order.index(better) < order.index(worse) for better, worse in strict)
            for order in permutations(answers)
        )
    return right / total


def tabulate(result: Config) -> Table:
    """One row for each set and seed."""
    trained = list(result["config"]["trained"])
    header = ["judgments", "seed", *(f"{name} (95 %)" for name in trained)]
    rows = [[*header, "the longer wins (95 %)", "the likelier wins (95 %)"]]
    for name, judgment_set in result["sets"].items():
        for run_result in judgment_set["runs"]:
            cells = [interval(run_result["trained"][form]) for form in trained]
            cells += [interval(run_result["longer_wins"]), interval(run_result["likelier_wins"])]
            rows.append([name, str(run_result["seed"]), *cells])
    return rows


if __name__ == "__main__":
    run("real_chat", measure, tabulate)
