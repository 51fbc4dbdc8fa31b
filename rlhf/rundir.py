"""What a stage leaves behind, and the only place that knows the names of those files.

OUT/config.yaml     the resolved settings
OUT/stage.json      stage, status, inputs and their hashes, versions, git commit, seed, hardware
OUT/metrics.jsonl   one object per step
OUT/checkpoints/    step-000100/ ... and `latest`, which names the newest complete one
OUT/model | policy | outputs    what the next stage reads
OUT/report.json  report.html    what people read
"""

import json
import os
import platform
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import yaml

from rlhf.config import to_plain, to_yaml
from rlhf.errors import InputError, InterruptedRunError
from rlhf.jsonl import write_json, write_text_atomically
from rlhf.ranks import is_main_process

PACKAGES = ("rlhf", "torch", "transformers", "accelerate", "datasets", "numpy")
STAGE_COMMANDS = {
    "reward": "rlhf train-reward",
    "reference": "rlhf reference",
    "ppo": "rlhf ppo",
    "evaluate": "rlhf evaluate",
}


@dataclass(frozen=True)
class RunDir:
    """The folder of one stage of one run."""

    path: Path

    @property
    def config_file(self) -> Path:
        """The resolved settings."""
        return self.path / "config.yaml"

    @property
    def stage_file(self) -> Path:
        """Status, inputs, versions, hardware."""
        return self.path / "stage.json"

    @property
    def metrics_file(self) -> Path:
        """One JSON object per step."""
        return self.path / "metrics.jsonl"

    @property
    def checkpoints(self) -> Path:
        """Folder of resumable states."""
        return self.path / "checkpoints"

    @property
    def model(self) -> Path:
        """The trained reward model."""
        return self.path / "model"

    @property
    def policy(self) -> Path:
        """The trained policy."""
        return self.path / "policy"

    @property
    def outputs(self) -> Path:
        """The reference outputs."""
        return self.path / "outputs"

    @property
    def report_json(self) -> Path:
        """What the stage found, for programs."""
        return self.path / "report.json"

    @property
    def report_html(self) -> Path:
        """What the stage found, for people."""
        return self.path / "report.html"

    def read_stage(self) -> dict[str, Any]:
        """The content of stage.json; empty when there is none."""
        if not self.stage_file.is_file():
            return {}
        content: dict[str, Any] = json.loads(self.stage_file.read_text(encoding="utf-8"))
        return content

    def read_report(self) -> dict[str, Any]:
        """The content of report.json: what a finished stage found."""
        content: dict[str, Any] = json.loads(self.report_json.read_text(encoding="utf-8"))
        return content

    @property
    def is_done(self) -> bool:
        """True when the stage finished."""
        return self.read_stage().get("status") == "done"


def open_stage(
    out: Path, stage: str, settings: Any, inputs: dict[str, dict[str, str]], *, resume: bool
) -> RunDir:
    """Create the folder of a stage, or reopen it to resume; only the main process looks and writes.

    Args:
        out: the folder.
        stage: reward, reference, ppo or evaluate.
        settings: the dataclass of resolved settings; written to config.yaml.
        inputs: for every input its `path` and `hash`; written to stage.json.
        resume: go on in an existing folder; one that does not exist yet is created all the same.

    Raises:
        InputError: the folder exists and `resume` is off, or its settings or inputs were others.
    """
    run = RunDir(out)
    if not is_main_process():
        return run
    if out.exists() and any(out.iterdir()):
        if not resume:
            status = run.read_stage().get("status", "no stage of ours")
            raise InputError(
                f"{out} already exists ({status})",
                "Add --resume to go on with it, or choose another --out.",
            )
        _require_same(run, settings, inputs)
    out.mkdir(parents=True, exist_ok=True)
    if not run.is_done:
        write_text_atomically(run.config_file, lambda stream: stream.write(to_yaml(settings)))
        _write_stage(run, stage, "running", inputs, seed=getattr(settings, "seed", None))
    return run


@contextmanager
def stage_status(run: RunDir) -> Iterator[None]:
    """Record in stage.json how the block ended: done, failed or interrupted."""
    try:
        yield
    except (KeyboardInterrupt, InterruptedRunError):
        _set_status(run, "interrupted")
        raise
    except BaseException as error:
        _set_status(run, "failed", error=f"{type(error).__name__}: {error}")
        raise
    _set_status(run, "done")


def require_done(path: Path, stage: str, result: str) -> RunDir:
    """The finished stage in `path`, whose folder `result` the caller is about to read.

    Raises:
        InputError: the folder is missing, is another stage's, did not finish, or was changed since.
    """
    run = RunDir(path)
    content = run.read_stage()
    command = STAGE_COMMANDS[stage]
    if not content:
        raise InputError(
            f"{path} does not hold a finished {stage} stage (no stage.json)",
            f"Make it first: {command} --out {path} …",
        )
    if content["stage"] != stage:
        raise InputError(
            f"{path} holds the stage {content['stage']!r}, {stage!r} is wanted here",
            f"Give the --out folder of {command}.",
        )
    if content["status"] != "done":
        raise InputError(
            f"The {stage} stage in {path} is {content['status']}, not done",
            f"Finish it first: {command} --resume --out {path} …",
        )
    if not (path / result).exists():
        raise InputError(f"{path} has lost its {result} folder", f"Make it again with {command}.")
    return run


def _require_same(run: RunDir, settings: Any, inputs: dict[str, dict[str, str]]) -> None:
    if not run.config_file.is_file():
        raise InputError(
            f"{run.path} exists but holds no run of ours (no config.yaml)",
            "Choose another --out; nothing was written.",
        )
    old = yaml.safe_load(run.config_file.read_text(encoding="utf-8"))
    new = to_plain(settings)
    free = ("out", "resume")  # a moved folder is the same run
    changed = sorted(k for k in new if k not in free and old.get(k) != new[k])
    if changed:
        described = ", ".join(f"{key}: {old.get(key)} → {new[key]}" for key in changed)
        raise InputError(
            f"{run.path} was started with other settings ({described})",
            "Resume with the same settings, or choose another --out.",
        )
    for name, value in inputs.items():
        before = run.read_stage().get("inputs", {}).get(name, {}).get("hash")
        if before != value["hash"]:
            raise InputError(
                f"The input {name} ({value['path']}) has changed since {run.path} was started",
                "Choose another --out and start again.",
            )


def _write_stage(
    run: RunDir, stage: str, status: str, inputs: dict[str, dict[str, str]], seed: int | None
) -> None:
    content = {
        "stage": stage,
        "status": status,
        "inputs": inputs,
        "seed": seed,
        "versions": {name: _version(name) for name in PACKAGES},
        "git_commit": _git_commit(),
        "hardware": {
            "machine": platform.machine(),
            "system": platform.platform(),
            "cpus": os.cpu_count(),
        },
        "started_at": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    write_json(run.stage_file, content)


def _set_status(run: RunDir, status: str, **extra: str) -> None:
    if not is_main_process():
        return
    content = run.read_stage()
    content.pop("error", None)
    finished_at = datetime.now(UTC).isoformat(timespec="seconds")
    write_json(run.stage_file, {**content, "status": status, "finished_at": finished_at, **extra})


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _git_commit() -> str | None:
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return None
    return done.stdout.strip() or None
