import pytest
import torch
from transformers import MistralConfig, MistralForSequenceClassification

from reward.data.batches import lay_out
from reward.model.module import RewardModule
from rlhf.modeling.attention.checkpointing import checkpoint_activations
from rlhf.modeling.attention.layout import Segment
from rlhf.modeling.attention.prefix_matmul import group_by_length, make_plan
from rlhf.modeling.attention.shared_prefix import share_prompts
from tests.reward.model.classifiers import SIZES, build_classifier
from tests.rlhf.modeling.attention.groups import GROUPS, rewards_and_gradients


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch):
    make_plan.cache_clear()
    monkeypatch.setattr(
        "rlhf.modeling.attention.prefix_matmul.QUERIES_AT_ONCE", 7
    )  # the first prompt takes three
    yield
    make_plan.cache_clear()


@pytest.mark.parametrize("family", ["llama", "qwen2", "gpt_neox"])
@pytest.mark.parametrize(("dtype", "atol"), [(torch.float64, 1e-6), (torch.float32, 1e-5)])
def test_sharing_changes_neither_rewards_nor_gradients(family, dtype, atol):
    module = RewardModule(build_classifier(family).to(dtype))
    plain = rewards_and_gradients(module, GROUPS, shared=False)
    assert share_prompts(module.classifier) is None
    shared = rewards_and_gradients(module, GROUPS, shared=True)
    torch.testing.assert_close(shared, plain, atol=atol, rtol=1e-5)
    assert module.classifier.config._attn_implementation == "shared_prefix"
    again = rewards_and_gradients(module, GROUPS, shared=False)  # padded rows still work
    torch.testing.assert_close(again, plain, atol=atol, rtol=1e-5)


def test_gradients_are_the_same_with_gradient_checkpointing():
    module = RewardModule(build_classifier("llama"))
    assert share_prompts(module.classifier) is None
    plain = rewards_and_gradients(module, GROUPS, shared=True)
    checkpoint_activations(module.classifier)
    module.train()
    torch.testing.assert_close(rewards_and_gradients(module, GROUPS, shared=True), plain)


def test_segments_do_not_attend_to_each_other():
    module = RewardModule(build_classifier("llama"))
    share_prompts(module.classifier)
    with torch.no_grad():
        together = module(lay_out(GROUPS, 0, shared=True))
        alone = torch.cat([module(lay_out([group], 0, shared=True)) for group in GROUPS])
    torch.testing.assert_close(together, alone, atol=1e-6, rtol=0)


def test_sharing_works_under_bf16_autocast():
    module = RewardModule(build_classifier("llama"))
    with torch.no_grad():
        exact = module(lay_out(GROUPS, 0, shared=False))
        share_prompts(module.classifier)
        with torch.autocast("cpu", torch.bfloat16):
            rewards = module(lay_out(GROUPS, 0, shared=True))
    assert rewards.dtype == torch.float32
    torch.testing.assert_close(rewards, exact, atol=0.03, rtol=0)


def test_segments_of_like_lengths_go_together():
    layout = (Segment(50, (20, 24)), Segment(9, (3,)), Segment(48, (22, 19)), Segment(400, (90,)))
    assert group_by_length(layout) == [[1], [2, 0], [3]]
    assert group_by_length((Segment(400, (90,)),) * 2) == [[0], [1]]  # too many scores for a cache


def test_a_model_with_its_own_attention_code_falls_back_and_says_so():
    module = RewardModule(build_classifier("gptj"))
    before = module.classifier.config._attn_implementation
    assert (
        share_prompts(module.classifier)
        == "GPTJForSequenceClassification has its own attention code"
    )
    assert module.classifier.config._attn_implementation == before


def test_a_sliding_window_falls_back_and_says_so():
    config = MistralConfig(**SIZES, num_key_value_heads=2, sliding_window=64)
    module = RewardModule(MistralForSequenceClassification(config))
    assert share_prompts(module.classifier) == "its attention slides over a window of 64 tokens"


def test_a_model_that_ignores_positions_is_detected():
    classifier = build_classifier("llama")
    trunk, original = classifier.base_model, classifier.base_model.forward
    for layer in trunk.layers:  # make a random model care about positions
        layer.self_attn.q_proj.weight.data *= 20

    def ignoring(**inputs):
        return original(**{**inputs, "position_ids": None})

    trunk.forward = ignoring
    assert "packed rows change what" in share_prompts(classifier)
    assert classifier.config._attn_implementation != "shared_prefix"
