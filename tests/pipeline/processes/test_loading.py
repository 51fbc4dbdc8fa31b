"""Under FSDP the main process reads a model and sends it one layer at a time."""

import json
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from rlhf.modeling.models import new_reward_model
from tests.conftest import build_tiny_model
from tests.servers.commands import run_group

WIDTH, INNER, LAYERS = 512, 2048, 12
LAYER_BYTES = 4 * (4 * WIDTH**2 + 3 * WIDTH * INNER)  # 17 MB; embeddings and norms are small
MEGABYTE = 2**20


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What the program has found in each of two processes."""
    folder = tmp_path_factory.mktemp("loading")
    tiny = build_tiny_model(folder / "tiny")
    new_reward_model(str(tiny), 0, seed=5).save_pretrained(folder / "reward")
    broken = build_tiny_model(folder / "broken")
    (broken / "model.safetensors").write_bytes(b"broken")
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=WIDTH,
        intermediate_size=INNER,
        num_hidden_layers=LAYERS,
        num_attention_heads=8,
        tie_word_embeddings=True,
    )
    with torch.device("meta"):
        large = LlamaForCausalLM(config)
    # as large on disk, and the two matrices that the config ties differ there
    large.to_empty(device="cpu").save_pretrained(folder / "large")
    large.to(torch.bfloat16).save_pretrained(folder / "rounded")
    names = (tiny, *(folder / one for one in ("reward", "large", "rounded")), broken)
    names = (*names, folder / "found")
    done = run_group(2, "-m", "tests.pipeline.processes.loading", *names)
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads((folder / f"found.{rank}").read_text()) for rank in (0, 1)]


def test_weights_buffers_losses_and_steps_are_the_same_bit_for_bit(found) -> None:
    names = {"tied embeddings", "adapters", "fresh head", "trained head", "frozen"}
    names |= {"frozen under ZeRO 3", "groups of one", "offloaded"}
    for one in found:
        assert one["same"] == dict.fromkeys(names, True)


def test_other_processes_never_hold_more_than_their_part_and_a_layer(found) -> None:
    whole = LAYERS * LAYER_BYTES
    assert whole / 2 < found[1]["peak"] < whole / 2 + LAYER_BYTES + 8 * MEGABYTE
    assert found[0]["peak"] > whole


def test_the_main_process_never_holds_policy_and_critic_whole(found) -> None:
    """When it reads the critic, which is as large, it has half of the policy: its own part.

    The file that it reads is in bf16: half as large as the weights.
    """
    whole = LAYERS * LAYER_BYTES
    most = (0.5 + 1 + 0.5) * whole
    assert 0.9 * most < found[0]["peak of both"] < most + 2 * LAYER_BYTES + 8 * MEGABYTE
    assert whole < found[1]["peak of both"] < whole + LAYER_BYTES + 8 * MEGABYTE


def test_all_processes_refuse_weights_that_the_main_one_cannot_read(found) -> None:
    assert found[0]["refusal"].startswith("Cannot load the weights of ")
    assert found[1]["refusal"] == found[0]["refusal"]
