"""What a layer with adapters keeps is compared with what autograd saves."""

from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from rlhf.modeling.adapters import add_adapters
from rlhf.modeling.attention.checkpointing import checkpoint_activations
from rlhf.planning.plan import Pass
from rlhf.planning.planner import kept_bytes, read_shape

SIZES = {"vocab_size": 64, "hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 6}
RANK, ROWS, LENGTH = 4, 4, 64


@pytest.mark.parametrize("checkpointing", [False, True])
def test_what_adapters_keep_is_what_autograd_saves(tmp_path: Path, checkpointing: bool) -> None:
    config = LlamaConfig(**SIZES, num_attention_heads=4, num_key_value_heads=4)
    config.save_pretrained(tmp_path)
    model = LlamaForCausalLM(config).bfloat16().requires_grad_(False)
    add_adapters(model, RANK, RANK, 0)
    model.train()
    if checkpointing:
        checkpoint_activations(model)
    own = {one.untyped_storage().data_ptr() for one in model.parameters()}
    saved: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            saved[storage.data_ptr()] = storage
        return tensor

    ids, mask = torch.ones(2, ROWS, LENGTH, dtype=torch.long)
    mask[:, 0] = 0  # padding
    with (
        torch.autocast("cpu", torch.bfloat16),
        torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor),
    ):
        model.model(ids, mask)
    shape = read_shape(str(tmp_path))
    copies = 0 if checkpointing else 2 * RANK * shape.lora_rows  # autocast's, of the adapters
    one_pass = Pass(ROWS * LENGTH, LENGTH, checkpointing, bf16_weights=True, lora_rank=RANK)
    planned = kept_bytes(shape, one_pass, bf16=True, padded=True)
    found = sum(one.nbytes() for one in saved.values()) - copies
    last_norm = 4 * ROWS * LENGTH * (SIZES["hidden_size"] + 1)  # and its scale
    assert found - last_norm == pytest.approx(planned, rel=0.05)
