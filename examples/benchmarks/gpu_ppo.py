"""PPO of a 6B-class policy on one GPU with `--share-base`: speed, phases, memory against the plan.

The model has the shape of examples/six_billion/llama_6b and random weights, the reward model is a
LoRA adapter beside them, as are policy and critic: speed and memory do not depend on what they say.
Prompts have about 256 tokens and answers 256: random weights hardly ever end one. The first step
warms up. Printed are, for each engine,

    sampling      tokens per second, prompts not counted, and over those of the first engine
    update        tokens per second, prompts counted
    utilisation   of the update: 4 · parameters of the matrices · tokens / second for policy and
                  critic, since frozen weights want no gradients, over the rate at which this device
                  multiplies large bf16 matrices; attention and recomputation are not counted
    memory        peak of the device over the peak that `--dry-run` plans

    bash examples/benchmarks/gpu_ppo.sh [--quick] [--json] [--engines generate,continuous]
"""

import argparse
import json
import random
import re
import resource
import statistics
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

from gpu_reward import WORDS, matmul_rate, write_model

REPOSITORY = Path(__file__).parents[2]
GIB = 2**30
PHASES = ("sample", "score", "update")
RANKED = 8  # prompts of the reward model's training, which is not measured

Line = dict[str, Any]


def write_records(folder: Path, prompts: int, words: int) -> None:
    """Prompts of random words, with two ranked answers each, as `rlhf export` writes them."""
    from rlhf.records.ranked import write_ranked
    from rlhf.records.schema import Message, Prompt, RankedPrompt, Ranking, Response

    generator = random.Random(0)

    def text() -> str:
        return " ".join(generator.choices(WORDS, k=words))

    records = []
    for number in range(prompts):
        prompt = Prompt.create((Message(role="user", content=text()),), "train", "benchmark")
        ids = (f"{number}-0", f"{number}-1")
        answers = tuple(Response(id=i, prompt_id=prompt.id, text=text(), model="") for i in ids)
        order = Ranking(
            id=str(number),
            prompt_id=prompt.id,
            annotator="benchmark",
            kind="signal",
            tiers=tuple((i,) for i in ids),
        )
        records.append(RankedPrompt(prompt=prompt, responses=answers, rankings=(order,)))
    folder.mkdir()
    write_ranked(folder, records, {})


def rlhf(*words: str | Path | float) -> None:
    """Run one command in a process of its own, which leaves the device when it ends."""
    command = [sys.executable, "-m", "rlhf.cli", *map(str, words)]
    subprocess.run(command, check=True, cwd=REPOSITORY, stdout=subprocess.DEVNULL)


def prepare(folder: Path, arguments: argparse.Namespace) -> None:
    """A model, an adapter that is its reward model, and what the model says to the prompts."""
    tokens = arguments.tokens
    write_model(folder / "model", tiny=arguments.quick)
    write_records(folder / "prompts", max(arguments.episodes, RANKED), tokens)
    model = ["--model", folder / "model"]
    rlhf(
        *("train-reward", "--rankings", folder / "prompts", *model, "--adapter", "lora"),
        *("--limit", RANKED, "--out", folder / "reward", "--gradient-checkpointing"),
    )
    rlhf(
        *("reference", "--prompts", folder / "prompts", *model, "--out", folder / "reference"),
        *("--max-new-tokens", tokens, "--batch-size", arguments.episodes),
    )


