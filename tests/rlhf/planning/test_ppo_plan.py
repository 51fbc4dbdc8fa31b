"""The memory of PPO, worked by hand on a model of two layers."""

from dataclasses import replace

import pytest

from rlhf.planning.plan import Plan, PPOBatch, SampleBatch, ShardLayout
from rlhf.planning.planner import Shape, layer_bytes, working_bytes
from rlhf.planning.ppo_plan import Roles, ppo_plan
from tests.rlhf.planning.two_layers import LAYER, SHAPE, sizes

POLICY, CRITIC, ADAPTERS = SHAPE.parameters, SHAPE.trunk + 8, 2 * SHAPE.lora_rows
LAYER_BYTES = layer_bytes(SHAPE, 8, bf16=True, padded=True)
# with adapters of rank 2: 8·8 of norms, 10·8 of copies, 2·(4·8) of attention and 2·8 of its output,
# a mask of 2·8, 8·16 of the MLP, 7 times 2 numbers
ADAPTED = 64 + 80 + 64 + 16 + 16 + 128 + 28


def ppo(**changes: object) -> Plan:
    numbers = {"sample_batch": 4, "prompt": 3, "new": 5, "bf16": True, "rollout": 0, **changes}
    sampled = SampleBatch(*(numbers.pop(name) for name in ("sample_batch", "prompt", "new")))
    rollout, texts = numbers.pop("rollout"), numbers.pop("texts", (0, 0))
    return ppo_plan(SHAPE, SHAPE, PPOBatch(sampled, 2, 1, rollout, texts), **numbers)


def updating(**changes: object) -> dict[str, float]:
    return sizes(ppo(**changes), "computing gradients")


def test_three_models_and_no_reference() -> None:
    plan = ppo()
    assert sizes(plan, "computing gradients") == {
        "policy: weights": 4 * POLICY,
        "policy: Adam": 8 * POLICY,
        "critic: weights": 4 * CRITIC,
        "critic: Adam": 8 * CRITIC,
        "reward model: weights": 4 * CRITIC,
        "gradients": 4 * (POLICY + CRITIC),
        "bf16 copies of the matrices": 2 * (4 * LAYER + 800),
        "policy: activations": 3 * 8 * 2 * LAYER_BYTES,  # the KL term's row passes through it
        "critic: activations": 2 * 8 * 2 * LAYER_BYTES,
        "critic: layer at work": 2 * 8 * LAYER_BYTES,
    }
    assert sizes(plan, "sampling")["keys and values"] == 2 * 4 * (4 * 8) * 4


def test_pretraining_texts_pass_through_the_policy_alone() -> None:
    phase = "computing gradients of texts"
    found = sizes(ppo(texts=(4, 16)), phase)
    layer = 4 * 16 * layer_bytes(SHAPE, 16, bf16=True, padded=True)
    assert found["policy: activations"] == 2 * layer
    assert found["logits"] == 2 * 4 * 100 * 4 * 15 > layer
    assert not {"critic: activations", "policy: layer at work"} & set(found)
    assert found["gradients"] == updating()["gradients"]
    assert phase not in ppo().phases


def test_vllm_holds_a_copy_of_the_policy_and_pages_for_every_response_and_one_more() -> None:
    plan = ppo(roles=Roles(vllm=1))
    found = sizes(plan, "sampling")
    assert found["vLLM: weights"] == 2 * POLICY
    assert found["vLLM: keys and values"] == 2 * 2 * (2 * 4) * (5 * 128)
    assert "keys and values" not in found
    assert "vLLM: weights" in [item.what for item in plan.always]
    asleep = ppo(roles=Roles(vllm=1, engine_sleeps=True))
    assert "vLLM: weights" in [item.what for item in asleep.phases["sampling"]]
    assert "vLLM: weights" not in [item.what for item in asleep.always]


def test_the_peak_is_that_of_the_largest_phase() -> None:
    plan = ppo(sample_batch=10_000)
    always = sum(item.size for item in plan.always)
    assert plan.peak == always + sum(item.size for item in plan.phases["sampling"])


