"""The memory of sampling and of reference outputs, worked by hand on a model of two layers."""

import pytest

from rlhf.planning.plan import SampleBatch, ShardLayout
from rlhf.planning.sampling_plan import reference_plan, vllm_pass
from tests.rlhf.planning.two_layers import LAYER, SHAPE, sizes


def test_the_plan_of_reference_outputs() -> None:
    plan = reference_plan(SHAPE, SHAPE, SampleBatch(4, 3, 5), bf16=False)
    found = sizes(plan, "scoring")
    assert found["reference model: weights"] == 4 * SHAPE.parameters
    assert found["reward model: weights"] == 4 * (SHAPE.trunk + 8)
    assert found["logits"] == 3 * 4 * 100 * 4 * 5
    many = reference_plan(SHAPE, SHAPE, SampleBatch(64, 3, 5), bf16=False)
    assert sizes(many, "scoring")["logits"] == 3 * 4 * 100 * 32 * 5
    alone = reference_plan(SHAPE, None, SampleBatch(4, 3, 5), bf16=False)
    assert "reward model: weights" not in sizes(alone, "scoring")


def test_vllm_holds_a_copy_of_the_model_beside_it() -> None:
    given = {"bf16": True, "layout": ShardLayout("fsdp", 4)}
    plan = reference_plan(SHAPE, None, SampleBatch(4, 3, 5), **given, vllm=1)
    found = sizes(plan, "scoring")  # vLLM's cache stays
    assert found["vLLM: weights"] == 2 * SHAPE.parameters
    # 5 requests of one page of 128 tokens, keys and values in each of 2 layers, 4 wide, bf16
    assert found["vLLM: keys and values"] == 5 * 128 * 2 * 2 * 4 * 2
    assert found["reference model: weights"] == SHAPE.parameters
    assert [item.what for item in plan.phases["sampling"]] == ["vLLM: logits"]


@pytest.mark.parametrize(
    ("batch", "parts", "bf16", "size"),
    [
        # 4 · 8 tokens take 2 · 32 · (2 · 8 + 3 · 16) = 4,096 bytes in a layer, logits 18 bytes each
        (SampleBatch(4, 3, 5), 1, True, 18 * 4 * 100),
        (SampleBatch(4, 3, 5), 1, False, 4 * 32 * (16 + 48)),
        (SampleBatch(4, 1, 1), 1, False, 16 * 4 * 100),
        (SampleBatch(4, 30, 34), 1, True, 2 * 256 * (16 + 48)),
        # the requests of both, half of the inside
        (SampleBatch(4, 30, 34), 2, True, 2 * 512 * (16 + 24)),
        (SampleBatch(100, 100, 156), 1, True, 2 * 8192 * (16 + 48)),
        (SampleBatch(1, 9000, 1000), 1, True, 2 * 10_000 * (16 + 48)),  # one request at least
    ],
)
def test_vllm_computes_a_layer_of_its_largest_pass_or_logits(
    batch: SampleBatch, parts: int, bf16: bool, size: int
) -> None:
    assert vllm_pass(SHAPE, batch, parts, bf16=bf16).size == size


def test_processes_that_hold_one_reference_model_divide_its_weights() -> None:
    plan = reference_plan(
        SHAPE, SHAPE, SampleBatch(4, 3, 5), bf16=True, layout=ShardLayout(parts=4)
    )
    for phase in ("sampling", "scoring"):
        found = sizes(plan, phase)
        assert found["reference model: weights"] == SHAPE.parameters
        assert found["reward model: weights"] == SHAPE.trunk + 8
        assert found["bf16 copies of the matrices"] == 2 * (2 * LAYER + 800) / 4
    assert sizes(plan, "scoring")["logits"] == (1 + 3) * 4 * 100 * 4 * 5  # whole, and as blocks


def test_processes_that_divide_a_reference_model_gather_it_to_sample() -> None:
    given = {"bf16": True, "layout": ShardLayout("fsdp", 4)}
    plan = reference_plan(SHAPE, SHAPE, SampleBatch(4, 3, 5), **given)
    assert sizes(plan, "sampling")["whole weights"] == 4 * SHAPE.parameters
    assert "whole weights" not in sizes(plan, "scoring")
    assert sizes(plan, "sampling")["bf16 copies of the matrices"] == 2 * (2 * LAYER + 800)
    assert "bf16 copies of the matrices" not in sizes(plan, "scoring")
    assert sizes(plan, "scoring")["reference model: weights"] == SHAPE.parameters
    offloaded = reference_plan(
        SHAPE, SHAPE, SampleBatch(4, 3, 5), bf16=True, layout=ShardLayout("fsdp", 4, offload=True)
    )
    assert sizes(offloaded, "scoring")["reference model: weights"] == 0
    assert plan.peak - offloaded.peak == SHAPE.parameters + SHAPE.trunk + 8
