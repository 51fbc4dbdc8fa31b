from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    CohereConfig,
    Gemma2Config,
    GPT2Config,
    GraniteConfig,
    LlamaConfig,
    PreTrainedConfig,
)

from rlhf.errors import InputError
from rlhf.modeling.models import new_reward_model
from rlhf.planning import planner
from rlhf.planning.plan import Item, Pass, Plan
from rlhf.planning.planner import read_shape
from rlhf.planning.training_plan import (
    distill_reward_plan,
    dpo_plan,
    fine_tuning_plans,
    reward_plan,
    sft_plan,
)
from tests.reward.encoders import build_encoder
from tests.rlhf.planning.two_layers import LAYER, SHAPE, sizes

ONE_LAYER = {"num_hidden_layers": 1, "vocab_size": 100, "hidden_size": 64}


def save_llama(folder: Path, **changes: object) -> str:
    sizes = {"vocab_size": 100, "hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": True}
    LlamaConfig(**{**sizes, **heads, **changes}).save_pretrained(folder)
    return str(folder)


def test_a_shape_is_read_from_a_config_alone(tmp_path: Path) -> None:
    assert read_shape(save_llama(tmp_path)) == SHAPE
    assert [file.name for file in tmp_path.iterdir()] == ["config.json"]


def test_an_output_matrix_of_its_own_is_not_part_of_a_reward_model(tmp_path: Path) -> None:
    shape = read_shape(save_llama(tmp_path, tie_word_embeddings=False))
    assert shape.parameters == SHAPE.parameters + 800
    assert (shape.trunk, shape.reward_parameters) == (SHAPE.trunk, SHAPE.trunk + 8)


def test_counts_are_those_of_the_models_that_are_trained(tiny_model: Path) -> None:
    shape = read_shape(str(tiny_model))
    for expected, model in (
        (shape.parameters, AutoModelForCausalLM.from_pretrained(tiny_model)),
        (shape.reward_parameters, new_reward_model(str(tiny_model), 0, 0)),
    ):
        assert expected == sum(parameter.numel() for parameter in model.parameters())


def test_the_layers_between_trunk_and_head_of_an_encoder_count(tmp_path: Path) -> None:
    folder = build_encoder(tmp_path, "Roberta", "roberta")
    model = new_reward_model(str(folder), 1, 0)
    total = sum(parameter.numel() for parameter in model.parameters())
    assert read_shape(str(folder)).reward_parameters == total


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (Gemma2Config(**ONE_LAYER, final_logit_softcapping=30.0), True),
        (Gemma2Config(**ONE_LAYER, final_logit_softcapping=None), False),
        (CohereConfig(**ONE_LAYER, logit_scale=0.0625), True),
        (GraniteConfig(**ONE_LAYER, logits_scaling=8.0), True),
        (GraniteConfig(**ONE_LAYER, logits_scaling=1.0), False),
    ],
)
def test_models_that_cap_or_scale_their_logits_need_them_whole(
    tmp_path: Path, config: PreTrainedConfig, expected: bool
) -> None:
    config.save_pretrained(tmp_path)
    assert read_shape(str(tmp_path)).whole_logits is expected


def test_another_architecture(tmp_path: Path) -> None:
    GPT2Config(n_embd=8, n_layer=2, n_head=2, vocab_size=100, n_positions=10).save_pretrained(
        tmp_path
    )
    shape = read_shape(str(tmp_path))
    assert (shape.hidden, shape.inner, shape.layers, shape.gated) == (8, 32, 2, False)
    assert shape.trunk_linear == 2 * (8 * 24 + 8 * 8 + 2 * 8 * 32)


def test_no_language_model(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "vit"}', encoding="utf-8")
    with pytest.raises(InputError, match=r"is not a language model \(ViTConfig\)"):
        read_shape(str(tmp_path))


def test_a_part_of_a_model_that_two_processes_hold_by_hand() -> None:
    part = planner.tensor_parallel_shape(SHAPE, 2)
    norms = 2 * 16 + 8
    assert part.parameters == part.trunk == norms + LAYER + 400
    assert (part.linear, part.trunk_linear) == (LAYER + 400, LAYER)
    # norms 16·8, copies 5·2·8, q and output 2·2·4, k and v 2·2·2, MLP 4·2·8
    assert planner.layer_bytes(part, 10, bf16=True, padded=False) == 128 + 80 + 16 + 8 + 64
    untied = replace(SHAPE, parameters=SHAPE.parameters + 800)
    assert planner.tensor_parallel_shape(untied, 2).parameters == norms + LAYER + 400 + 400
    assert planner.tensor_parallel_shape(SHAPE, 1) == SHAPE


