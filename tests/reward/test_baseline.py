import pytest
import torch
from accelerate import Accelerator
from transformers import AutoModelForCausalLM

from reward.baseline import base_log_probs
from reward.groups import Group
from reward.prefix import share_prompts


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("tokens", [1, 1000])
def test_log_probs_are_those_of_each_sequence_alone(tiny_model, tokens, shared):
    groups = [
        Group("a", (5, 9, 7), ((11, 3), (4, 8, 6, 10), ())),
        Group("b", tuple(range(3, 14)), ((14, 15, 16), (17,))),
    ]
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
