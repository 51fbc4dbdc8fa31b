"""PPO against trl 1.12's PPOTrainer, the last that trl shipped: speed, and time to the same goal.

Both see the same prompts and start from the same policy, the same reward model, a full-size critic
made from it, and AdamW with the same β and ε. Each run is a process of its own.

    speed    episodes per second in paired runs: critic and policy trained in full, a resident copy
             for the KL, the same batch, response length and epochs; the first step warms up. Then
             the phases of ours, beside what their bytes or their arithmetic would take at the rates
             that this machine has in the same minute
    target   wall time of the process until three steps together have 90 % of what our run gains in
             gold reward: ours with examples/evidence/primed/ppo.yaml, trl's with the same batch,
             epochs, learning rate and penalty, its own defaults for the rest, and more steps, so
             that it has more than four times our time. A run that never gets there counts with all
             its time, and the ratio is a lower bound. First run
             rlhf loop --config examples/evidence/primed/loop.yaml

    python examples/benchmarks/ppo.py [speed|target] [--quick] [--json]

trl is measured as ours: AdamW steps float32 weights, bf16 autocast multiplies; its frozen models
are in bf16 (`trl`). With every weight and moment in bf16 (`trl-bf16`) it is faster and trains
another way, since small updates are lost; that ratio is printed, too. Its environment is made in
--work, on first use.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from importlib.metadata import version
from itertools import takewhile
from pathlib import Path
from typing import Any

import yaml

REPOSITORY = Path(__file__).parents[2]
MODEL = REPOSITORY / "models" / "SmolLM2-135M-Instruct"
QUICKSTART = REPOSITORY / "examples" / "quickstart"
PRIMED = REPOSITORY / "examples" / "evidence" / "primed"  # short answers, as trl is slow
PEER = ("trl==1.12.0", "transformers", "accelerate", "datasets", "numpy", "vaderSentiment")
PHASES = ("sample", "score", "update")
KL = 0.05  # trl's default coefficient of the reverse KL in the reward
WINDOW = 3  # steps whose mean gold reward counts: one step's is too noisy
SHARE_OF_GAIN = 0.9
LARGEST_DIFFERENCE = 0.2  # of the lengths of answers: random, but not by more
QUIET = {"TQDM_DISABLE": "1", "TRL_EXPERIMENTAL_SILENCE": "1"}

Line = dict[str, Any]


def peer_python(work: Path) -> Path:
    """The Python of trl's environment, which is made here if it is not there yet."""
    folder = work / "trl-1.12"
    python, ready = folder / "bin" / "python", folder / "ready"
    if not ready.is_file():
        pinned = (REPOSITORY / "constraints.txt").read_text(encoding="utf-8").splitlines()
        constraints = work / "constraints.txt"
        constraints.write_text("\n".join(line for line in pinned if line[:5] != "trl=="))
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
        pip = [str(python), "-m", "pip", "install", "--quiet", "--constraint", str(constraints)]
        for packages in (("torch",), PEER):
            subprocess.run([*pip, *packages], check=True)
        ready.touch()
    return python


def prepare(arguments: argparse.Namespace) -> Line:
    """Prompts, a reward model with a fresh head, and a reference store; made once in --work."""
    from rlhf.modeling.models import new_reward_model, save_model
    from rlhf.modeling.tokens import load_tokenizer

    folder: Path = arguments.work / f"speed-{arguments.episodes}-{arguments.response}"
    folder.mkdir(parents=True, exist_ok=True)
    prompts, reward = folder / "prompts.jsonl", folder / "reward"
    lines = (PRIMED / "prompts.jsonl").read_text(encoding="utf-8").splitlines()
    prompts.write_text("\n".join(lines[: 2 * arguments.episodes]) + "\n", encoding="utf-8")
    tokenizer = load_tokenizer(arguments.model)
    if not reward.exists():
        pad_id = int(tokenizer.pad_token_id)
        save_model(new_reward_model(arguments.model, pad_id, 0), tokenizer, reward)
    command = [sys.executable, "-m", "rlhf.cli", "reference", "--resume"]
    command += ["--prompts", str(prompts), "--model", arguments.model]
    command += ["--temperature", str(arguments.temperature), "--reward", str(reward)]
    command += ["--max-new-tokens", str(arguments.response), "--out", str(folder / "reference")]
    subprocess.run(command, check=True, cwd=REPOSITORY, stdout=subprocess.DEVNULL)
    return {"reward": str(reward), "reference": str(folder / "reference"), "folder": folder}