def test_bytes_of_a_layer_by_hand() -> None:
    # bf16: norms 16·8, copies 5·2·8, q and output 2·2·8, k and v 2·2·4, MLP 4·2·16
    bf16 = 128 + 80 + 32 + 16 + 128
    assert planner.layer_bytes(SHAPE, 10, bf16=True, padded=False) == bf16
    # padded: k and v as wide as q (+ 2·2·4), and a mask of 10 bf16 numbers
    assert planner.layer_bytes(SHAPE, 10, bf16=True, padded=True) == bf16 + 16 + 20
    # float32: norms 16·8, copies 2·4·8, q and output 2·4·8, k and v 2·4·4, MLP 4·4·16
    assert planner.layer_bytes(SHAPE, 10, bf16=False, padded=False) == 128 + 64 + 64 + 32 + 256
    # bf16 weights: norms 2·(4 + 2)·8, what they return 2·2·8, the rest as with bf16
    rounded = planner.layer_bytes(SHAPE, 10, bf16=True, padded=False, bf16_weights=True)
    assert rounded == 96 + 32 + 32 + 16 + 128


@pytest.mark.parametrize("padded", [True, False])
@pytest.mark.parametrize(("bf16", "rounded"), [(True, False), (False, False), (True, True)])
def test_bytes_of_a_layer_are_what_a_real_forward_pass_keeps(
    tiny_model: Path, bf16: bool, rounded: bool, padded: bool
) -> None:
    dtype = torch.bfloat16 if rounded else torch.float32
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=dtype)
    shape = read_shape(str(tiny_model))
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    weight_shapes = {s for p in model.parameters() for s in (p.shape, p.shape[::-1])}
    kept: dict[int, torch.Tensor] = {}
    mask = torch.ones(8, 64, dtype=torch.long)
    mask[0, 0] = 0

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage().data_ptr()
        if storage not in weights and tensor.shape not in weight_shapes:  # nor their bf16 copies
            kept[storage] = tensor
        return tensor

    with (
        torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor),
        torch.autocast("cpu", torch.bfloat16, enabled=bf16),
    ):
        ids = torch.zeros(8, 64, dtype=torch.long)
        output = model.base_model(
            input_ids=ids, attention_mask=mask if padded else None, use_cache=False
        )
    assert output.last_hidden_state.requires_grad
    found = sum(tensor.untyped_storage().nbytes() for tensor in kept.values()) / (8 * 64)
    planned = shape.layers * planner.layer_bytes(
        shape, 64, bf16=bf16, padded=padded, bf16_weights=rounded
    )
    assert found == pytest.approx(planned, rel=0.12)  # the last norm and small things come on top


def test_activations_by_hand() -> None:
    layer = 384  # bf16, as above
    keep = planner.activation_bytes(SHAPE, Pass(6, 3, False), bf16=True, padded=False)
    assert keep == 6 * (2 + 1) * layer
    again = planner.activation_bytes(SHAPE, Pass(6, 3, True), bf16=True, padded=False)
    assert again == 6 * (4 * 8 * 2 + 2 * layer)
    rounded = planner.activation_bytes(SHAPE, Pass(6, 3, True, True), bf16=True, padded=False)
    assert rounded == 6 * (2 * 8 * 2 + 2 * 304)  # 10·8 less than 384 in a layer


def test_logits_and_cache_by_hand() -> None:
    assert planner.logits_bytes(SHAPE, 5) == 16 * 100 * 5
    assert planner.block_bytes(SHAPE, 5) == 2 * 4 * 100 * 5
    large = replace(SHAPE, vocabulary=100_000)
    assert planner.block_bytes(large, 5) == 2 * 4 * 4096 * 5
    assert planner.block_bytes(large, 2**13) == 2 * 4 * 2**23  # 1,024 tokens of the vocabulary
    whole = replace(large, whole_logits=True)
    assert planner.block_bytes(whole, 5) == (2 * 4096 + 100_000) * 4 * 5
    assert planner.block_bytes(whole, 5, backward=True) == (2 * 4096 + 2 * 100_000) * 4 * 5
    assert planner.kv_cache_bytes(SHAPE, 7, bf16=True) == 2 * 4 * 7 * 4
    assert planner.kv_cache_bytes(SHAPE, 7, bf16=False) == 2 * 4 * 7 * 8


def test_the_plan_of_a_reward_model() -> None:
    plan = reward_plan(SHAPE, Pass(6, 3), bf16=True, has_stepped_copy=True)
    parameters = SHAPE.trunk + 8
    assert sizes(plan, "computing gradients") == {
        "reward model: weights": 4 * parameters,
        "reward model: Adam": 8 * parameters,
        "reward model: stepped weights": 4 * parameters,
        "gradients": 4 * parameters,
        "bf16 copies of the matrices": 2 * 2 * LAYER,
        "activations": 6 * 3 * 384,
    }
    assert plan.peak == 20 * parameters + 4 * LAYER + 6 * 3 * 384
    alone = reward_plan(SHAPE, Pass(6, 3), bf16=False)
    assert "reward model: stepped weights" not in sizes(alone, "computing gradients")
    assert "bf16 copies of the matrices" not in sizes(alone, "computing gradients")