def test_a_critics_head_alone_keeps_no_activations() -> None:
    found = updating(roles=Roles(critic="own head"))
    assert found["critic: trunk"] == 4 * SHAPE.trunk
    assert (found["critic: weights"], found["critic: Adam"]) == (4 * 8, 8 * 8)
    assert found["gradients"] == 4 * (POLICY + 8)
    assert not {"critic: activations", "critic: layer at work"} & set(found)  # its trunk has run
    assert found["bf16 copies of the matrices"] == 2 * (2 * LAYER + 800)
    assert "critic: what its head reads" not in found
    kept = updating(roles=Roles(critic="own head"), rollout=5, new=3)
    assert kept["critic: what its head reads"] == 4 * 5 * 3 * 8


def test_without_a_critic_or_with_a_head_on_the_policy() -> None:
    none, head = updating(roles=Roles(critic="none")), updating(roles=Roles(critic="head"))
    assert not any(name.startswith("critic") for name in none)
    assert head["critic: weights"] == 4 * 8
    assert none["gradients"] == 4 * POLICY
    assert not {"critic: trunk", "critic: activations", "critic: layer at work"} & set(head)


def test_an_adapter_beside_frozen_weights() -> None:
    found = updating(roles=Roles(critic="none", lora_rank=2, reward_models=0, resident=True))
    assert found == {
        "reference model: weights": 4 * POLICY,
        "policy: frozen weights": 4 * POLICY,
        "policy: weights": 4 * ADAPTERS,
        "policy: Adam": 8 * ADAPTERS,
        "gradients": 4 * ADAPTERS,
        "bf16 copies of the matrices": 2 * ADAPTERS,
        "policy: activations": 3 * 8 * 2 * ADAPTED,
        "logits": 2 * 4 * 100 * 3 * 5,  # the only block, twice
    }


def at_the_peak(policy: Shape, rows: int, critic: Shape, **how: bool) -> dict[str, float]:
    """What one episode of 8 tokens and some reference rows compute."""
    plan = ppo_plan(policy, critic, PPOBatch(SampleBatch(1, 3, 5), 1, rows), **how)
    names = ("activations", "layer at work", "logits")
    items = plan.phases["computing gradients"]
    return {item.what: item.size for item in items if item.what.endswith(names)}


def test_critic_and_policy_are_never_at_work_at_once() -> None:
    again = {"bf16": True, "checkpointing": True}
    # 80 tokens of the policy, of which a layer takes 208 · 80 twice; 8 of the critic
    light = replace(SHAPE, vocabulary=1)
    assert at_the_peak(light, 9, SHAPE, **again) == {
        "policy: activations": 80 * 4 * 8 * 2,
        "policy: layer at work": 80 * 2 * LAYER_BYTES,
    }
    # whole logits stay while the critic computes, of 5 positions; later they are there twice, with
    # a block and its exponentials
    whole = replace(SHAPE, vocabulary=100, whole_logits=True)
    assert at_the_peak(whole, 0, SHAPE, bf16=True) == {
        "policy: activations": 8 * 2 * LAYER_BYTES,
        "critic: activations": 8 * 2 * LAYER_BYTES,
        "critic: layer at work": 8 * LAYER_BYTES,
        "logits": 4 * 100 * 5,
    }
    large = replace(whole, vocabulary=1000)
    assert at_the_peak(large, 0, SHAPE, **again) == {
        "policy: activations": 8 * 4 * 8 * 2,
        "logits": (2 + 2) * 4 * 1000 * 5,
    }


def test_one_base_under_all_roles() -> None:
    found = updating(roles=Roles(lora_rank=2, share_base=True))
    assert found["shared base: weights"] == 2 * POLICY
    assert found["policy: weights"] == 4 * ADAPTERS
    assert found["critic: weights"] == 4 * (ADAPTERS + 8)
    assert found["reward model: adapters"] == 4 * ADAPTERS
    assert "reward model: weights" not in found
    assert found["bf16 copies of the matrices"] == 2 * 2 * ADAPTERS
    ranks = updating(roles=Roles(lora_rank=2, share_base=True, reward_ranks=(4, 6)))
    assert ranks["policy: weights"] == 4 * ADAPTERS
    assert ranks["critic: weights"] == 4 * (2 * ADAPTERS + 8)  # starts as the first
    assert ranks["reward model: adapters"] == 4 * (2 + 3) * ADAPTERS
    assert ranks["bf16 copies of the matrices"] == 2 * 3 * ADAPTERS
    packed = updating(roles=Roles(lora_rank=2, share_base=True, four_bits=True))
    assert packed["shared base: weights"] == 0.516 * 2 * LAYER + 2 * (POLICY - 2 * LAYER)
    assert found["policy: activations"] == 3 * 8 * 2 * ADAPTED
    assert found["critic: activations"] == 2 * 8 * 2 * ADAPTED
    assert found["critic: layer at work"] == 2 * 8 * ADAPTED
    again = updating(roles=Roles(lora_rank=2, share_base=True), checkpointing=True)
    assert again["policy: activations"] == 3 * 8 * 2 * 8 * 2  # the input of a layer, in bf16
    whole = updating(roles=Roles(lora_rank=2, share_base=True), bf16=False)
    assert whole["shared base: weights"] == 4 * POLICY


