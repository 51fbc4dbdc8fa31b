"""How far the price that `rlhf plan` forecasts is from the price that a run then has.

On the CPU, with random words in place of people's answers: train-reward with adapters, reference
outputs, PPO, and PPO with adapters on one frozen model. Of each stage a short run comes first, then
forecasts of a longer one, then that run. One forecast is `like` the short run, which knows how fast
this machine is at each phase; the other assumes utilizations, as before any run. An hour costs
3,600, so that prices are seconds. Each run is a process of its own.

On a machine that other work shares, both runs wait for processors, and not equally long. `busy` is
the share of its time in which a process had one; `at equal load` is the ratio as it would be if
the long run had waited as much as the short one.

    python examples/benchmarks/cost.py [--quick] [--json] [--work DIR]
"""

import argparse
import json
import random
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).parents[2]
MODEL = REPOSITORY / "models" / "SmolLM2-135M-Instruct"
PROMPTS = REPOSITORY / "examples" / "quickstart" / "prompts.jsonl"
PRICE = 3600  # of an hour
WORDS = (20, 60)  # of an answer that is ranked
NEW_TOKENS = 32
HELD_OUT = 8
BATCH = 8
EPISODES = 16
SHORT = {"rankings": 16, "prompts": 16, "steps": 4}  # the first two steps of PPO are slower
LONG = {"rankings": 96, "prompts": 192, "steps": 12}
QUICK = {"rankings": 32, "prompts": 48, "steps": 6}

Sizes = dict[str, int]
Row = dict[str, Any]


def rlhf(*arguments: str) -> Row:
    """The result of a command."""
    command = [sys.executable, "-m", "rlhf.cli", *arguments, "--json"]
    began, before = time.monotonic(), children_seconds()
    done = subprocess.run(command, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True, check=True)
    result: Row = json.loads(done.stdout.splitlines()[-1])
    return result | {"busy": (children_seconds() - before) / (time.monotonic() - began)}


