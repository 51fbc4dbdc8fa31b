"""What is kept of the quickstart's gain by half the layers, and by int8 weights; how fast each is.

Per seed of the quickstart: its policy is the teacher and writes the outputs that a student of half
its layers learns from (`rlhf distill`). Measured on held-out prompts: the share of the teacher's
gain in gold reward that the student keeps, the win rate of the int8 policy against the policy, and
the tokens per second of the student over those of its teacher at each batch size.
"""

from functools import partial
from pathlib import Path

from examples.evidence.commands import Config, at_once, flags, rlhf, stage
from examples.evidence.experiment import Table, interval, run, signed
from rlhf.errors import InputError
from rlhf.run.rundir import RunDir


def measure(config: Config, out: Path) -> Config:
    """Distill, quantize, evaluate and time for every seed; nothing else runs while one is timed."""
    runs = at_once(*(partial(measure_seed, config, out, seed) for seed in config["seeds"]))
    return {
        "runs": [
            run_result | {"speed": time_seed(config, out, run_result["seed"])}
            for run_result in runs
        ]
    }


def measure_seed(config: Config, out: Path, seed: int) -> Config:
    """Distill and quantize one policy of the quickstart, and measure what is kept of it.

    Raises:
        InputError: there is no such policy.
    """
    of = quickstart(config, seed)
    if not (of / "ppo" / "report.json").is_file():
        raise InputError(
            f"There is no run of the quickstart in {of}",
            "rlhf loop --config examples/quickstart/loop.yaml "
            f"--config examples/quickstart/signal.yaml --seed {seed} --out {of.parent}",
        )
    policy, prompts = of / "ppo", of / "rankings"
    outputs, student, evaluated, int8 = (
        out / f"{kind}-{seed}" for kind in ("teacher-outputs", "distill", "evaluate", "int8")
    )
    options = ["--seed", seed, *flags(config["teacher_outputs"])]
    stage(outputs, "reference", "--model", policy / "policy", "--prompts", prompts, *options)
    base = ["--teacher", policy, "--student", policy / "policy", "--outputs", outputs]
    stage(student, "distill", *base, "--seed", seed, *flags(config["distill"]))
    base = ["--policy", student, "--against", policy, "--reference", of / "reference"]
    options = ["--gold", config["gold"], "--seed", seed, *flags(config["evaluate"])]
    report = stage(evaluated, "evaluate", *base, "--reward", of / "reward", *options)
    base = [policy, "--prompts", prompts, "--seed", seed]
    base += ["--reward", f"signal:{config['gold']}"]
    quantized = once(int8, "quantize", *base, *flags(config["quantize"]))
    return {
        "seed": seed,
        "kept": report["student"]["gain"]["gold"],
        "parameters": report["student"]["parameters"],
        "gold": {side: scores["mean"] for side, scores in report["gold"].items()},
        "eos_rate": report["eos_rate"],
        "int8": {name: quantized[name] for name in ("win_rate", "log_prob", "bytes")},
    }


def time_seed(config: Config, out: Path, seed: int) -> list[Config]:
    """How fast a seed's student is beside its teacher."""
    policy, student = quickstart(config, seed) / "ppo", out / f"distill-{seed}"
    options = [
        "--seed",
        seed,
        *(word for setting in config["benchmark"].items() for word in listed(*setting)),
    ]
    timed = once(out / f"benchmark-{seed}", "benchmark", policy, student, *options)
    return speeds(timed["rows"], str(policy), str(student))


def quickstart(config: Config, seed: int) -> Path:
    """The first round of the quickstart with a seed."""
    return Path(config["runs"].format(seed))


def once(out: Path, *arguments: str | Path | float) -> Config:
    """Run a command that cannot go on where it was stopped, unless its report is there."""
    if not RunDir(out).report_json.is_file():
        rlhf(*arguments, "--out", out)
    return RunDir(out).read_report()


def listed(name: str, values: list[int] | int) -> list[str]:
    """A setting with one or several values as words of a command line."""
    value_list = values if isinstance(values, list) else [values]
    return ["--" + name.replace("_", "-"), *map(str, value_list)]


def speeds(rows: list[Config], teacher: str, student: str) -> list[Config]:
    """Tokens per second of both at each batch size, and how many times the student is as fast."""
    rates = {(row["run"], row["batch_size"]): row["tokens_per_second"] for row in rows}
    sizes = sorted({size for _, size in rates})
    return [
        {
            "batch_size": size,
            "teacher": rates[teacher, size],
            "student": rates[student, size],
            "ratio": rates[student, size] / rates[teacher, size],
        }
        for size in sizes
    ]


def tabulate(result: Config) -> Table:
    """One row for each seed."""
    sizes = [speed["batch_size"] for speed in result["runs"][0]["speed"]]
    header = ["seed", "parameters, millions", "gain in gold reward of the teacher (95 %)"]
    header += [
        "kept by the student (95 %)",
        "responses that end: teacher → student",
        "int8 against the policy: wins (95 %)",
        "int8: change of a token's log-prob, nats",
    ]
    rows = [[*header, *(f"student's tokens/s, times its teacher's: batch {n}" for n in sizes)]]
    for run_result in result["runs"]:
        sides = (run_result["parameters"][side] / 1e6 for side in ("teacher", "student"))
        rows.append(
            [
                str(run_result["seed"]),
                " → ".join(f"{side:.0f}" for side in sides),
                signed(run_result["kept"]["teacher"]),
                interval(run_result["kept"]["kept"]),
                " → ".join(
                    f"{100 * run_result['eos_rate'][side]:.0f} %" for side in ("rival", "policy")
                ),
                interval(run_result["int8"]["win_rate"]),
                f"{run_result['int8']['log_prob']['mean']:.2f}",
                *(f"{speed['ratio']:.2f}" for speed in run_result["speed"]),
            ]
        )
    return rows


if __name__ == "__main__":
    run("student", measure, tabulate)