def test_what_four_processes_divide() -> None:
    roles = Roles(critic="none")

    def of(strategy: str, **changes: object) -> dict[str, float]:
        return updating(roles=roles, layout=ShardLayout(strategy, 4, processes=4, **changes))

    names = ("policy: weights", "policy: Adam", "gradients", "reward model: weights")
    for strategy, shares in {
        "ddp": (1, 1, 1, 1),
        "zero1": (1, 4, 1, 1),
        "zero2": (1, 4, 4, 1),
        "zero3": (4, 4, 4, 4),
        "fsdp": (4, 4, 4, 4),
    }.items():
        whole = (4 * POLICY, 8 * POLICY, 4 * POLICY, 4 * CRITIC)
        found = of(strategy)
        assert [found[name] for name in names] == [
            w / n for w, n in zip(whole, shares, strict=True)
        ]
        assert found.get("policy: stepped weights", 0) == POLICY * strategy.startswith("zero")
    assert of("fsdp", offload=True)["policy: weights"] == 0


@pytest.mark.parametrize("phase", ["sampling", "measuring the KL", "auditing", "stepping"])
def test_ddp_keeps_its_gradients_in_every_phase(phase: str) -> None:
    """Its buckets hold them from the first step on; in one process they go with the step."""
    roles = Roles(critic="own")
    alone, several = (ppo(roles=roles, layout=ShardLayout("ddp", processes=n)) for n in (1, 2))
    assert sizes(several, phase)["gradients"] == 4 * (POLICY + CRITIC)
    assert ("gradients" in sizes(alone, phase)) is (phase == "stepping")


def test_the_policy_is_gathered_to_sample_and_copied_in_bf16() -> None:
    """FSDP measures a layer at a time; ZeRO 3 gathers policy and critic to measure."""
    copied, both = "bf16 copies of the matrices", 2 * (2 * LAYER + 800 + 2 * LAYER)
    for strategy in ("fsdp", "zero3"):
        plan = ppo(layout=ShardLayout(strategy, 4, processes=4))
        found = added(plan, "sampling")
        assert found["whole weights"] == 4 * POLICY
        assert found[copied] == 2 * (2 * LAYER + 800)
        assert copied not in added(plan, "computing gradients")
        read = added(plan, "reading the rollout")
        whole = {"whole weights": 4 * (POLICY + SHAPE.trunk), copied: both}
        kept = {name: size for name, size in read.items() if name in whole}
        assert kept == (whole if strategy == "zero3" else {})
    assert added(ppo(), "reading the rollout")[copied] == both  # in one process
    assert added(ppo(), "computing gradients")[copied] == both


def test_adapters_beside_sharded_weights_are_sharded_too() -> None:
    """Policy with adapters, whole critic and reward model, over four processes."""
    roles = Roles(lora_rank=2)
    trained = ADAPTERS + CRITIC
    for strategy in ("fsdp", "zero3"):
        plan = ppo(roles=roles, layout=ShardLayout(strategy, 4, processes=4))
        found = sizes(plan, "computing gradients")
        assert found["policy: frozen weights"] == 4 * POLICY / 4
        assert (found["policy: weights"], found["policy: Adam"]) == (ADAPTERS, 2 * ADAPTERS)
        assert (found["critic: weights"], found["critic: Adam"]) == (CRITIC, 2 * CRITIC)
        assert found["gradients"] == trained
        assert added(plan, "sampling")["whole weights"] == 4 * (POLICY + ADAPTERS)
        assert found["policy: activations"] == 3 * 8 * 2 * ADAPTED
        assert found["critic: activations"] == 2 * 8 * 2 * LAYER_BYTES  # all of it is trained
    both = added(
        ppo(roles=roles, layout=ShardLayout("zero3", 4, processes=4)), "reading the rollout"
    )
    assert both["whole weights"] == 4 * (POLICY + ADAPTERS + SHAPE.trunk)


