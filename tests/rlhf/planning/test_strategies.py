from dataclasses import replace

import pytest

from rlhf.parallel.settings import MemoryKind
from rlhf.planning.advice import advice, tensor_parallel_advice
from rlhf.planning.strategies import (
    DDP,
    DDP_BF16_WEIGHTS,
    FSDP,
    FSDP_BF16_WEIGHTS,
    LORA,
    ZERO1,
    ZERO2,
    ZERO3,
    Load,
    Option,
    Sizes,
    passing_bytes,
    phase_bytes,
    plan_of,
    reading_bytes,
    sizes_of,
    stage_bytes,
    tensor_parallel_bytes,
)
from rlhf.planning.traffic import tensor_parallel_traffic
from tests.rlhf.planning.seven_billion import BOTH, CRITIC, GIB, LOAD, OUTSIDE, SHAPE

MATRICES = 6_700_000_000  # of the critic and of a reward model; the policy has one more
COPIED = 2 * MATRICES + 100_000_000


def in_computing(option: Option, gpus: int) -> float:
    """Bytes of PPO's state while gradients are computed, without activations."""
    plan = plan_of("ppo", option, SHAPE, LOAD, gpus)
    items = (*plan.always, *plan.phases["computing gradients"])
    return sum(item.size for item in items if item.state is not MemoryKind.ACTIVATIONS)


@pytest.mark.parametrize(
    ("option", "trained", "frozen", "copied"),
    [  # bytes a parameter on one of eight devices
        (DDP, 16, 4, 2),
        (DDP_BF16_WEIGHTS, 16, 4, 0),  # 2 of weights and gradients, 4 of masters, 8 of moments
        (ZERO1, 4 + 4 + 12 / 8, 4, 2),
        (ZERO2, 4 + 16 / 8, 4, 2),
        (ZERO3, 20 / 8, 4 / 8, 0),
        (FSDP, 16 / 8, 4 / 8, 0),
        (FSDP_BF16_WEIGHTS, 16 / 8, 4 / 8, 0),
    ],
)
def test_state_by_hand(option: Option, trained: float, frozen: float, copied: float) -> None:
    expected = trained * BOTH + frozen * CRITIC + copied * COPIED
    head = 2 * 4096 if option == DDP_BF16_WEIGHTS else 0  # float32, and its own master
    assert in_computing(option, 8) == pytest.approx(expected, abs=head)


@pytest.mark.parametrize(
    ("option", "computing", "expected"),
    [  # P = 100, which is less than DeepSpeed moves at once and gives back, G = 5, E = 10
        (DDP, 70, 70),
        (ZERO2, 70, 70),
        (ZERO3, 70, 70 + 4 * 100 + 8 * 100),
        (FSDP, 70, 70 + 8 * 5 + 4 * 10),
        (FSDP, 7, 12 * 10),  # the end of the backward pass
        (FSDP_BF16_WEIGHTS, 70, 70 + 8 * 5 + 2 * 10),
        (FSDP_BF16_WEIGHTS, 7, 8 * 10),  # 2 gathered, 2 of gradients, 4 of what is sent
    ],
)
def test_what_a_pass_adds_by_hand(option: Option, computing: float, expected: float) -> None:
    sizes = Sizes(trained=100, layer=5, outside=10)
    assert passing_bytes(option, sizes, 4, computing) == expected
    assert passing_bytes(option, sizes, 1, computing) == computing


@pytest.mark.parametrize(
    ("computing", "output", "expected"),
    [  # G = 5, E = 10, 6 of them in matrices, the largest of 4: 16 bytes are always gathered
        (70, 0, 16 + 70 + 40),
        (7, 0, 16 + 12 * 4),  # embeddings, at the end
        (70, 4, 16 + 30 + 40 + 16 * 4),  # an output matrix, when 30 of the activations are there
    ],
)
def test_matrices_that_fsdp_gathers_apart_by_hand(
    computing: float, output: float, expected: float
) -> None:
    sizes = Sizes(trained=100, layer=5, outside=10, matrices=6, matrix=4, output=output)
    assert passing_bytes(FSDP, sizes, 4, computing, 30) == expected


