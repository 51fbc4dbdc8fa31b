"""The README.md of a saved model: where it comes from, in the form the hub reads."""

from pathlib import Path
from typing import Any

from huggingface_hub import ModelCardData

PIPELINES = {
    "reward": "text-classification",
    "ppo": "text-generation",
    "sft": "text-generation",
    "dpo": "text-generation",
    "distill": "text-generation",
}


def model_card(stage: dict[str, Any]) -> str:
    """The README.md of a saved model: metadata as the hub reads it, then inputs and versions."""
    name, inputs = stage["stage"], stage["inputs"]
    base = str(inputs.get("model", {}).get("path", ""))
    on_the_hub = base.count("/") == 1 and not Path(base).exists()
    metadata = ModelCardData(
        library_name="transformers",
        pipeline_tag=PIPELINES.get(name),
        base_model=base if on_the_hub else None,
        tags=["rlhf", name],
    )
    command = " ".join(stage.get("command", ()))
    rows = "\n".join(f"| {k} | `{v['path']}` | `{v['hash']}` |" for k, v in inputs.items())
    versions = ", ".join(f"{k} {v}" for k, v in stage["versions"].items() if v)
    return f"""---
{metadata.to_yaml()}
---

# {name}, {"made" if name == "quantize" else "trained"} from {base}

| input | path | hash |
| --- | --- | --- |
{rows}

Command: `{command}`, seed {stage["seed"]}, {stage.get("processes", 1)} processes.
Code: {stage["git_commit"]}. Versions: {versions}. Started {stage["started_at"]}.
The settings are in `config.yaml`, the measurements in `metrics.jsonl` and `report.json` of the run.
"""
