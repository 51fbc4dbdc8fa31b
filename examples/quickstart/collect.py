"""Results of several runs of the quickstart, as `results.json` and as the README's table.

    python examples/quickstart/collect.py runs/seed-0 runs/seed-1 runs/seed-2

A test holds the README to `results.json`.
"""

import json
import sys
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).with_name("results.json")
HEAD = (
    "| seed | pair accuracy of the reward model | win rate by the signal | win rate by the reward "
    "model | reverse KL, nats | length, tokens | answers that end |\n"
    "| --- | --- | --- | --- | --- | --- | --- |"
)


def collect(run: Path) -> dict[str, Any]:
    """What the README says about one run: accuracy, win rates, KL, length and time."""
    reward, ppo, evaluate = (
        json.loads((run / stage / "report.json").read_text())
        for stage in ("reward", "ppo", "evaluate")
    )
    stages = [json.loads(file.read_text()) for file in sorted(run.glob("*/stage.json"))]
    return {
        "seed": evaluate["seed"],
        "accuracy": reward["accuracy"],
        "win_rate": evaluate["win_rate"],
        "kl": evaluate["kl"],
        "length": evaluate["length"],
        "eos_rate": evaluate["eos_rate"],
        "critic_fit": ppo["critic_fit"],
        "versions": stages[0]["versions"],
    }


def percent(share: float) -> str:
    """A share in per cent."""
    return f"{100 * share:.0f} %"


def interval(found: dict[str, Any]) -> str:
    """A share with its 95 % interval, in per cent."""
    return f"{percent(found['value'])} ({percent(found['low'])} to {percent(found['high'])})"


def table(results: list[dict[str, Any]]) -> str:
    """The README's table."""
    rows = [
        f"| {one['seed']} | {interval(one['accuracy'])} | {interval(one['win_rate']['gold'])} "
        f"| {interval(one['win_rate']['reward'])} | {one['kl']['reverse']['nats']:.1f} "
        f"| {one['length']['reference']:.0f} → {one['length']['policy']:.0f} "
        f"| {percent(one['eos_rate']['reference'])} → {percent(one['eos_rate']['policy'])} |"
        for one in results
    ]
    return "\n".join([HEAD, *rows])


if __name__ == "__main__":
    collected = [collect(Path(name)) for name in sys.argv[1:]]
    RESULTS.write_text(json.dumps(collected, indent=2) + "\n")
    print(table(collected))