def test_the_plan_of_dpo_holds_one_model() -> None:
    plan = dpo_plan(SHAPE, Pass(6, 3), bf16=False, processes=1, lora_rank=2)
    adapters = 2 * SHAPE.lora_rows
    adapted = Pass(6, 3, lora_rank=2)  # of a layer 8·d less, and 7 times 2 numbers
    activations = planner.activation_bytes(SHAPE, Pass(6, 3), bf16=False, padded=True)
    less = planner.activation_bytes(SHAPE, adapted, bf16=False, padded=True)
    assert activations - less == 6 * 3 * (8 * 8 - 7 * 2 * 4)
    assert sizes(plan, "computing gradients") == {
        "model: weights": 4 * SHAPE.parameters,
        "adapters: weights": 4 * adapters,
        "adapters: Adam": 8 * adapters,
        "gradients": 4 * adapters,
        "activations": less,
        "logits": 4 * 6 * SHAPE.vocabulary,
    }
    whole = dpo_plan(SHAPE, Pass(6, 3), bf16=False, processes=1)
    head = 4 * 6 * SHAPE.vocabulary + 4 * 8 * SHAPE.vocabulary
    assert whole.peak == 16 * SHAPE.parameters + activations + head


def test_the_logits_of_fine_tuning_are_a_tile() -> None:
    large = replace(SHAPE, vocabulary=100_000)
    for tokens, bf16, on_cpu, expected in (
        (10_000, True, False, 2 * 4096 * 32_768),
        (10_000, False, False, 4 * 4096 * 32_768),
        (1000, True, True, 8 * 4 * 1000 * 32_768),
    ):
        plan = sft_plan(large, Pass(tokens, 10), bf16=bf16, processes=1, on_cpu=on_cpu)
        found = sizes(plan, "computing gradients")
        assert found["logits"] == expected
        assert found["gradient of the output matrix"] == 4 * 8 * 100_000


def test_fine_tuning_reads_sequences_and_pairs_and_shards_nothing() -> None:
    # three sequences of 4 tokens; DPO reads two pairs
    student = replace(SHAPE, parameters=1000, layers=1)
    plans = fine_tuning_plans(SHAPE, student, Pass(12, 4), bf16=False, processes=2, lora_rank=2)
    read = {
        tokens: planner.activation_bytes(SHAPE, Pass(tokens, 4), bf16=False, padded=True)
        for tokens in (12, 16)
    }
    # weights, two moments and buckets; then gradients and what the pass keeps
    everything = 5 * 4 * SHAPE.parameters
    head = {tokens: 4 * SHAPE.vocabulary * (tokens + 8) for tokens in (12, 16)}
    assert plans["sft"].peak == everything + read[12] + head[12]
    assert plans["dpo"].peak == everything + read[16] + head[16]
    adapted = planner.activation_bytes(SHAPE, Pass(16, 4, lora_rank=2), bf16=False, padded=True)
    adapters = 5 * 4 * 2 * SHAPE.lora_rows
    tile = 4 * SHAPE.vocabulary * 16
    assert plans["dpo LoRA"].peak == 4 * SHAPE.parameters + adapters + adapted + tile
    # a frozen teacher; the student as sft, with 17 tensors of logits
    small = planner.activation_bytes(student, Pass(12, 4), bf16=False, padded=True)
    trained = 5 * 4 * 1000 + small + 17 * 4 * SHAPE.vocabulary * 12
    assert plans["distill"].peak == 4 * SHAPE.parameters + trained


def test_the_teacher_of_a_reward_model_is_gone_before_its_student_is_loaded() -> None:
    student = replace(SHAPE, trunk=1000)
    plan = distill_reward_plan(SHAPE, student, Pass(12, 4), bf16=False, processes=1)
    kept = planner.activation_bytes(student, Pass(12, 4), bf16=False, padded=True)
    assert plan.peak == 4 * 4 * (1000 + 8) + kept
    large = replace(SHAPE, trunk=10**6)
    plan = distill_reward_plan(large, student, Pass(12, 4), bf16=False, processes=1)
    assert plan.peak == 4 * (10**6 + 8)


def test_a_plan_as_text() -> None:
    phases = {"sampling": (Item("cache", 2**30, "long"),), "stepping": (Item("sums", 2**20, "-"),)}
    plan = Plan("Memory", (Item("weights", 5 * 2**29, "4 bytes each"),), phases)
    assert plan.text.splitlines() == [
        "Memory",
        "                    GiB",
        "weights            2.50  4 bytes each",
        "while sampling",
        "  cache            1.00  long",
        "while stepping",
        "  sums           0.0010  -",
        "peak               3.50  what is always held, and the phase with the highest peak",
    ]


@pytest.mark.model
def test_the_real_model(real_model: Path) -> None:
    shape = read_shape(str(real_model))
    assert (shape.parameters, shape.layers, shape.key_width) == (134_515_008, 30, 192)