def write_prompt_ids(reference: str, file: Path) -> list[list[int]]:
    """The token ids of every training prompt of a reference store, also as a file for trl."""
    from policies.reference.store import open_store

    groups = open_store(Path(reference) / "outputs").by_prompt("train")
    ids = [[int(token) for token in group[0].prompt_ids] for group in groups]
    file.write_text(json.dumps(ids), encoding="utf-8")
    return ids


def run_job(arguments: argparse.Namespace, inputs: Line, kind: str, **changes: Any) -> list[Line]:
    """Train in a process of its own; what each step took, and earned."""
    from rlhf.parallel.distributed import choose_precision

    out = inputs["folder"] / f"run-{kind}"
    shutil.rmtree(out, ignore_errors=True)
    settings = {
        "steps": arguments.steps,
        "batch.episodes_per_step": arguments.episodes,
        "batch.micro_batch_size": arguments.micro_batch,
        "optim.epochs": arguments.epochs,
        "optim.learning_rate": 1e-5,
        "critic.learning_rate": 1e-5,
        "rewards.missing_eos_penalty": 0.0,
        "critic.trains": "all",
        "seed": arguments.seed,
        **changes.pop("settings", {}),
    }
    job = {
        "began": time.time(),
        "model": arguments.model,
        "reward": inputs["reward"],
        "reference": inputs["reference"],
        "prompts": str(inputs["folder"] / "prompt_ids.json"),
        "gold": str(QUICKSTART / "sentiment.py"),
        "out": str(out),
        "bf16": choose_precision("auto") == "bf16",
        "pure_bf16": kind == "trl-bf16",
        "response": arguments.response,
        "temperature": arguments.temperature,
        "kl": KL,
        "kl_settings": {"source": "resident", "coefficient": KL},
        "settings": settings,
        **changes,
    }
    ours = kind == "ours"
    python = sys.executable if ours else str(peer_python(arguments.work))
    script = Path(__file__).parent / "peers" / ("ppo_ours.py" if ours else "ppo_trl.py")
    done = subprocess.run(
        [python, str(script), json.dumps(job)],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        cwd=REPOSITORY,
        env={**os.environ, **QUIET},
    )
    shutil.rmtree(out, ignore_errors=True)
    steps: list[Line] = json.loads(done.stdout.splitlines()[-1])
    return steps


def measure_speed(arguments: argparse.Namespace) -> Line:
    """Episodes per second of both, run after run, and the phases of ours beside their limits."""
    inputs = prepare(arguments)
    prompts = write_prompt_ids(inputs["reference"], inputs["folder"] / "prompt_ids.json")
    kinds = arguments.kinds.split(",")
    runs: list[Line] = []
    ratios: dict[str, list[float]] = {kind: [] for kind in kinds[1:]}
    for number in range(arguments.rounds):
        speeds = {}
        for kind in kinds:
            steps = run_job(arguments, inputs, kind)
            timed = steps[1:]
            run = {name: statistics.median(step[name] for step in timed) for name in PHASES}
            run |= {name: statistics.fmean(step[name] for step in timed) for name in ("length",)}
            seconds = statistics.median(step["seconds"] for step in timed)
            speeds[kind] = arguments.episodes / seconds
            runs.append({"kind": kind, "round": number, "episodes_per_second": speeds[kind], **run})
            phases = "  ".join(f"{name} {run[name]:.1f} s" for name in PHASES)
            print(f"{kind:9} {speeds[kind]:6.3f} episodes/s  {phases}  length {run['length']:.1f}")
        for kind, each in ratios.items():
            each.append(speeds["ours"] / speeds[kind])
    lengths = [run["length"] for run in runs]
    if max(lengths) > min(lengths) * (1 + LARGEST_DIFFERENCE):
        raise SystemExit(f"answers of {min(lengths):.1f} and {max(lengths):.1f} tokens: other work")
    for kind, each in ratios.items():
        summary = f"x{statistics.median(each):.2f} of {kind}, median of {len(each)} pairs"
        print(f"{summary}, {min(each):.2f} to {max(each):.2f}")
    limits = show_limits(arguments, prompts, [run for run in runs if run["kind"] == "ours"])
    ratio = round(statistics.median(ratios[kinds[1]]), 2)
    return {"ratio": ratio, "ratios": ratios, "limits": limits, "runs": runs}