@pytest.mark.parametrize(
    ("computing", "usual", "wide", "narrow"),
    [  # twice the layer of 5 or the matrix of 4, and what is computed or the buffer before
        (70, 16 + 2 * 4 * 4 + 70, 16 + 2 * 4 * 5 + 70, 8 + 2 * 2 * 5 + 70),
        (7, 16 + 3 * 4 * 4, 16 + 3 * 4 * 5, 8 + 3 * 2 * 5),
    ],
)
def test_what_fsdp_gathers_to_read_by_hand(
    computing: float, usual: float, wide: float, narrow: float
) -> None:
    sizes = Sizes(trained=100, layer=5, outside=10, matrices=6, matrix=4, output=4)
    assert reading_bytes(sizes, computing) == usual
    assert reading_bytes(sizes, computing, layers=4) == wide
    assert reading_bytes(sizes, computing, ends=2) == narrow
    assert reading_bytes(sizes, computing, copied=8) == usual + 8


def test_ppo_reads_a_rollout_a_layer_at_a_time_by_hand() -> None:
    matrix, layer = 32000 * 4096, 6_700_000_000 // 32
    shape = replace(SHAPE, parameters=SHAPE.trunk + matrix)
    state = (12 * (shape.parameters + CRITIC) + 4 * CRITIC) / 8
    rest = 3 * 4096  # two norms and a head
    assert reads(4) < 4 * matrix  # of which three are there, and the output matrix's bf16 copy
    assert 2 * matrix < 2 * layer
    rounded = state + 2 * rest + 4 * layer + max(2 * layer, reads(4))
    for load in (LOAD, replace(LOAD, vllm=1)):
        found = phase_bytes("ppo", FSDP, shape, load, 8)["reading the rollout"]
        assert found == pytest.approx(state + 4 * rest + 14 * matrix, rel=1e-9)
        found = phase_bytes("ppo", FSDP_BF16_WEIGHTS, shape, load, 8)["reading the rollout"]
        assert found == pytest.approx(rounded, rel=1e-9)


def test_an_output_matrix_of_bf16_weights_by_hand() -> None:
    sizes = Sizes(trained=100, layer=5, outside=10, matrices=6, matrix=4, output=4)
    # 2 bytes gathered, 2 of the buffer, 2 of gradients, 4 of what is sent
    assert passing_bytes(FSDP_BF16_WEIGHTS, sizes, 4, 7, 3) == 8 + 3 + 40 + 10 * 4


def test_a_stage_is_its_state_and_what_it_computes() -> None:
    # bf16, unpadded: (16 + 10)·d + 2·(2·4096 + 2·4096) + 8·f, 33 times for each of 2048 tokens
    activations = 2048 * 33 * (26 * 4096 + 4 * 2 * 4096 + 8 * 11008)
    assert phase_bytes("reward", DDP, SHAPE, LOAD, 1) == {
        "computing gradients": 16 * CRITIC + 2 * MATRICES + activations,
        "stepping": 16 * CRITIC,
    }
    # bf16 weights: 10·d less; 2 + 2 bytes of weights and gradients, 12 of masters and moments
    found = phase_bytes("reward", DDP_BF16_WEIGHTS, SHAPE, LOAD, 8)
    lighter = 2048 * 33 * (16 * 4096 + 4 * 2 * 4096 + 8 * 11008)
    assert found["computing gradients"] == pytest.approx(16 * CRITIC + lighter, abs=2 * 4096)
    # one master at a time has float32 gradients: of 32,000 tokens
    assert found["stepping"] == pytest.approx(16 * CRITIC + 4 * 32000 * 4096, abs=2 * 4096)


def test_deepspeed_moves_a_bucket_and_steps_on_a_copy_of_the_gradients() -> None:
    activations = 2048 * 33 * (26 * 4096 + 4 * 2 * 4096 + 8 * 11008)
    expected = 2.5 * CRITIC + activations + 4 * 10**9 + 8 * 10**7
    assert stage_bytes("reward", ZERO3, SHAPE, LOAD, 8) == expected
    light = replace(LOAD, batch=1, length=2, checkpointing=True)
    assert stage_bytes("reward", ZERO3, SHAPE, light, 4) == 6 * CRITIC
    # before it shards the weights each device holds them all
    assert stage_bytes("reward", ZERO3, SHAPE, light, 64) == pytest.approx(
        max(4 * CRITIC, 20 / 64 * CRITIC + 4 * 10**9 + 8 * 10**7)
    )
    assert phase_bytes("ppo", ZERO3, SHAPE, light, 64)["loading"] == 4 * (BOTH - 4096)


