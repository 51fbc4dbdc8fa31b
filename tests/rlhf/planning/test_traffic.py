"""Traffic and time of a step, worked by hand."""

from dataclasses import replace

import pytest

from rlhf.planning.strategies import (
    DDP,
    DDP_BF16_WEIGHTS,
    FSDP,
    FSDP_BF16_WEIGHTS,
    LORA,
    ZERO1,
    ZERO2,
    ZERO3,
    Option,
    Sizes,
)
from rlhf.planning.traffic import Speed, communication_bytes, step_bytes, step_seconds
from tests.rlhf.planning.seven_billion import BOTH, CRITIC, LOAD, OUTSIDE, SHAPE


@pytest.mark.parametrize(
    ("option", "numbers"),
    [  # P = 100, E = 20, A = 3, two passes on four devices: 4 bytes, 3/4 of them move
        (DDP, 200),
        (ZERO1, 300),
        (ZERO2, 500),
        (ZERO3, 600),
        (FSDP, 2 * (100 + 100)),
        (LORA, 6),
        (DDP_BF16_WEIGHTS, 100),
        (FSDP_BF16_WEIGHTS, 2 * (20 / 2 + 80 / 2 * 2 + 100)),
    ],
)
def test_traffic_by_hand(option: Option, numbers: int) -> None:
    sizes = Sizes(trained=100, adapters=3, outside=20)
    assert communication_bytes(option, sizes, 2, 4) == 4 * numbers * 3 / 4
    assert communication_bytes(option, sizes, 2, 1) == 0


def test_traffic_of_float32_layers_and_of_groups_by_hand() -> None:
    sizes = Sizes(trained=100, outside=20, matrices=7)
    assert communication_bytes(FSDP, sizes, 1, 4) == 4 * (20 + 7 + 80 + 100) * 3 / 4
    sizes = Sizes(trained=100, outside=20)
    assert communication_bytes(FSDP, sizes, 2, 4, bf16=False) == 4 * 2 * (180 + 100) * 3 / 4
    # pairs of eight devices: half of 400 numbers moves in each, twice 50 are summed over four pairs
    assert communication_bytes(FSDP, sizes, 2, 8, group=2) == 4 * (400 / 2 + 2 * 2 * 50 * 3 / 4)


@pytest.mark.parametrize(
    ("option", "numbers"),
    [  # of 4 bytes, gradients half as wide
        (DDP, 100),
        (FSDP, 2 * (100 + 50)),
        (FSDP_BF16_WEIGHTS, 2 * (20 / 2 + 80 / 2 * 2 + 50)),
        (LORA, 3),
    ],
)
def test_traffic_of_gradients_in_bf16_by_hand(option: Option, numbers: int) -> None:
    sizes = Sizes(trained=100, adapters=3, outside=20)
    assert communication_bytes(option, sizes, 2, 4, reduce_dtype="bf16") == 4 * numbers * 3 / 4
    if option == FSDP:  # and between four pairs 2 · 50 numbers of 2 bytes, in both passes
        sent = communication_bytes(option, sizes, 2, 8, group=2, reduce_dtype="bf16")
        assert sent == 4 * 300 / 2 + 2 * (2 * 2 * 50 * 3 / 4)


MATRICES = 3 * 32000 * 4096  # embeddings of both, and the policy's output matrix


def test_sampling_gathers_the_policy_once_and_measuring_both_models_in_each_pass() -> None:
    sent = step_bytes("ppo", FSDP, SHAPE, LOAD, passes=3, gpus=2)
    updating = 4 * 3 * (2 * BOTH + MATRICES)
    read = 4 * OUTSIDE + 2 * (BOTH - OUTSIDE)
    assert sent == pytest.approx((updating + 4 * SHAPE.parameters + 3 * read) / 2)
    rounded = step_bytes("ppo", FSDP_BF16_WEIGHTS, SHAPE, LOAD, passes=3, gpus=2)
    updating -= 4 * 3 * (OUTSIDE + MATRICES) / 2  # what FSDP gathers in float32 otherwise
    assert rounded == pytest.approx((updating + 2 * SHAPE.parameters + 3 * 2 * BOTH) / 2)
    sent = step_bytes("ppo", ZERO3, SHAPE, LOAD, passes=3, gpus=2)
    assert sent == pytest.approx((4 * 3 * 3 * BOTH + 4 * SHAPE.parameters + 4 * BOTH) / 2)


def test_for_vllm_the_policy_is_gathered_in_bf16_and_both_models_to_read() -> None:
    shared = replace(LOAD, vllm=8)
    read = 4 * OUTSIDE + 2 * (BOTH - OUTSIDE)
    updating = 4 * 3 * (2 * BOTH + MATRICES)
    sent = step_bytes("ppo", FSDP, SHAPE, shared, passes=3, gpus=2)
    assert sent == pytest.approx((updating + 2 * SHAPE.parameters + 3 * read) / 2)
    updating -= 4 * 3 * (OUTSIDE + MATRICES) / 2
    sent = step_bytes("ppo", FSDP_BF16_WEIGHTS, SHAPE, shared, passes=3, gpus=2)
    assert sent == pytest.approx((updating + 2 * SHAPE.parameters + 3 * 2 * BOTH) / 2)


def test_a_step_sends_gradients_in_the_precision_of_the_load() -> None:
    rounded = replace(LOAD, reduce_dtype="bf16")
    for stage, trained in (("reward", CRITIC), ("ppo", BOTH)):
        assert step_bytes(stage, DDP, SHAPE, rounded, 1, 2) == 2 * 2 * trained / 2
        assert step_bytes(stage, ZERO1, SHAPE, rounded, 1, 2) == 4 * 3 * trained / 2


def test_time_of_reference_rows_by_hand() -> None:
    # 4 sequences by policy and critic, 2 rows by the policy
    seconds = step_seconds("ppo", DDP, SHAPE, LOAD, 3, 1, Speed(400, 50))
    assert seconds == pytest.approx(6 * (4 * BOTH + 2 * SHAPE.parameters) * 512 * 3 / 400e12)


def test_time_by_hand() -> None:
    seconds = step_seconds("reward", DDP, SHAPE, LOAD, 2, 2, Speed(400, 50))
    computing = 6 * CRITIC * 512 * 4 * 2 / 400e12
    assert seconds == pytest.approx(computing + 2 * 4 * CRITIC / 2 / 50e9)
