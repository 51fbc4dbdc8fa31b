from dataclasses import replace

import pytest

from rlhf.planning.advice import advice, advice_for_all
from rlhf.planning.planner import Shape
from rlhf.planning.strategies import (
    Load,
    Sizes,
    Speed,
    communication_bytes,
    computing_bytes,
    passing_bytes,
    phase_bytes,
    reading_bytes,
    sizes_of,
    stage_bytes,
    state_bytes,
    step_bytes,
    step_seconds,
    tensor_parallel_advice,
    tensor_parallel_bytes,
    tensor_parallel_traffic,
)

GIB = 2**30
SHAPE = Shape(
    parameters=7_000_000_000,
    trunk=6_900_000_000,
    linear=6_800_000_000,
    trunk_linear=6_700_000_000,
    lora_rows=2_000_000,
    layers=32,
    hidden=4096,
    inner=11008,
    query_width=4096,
    key_width=4096,
    vocabulary=32000,
    gated=True,
)
LOAD = Load(length=512, batch=4, checkpointing=False, lora_rank=16)
BOTH = 7_000_000_000 + 6_900_000_000 + 4096  # policy and critic
CRITIC = 6_900_000_000 + 4096
OUTSIDE = 2 * 32001 * 4096 + 100_000_000 + 4096  # embeddings and norms, output matrix, head


@pytest.mark.parametrize(
    ("strategy", "one", "four"),
    [  # P = 100, F = 40, A = 3 on one and on four devices
        ("DDP", 1800 + 160, 1800 + 160),
        ("ZeRO-1", 1000 + 1200 + 160, 1000 + 300 + 160),
        ("ZeRO-2", 600 + 1600 + 160, 600 + 400 + 160),
        ("ZeRO-3", 2000 + 160, 500 + 40),
        ("FSDP", 1600 + 160, 400 + 40),
        ("LoRA", 200 + 48, 200 + 48),
    ],
)
def test_state_by_hand(strategy: str, one: float, four: float) -> None:
    sizes = Sizes(trained=100, frozen=40, adapters=3)
    assert state_bytes(strategy, sizes, 1) == one
    assert state_bytes(strategy, sizes, 4) == four


@pytest.mark.parametrize(
    ("strategy", "computing", "expected"),
    [  # P = 100, which is less than DeepSpeed moves at once and gives back, G = 5, E = 10
        ("DDP", 70, 70),
        ("ZeRO-2", 70, 70),
        ("ZeRO-3", 70, 70 + 4 * 100 + 8 * 100),
        ("FSDP", 70, 70 + 8 * 5 + 4 * 10),
        ("FSDP", 7, 12 * 10),  # the end of the backward pass
    ],
)
def test_what_a_pass_adds_by_hand(strategy: str, computing: float, expected: float) -> None:
    sizes = Sizes(trained=100, layer=5, outside=10)
    assert passing_bytes(strategy, sizes, 4, computing) == expected
    assert passing_bytes(strategy, sizes, 1, computing) == computing


@pytest.mark.parametrize(
    ("computing", "output", "expected"),
    [  # G = 5, E = 10, 6 of them in matrices, the largest of 4: 16 bytes are always gathered
        (70, 0, 16 + 70 + 40),
        (7, 0, 16 + 12 * 4),  # embeddings, at the end
        (70, 4, 16 + 35 + 40 + 16 * 4),  # an output matrix, when half of the activations are there
    ],
)
def test_matrices_that_fsdp_gathers_apart_by_hand(
    computing: float, output: float, expected: float
) -> None:
    sizes = Sizes(trained=100, layer=5, outside=10, matrices=6, matrix=4, output=output)
    assert passing_bytes("FSDP", sizes, 4, computing) == expected
    # the layer at work, the next and its buffer, half as wide in bf16; a matrix and its buffer
    assert reading_bytes(sizes, computing) == 16 + computing + 3 * 2 * 5 + 8 * 4
    assert reading_bytes(sizes, computing, bf16=False) == 16 + computing + 3 * 4 * 5 + 8 * 4


def test_a_stage_is_its_state_and_what_it_computes() -> None:
    computing = computing_bytes("reward", SHAPE, LOAD)
    assert stage_bytes("reward", "DDP", SHAPE, LOAD, 1) == 18 * CRITIC + max(computing.values())
    # bf16, unpadded: (16 + 10)·d + 2·(2·4096 + 2·4096) + 8·f, 33 times for each of 2048 tokens
    activations = 2048 * 33 * (26 * 4096 + 4 * 2 * 4096 + 8 * 11008)
    assert computing == {"computing gradients": activations, "stepping": 0}


