"""`rlhf benchmark`: what answers and scores take on this machine, and what they cost.

All models of a report do the same work, one after the other, one in memory at a time. The run
folder appears when the report is finished.
"""

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from accelerate import Accelerator

from policies.deployment.benchmark_page import write_page
from policies.deployment.model_folders import find_folders, is_scorer
from policies.deployment.quantize import weight_bytes
from policies.deployment.settings import BenchmarkSettings
from policies.deployment.timing import (
    Batch,
    Row,
    all_cases,
    measure_policy,
    measure_scorer,
    require_context,
)
from reward.scoring.files import require_new
from rlhf.modeling.logits.freed_memory import keep_freed_blocks
from rlhf.modeling.models import describe_model
from rlhf.parallel.distributed import start_alone
from rlhf.planning.price import cost_of
from rlhf.records.jsonl import new_folder, write_json
from rlhf.run.metrics import append_metrics, progress
from rlhf.run.rundir import RunDir, open_stage, stage_status

SECONDS_PER_HOUR = 3600
Models = dict[str, dict[str, Any]]


def benchmark(settings: BenchmarkSettings) -> dict[str, Any]:
    """Run the whole stage and return its report.

    Raises:
        InputError: a model or --out cannot be used, or the lengths exceed a model's context.
    """
    began = time.monotonic()
    require_new(settings.out)
    names = list(dict.fromkeys(settings.runs))
    models = {name: _describe(name) for name in names}
    for described in models.values():
        require_context(described["folder"], settings)
    inputs = {name: describe_model(models[name]["folder"]) for name in names}
    accelerator = start_alone(settings.precision, settings.seed)
    if accelerator.device.type == "cpu":
        keep_freed_blocks()  # as sampling does, or scores after a policy would take less time
    with new_folder(settings.out) as partial:
        run = open_stage(partial, "benchmark", settings, inputs, resume=False)
        with stage_status(run):
            rows = _measure(run, models, settings, accelerator)
            report = {
                "models": models,
                "rows": [row | prices(row, settings.price_per_hour) for row in rows],
                "engine": settings.engine,
                "precision": accelerator.mixed_precision,
                "device": str(accelerator.device.type),
                "hardware": run.read_stage()["hardware"],
                "repeats": settings.repeats,
                "price_per_hour": settings.price_per_hour,
                "cost": cost_of(run, settings.price_per_hour),
                "seconds": round(time.monotonic() - began, 1),
            }
            write_json(run.report_json, report)
            write_page(run.report_html, report)
    return report


def prices(row: Mapping[str, Any], price_per_hour: float | None) -> dict[str, float]:
    """The price of a million tokens of answers, or of a thousand scores; {} without an hour's.

    Worked example: 500 tokens a second at 1.8 an hour are 1,000 for a million tokens:
    1.8 / 3,600 s · 10⁶ / 500 = 1.00.
    """
    if price_per_hour is None:
        return {}
    per_second = price_per_hour / SECONDS_PER_HOUR
    if "tokens_per_second" in row:
        return {"price_per_million_tokens": per_second * 1e6 / row["tokens_per_second"]}
    return {"price_per_thousand_scores": per_second * 1e3 / row["scores_per_second"]}


def _describe(name: str) -> dict[str, Any]:
    """A model's kind, folder and size on disk, of an ensemble the first member's folder."""
    folder, *_ = folders = find_folders(name)
    kind = "reward model" if is_scorer(name) else "policy"
    size = sum(weight_bytes(Path(path)) for path in folders)
    return {"kind": kind, "folder": folder, "bytes": size, "members": len(folders)}


def _measure(
    run: RunDir, models: Models, settings: BenchmarkSettings, accelerator: Accelerator
) -> list[Row]:
    """The rows of all models; every measured batch also becomes a line of metrics.jsonl."""
    total = len(models) * len(all_cases(settings)) * settings.repeats
    rows: list[Row] = []
    step = 0
    with progress("measuring batches", total) as bar:
        for name, described in models.items():
            bar.show(name)

            def record(batch: Batch, name: str = name) -> None:
                nonlocal step
                step += 1
                row = {"step": step, "run": name, **vars(batch.case), "seconds": batch.seconds}
                append_metrics(run.metrics_file, row)
                bar.advance()

            folder = described["folder"]
            if described["kind"] == "policy":
                model_rows = measure_policy(folder, accelerator, settings, record)
            else:
                model_rows = measure_scorer(name, folder, accelerator, settings, record)
            rows += [{"run": name, "kind": described["kind"], **row} for row in model_rows]
    return rows