def test_ppo_trains_two_models_and_asks_a_third() -> None:
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


def reads(rows: int) -> float:
    """What a forward pass alone computes: half a layer, padded, and a block of logits twice."""
    layer = rows * 512 * (26 * 4096 + 4 * 2 * 4096 + 2 * 512 + 8 * 11008) / 2
    positions = rows * 256
    block = 2**23 / positions if positions > 2**11 else 4096  # tokens of the vocabulary
    return layer + 2 * 4 * block * positions


@pytest.mark.parametrize(
    ("option", "held", "whole", "copies"),
    [  # bytes a trained parameter: state without gradients, but in DDP's buckets; gathered
        (DDP, 16, 0, 2),
        (DDP_BF16_WEIGHTS, 16, 0, 0),
        (ZERO1, 4 + 12 / 8, 0, 2),
        (ZERO2, 4 + 12 / 8, 0, 2),
        (ZERO3, 16 / 8, 4, 2),
    ],
)
def test_phases_of_ppo_by_hand(option: Option, held: float, whole: float, copies: float) -> None:
    found = phase_bytes("ppo", option, SHAPE, LOAD, 8)
    state = held * BOTH + (4 / 8 if option == ZERO3 else 4) * CRITIC
    expected = state + whole * BOTH + copies * COPIED + reads(4)
    # the critic's head is not gathered, nor rounded
    assert found["reading the rollout"] == pytest.approx(expected, abs=4 * 4096)
    expected += reads(32) - reads(4) - copies * MATRICES  # the policy alone
    assert found["measuring the KL"] == pytest.approx(expected, abs=4 * 4096)
    # the original model beside all that, in float32, when nothing is gathered
    expected = state + 4 * SHAPE.parameters + reads(32)
    assert found["auditing"] == pytest.approx(expected, abs=4 * 4096)


@pytest.mark.parametrize(
    ("option", "like", "held", "size"),
    [
        (ZERO3, DDP, 16 * BOTH + 4 * CRITIC, 4),
        (FSDP, DDP, 12 * BOTH + 4 * CRITIC, 4),
        (FSDP_BF16_WEIGHTS, DDP_BF16_WEIGHTS, 12 * BOTH + 4 * CRITIC, 2),
    ],
)
def test_the_policy_alone_is_gathered_to_sample(
    option: Option, like: Option, held: float, size: int
) -> None:
    sampling = phase_bytes("ppo", like, SHAPE, LOAD, 8)["sampling"] - 16 * BOTH - 4 * CRITIC
    found = phase_bytes("ppo", option, SHAPE, LOAD, 8)["sampling"]
    assert found == held / 8 + size * SHAPE.parameters + sampling


def test_with_vllm_ddp_keeps_no_copies_while_it_samples() -> None:
    shared = replace(LOAD, vllm=1)
    pages = 2 * 2 * 32 * 4096 * 5 * 512  # four sequences and one more
    largest = 2 * 32000 * 4096
    found = phase_bytes("ppo", DDP, SHAPE, shared, 8)
    engine = 2 * SHAPE.parameters + pages
    assert found["sampling"] == 16 * BOTH + 4 * CRITIC + engine + largest


def test_more_devices_need_no_more_memory_each() -> None:
    for option in (ZERO1, ZERO2, ZERO3, FSDP):
        needs = [stage_bytes("ppo", option, SHAPE, LOAD, gpus) for gpus in (2, 4, 8, 64)]
        assert needs == sorted(needs, reverse=True)
        assert needs[0] > needs[-1]


def test_groups_divide_by_their_size() -> None:
    grouped = replace(LOAD, group=8)
    for stage in ("reward", "ppo"):
        assert stage_bytes(stage, FSDP, SHAPE, grouped, 64) == stage_bytes(
            stage, FSDP, SHAPE, LOAD, 8
        )
        assert stage_bytes(stage, ZERO3, SHAPE, grouped, 64) == stage_bytes(
            stage, ZERO3, SHAPE, LOAD, 64
        )


