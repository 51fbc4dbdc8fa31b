"""Results of several runs of the quickstart, as `results.json` and as the README's tables.

    python examples/quickstart/collect.py runs/seed-{0,1,2}/round-0

A test holds the README to `results.json`, and to `tries.json`: the settings that were tried on
validation.jsonl.
"""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

RESULTS = Path(__file__).with_name("results.json")
TRIES = Path(__file__).with_name("tries.json")
SHOWN = 10  # held-out prompts on the page, the first of the file


def collect(run: Path) -> dict[str, Any]:
    """What the README says about one run: accuracy, win rates, KL, endings and samples."""
    reward, evaluate = (
        json.loads((run / stage / "report.json").read_text()) for stage in ("reward", "evaluate")
    )
    stages = [json.loads(file.read_text()) for file in sorted(run.glob("*/stage.json"))]
    return {
        "seed": evaluate["seed"],
        "accuracy": reward["accuracy"],
        "counts": reward["counts"],
        **{name: evaluate[name] for name in ("win_rate", "kl", "length", "eos_rate", "gold")},
        "tied": count_ties(evaluate["scores"]["gold"], len(evaluate["samples"])),
        "commonest": {side: evaluate["template"][side] for side in ("reference", "policy")},
        "samples": [
            {"prompt": one["turns"][-1]["content"], **one["answers"]}
            for one in evaluate["samples"][:SHOWN]
        ],
        "versions": stages[0]["versions"],
    }


def count_ties(scores: dict[str, list[float]], prompts: int) -> float:
    """The share of comparisons, every new response with every original one, that score the same."""
    ours, theirs = (np.reshape(scores[side], (prompts, -1)) for side in ("policy", "reference"))
    return float((ours[:, :, None] == theirs[:, None, :]).mean())


def percent(share: float) -> str:
    """A share in per cent."""
    return f"{100 * share:.0f} %"


def interval(found: dict[str, Any]) -> str:
    """A share with its 95 % interval, in per cent."""
    return f"{percent(found['value'])} ({100 * found['low']:.0f}–{percent(found['high'])})"


def change(found: dict[str, float], form: str = "{:.0f}") -> str:
    """What the original model has, and what the policy has."""
    return f"{form.format(found['reference'])} → {form.format(found['policy'])}"


def table(results: list[dict[str, Any]]) -> str:
    """The README's table of results: a row for every seed."""
    header = (
        "seed",
        "gold win rate",
        "at equal length",
        "reverse KL, nats",
        "responses that end",
        "length, tokens",
        "mean VADER score",
        "most frequent 4-gram",
        "accuracy of the reward model",
    )
    return markdown(
        header,
        [
            (
                str(one["seed"]),
                interval(one["win_rate"]["gold"]),
                interval(one["win_rate"]["gold"]["length_controlled"]),
                f"{one['kl']['reverse']['nats']:.1f}",
                change({side: 100 * share for side, share in one["eos_rate"].items()}) + " %",
                change(one["length"]),
                change({side: of["mean"] for side, of in one["gold"].items()}, "{:.2f}"),
                change({side: 100 * of["share"] for side, of in one["commonest"].items()}) + " %",
                interval(one["accuracy"]),
            )
            for one in results
        ],
    )


def missed(results: list[dict[str, Any]]) -> str:
    """Which seeds miss what was asked of all, as a list for the README."""
    lines = []
    for one in results:
        gold, ends = one["win_rate"]["gold"], one["eos_rate"]
        even = gold["length_controlled"]["value"]
        fall, nats = ends["reference"] - ends["policy"], one["kl"]["reverse"]["nats"]
        misses = [
            (gold["value"] < 0.75, f"wins {100 * gold['value']:.1f} %, under 75 %"),
            (even < 0.7, f"wins {100 * even:.1f} % at equal length, under 70 %"),
            (nats > 12, f"moved {nats:.1f} nats, over 12"),
            (
                fall > 0.05,
                f"the share of responses that end fell by {100 * fall:.0f} points, over 5",
            ),
        ]
        lines += [f"* Seed {one['seed']}: {words}." for is_missed, words in misses if is_missed]
    return "\n".join(lines)


def samples(result: dict[str, Any]) -> str:
    """The README's samples: the first held-out prompts, before and after."""
    rows = [
        tuple(" ".join(one[side].split()) for side in ("prompt", "reference", "policy"))
        for one in result["samples"]
    ]
    suffix = " Answer in one short sentence."
    return markdown(
        ("question", "before", "after"),
        [(prompt.removesuffix(suffix), before, after) for prompt, before, after in rows],
    )


def tried(tries: list[dict[str, Any]]) -> str:
    """The README's table of the settings that were tried on the validation prompts."""
    rows = [
        (
            one["settings"],
            percent(one["gold"]),
            percent(one["at_equal_length"]),
            f"{one['nats']:.1f}",
            change({side: 100 * share for side, share in one["eos_rate"].items()}) + " %",
        )
        for one in tries
    ]
    header = ("settings", "gold win rate", "at equal length", "reverse KL", "responses that end")
    return markdown(header, rows)


def markdown(header: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    """A table."""
    lines = [header, ("---",) * len(header), *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


if __name__ == "__main__":
    collected = [collect(Path(name)) for name in sys.argv[1:]]
    RESULTS.write_text(json.dumps(collected, indent=2, ensure_ascii=False) + "\n")
    print(table(collected), samples(collected[0]), sep="\n\n")
