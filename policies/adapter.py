"""A LoRA adapter (arXiv 2106.09685): with it switched off, the policy is its own reference."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.lora import LoraLayer
from torch import nn
from transformers import PreTrainedModel


def add_adapter(policy: PreTrainedModel, rank: int, seed: int) -> None:
    """Freeze a language model and put adapters of this rank on its linear layers.

    They change nothing yet: the second of their two factors is 0. The first is drawn from `seed`,
    so that all processes start alike.
    """
    config = LoraConfig(
        r=rank, lora_alpha=2 * rank, target_modules="all-linear", task_type="CAUSAL_LM"
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        inject_adapter_in_model(config, policy)


@contextmanager
def without_adapter(policy: nn.Module) -> Iterator[None]:
    """Inside, the model answers as it did before `add_adapter`."""
    layers = [part for part in policy.modules() if isinstance(part, LoraLayer)]
    for layer in layers:
        layer.enable_adapters(False)
    try:
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)


def merge_adapter(policy: PreTrainedModel) -> None:
    """Make the adapter part of the weights: the model is a plain one again."""
    layers = [(name, part) for name, part in policy.named_modules() if isinstance(part, LoraLayer)]
    for name, layer in layers:
        layer.merge()
        policy.set_submodule(name, layer.get_base_layer())
