"""The README.md of a saved model: where it comes from, in the form the hub reads."""

from pathlib import Path
from typing import Any, Literal

from huggingface_hub import ModelCardData

from rlhf.config import read_settings_file
from rlhf.run.rundir import RunDir, device_seconds

Pipeline = Literal["text-generation", "text-classification"]


def card_of(run: RunDir, pipeline: Pipeline) -> str:
    """The card of a model that a stage saves, with what it has cost until now; "" outside one."""
    stage = run.read_stage()
    if not stage:
        return ""
    given = read_settings_file(run.config_file) if run.config_file.is_file() else {}
    price = given.get("price_per_hour")
    price = float(price) if isinstance(price, int | float) else None
    return model_card(stage, device_seconds(run), price, pipeline)


def model_card(
    stage: dict[str, Any],
    device_seconds: float = 0.0,
    price_per_hour: float | None = None,
    pipeline: Pipeline = "text-generation",
) -> str:
    """The README.md of a saved model: metadata as the hub reads it, then inputs and versions.

    Args:
        stage: the content of stage.json.
        device_seconds: of the training until now, over all processes; 0: not known.
        price_per_hour: of one device.
        pipeline: what the model is for, in the hub's words.
    """
    name, inputs = stage["stage"], stage["inputs"]
    base = str(inputs.get("model", {}).get("path", ""))
    on_the_hub = base.count("/") == 1 and not Path(base).exists()
    metadata = ModelCardData(
        library_name="transformers",
        pipeline_tag=pipeline,
        base_model=base if on_the_hub else None,
        tags=["rlhf", name],
    )
    command = " ".join(stage.get("command", ()))
    rows = "\n".join(f"| {k} | `{v['path']}` | `{v['hash']}` |" for k, v in inputs.items())
    hours = device_seconds / 3600
    cost = f"\nCost: {hours:.3g} device-hours" if hours else ""
    if hours and price_per_hour is not None:
        cost += f" at {price_per_hour:g} each, {hours * price_per_hour:.3g} in all"
    cost = f"{cost}." if cost else ""
    versions = ", ".join(f"{k} {v}" for k, v in stage["versions"].items() if v)
    return f"""---
{metadata.to_yaml()}
---

# {name}, {"made" if name == "quantize" else "trained"} from {base}

| input | path | hash |
| --- | --- | --- |
{rows}

Command: `{command}`, seed {stage["seed"]}, {stage.get("processes", 1)} processes.
Code: {stage["git_commit"]}. Versions: {versions}. Started {stage["started_at"]}.{cost}
The settings are in `config.yaml`, the measurements in `metrics.jsonl` and `report.json` of the run.
"""
