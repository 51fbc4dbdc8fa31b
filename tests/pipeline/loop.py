"""Running commands, and what one run of the whole loop leaves."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from rlhf.cli import main
from rlhf.records.jsonl import write_jsonl
from tests.servers.commands import run_group

SIGNAL = "tests.pipeline.signals:count_vowels"
SHORT = ["--max-new-tokens", "12", "--precision", "fp32"]


@dataclass(frozen=True)
class Loop:
    """The files that the commands have left."""

    folder: Path
    model: Path

    def path(self, name: str) -> str:
        return str(self.folder / name)

    def ppo_arguments(self, out: Path, *more: str, steps: int = 4) -> list[str]:
        return [
            *("ppo", "--model", str(self.model), "--reward", self.path("reward")),
            *("--reference", self.path("reference"), "--out", str(out), "--steps", str(steps)),
            *("--episodes-per-step", "4", "--precision", "fp32", "--learning-rate", "1e-3"),
            *more,
        ]


def run_loop(folder: Path, model: Path) -> Loop:
    """Run import … evaluate once; every command must exit with 0."""
    done = Loop(folder, model)
    database, rankings = done.path("labels.db"), done.path("rankings")
    prompts = str(write_prompts(folder / "prompts.jsonl"))
    reward, reference = done.path("reward"), done.path("reference")
    base = ["--model", str(model)]
    judge = ["--reward", reward, "--reference", reference, "--precision", "fp32"]
    commands = [
        ["import", prompts, "--db", database],
        ["generate", "--db", database, *base, "-k", "4", *SHORT],
        ["annotate", "--db", database, "--annotator", f"signal:{SIGNAL}"],
        ["export", "--db", database, "--out", rankings],
        ["train-reward", "--rankings", rankings, *base, "--out", reward, "--precision", "fp32"],
        [
            *("reference", "--prompts", rankings, *base, "--out", reference),
            *("--samples", "2", "--reward", reward, *SHORT),
        ],
        done.ppo_arguments(folder / "ppo", "--save-every", "2"),
        [
            *("evaluate", "--policy", done.path("ppo"), *judge),
            *("--gold", SIGNAL, "--out", done.path("evaluate"), "--samples", "2"),
        ],
    ]
    for command in commands:
        assert main(command) == 0, command
    return done


def read_json(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(path.read_text())
    return content


def without_clock(row: dict[str, Any]) -> dict[str, Any]:
    """A row of metrics without what depends on how fast this machine is."""
    return {k: v for k, v in row.items() if not k.startswith(("seconds", "speed/"))}


def write_prompts(path: Path) -> Path:
    """Eight training and four test prompts."""
    words = ["house", "dog", "train", "garden", "meeting", "music", "hotel", "trip"]
    rows = [{"prompt": f"Tell me about the {word}.", "split": "train"} for word in words]
    rows += [{"prompt": f"How was the {word}?", "split": "test"} for word in words[:4]]
    write_jsonl(path, rows)
    return path


def spread(processes: int, *arguments: str) -> dict[str, Any]:
    """Run tests.pipeline.processes.spread; what its main process wrote."""
    program = ("-m", "tests.pipeline.processes.spread", *arguments)
    environment = {"DS_ACCELERATOR": "cpu"}
    done = run_group(processes, *program, environment=environment)
    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[str, Any] = json.loads(Path(arguments[1]).read_text(encoding="utf-8"))
    return found


def require_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    """Compare what two spreads found, but for the order in which numbers are added."""
    for mine, theirs in zip(found["ppo"]["rows"], expected["ppo"]["rows"], strict=True):
        assert mine == pytest.approx(theirs, rel=1e-4, abs=1e-6)
    assert found["ppo"]["norms"] == pytest.approx(expected["ppo"]["norms"], rel=1e-7)
    for mine, theirs in zip(found["reward"]["rows"], expected["reward"]["rows"], strict=True):
        assert mine == pytest.approx(theirs, rel=1e-4, abs=1e-6)
