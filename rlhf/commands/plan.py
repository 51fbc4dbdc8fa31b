"""`rlhf plan`: which ways of training a model fit on which machine."""

from dataclasses import dataclass
from typing import Any

from rlhf.config import require_range

STAGES = ("reward", "reference", "ppo")


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The model and the machine."""

    model: str
    """Model folder or hub name; only its config is read."""
    gpus: int = 1
    """Devices in all."""
    gpu_memory: float = 80.0
    """Memory of each device in GiB; a tenth of it is left for what no plan counts."""
    sequence_length: int = 1024
    """Tokens of prompt and response together."""
    batch: int = 8
    """Sequences in one forward pass of one device."""
    gradient_checkpointing: bool = False
    """Count activations as if they were computed again in the backward pass."""
    lora_rank: int = 16
    """Rank of the adapters in the line for LoRA."""

    def __post_init__(self) -> None:
        require_range("gpus", self.gpus, 1)
        require_range("gpu_memory", self.gpu_memory, 0, above_low=True)
        require_range("sequence_length", self.sequence_length, 2)
        require_range("batch", self.batch, 1)
        require_range("lora_rank", self.lora_rank, 1)


def run(settings: Settings) -> dict[str, Any]:
    """Show the memory that each stage needs on each device under DDP, ZeRO, FSDP and LoRA."""
    from rlhf.planner import GIB, read_shape
    from rlhf.strategies import STRATEGIES, USABLE, Load, advice, stage_bytes

    shape = read_shape(settings.model)
    load = Load(
        settings.sequence_length,
        settings.batch,
        settings.gradient_checkpointing,
        settings.lora_rank,
    )
    usable = settings.gpu_memory * USABLE
    needs = {
        name: {
            stage: round(stage_bytes(stage, name, shape, load, settings.gpus) / GIB, 3)
            for stage in STAGES
        }
        for name in STRATEGIES
    }
    hints = [advice(stage, shape, load, settings.gpus, usable * GIB) for stage in STAGES]
    return {
        "parameters": shape.parameters,
        "gib": needs,
        "fits": {n: {s: gib <= usable for s, gib in row.items()} for n, row in needs.items()},
        "advice": [hint for hint in hints if hint],
    }


def describe(result: dict[str, Any]) -> str:
    """The result as a table; a star marks what fits."""
    lines = [
        f"{result['parameters']:,} parameters. GiB on each device; * fits.",
        "",
        f"{'':8}" + "".join(f"{stage:>12}" for stage in STAGES),
    ]
    for name, row in result["gib"].items():
        marks = {stage: "*" if result["fits"][name][stage] else " " for stage in STAGES}
        lines.append(f"{name:8}" + "".join(f"{row[s]:>11,.2f}{marks[s]}" for s in STAGES))
    return "\n".join([*lines, *(["", *result["advice"]] if result["advice"] else [])])