def test_whole_bf16_weights_need_no_copies() -> None:
    plan = ppo(layout=ShardLayout("fsdp", 4, processes=4, bf16_weights=True))
    assert added(plan, "sampling")["whole weights"] == 2 * POLICY
    for phase in ("sampling", "reading the rollout"):
        assert "bf16 copies of the matrices" not in added(plan, phase)


def test_weights_go_to_vllm_a_layer_at_a_time() -> None:
    one = {"sample_batch": 1}  # its logits are 100 · 18 bytes, in float32 100 · 16
    layer = "vLLM: layer given"
    # embeddings are the largest layer: 8 · 100, which vLLM makes anew
    alone = ppo(roles=Roles(vllm=1), **{**one, "bf16": False})
    assert added(alone, "sampling") == {layer: 4 * 800}
    sharded = ShardLayout("fsdp", 4, processes=4)  # what is given is a copy, too
    assert added(ppo(roles=Roles(vllm=1), layout=sharded, **one), "sampling") == {layer: 4 * 800}
    shared = added(ppo(roles=Roles(vllm=2), layout=sharded, **one), "sampling")
    assert shared == {"vLLM: logits": 18 * 2 * 100}  # of both
    # gate and up, 8 · 16 each, merged in float32 with the product of one's adapters, then rounded
    packed = Roles(vllm=1, lora_rank=2, share_base=True, four_bits=True)
    assert added(ppo(roles=packed, **one), "sampling") == {layer: (4 * 3 + 2 * 2) * 128}
    given = Roles(vllm=1, lora_rank=2, share_base=True)
    assert added(ppo(roles=given, **one), "sampling") == {"vLLM: logits": 1800}
    held = {item.what: item.size for item in ppo(roles=given, **one).always}
    assert held["vLLM: adapters"] == 2 * 2 * SHAPE.lora_rows
    assert "vLLM: adapters" not in sizes(ppo(roles=packed, **one), "sampling")


def added(plan: Plan, phase: str) -> dict[str, float]:
    return {item.what: item.size for item in plan.phases[phase]}


def test_audits_load_the_reference_unless_it_lies_beneath_adapters() -> None:
    beneath = ppo(roles=Roles(lora_rank=2, audited_rows=3)).phases
    assert not {"auditing", "auditing during training"} & set(beneath)
    assert "auditing" in ppo(roles=Roles(lora_rank=2, share_base=True, four_bits=True)).phases
    position = 2 * 4 * 100 * 5  # the only block of a row's logits, twice

    def reads(rows: int) -> dict[str, float]:
        working = working_bytes(SHAPE, rows * 8, 8, bf16=True)
        return {"one layer": working, "logits": rows * position}

    whole, loaded = {"whole weights": 4 * POLICY}, {"loaded reference: weights": 4 * POLICY}
    plan = ppo(
        roles=Roles(critic="none", audited_rows=3), layout=ShardLayout("zero3", 4, processes=4)
    )
    assert added(plan, "auditing") == {**loaded, **reads(32)}
    assert added(plan, "auditing during training") == {**whole, **loaded, **reads(3)}
    copied = {"bf16 copies of the matrices": 2 * (2 * LAYER + 800)}
    assert added(plan, "measuring the KL") == {**whole, **copied, **reads(32)}
    assert added(plan, "reading the rollout") == {**whole, **copied, **reads(2)}
    # under FSDP the original is sharded like the policy, and nothing is whole
    loaded = {"loaded reference: weights": 4 * POLICY / 4}
    for vllm in (0, 4):
        roles = Roles(critic="none", audited_rows=3, vllm=vllm)
        plan = ppo(roles=roles, layout=ShardLayout("fsdp", 4, processes=4))
        assert added(plan, "auditing during training") == {**loaded, **reads(3)}
        assert added(plan, "measuring the KL") == reads(32)
        assert added(plan, "reading the rollout") == reads(2)
    assert "auditing during training" not in ppo().phases
