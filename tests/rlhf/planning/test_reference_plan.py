"""The memory of storing reference outputs, worked by hand on a model of two layers."""

from rlhf.planning.plan import SampleBatch, ShardLayout
from rlhf.planning.reference_plan import reference_plan
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
    assert list(plan.phases) == ["scoring"]  # vLLM's cache stays
    found = sizes(plan, "scoring")
    assert found["vLLM: weights"] == 2 * SHAPE.parameters
    # 5 requests of one page of 128 tokens, keys and values in each of 2 layers, 4 wide, bf16
    assert found["vLLM: keys and values"] == 5 * 128 * 2 * 2 * 4 * 2
    assert found["reference model: weights"] == SHAPE.parameters


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