def work(folder: Path, engine: str, arguments: argparse.Namespace) -> Line:
    """Train for some steps in this process; what a step took, and what it held."""
    import torch

    from policies.ppo import setting_groups as groups
    from policies.ppo.settings import PPOSettings
    from policies.ppo.train import train_policy
    from rlhf.commands.models.ppo import memory_plan
    from rlhf.planning.planner import read_shape
    from rlhf.run.metrics import read_metrics

    settings = PPOSettings(
        model=str(folder / "model"),
        reward=(str(folder / "reward"),),
        reference=folder / "reference",
        out=folder / f"ppo-{engine}",
        steps=arguments.steps,
        batch=groups.BatchSettings(
            episodes_per_step=arguments.episodes,
            micro_batch_size=arguments.micro_batch,
            gradient_checkpointing=True,
        ),
        sampling=groups.SamplingSettings(
            engine=engine,  # type: ignore[arg-type]  # the settings check it
            batch_size=arguments.episodes,
        ),
        lora=groups.LoraSettings(rank=16, share_base=True),
        precision="bf16",
        kl=groups.KLSettings(source="adapter", coefficient=0.05),
        checkpoint=groups.CheckpointSettings(every=arguments.steps),
    )
    planned = re.search(r"^peak +([\d.]+)", memory_plan(settings), re.MULTILINE)
    assert planned
    train_policy(settings)
    rows = read_metrics(settings.out / "metrics.jsonl")[1:]
    found = {name: statistics.median(row[f"seconds/{name}"] for row in rows) for name in PHASES}
    answered = arguments.episodes * statistics.fmean(row["length"] for row in rows)
    read = answered + arguments.episodes * arguments.tokens
    rate = matmul_rate(256 if arguments.quick else 8192)
    update_rate = read / found["update"]
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    if torch.cuda.is_available():
        peak = torch.cuda.max_memory_allocated() / GIB
    return {
        "engine": engine,
        **found,
        "sampled_per_second": answered / found["sample"],
        "updated_per_second": update_rate,
        "utilisation": 2 * 4 * read_shape(settings.model).trunk_linear * update_rate / rate,
        "sampler_gap": max(row["sampler_gap"] for row in rows),
        "peak_gib": peak,
        "planned_gib": float(planned[1]),
        "matmul_tflops": rate / 1e12,
    }


def measure(folder: Path, arguments: argparse.Namespace) -> Line:
    """Every engine in a process of its own."""
    prepare(folder, arguments)
    runs: list[Line] = []
    for engine in arguments.engines.split(","):
        words = [sys.executable, __file__, *sys.argv[1:], "--work", str(folder), "--as", engine]
        done = subprocess.run(words, stdout=subprocess.PIPE, text=True, check=True, cwd=REPOSITORY)
        run = json.loads(done.stdout.splitlines()[-1])
        runs.append(run)
        whole = sum(run[name] for name in PHASES)
        shares = "  ".join(f"{name} {run[name] / whole:.0%}" for name in PHASES)
        speedup = run["sampled_per_second"] / runs[0]["sampled_per_second"]
        print(
            f"{engine:10}  sampling {run['sampled_per_second']:.0f} tokens/s (x{speedup:.2f})  "
            f"update {run['updated_per_second']:.0f} tokens/s  "
            f"utilisation {run['utilisation']:.1%}  {shares}  "
            f"peak {run['peak_gib']:.3g} of {run['planned_gib']:.3g} GiB planned"
        )
    ratio = runs[-1]["sampled_per_second"] / runs[0]["sampled_per_second"]
    return {"ratio": round(ratio, 2), "runs": runs}


def main() -> None:
    """Write model and data, measure, print."""
    sys.path[0] = str(REPOSITORY)  # beside this file lies a reward.py that is not the package
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a tiny model, to see it run")
    parser.add_argument("--json", action="store_true", help="one JSON object on the last line")
    parser.add_argument("--engines", default="generate,continuous")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--episodes", type=int, default=64, help="in a step")
    parser.add_argument("--micro-batch", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=256, help="of a prompt, and of an answer")
    for name in ("--work", "--as"):
        parser.add_argument(name, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.steps, arguments.episodes, arguments.micro_batch = 2, 4, 2
        arguments.tokens = 16
    if arguments.work:
        print(json.dumps(work(Path(arguments.work), vars(arguments)["as"], arguments)))
        return
    with tempfile.TemporaryDirectory() as name:
        result = measure(Path(name), arguments)
    if arguments.json:
        versions = {name: version(name) for name in ("torch", "transformers")}
        print(json.dumps({**result, "versions": versions}))


if __name__ == "__main__":
    main()
