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
    """The README's numbers of one run: accuracy, win rates, KL, endings and samples."""
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
            {"prompt": sample["turns"][-1]["content"], **sample["answers"]}
            for sample in evaluate["samples"][:SHOWN]
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


def interval(rate: dict[str, Any]) -> str:
    """A share with its 95 % interval, in per cent."""
    return f"{percent(rate['value'])} ({100 * rate['low']:.0f}–{percent(rate['high'])})"


def change(values: dict[str, float], form: str = "{:.0f}") -> str:
    """A value of the original model, and that of the policy."""
    return f"{form.format(values['reference'])} → {form.format(values['policy'])}"


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
                str(result["seed"]),
                interval(result["win_rate"]["gold"]),
                interval(result["win_rate"]["gold"]["length_controlled"]),
                f"{result['kl']['reverse']['nats']:.1f}",
                change({side: 100 * share for side, share in result["eos_rate"].items()}) + " %",
                change(result["length"]),
                change({side: of["mean"] for side, of in result["gold"].items()}, "{:.2f}"),
                change({side: 100 * of["share"] for side, of in result["commonest"].items()})
                + " %",
                interval(result["accuracy"]),
            )
            for result in results
        ],
    )


def missed(results: list[dict[str, Any]]) -> str:
    """Which seeds miss what was asked of all, as a list for the README."""
    lines = []
    for result in results:
        gold, eos_rate = result["win_rate"]["gold"], result["eos_rate"]
        even = gold["length_controlled"]["value"]
        fall, nats = eos_rate["reference"] - eos_rate["policy"], result["kl"]["reverse"]["nats"]
        misses = [
            (gold["value"] < 0.75, f"wins {100 * gold['value']:.1f} %, under 75 %"),
            (even < 0.7, f"wins {100 * even:.1f} % at equal length, under 70 %"),
            (nats > 12, f"moved {nats:.1f} nats, over 12"),
            (
                fall > 0.05,
                f"the share of responses that end fell by {100 * fall:.0f} points, over 5",
            ),
        ]
        lines += [f"* Seed {result['seed']}: {miss}." for is_missed, miss in misses if is_missed]
    return "\n".join(lines)


def samples(result: dict[str, Any]) -> str:
    """The README's samples: the first held-out prompts, before and after."""
    rows = [
        tuple(" ".join(sample[side].split()) for side in ("prompt", "reference", "policy"))
        for sample in result["samples"]
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
            attempt["settings"],
            percent(attempt["gold"]),
            percent(attempt["at_equal_length"]),
            f"{attempt['nats']:.1f}",
            change({side: 100 * share for side, share in attempt["eos_rate"].items()}) + " %",
        )
        for attempt in tries
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
