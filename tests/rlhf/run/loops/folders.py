"""Folders of loops as far as promotions and the Runs page read them, made by hand."""

from pathlib import Path
from typing import Any

from rlhf.config import to_yaml
from rlhf.records.jsonl import write_json
from rlhf.run.rundir import RunDir

REPORT = "<!doctype html><html lang='en'><title>Evaluation</title><body><h1>Round {}</h1></html>"


def make_loop(out: Path, model: str, **stage: Any) -> Path:
    """A loop that was started."""
    run = RunDir(out)
    write_json(run.stage_file, {"stage": "loop", "status": "done", **stage})
    run.config_file.write_text(to_yaml({"out": str(out), "model": model}), encoding="utf-8")
    return out


def make_round(out: Path, number: int, ppo: str = "done", evaluate: str = "done") -> Path:
    """A round with the stages ppo and evaluate."""
    folder = out / f"round-{number}"
    for name, status in (("ppo", ppo), ("evaluate", evaluate)):
        write_json(folder / name / "stage.json", {"stage": name, "status": status})
    page = RunDir(folder / "evaluate").report_html
    page.write_text(REPORT.format(number), encoding="utf-8")
    return folder
