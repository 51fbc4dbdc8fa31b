"""Activation checkpointing under either of transformers' names for it.

Up to 5.19, the newest that vLLM 0.32 takes, transformers says gradient checkpointing.
"""

from typing import Any

from transformers import PreTrainedModel, TrainingArguments

NEW, OLD = "activation_checkpointing", "gradient_checkpointing"


def checkpoint_activations(model: PreTrainedModel) -> None:
    """Let a model's layers compute their activations again in the backward pass."""
    name = NEW if hasattr(model, f"{NEW}_enable") else OLD
    getattr(model, f"{name}_enable")({"use_reentrant": False})


def checkpoints_activations(model: Any) -> bool:
    """Whether a model's layers compute their activations again in training."""
    name = NEW if hasattr(model, f"is_{NEW}") else OLD
    return bool(getattr(model, f"is_{name}", False))


def checkpointing_argument(kind: type[TrainingArguments]) -> str:
    """The name of the argument that asks one of transformers' or trl's trainers for it."""
    return NEW if NEW in kind.__dataclass_fields__ else OLD