def test_deepspeed_moves_a_bucket_and_steps_on_a_copy_of_the_gradients() -> None:
    computing = max(computing_bytes("reward", SHAPE, LOAD).values())
    passing = computing + 4 * 10**9 + 8 * 10**7
    expected = 2.5 * CRITIC + max(passing, 4 * CRITIC / 8)
    assert stage_bytes("reward", "ZeRO-3", SHAPE, LOAD, 8) == expected
    light = replace(LOAD, batch=1, length=2, checkpointing=True)
    assert stage_bytes("reward", "ZeRO-3", SHAPE, light, 4) == 6 * CRITIC


def test_ppo_trains_two_models_and_asks_a_third() -> None:
    computing = max(computing_bytes("ppo", SHAPE, LOAD).values())
    state = stage_bytes("ppo", "ZeRO-1", SHAPE, LOAD, 8) - computing
    assert state == pytest.approx(10 * BOTH + 1.5 * BOTH + 4 * CRITIC)
    assert sizes_of("ppo", SHAPE, LOAD) == Sizes(
        trained=BOTH,
        frozen=CRITIC,
        adapters=2 * 16 * 2_000_000,
        layer=6_700_000_000 / 32,
        outside=OUTSIDE,
        matrices=3 * 32000 * 4096,  # of policy and critic, and the policy's output matrix
        matrix=32000 * 4096,
        output=32000 * 4096,
    )


def test_more_devices_need_no_more_memory_each() -> None:
    for strategy in ("ZeRO-1", "ZeRO-2", "ZeRO-3", "FSDP"):
        needs = [stage_bytes("ppo", strategy, SHAPE, LOAD, gpus) for gpus in (2, 4, 8, 64)]
        assert needs == sorted(needs, reverse=True)
        assert needs[0] > needs[-1]


def test_groups_divide_by_their_size() -> None:
    grouped = replace(LOAD, group=8)
    for stage in ("reward", "ppo"):
        assert stage_bytes(stage, "FSDP", SHAPE, grouped, 64) == stage_bytes(
            stage, "FSDP", SHAPE, LOAD, 8
        )
        assert stage_bytes(stage, "ZeRO-3", SHAPE, grouped, 64) == stage_bytes(
            stage, "ZeRO-3", SHAPE, LOAD, 64
        )


def test_reference_outputs_are_made_by_a_whole_float32_model() -> None:
    computing = max(computing_bytes("reference", SHAPE, LOAD).values())
    for strategy in ("DDP", "FSDP", "LoRA"):
        needs = stage_bytes("reference", strategy, SHAPE, LOAD, 64)
        assert needs == 4 * SHAPE.parameters + computing


def test_adapters_of_ppo_share_one_frozen_model() -> None:
    computing = max(computing_bytes("ppo", SHAPE, LOAD).values())
    adapters = 16 * 2_000_000  # of policy, critic and reward model each
    trained = 2 * adapters + 4096
    state = 2 * 7_000_000_000 + 16 * trained + 4 * adapters + 2 * 2 * adapters
    assert stage_bytes("ppo", "LoRA", SHAPE, LOAD, 1) == state + computing
    assert stage_bytes("ppo", "LoRA", SHAPE, LOAD, 8) == state + computing


def test_advice_names_the_flags_of_adapters() -> None:
    found = advice("reward", SHAPE, LOAD, 1, 30 * GIB)
    assert found.sentence.startswith("reward: LoRA, up to ")
    assert found.flags is not None
    assert found.flags[:2] == ("--adapter lora", "--lora.rank 16")
    found = advice("ppo", SHAPE, LOAD, 1, 40 * GIB)
    assert found.sentence.startswith("ppo: LoRA with --batch.gradient-checkpointing, up to ")
    assert found.flags is not None
    adapters, rank, again, batch, sampled = found.flags
    assert (adapters, rank) == ("--lora.share-base", "--lora.rank 16")
    assert again == "--batch.gradient-checkpointing"
    assert batch.startswith("--batch.micro-batch-size ")
    assert sampled.startswith("--sampling.batch-size ")