def children_seconds() -> float:
    """Processor seconds of the commands that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def write_inputs(folder: Path, sizes: Sizes) -> None:
    """An export of rankings, and a file of prompts, of these sizes."""
    lines = [json.loads(line) for line in PROMPTS.read_text(encoding="utf-8").splitlines()]
    by_split = {s: [line for line in lines if line["split"] == s] for s in ("train", "test")}
    generator = random.Random(0)
    vocabulary = " ".join(line["prompt"] for line in lines).split()

    def answer() -> str:
        return " ".join(generator.choices(vocabulary, k=generator.randint(*WORDS)))

    def chosen(count: int) -> list[Row]:
        return [*by_split["train"][:count], *by_split["test"][:HELD_OUT]]

    folder.mkdir(parents=True)
    pairs = [
        {**line, "chosen": answer(), "rejected": answer()} for line in chosen(sizes["rankings"])
    ]
    write_lines(folder / "pairs.jsonl", pairs)
    write_lines(folder / "prompts.jsonl", chosen(sizes["prompts"]))
    rlhf("import", str(folder / "pairs.jsonl"), "--db", str(folder / "labels.db"))
    rankings = ["--db", str(folder / "labels.db"), "--out", str(folder / "rankings")]
    rlhf("export", *rankings)


def write_lines(path: Path, lines: list[Row]) -> None:
    """One JSON object on each line."""
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


def command(stage: str, folder: Path, shared: Path, sizes: Sizes, model: str) -> list[str]:
    """The command of a stage; PPO of any size uses the reward model and reference in `shared`."""
    given = ["--model", model, "--out", str(folder / stage), "--price-per-hour", str(PRICE)]
    if stage == "reward_lora":
        adapters = ["--adapter", "lora", "--lora.rank", "16"]
        return ["train-reward", *given, *adapters, "--rankings", str(folder / "rankings")]
    reward = str(shared / "reward_lora")
    if stage == "reference":
        prompts = ["--prompts", str(folder / "prompts.jsonl"), "--reward", reward]
        # a batch takes as long half empty: the short run must fill its batches too
        sampling = ["--sampling.max-new-tokens", str(NEW_TOKENS), "--batch-size", str(BATCH)]
        return ["reference", *given, *prompts, *sampling]
    steps = ["--steps", str(sizes["steps"]), "--batch.episodes-per-step", str(EPISODES)]
    inputs = ["--reward", reward, "--reference", str(shared / "reference")]
    adapters = ["--lora.share-base", "--lora.rank", "16"] if stage == "ppo_lora" else []
    return ["ppo", *given, *steps, *inputs, *adapters]


def forecast(stage: str, known: Row, sizes: Sizes, model: str, like: Path | None) -> Row:
    """The forecast by `rlhf plan` of a run with `sizes`; without `like`, lengths are as known."""
    name = {"reward_lora": "rankings", "reference": "prompts"}.get(stage, "steps")
    amount = {**({} if like else known), "steps" if name == "steps" else "prompts": sizes[name]}
    arguments = ["plan", "--model", model, "--price-per-hour", str(PRICE)]
    for field, value in amount.items():
        arguments += [f"--amount.{field.replace('_', '-')}", str(value)]
    if like:
        arguments += ["--like", str(like)]
    stage_forecast: Row = rlhf(*arguments)["forecast"]["stages"][stage]
    return stage_forecast


def measure(stage: str, work: Path, sizes: Sizes, model: str) -> Row:
    """Run a stage in short, forecast the longer run, and take that."""
    short, long = work / "short", work / "long"
    trial = rlhf(*command(stage, short, short, SHORT, model))
    like = forecast(stage, {}, sizes, model, short / stage)
    assumed = forecast(stage, trial["amount"], sizes, model, None)
    done = rlhf(*command(stage, long, short, sizes, model))
    stage_json = json.loads((long / stage / "stage.json").read_text(encoding="utf-8"))
    price = stage_json["device_seconds"] * PRICE / 3600
    return {
        "stage": stage,
        "short": trial["cost"]["price"],
        "price": round(price, 1),
        "forecast": round(like["price"], 1),
        "ratio": round(like["price"] / price, 3),
        "busy": [round(run["busy"], 3) for run in (trial, done)],
        "ratio_at_equal_load": round(like["price"] / price * trial["busy"] / done["busy"], 3),
        "assumed": round(assumed["price"], 1),
        "assumed_ratio": round(assumed["price"] / price, 3),
        "utilization": {name: round(use, 4) for name, use in like["utilization"].items()},
        "seconds": {name: round(value, 1) for name, value in like["seconds"].items()},
        "start_seconds": round(like["start_seconds"], 1),
        "use": done.get("use") or done.get("phases"),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="shorter runs")
    parser.add_argument("--json", action="store_true", help="one JSON object on the last line")
    parser.add_argument("--model", default=str(MODEL))
    parser.add_argument("--work", type=Path, help="keep runs here; default: a temporary folder")
    parser.add_argument(
        "--stages", default="reward_lora,reference,ppo_lora,ppo", help="the first two come first"
    )
    arguments = parser.parse_args()
    sizes = QUICK if arguments.quick else LONG
    work: Path = arguments.work or Path(tempfile.mkdtemp(prefix="cost-"))
    for name, of in (("short", SHORT), ("long", sizes)):
        shutil.rmtree(work / name, ignore_errors=True)
        write_inputs(work / name, of)
    rows = []
    print(
        f"{'stage':12}{'price':>9}{'forecast':>10}{'ratio':>7}{'at equal load':>15}"
        f"{'assumed':>9}{'ratio':>7}"
    )
    for stage in arguments.stages.split(","):
        row = measure(stage, work, sizes, arguments.model)
        rows.append(row)
        print(
            f"{stage:12}{row['price']:>9.1f}{row['forecast']:>10.1f}{row['ratio']:>7.2f}"
            f"{row['ratio_at_equal_load']:>15.2f}{row['assumed']:>9.1f}{row['assumed_ratio']:>7.2f}",
            flush=True,
        )
    if arguments.work is None:
        shutil.rmtree(work)
    if arguments.json:
        worst = max((row["ratio"] for row in rows), key=lambda ratio: abs(ratio - 1))
        versions = {name: version(name) for name in ("torch", "transformers")}
        print(json.dumps({"ratio": worst, "runs": rows, "versions": versions}))


if __name__ == "__main__":
    main()
