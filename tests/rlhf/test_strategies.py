import pytest

from rlhf.planner import Shape
from rlhf.strategies import (
    Load,
    advice,
    communication_bytes,
    computing_bytes,
    stage_bytes,
    state_bytes,
    step_bytes,
    step_seconds,
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


@pytest.mark.parametrize(
    ("strategy", "one", "four"),
    [  # P = 100, F = 40, A = 3, G = 5 on one and on four devices
        ("DDP", 1800 + 160, 2200 + 160),
        ("ZeRO-1", 1000 + 1200 + 160, 1000 + 300 + 160),
        ("ZeRO-2", 600 + 1600 + 160, 600 + 400 + 160),
        ("ZeRO-3", 2000 + 160, 500 + 60 + 160),
        ("FSDP", 1600 + 160, 400 + 60 + 160),
        ("LoRA", 200 + 48 + 80, 200 + 48 + 80),
    ],
)
def test_state_by_hand(strategy: str, one: float, four: float) -> None:
    numbers = {"trained": 100, "frozen": 40, "adapters": 3, "layer": 5}
    assert state_bytes(strategy, **numbers, gpus=1) == one
    assert state_bytes(strategy, **numbers, gpus=4) == four


def test_a_stage_is_its_state_and_what_it_computes() -> None:
    shared = computing_bytes("reward", SHAPE, LOAD)
    parameters = 6_900_000_000 + 4096
    assert stage_bytes("reward", "DDP", SHAPE, LOAD, 1) == 18 * parameters + shared
    # bf16, unpadded: (16 + 10)·d + 2·(2·4096 + 2·4096) + 8·f, 33 times for each of 2048 tokens
    assert shared == 2048 * 33 * (26 * 4096 + 4 * 2 * 4096 + 8 * 11008)


def test_ppo_trains_two_models_and_asks_a_third() -> None:
    policy, critic = 7_000_000_000, 6_900_000_000 + 4096
    state = stage_bytes("ppo", "ZeRO-1", SHAPE, LOAD, 8) - computing_bytes("ppo", SHAPE, LOAD)
    assert state == pytest.approx(10 * (policy + critic) + 1.5 * (policy + critic) + 4 * critic)


def test_more_devices_need_no_more_memory_each() -> None:
    for strategy in ("ZeRO-1", "ZeRO-2", "ZeRO-3", "FSDP"):
        needs = [stage_bytes("ppo", strategy, SHAPE, LOAD, gpus) for gpus in (2, 4, 8, 64)]
        assert needs == sorted(needs, reverse=True)


def test_no_advice_where_something_fits() -> None:
    assert advice("reward", SHAPE, LOAD, 8, 70 * GIB) == ""


def test_advice_goes_from_the_cheap_to_the_dear() -> None:
    heavy = Load(length=2048, batch=4, checkpointing=False, lora_rank=16)
    # activations 57 GiB, checkpointed 7.5; ZeRO-2's 8 bytes a parameter 51, ZeRO-3's 2.5 16.1
    assert advice("reward", SHAPE, heavy, 8, 40 * GIB) == (
        "reward: ZeRO-3 fits with --gradient-checkpointing."
    )
    # 20 bytes for each of 6.9e9 parameters: 128.5 GiB, of 16 devices 8; two layers 2.3
    assert advice("reward", SHAPE, LOAD, 1, 12 * GIB) == (
        "reward: ZeRO-3 fits on 16 such GPUs with --gradient-checkpointing and --batch 1."
    )
    assert advice("ppo", SHAPE, LOAD, 1, 0.1 * GIB) == (
        "ppo: nothing fits; use a smaller model, a shorter --sequence-length or larger GPUs."
    )


@pytest.mark.parametrize(
    ("strategy", "numbers"),
    [  # P = 100, 80 of them in layers, A = 3, two passes on four devices: 4 bytes, 3/4 of them move
        ("DDP", 200),
        ("ZeRO-1", 300),
        ("ZeRO-2", 500),
        ("ZeRO-3", 600),
        ("FSDP", 2 * 180 + 100),
        ("LoRA", 6),
    ],
)
def test_traffic_by_hand(strategy: str, numbers: int) -> None:
    sizes = {"trained": 100, "in_layers": 80, "adapters": 3, "passes": 2}
    assert communication_bytes(strategy, **sizes, gpus=4) == 4 * numbers * 3 / 4
    assert communication_bytes(strategy, **sizes, gpus=1) == 0


def test_sampling_gathers_policy_and_critic_once_and_holds_them_whole() -> None:
    both = 7_000_000_000 + 6_900_000_000 + 4096
    others = 6_900_000_000 - 32001 * 4096  # of each model, without embeddings and the last norm
    sent = step_bytes("ppo", "FSDP", SHAPE, LOAD, passes=3, gpus=2)
    assert sent == pytest.approx(4 * (3 * (both + 2 * others) + both + both) / 2)
    state = 16 * both / 64 + 12 * 6_700_000_000 / 32 + 4 * (6_900_000_000 + 4096)
    assert stage_bytes("ppo", "FSDP", SHAPE, LOAD, 64) - state > 4 * both


def test_time_by_hand() -> None:
    parameters = 6_900_000_000 + 4096
    seconds = step_seconds("reward", "DDP", SHAPE, LOAD, 2, 2, tflops=400, network=50)
    computing = 6 * parameters * 512 * 4 * 2 / 400e12
    assert seconds == pytest.approx(computing + 2 * 4 * parameters / 2 / 50e9)
