import pytest

from rlhf.planner import Shape
from rlhf.strategies import Load, advice, computing_bytes, stage_bytes, state_bytes

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
        ("ZeRO-1", 1600 + 80, 400 + 300 + 80),
        ("ZeRO-2", 1600 + 80, 200 + 350 + 80),
        ("ZeRO-3", 1600 + 80, 400 + 20 + 20),
        ("FSDP", 1600 + 160, 400 + 20 + 40),
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
    assert state == pytest.approx(4 * (policy + critic) + 1.5 * (policy + critic) + 2 * critic)


def test_more_devices_need_no_more_memory_each() -> None:
    for strategy in ("ZeRO-1", "ZeRO-2", "ZeRO-3", "FSDP"):
        needs = [stage_bytes("ppo", strategy, SHAPE, LOAD, gpus) for gpus in (2, 4, 8, 64)]
        assert needs == sorted(needs, reverse=True)


def test_no_advice_where_something_fits() -> None:
    assert advice("reward", SHAPE, LOAD, 8, 70 * GIB) == ""


def test_advice_goes_from_the_cheap_to_the_dear() -> None:
    heavy = Load(length=2048, batch=4, checkpointing=False, lora_rank=16)
    # activations 57 GiB, checkpointed 7.5; ZeRO-1's 5.5 bytes a parameter 35.3, ZeRO-2's 3.75 24.1
    assert advice("reward", SHAPE, heavy, 8, 40 * GIB) == (
        "reward: ZeRO-2 fits with --gradient-checkpointing."
    )
    # 16 bytes for each of 13.9e9 parameters: 207 GiB, of 32 devices 6.5 each; 13 of 16 are too much
    assert advice("ppo", SHAPE, LOAD, 1, 12 * GIB) == (
        "ppo: ZeRO-3 fits on 32 such GPUs with --gradient-checkpointing and --batch 1."
    )
    assert advice("ppo", SHAPE, LOAD, 1, 0.1 * GIB) == (
        "ppo: nothing fits; use a smaller model, a shorter --sequence-length or larger GPUs."
    )
