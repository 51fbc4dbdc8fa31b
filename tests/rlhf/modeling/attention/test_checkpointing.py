from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from trl.trainer.dpo_config import DPOConfig
from trl.trainer.reward_config import RewardConfig
from trl.trainer.sft_config import SFTConfig

from rlhf.modeling.attention.checkpointing import (
    checkpoint_activations,
    checkpointing_argument,
    checkpoints_activations,
)

SIZES: Any = {"hidden_size": 8, "intermediate_size": 16, "vocab_size": 16, "num_attention_heads": 2}


@pytest.mark.parametrize("checkpointing", [False, True])
def test_layers_run_again_in_the_backward_pass(checkpointing: bool) -> None:
    model = LlamaForCausalLM(LlamaConfig(**SIZES, num_hidden_layers=3)).train()
    if checkpointing:
        checkpoint_activations(model)
    assert checkpoints_activations(model) == checkpointing
    passes: list[object] = []
    for layer in model.model.layers:
        layer.mlp.register_forward_pre_hook(lambda *given: passes.append(given))
    ids = torch.arange(10)[None]
    model(ids, labels=ids).loss.backward()
    assert len(passes) == 3 * (2 if checkpointing else 1)


@pytest.mark.parametrize("kind", [RewardConfig, SFTConfig, DPOConfig])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_trainers_take_the_argument(kind: type, checkpointing: bool) -> None:
    name = checkpointing_argument(kind)
    arguments = kind(**{name: checkpointing}, use_cpu=True, bf16=False)
    assert getattr(arguments, name) == checkpointing