def test_a_reward_model_for_ppo_on_a_shared_base_has_adapters() -> None:
    found = advice_for_all(SHAPE, LOAD, 8, 72 * GIB)
    assert found["ppo"].sentence.startswith("ppo: LoRA, up to ")
    assert found["reward"].flags is not None
    assert found["reward"].flags[:2] == ("--adapter lora", "--lora.rank 16")
    assert found["reward"].sentence.startswith("reward: LoRA, up to ")
    assert found["reward"].sentence.endswith(
        " in a forward pass; ppo --lora.share-base needs adapters."
    )
    whole = advice_for_all(SHAPE, LOAD, 8, 400 * GIB)
    assert [one.sentence.split(",")[0] for one in whole.values()] == [
        *("reward: DDP", "reference: DDP", "ppo: DDP")
    ]


def test_advice_is_the_best_that_fits_and_its_largest_batch() -> None:
    # 141 GiB of state for DDP, FSDP's eighth 12.9; gathered 1.6; 3.58 for each sequence: 16 fit
    assert advice("reward", SHAPE, LOAD, 8, 72 * GIB).sentence == (
        "reward: FSDP, up to 16 sequences in a forward pass."
    )
    assert advice("reward", SHAPE, LOAD, 8, 180 * GIB).sentence.startswith("reward: DDP, up to ")


def test_advice_goes_from_the_cheap_to_the_dear() -> None:
    heavy = Load(length=2048, batch=4, checkpointing=False, lora_rank=16)
    # activations 57 GiB, checkpointed 7.5
    assert advice("reward", SHAPE, heavy, 8, 40 * GIB).sentence == (
        "reward: FSDP with --batch.gradient-checkpointing, up to 8 sequences in a forward pass."
    )
    # 16 bytes for each of 6.9e9 parameters on 16 devices: 6.4 GiB; gathered 2.1, two layers 0.4
    assert advice("reward", SHAPE, LOAD, 1, 9.5 * GIB).sentence == (
        "reward: FSDP fits on 16 such GPUs with --batch.gradient-checkpointing "
        "--batch.micro-tokens 512."
    )
    assert advice("ppo", SHAPE, LOAD, 1, 0.1 * GIB).sentence == (
        "ppo: nothing fits; use a smaller model, a shorter --sequence-length or larger GPUs."
    )


def test_reference_outputs_need_no_flags_but_a_smaller_batch() -> None:
    heavy = replace(LOAD, batch=256)
    # 26.1 GiB of weights, and 0.4 for each sequence
    assert advice("reference", SHAPE, heavy, 8, 30 * GIB).sentence == (
        "reference: DDP, up to 8 sequences in a forward pass."
    )
    assert advice("reference", SHAPE, heavy, 8, 14 * GIB).sentence == (
        "reference: each model in 2 processes, 1 sequence in a forward pass."
    )
    assert advice("reference", SHAPE, LOAD, 1, 14 * GIB).sentence.startswith(
        "reference: nothing fits"
    )


def test_a_reference_model_that_no_device_holds_is_held_together() -> None:
    # 4 bytes for each of 7e9 parameters: 26.1 GiB, of four devices 6.5; 1.6 for what is computed
    assert advice("reference", SHAPE, LOAD, 8, 10 * GIB).sentence == (
        "reference: each model in 4 processes, 4 sequences in a forward pass."
    )


def test_processes_that_hold_a_model_together_by_hand() -> None:
    light = Load(length=10, batch=2, checkpointing=False, lora_rank=16)
    # 20 tokens of 4096 numbers, added up for the embeddings and in each of 32 layers
    bf16, fp32 = 4 + 32 * (2 * 2 + 5 * 4), 4 + 32 * 7 * 4
    sent = tensor_parallel_traffic(SHAPE, light, 3, 4)
    assert sent == 3 * 20 * 4096 * bf16 * 2 * 3 / 4
    assert tensor_parallel_traffic(SHAPE, light, 1, 2, bf16=False) == 20 * 4096 * fp32
    again = replace(light, checkpointing=True)
    assert tensor_parallel_traffic(SHAPE, again, 1, 2) == 20 * 4096 * (bf16 + 32 * 2)
    embeddings = 32000 * 4096
    part = CRITIC - (6_700_000_000 + embeddings) * 3 / 4
    # bf16: (16 + 10)·d + 2·(2·1024 + 2·1024) + 8·2752, 33 times for each token
    activations = 20 * 33 * (26 * 4096 + 2 * 4 * 1024 + 8 * 2752)
    assert tensor_parallel_bytes(SHAPE, light, 4) == 18 * part + activations
    assert tensor_parallel_advice(SHAPE, light, 3, 4) == (
        f"reward: --parallel.tensor-parallel 4 holds {(18 * part + activations) / GIB:,.2f} GiB in "
        f"each process, which sends {sent / GIB:,.2f} GiB in one step."
    )