def show_limits(arguments: argparse.Namespace, prompts: list[list[int]], runs: list[Line]) -> Line:
    """The seconds that each phase of ours takes, and would take at this machine's own rates."""
    from rlhf.planning.planner import read_shape

    flops, bandwidth = matmul_rate(arguments.quick), memory_rate(arguments.quick)
    length = statistics.fmean(run["length"] for run in runs)
    columns = zip(*prompts, strict=False)
    shared = len(list(takewhile(lambda column: len(set(column)) == 1, columns)))
    each = statistics.fmean(len(prompt) - shared for prompt in prompts)
    fed, answered = shared + arguments.episodes * each, arguments.episodes * length
    shape = read_shape(arguments.model)
    trunk, head = shape.trunk_linear, shape.linear - shape.trunk_linear
    policy = 2 * (trunk * (fed + answered) + head * answered)
    critic = 2 * trunk * (fed + answered)
    decoding = max(
        2 * shape.linear * answered / flops, arguments.response * 2 * shape.linear / bandwidth
    )
    limits = {
        "sample": 2 * trunk * fed / flops + decoding,
        "score": (2 * policy + 2 * critic) / flops,  # policy, reference, critic, reward model
        "update": 3 * arguments.epochs * (policy + critic) / flops,
    }
    print(f"limits at {flops / 1e12:.2f} TFLOP/s and {bandwidth / 1e9:.1f} GB/s:")
    for name, limit in limits.items():
        taken = statistics.median(run[name] for run in runs)
        print(f"  {name:6} {taken:6.2f} s, limit {limit:6.2f} s: {limit / taken:.0%} of it")
    return {**limits, "matmul_flops": flops, "memory_bytes": bandwidth}


def matmul_rate(quick: bool) -> float:
    """Floating-point operations per second of a large bf16 matrix product; the best of some."""
    import torch

    size = 512 if quick else 4096
    left, right = (torch.randn(size, size).bfloat16() for _ in range(2))
    return 2 * size**3 / min(clock(lambda: left @ right) for _ in range(4))


def memory_rate(quick: bool) -> float:
    """Bytes per second read and written by a copy that no cache holds; the best of some."""
    import torch

    source = torch.ones(2**20 if quick else 2**27)
    target = torch.empty_like(source)
    return 2 * 4 * source.numel() / min(clock(lambda: target.copy_(source)) for _ in range(4))


