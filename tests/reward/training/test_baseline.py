from dataclasses import replace

import pytest
import torch
from accelerate import Accelerator
from transformers import (
    AutoModelForCausalLM,
    CohereConfig,
    CohereForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
)

from reward.data.groups import Group
from reward.training.baseline import base_log_probs
from rlhf.modeling.attention.shared_prefix import share_prompts


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("tokens", [1, 1000])
@pytest.mark.parametrize("system", [False, True])
def test_log_probs_are_those_of_each_sequence_alone(tiny_model, tokens, shared, system):
    groups = [
        Group("a", (5, 9, 7), ((11, 3), (4, 8, 6, 10), ())),
        Group("b", tuple(range(3, 14)), ((14, 15, 16), (17,))),
    ]
    if system:  # a beginning of all prompts, packed once
        groups = [replace(one, prompt=(*range(20, 40), *one.prompt)) for one in groups]
    accelerator = Accelerator(mixed_precision="no")
    found = base_log_probs(str(tiny_model), accelerator, groups, tokens, pad_id=0, shared=shared)
    model = AutoModelForCausalLM.from_pretrained(tiny_model).eval()
    assert share_prompts(AutoModelForCausalLM.from_pretrained(tiny_model)) is None
    for group, row in zip(groups, found, strict=True):
        for response, value in zip(group.responses, row, strict=True):
            if not response:
                assert value == 0
                continue
            with torch.no_grad():
                logits = model(torch.tensor([group.prompt + response])).logits[0]
            table = logits.double().log_softmax(dim=-1)
            steps = [
                table[len(group.prompt) - 1 + place, token] for place, token in enumerate(response)
            ]
            assert value == pytest.approx(float(sum(steps)) / len(steps), abs=1e-5)


SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 64,
    "initializer_range": 0.5,
}
FAMILIES = {  # what each makes of the products with its output matrix
    "gemma2": (
        Gemma2Config,
        Gemma2ForCausalLM,
        "final_logit_softcapping",
        lambda z: 2 * (z / 2).tanh(),
    ),
    "cohere": (CohereConfig, CohereForCausalLM, "logit_scale", lambda z: 2 * z),
    "granite": (GraniteConfig, GraniteForCausalLM, "logits_scaling", lambda z: z / 2),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_scaled_and_capped_as_the_model_does(tmp_path, family):
    config_class, model_class, setting, change = FAMILIES[family]
    config = config_class(**SIZES, pad_token_id=0, **{setting: 2.0})
    torch.manual_seed(0)
    model = model_class(config).eval()
    model.save_pretrained(tmp_path)
    group = Group("a", (5, 9, 7), ((11, 3), (4, 8, 6, 10)))
    accelerator = Accelerator(mixed_precision="no")
    [found] = base_log_probs(str(tmp_path), accelerator, [group], 1000, pad_id=0, shared=True)
    for response, value in zip(group.responses, found, strict=True):
        with torch.no_grad():
            states = model.base_model(torch.tensor([group.prompt + response])).last_hidden_state[0]
            products = (states @ model.lm_head.weight.T).double()
        before = range(2, 2 + len(response))
        table, plain = (z.log_softmax(dim=-1) for z in (change(products), products))
        expected, without = (float(one[before, response].mean()) for one in (table, plain))
        assert value == pytest.approx(expected, abs=1e-5)
        assert abs(value - without) > 0.01