def test_reference_outputs_are_made_by_a_whole_float32_model() -> None:
    # autocast keeps copies of its matrices; scoring reads logits at a temperature of 1, too
    second = 4 * 4096 * 4 * 256
    expected = 4 * SHAPE.parameters + 2 * SHAPE.linear + reads(4) + second
    for option in (DDP, FSDP, LORA):
        found = phase_bytes("reference", option, SHAPE, LOAD, 64)
        assert found["scoring"] == expected
        assert stage_bytes("reference", option, SHAPE, LOAD, 64) == max(found.values())


def test_adapters_of_ppo_share_one_frozen_model() -> None:
    adapters = 16 * 2_000_000  # of policy, critic and reward model each
    trained = 2 * adapters + 4096
    # padded: (8 + 10)·d + 2·(2·4096 + 2·4096) + 2·4096 + 2·512 + 8·f, and 7 times 16 numbers
    layer = 18 * 4096 + 5 * 2 * 4096 + 2 * 512 + 8 * 11008 + 2 * 7 * 16
    # 4 sequences and 2 reference rows of 512 tokens by the policy, then 4 by the critic, of which
    # one layer is at work
    activations = (6 * 32 + 4 * 33) * 512 * layer
    state = 2 * 7_000_000_000 + 16 * trained + 4 * adapters + 2 * 2 * adapters
    assert stage_bytes("ppo", LORA, SHAPE, LOAD, 1) == state + activations
    assert stage_bytes("ppo", LORA, SHAPE, LOAD, 8) == state + activations


def test_adapters_of_a_reward_model_beside_a_frozen_one() -> None:
    adapters = 16 * 2_000_000 + 4096  # with the head
    layer = 18 * 4096 + 5 * 2 * 4096 + 8 * 11008 + 2 * 7 * 16
    expected = 2 * 6_900_000_000 + 18 * adapters + 2048 * 33 * layer
    assert stage_bytes("reward", LORA, SHAPE, LOAD, 1) == expected


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
    held = 16 * part + 2 * 6_700_000_000 / 4
    assert activations < 4 * embeddings  # whose gradient comes whole to every process
    assert tensor_parallel_bytes(SHAPE, light, 4) == held + 4 * embeddings
    more = tensor_parallel_bytes(SHAPE, replace(light, batch=20), 4)
    assert more == held + 10 * activations > held + 4 * embeddings
    held += 4 * embeddings
    assert tensor_parallel_advice(SHAPE, light, 3, 4) == (
        f"reward: --parallel.tensor-parallel 4 holds {held / GIB:,.2f} GiB in "
        f"each process, which sends {sent / GIB:,.2f} GiB in one step."
    )


def test_with_vllm_no_device_holds_a_whole_model() -> None:
    shared = replace(LOAD, vllm=8)
    found = phase_bytes("ppo", FSDP, SHAPE, shared, 64)
    state = (16 * BOTH + 4 * CRITIC) / 64
    norms = 6_900_000_000 - 6_700_000_000 - 32000 * 4096
    part = norms + (6_700_000_000 + 32000 * 4096 + 100_000_000) // 8
    # 8 times 4 sequences and one more, 512 tokens each, of an eighth of the heads
    pages = 2 * 2 * 32 * (4096 // 8) * 33 * 512
    # the embeddings, gathered, and vLLM's eighth of them
    largest = 2 * 32000 * 4096 * (1 + 1 / 8)
    # without gradients
    assert found["sampling"] == state - 4 * BOTH / 64 + 2 * part + pages + largest
    assert max(found.values()) == stage_bytes("ppo", FSDP, SHAPE, shared, 64)
    assert (
        found["computing gradients"]
        == phase_bytes("ppo", FSDP, SHAPE, LOAD, 64)["computing gradients"]
    )


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
    assert stage_bytes("reference", DDP, SHAPE, shared, 8) == stage_bytes(
        "reference", DDP, SHAPE, replace(LOAD, vllm=1), 8
    )
    # a model of 26 GiB, an eighth of it; a quarter of vLLM's 13; a layer of .8 and the next
    assert 8 * GIB < stage_bytes("reference", FSDP, SHAPE, shared, 8) < 14 * GIB