def clock(work: Any) -> float:
    """Seconds that a call takes."""
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def measure_target(arguments: argparse.Namespace) -> Line:
    """Wall time to the same gold reward, with the settings of examples/evidence/primed."""
    from rlhf.config import flatten

    shipped = flatten(yaml.safe_load((PRIMED / "ppo.yaml").read_text(encoding="utf-8")))
    if arguments.quick:
        inputs = prepare(arguments)
        shipped |= {"batch.episodes_per_step": arguments.episodes, "batch.micro_batch_size": 2}
    else:
        demo: Path = arguments.demo
        if not (demo / "reference" / "report.json").is_file():
            raise SystemExit(
                f"There is no reference store in {demo}; the top of this file says how."
            )
        folder = arguments.work / "target"
        folder.mkdir(parents=True, exist_ok=True)
        inputs = {"reward": str(demo / "reward" / "model"), "folder": folder}
        inputs["reference"] = str(demo / "reference")
    write_prompt_ids(inputs["reference"], inputs["folder"] / "prompt_ids.json")
    names = [name for name in shipped if name.startswith("kl.")]
    kl = {name.removeprefix("kl."): shipped.pop(name) for name in names}
    ours = run_job(arguments, inputs, "ours", settings=shipped, kl_settings=kl)
    longer = {**shipped, "steps": arguments.peer_steps}
    theirs = run_job(arguments, inputs, "trl", settings=longer)
    curves = {"ours": smooth(ours), "trl": smooth(theirs)}
    start, end = curves["ours"][0], max(curves["ours"])
    goal = start + SHARE_OF_GAIN * (end - start)
    seconds, reached = {}, {}
    for name, steps in (("ours", ours), ("trl", theirs)):
        there = [index for index, value in enumerate(curves[name]) if value >= goal]
        index = min(there[0] + WINDOW, len(steps)) - 1 if there else len(steps) - 1
        seconds[name], reached[name] = steps[index]["wall"], bool(there)
        note = f"after step {index + 1}" if there else "never; all its steps"
        print(
            f"{name:5} gold {curves[name][0]:+.2f} → {max(curves[name]):+.2f}  "
            f"{goal:+.2f} in {seconds[name]:.0f} s ({note})"
        )
    ratio = seconds["trl"] / seconds["ours"]
    sign = "" if reached["trl"] else "at least "
    print(f"{sign}x{ratio:.2f} less wall time than trl to the same gold reward, one run of each")
    runs = {"ours": ours, "trl": theirs}
    return {"ratio": round(ratio, 2), "goal": goal, "reached": reached, "runs": runs}


def smooth(steps: list[Line]) -> list[float]:
    """Mean gold reward of every WINDOW steps in a row."""
    gold = [step["gold"] for step in steps]
    width = min(WINDOW, len(gold))
    return [statistics.fmean(gold[i : i + width]) for i in range(len(gold) - width + 1)]


def main() -> None:
    """Measure what is asked for."""
    sys.path[0] = str(REPOSITORY)  # beside this file are names of packages
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("what", nargs="?", choices=("speed", "target"), default="speed")
    parser.add_argument("--quick", action="store_true", help="a few episodes, to see it run")
    parser.add_argument("--json", action="store_true", help="one JSON object on the last line")
    parser.add_argument("--work", type=Path, default=REPOSITORY / "runs" / "benchmarks")
    parser.add_argument("--demo", type=Path, default=REPOSITORY / "runs" / "primed" / "round-0")
    parser.add_argument("--model", default=str(MODEL))
    parser.add_argument(
        "--kinds", default="ours,trl,trl-bf16", help="of `speed`: ours, then others"
    )
    parser.add_argument("--rounds", type=int, default=3, help="of paired runs")
    parser.add_argument("--steps", type=int, help="4 for speed, 16 for target")
    parser.add_argument("--peer-steps", type=int, default=25, help="trl's for target")
    parser.add_argument("--episodes", type=int, default=48, help="in a step")
    parser.add_argument("--micro-batch", type=int, default=48)
    parser.add_argument("--response", type=int, default=24, help="tokens of an answer, at most")
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--temperature", type=float, default=0.8)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    arguments.steps = arguments.steps or {"speed": 4, "target": 16}[arguments.what]
    if arguments.quick:
        arguments.rounds, arguments.steps, arguments.peer_steps = 1, 2, 3
        arguments.episodes, arguments.micro_batch, arguments.response = 4, 2, 8
    arguments.work.mkdir(parents=True, exist_ok=True)
    result = {"speed": measure_speed, "target": measure_target}[arguments.what](arguments)
    if arguments.json:
        versions = {name: version(name) for name in ("torch", "transformers")}
        versions["trl"] = PEER[0].partition("==")[2]
        print(json.dumps({**result, "versions": versions}))


if __name__ == "__main__":
    main()
