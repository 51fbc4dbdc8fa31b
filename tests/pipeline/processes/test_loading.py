"""Under FSDP each process reads its part of a model; else the main one reads it and sends it."""

import json
import shutil
import socket
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

from rlhf.modeling.models import new_reward_model
from tests.conftest import build_tiny_model
from tests.servers.commands import run_group, run_process

WIDTH, INNER, LAYERS = 512, 2048, 12
LAYER_BYTES = 4 * (4 * WIDTH**2 + 3 * WIDTH * INNER)  # 17 MB; embeddings and norms are small
MEGABYTE = 2**20
VOCABULARY = 377  # of the tiny model's tokenizer: one process has 189 rows, the other 188
SIZES = {
    **{"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "bos_token_id": None},
}
BY_PARTS = (
    *("tied embeddings", "adapters", "fresh head", "trained head", "frozen"),
    *("frozen under ZeRO 3", "groups of one", "offloaded", "uneven vocabulary"),
    *("several files", "bf16 files"),
)
SENT = ("tied, but two matrices", "pytorch_model.bin", "experts", "other files")
NOT_ONE_MODEL = "files of the same sizes"  # in which the processes have different weights


def build_small_ones(folder: Path) -> None:
    """Models with every way in which weights are stored."""
    tiny = build_tiny_model(folder / "tiny")
    new_reward_model(str(tiny), 0, seed=5).save_pretrained(folder / "reward")
    for rank in (0, 1):
        shutil.copytree(tiny, folder / f"lost later.{rank}")
    (build_tiny_model(folder / "broken") / "model.safetensors").write_bytes(b"broken")
    torch.manual_seed(3)
    uneven = LlamaForCausalLM(
        LlamaConfig(vocab_size=VOCABULARY, tie_word_embeddings=False, **SIZES)
    )
    uneven.save_pretrained(folder / "uneven")
    uneven.save_pretrained(folder / "several files", max_shard_size="40KB")
    assert len(list((folder / "several files").glob("*.safetensors"))) > 2
    for rank in (0, 1):
        shutil.copytree(folder / "several files", folder / f"spoiled.{rank}")
        shutil.copytree(folder / "uneven", folder / f"same sizes.{rank}")
    refill(folder / "same sizes.1" / "model.safetensors")
    shutil.copytree(folder / "uneven", folder / "other.0")
    shutil.copytree(folder / "several files", folder / "other.1")
    LlamaForCausalLM.from_pretrained(folder / "uneven").bfloat16().save_pretrained(folder / "bf16")
    uneven.config.save_pretrained(folder / "binary")
    torch.save(uneven.state_dict(), folder / "binary" / "pytorch_model.bin")
    uneven.config.tie_word_embeddings = True
    shutil.copytree(folder / "uneven", folder / "two")  # lm_head.weight is stored, and another one
    uneven.config.save_pretrained(folder / "two")
    experts = MixtralConfig(vocab_size=64, num_local_experts=4, **SIZES)
    MixtralForCausalLM(experts).save_pretrained(folder / "experts")


def refill(path: Path) -> None:
    """Overwrite the weights in a file, as a later checkpoint of the same model would."""
    tensors = {name: torch.full_like(one, 2.0) for name, one in load_file(path).items()}
    size = path.stat().st_size
    save_file(tensors, path, {"format": "pt"})
    assert path.stat().st_size == size


def take_a_tensor_away(folder: Path) -> tuple[str, str]:
    """Remove a tensor of a model in several files; returns its name, and that of its file."""
    path = sorted(folder.glob("*.safetensors"))[1]
    tensors = load_file(path)
    lost = sorted(tensors)[0]
    del tensors[lost]
    save_file(tensors, path, {"format": "pt"})
    return lost, path.name


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All models, and what the program has found in each of two processes."""
    folder = tmp_path_factory.mktemp("loading")
    build_small_ones(folder)
    shutil.copytree(folder / "several files", folder / "lacking")
    (folder / "lost").write_text(" in ".join(take_a_tensor_away(folder / "lacking")))
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=WIDTH,
        intermediate_size=INNER,
        num_hidden_layers=LAYERS,
        num_attention_heads=8,
        tie_word_embeddings=False,
    )
    with torch.device("meta"):
        large = LlamaForCausalLM(config)
    large.to_empty(device="cpu").save_pretrained(folder / "large")
    config.save_pretrained(folder / "large.bin")
    torch.save(large.state_dict(), folder / "large.bin" / "pytorch_model.bin")
    large.to(torch.bfloat16).save_pretrained(folder / "rounded")
    done = run_group(2, "-m", "tests.pipeline.processes.loading", folder)
    assert done.returncode == 0, done.stderr[-4000:]
    (folder / "stderr").write_text(done.stderr)
    return folder


@pytest.fixture(scope="module")
def found(folder: Path) -> list[dict[str, Any]]:
    return [json.loads((folder / f"found.{rank}").read_text()) for rank in (0, 1)]


def test_weights_buffers_losses_and_steps_are_the_same_bit_for_bit(found) -> None:
    for one in found:
        assert one["same"] == dict.fromkeys((*BY_PARTS, *SENT), True)


def test_weights_stay_in_files_that_hold_them_as_the_model_does(found) -> None:
    for one, sent in zip(found, ("here", "elsewhere"), strict=True):
        wanted = dict.fromkeys(BY_PARTS, "files") | dict.fromkeys((*SENT, NOT_ONE_MODEL), sent)
        assert one["places"] == wanted


def test_one_line_says_why_the_main_process_sends_the_weights(folder: Path, found) -> None:
    said = (folder / "stderr").read_text().splitlines()
    reasons = {
        "two": "its files hold lm_head.weight and model.embed_tokens.weight, which its config ties",
        "binary": "model.embed_tokens.weight is in no safetensors file",
        "experts": "transformers converts them while loading",
        "other.0": f"rank 1 ({socket.gethostname()}) has other files of it",
    }
    for name, reason in reasons.items():
        words = f"The main process reads {folder / name} and sends its weights: {reason}."
        assert said.count(words) == 2, name  # once for each time that the program loads it
    words = f"The main process reads {folder / 'same sizes.0'} and sends its weights: rank 1"
    assert len([one for one in said if one.startswith(words)]) == 1
    assert not [one for one in said if f"reads {folder / 'tiny'} " in one]


def test_a_process_reads_nothing_but_its_part(found) -> None:
    assert [one["spoiled"] for one in found] == [True, True]


def test_no_process_ever_holds_more_than_its_part(found) -> None:
    """Besides, it holds the rows that it is reading: half of 4 MB."""
    whole = LAYERS * LAYER_BYTES
    for one in found:
        assert 0.49 * whole < one["peak"]["own"] < whole / 2 + 8 * MEGABYTE


def test_where_weights_are_sent_others_never_hold_more_than_their_part_and_a_layer(found) -> None:
    whole = LAYERS * LAYER_BYTES
    main, other = (one["peak of sending"]["resident"] for one in found)
    assert whole / 2 < other < whole / 2 + LAYER_BYTES + 8 * MEGABYTE
    assert main > whole


def test_no_process_ever_holds_more_than_its_parts_of_policy_and_critic(found) -> None:
    """The main one tries packed rows with two layers while it lacks its part of the critic."""
    whole = LAYERS * LAYER_BYTES
    for one in found:
        assert 0.98 * whole < one["peak of both"]["own"] < whole + 8 * MEGABYTE


def test_all_processes_refuse_broken_files_and_missing_tensors(folder: Path, found) -> None:
    lost = (folder / "lost").read_text()
    broken = folder / "broken" / "model.safetensors"
    for rank, one in enumerate(found):
        said = one["refusals"]
        assert said["broken"].startswith(f"Cannot load the weights of {broken} (")
        assert f"(missing: {lost})" in said["lacking"]
        assert said["lost later"].startswith(
            f"Rank 1 cannot read its part of the weights in {folder / f'lost later.{rank}'} "
            "(Missing key in checkpoint state_dict: model.layers.0.input_layernorm.weight.)"
        )


def test_a_command_refuses_a_missing_tensor_with_code_2(folder: Path, tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(folder / "lacking", model)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(folder / "tiny" / name, model)
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps({"prompt": "w1 w2", "split": "train"}) + "\n")
    inputs = ("--prompts", prompts, "--model", model, "--out", tmp_path / "reference")
    done = run_process("reference", *inputs, "--sharding", "fsdp", processes=2)
    assert done.returncode == 2, done.stderr[-3000:]
    assert f"(missing: {(folder / 'lost').read_text()})" in done.stderr