@pytest.mark.parametrize(
    ("strategy", "numbers"),
    [  # P = 100, E = 20, A = 3, two passes on four devices: 4 bytes, 3/4 of them move
        ("DDP", 200),
        ("ZeRO-1", 300),
        ("ZeRO-2", 500),
        ("ZeRO-3", 600),
        ("FSDP", 2 * (100 + 100)),
        ("LoRA", 6),
    ],
)
def test_traffic_by_hand(strategy: str, numbers: int) -> None:
    sizes = Sizes(trained=100, adapters=3, outside=20)
    assert communication_bytes(strategy, sizes, 2, 4) == 4 * numbers * 3 / 4
    assert communication_bytes(strategy, sizes, 2, 1) == 0


def test_traffic_of_float32_layers_and_of_groups_by_hand() -> None:
    sizes = Sizes(trained=100, outside=20, matrices=7)
    assert communication_bytes("FSDP", sizes, 1, 4) == 4 * (20 + 7 + 80 + 100) * 3 / 4
    sizes = Sizes(trained=100, outside=20)
    assert communication_bytes("FSDP", sizes, 2, 4, bf16=False) == 4 * 2 * (180 + 100) * 3 / 4
    # pairs of eight devices: half of 400 numbers moves in each, twice 50 are summed over four pairs
    assert communication_bytes("FSDP", sizes, 2, 8, group=2) == 4 * (400 / 2 + 2 * 2 * 50 * 3 / 4)


def test_sampling_gathers_policy_and_critic_once_and_holds_them_whole() -> None:
    sent = step_bytes("ppo", "FSDP", SHAPE, LOAD, passes=3, gpus=2)
    matrices = 3 * 32000 * 4096
    assert sent == pytest.approx(4 * (3 * (2 * BOTH + matrices) + BOTH) / 2)
    state = (16 * BOTH + 4 * CRITIC) / 64
    assert stage_bytes("ppo", "FSDP", SHAPE, LOAD, 64) - state > 4 * BOTH


def test_with_vllm_no_device_holds_a_whole_model() -> None:
    shared = replace(LOAD, vllm=8)
    found = phase_bytes("ppo", "FSDP", SHAPE, shared, 64)
    state = (16 * BOTH + 4 * CRITIC) / 64
    norms = 6_900_000_000 - 6_700_000_000 - 32000 * 4096
    part = norms + (6_700_000_000 + 32000 * 4096 + 100_000_000) // 8
    # 8 times 4 sequences and one more, 512 tokens each, of an eighth of the heads
    pages = 2 * 2 * 32 * (4096 // 8) * 33 * 512
    largest = 2 * 32000 * 4096
    assert found["sampling"] == state + 2 * part + pages + largest
    assert max(found.values()) == stage_bytes("ppo", "FSDP", SHAPE, shared, 64)
    assert (
        found["computing gradients"]
        == phase_bytes("ppo", "FSDP", SHAPE, LOAD, 64)["computing gradients"]
    )
    sent = step_bytes("ppo", "FSDP", SHAPE, shared, passes=3, gpus=2)
    read = 4 * OUTSIDE + 2 * (BOTH - OUTSIDE)
    updating = 4 * 3 * (2 * BOTH + 3 * 32000 * 4096)
    assert sent == pytest.approx((updating + 2 * SHAPE.parameters + 3 * read) / 2)


def test_reference_outputs_of_a_model_that_no_device_holds_by_vllm() -> None:
    shared = replace(LOAD, vllm=4)
    found = advice("reference", SHAPE, shared, 8, 14 * GIB)
    assert found.flags == (
        "--sharding fsdp",
        "--sampling.engine vllm",
        "--sampling.engine-tensor-parallel 4",
        "--batch-size 4",
    )
    # without FSDP each has an engine of its own
    assert stage_bytes("reference", "DDP", SHAPE, shared, 8) == stage_bytes(
        "reference", "DDP", SHAPE, replace(LOAD, vllm=1), 8
    )
    # a model of 26 GiB, an eighth of it; a quarter of vLLM's 13; a layer of .8 and the next
    assert 8 * GIB < stage_bytes("reference", "FSDP", SHAPE, shared, 8) < 14 * GIB


def test_time_by_hand() -> None:
    seconds = step_seconds("reward", "DDP", SHAPE, LOAD, 2, 2, Speed(400, 50))
    computing = 6 * CRITIC * 512 * 4 * 2 / 400e12
    assert seconds == pytest.approx(computing + 2 * 4 * CRITIC / 2 / 50e9)
