from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from transformers import AutoModelForCausalLM

from policies.reference.audit import (
    audit_policy,
    estimate,
    measure_for_audit,
    measure_forward_kl,
    score_responses,
)
from policies.reference.shards import ReferenceRow
from policies.reference.store import open_store
from policies.sampling.generate import GenerateSampler, sample_responses
from rlhf.modeling.adapters import add_adapters
from rlhf.modeling.attention.packing import pack_prefixes
from rlhf.modeling.models import load_causal_lm
from rlhf.modeling.tokens import load_tokenizer
from rlhf.parallel.sharding import Sharding
from rlhf.records.schema import Message, Prompt
from tests.policies.conftest import Inputs


def test_the_error_is_that_of_the_prompts() -> None:
    # prompt means 2 and 4: mean 3, standard deviation √2, error √2/√2 = 1
    result = estimate([1.0, 3.0, 4.0, 4.0], [2, 2, 4, 4], ["a", "a", "b", "b"])
    assert result == {
        "nats": pytest.approx(3.0),
        "standard_error": pytest.approx(1.0),
        "per_token": pytest.approx(1.0),
        "sequences": 4,
    }


def test_one_prompt_has_no_error() -> None:
    assert estimate([1.0, 2.0], [3, 3], ["a", "a"])["standard_error"] is None


def test_a_prompt_is_read_once_for_its_responses(tiny_model: Path) -> None:
    model, tokenizer = load_causal_lm(str(tiny_model)), load_tokenizer(str(tiny_model))
    prompts = [[5, 6, 7, 8, 9, 10], [11, 12, 13, 14, 15]]
    responses = [[7, 8], [9], [10, 11, 12], [13]]
    inputs = (tokenizer, [prompts[0], prompts[1]] * 2, responses, 0.7)
    accelerator = Accelerator(mixed_precision="no")
    expected = score_responses(accelerator, model, *inputs)
    assert pack_prefixes(model) is None
    read: list[int] = []
    model.get_input_embeddings().register_forward_pre_hook(
        lambda _, ids: read.append(ids[0].numel())
    )
    found = score_responses(accelerator, model, *inputs, 2)
    assert read == [5 + 2, 6 + 5]  # a batch for each prompt, the one with short responses first
    for mine, other in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-5)


def test_log_ratios_that_k3_holds_are_counted(tiny_model: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_model).eval()
    tokenizer = load_tokenizer(str(tiny_model))
    accelerator = Accelerator(mixed_precision="no")
    [own] = score_responses(accelerator, model, tokenizer, [[5, 6]], [[7, 8, 9, 10]], 1.0)
    log_probs = (own + torch.tensor([0.0, 25.0, -12.0, 0.5])).tolist()
    prompt = Prompt.create((Message(role="user", content="How?"),), "test", "")
    row = ReferenceRow(
        prompt=prompt,
        sample_index=0,
        prompt_ids=[5, 6],
        response_ids=[7, 8, 9, 10],
        text="",
        finished=True,
        reused=False,
        log_probs=log_probs,
        log_probs_at_1=log_probs,
        entropy=[0.0] * 4,
    )
    found = measure_forward_kl(accelerator, model, tokenizer, [row], 1.0)
    assert found["clamped_fraction"] == 1 / 4
    assert found["abandoned_fraction"] == 1 / 4
    # log r = -25 in full, 12 as 10, -0.5: e^-25 + 25 - 1, e^10 - 10 - 1 and e^-0.5 + 0.5 - 1
    assert found["nats"] == pytest.approx(24.0 + 22015.4658 + 0.1065307, rel=1e-6)


def test_beneath_its_adapters_a_policy_holds_the_reference(inputs: Inputs) -> None:
    """Adapters switched off, it says what the reference says that is loaded beside it."""
    store = open_store(Path(inputs.path("reference"), "outputs"))
    policy = load_causal_lm(inputs.path("original")).eval()
    add_adapters(policy, rank=4, alpha=8, seed=0)
    generator = torch.Generator().manual_seed(1)
    for name, value in policy.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(value, std=0.3, generator=generator)
    tokenizer, accelerator = (
        load_tokenizer(inputs.path("original")),
        Accelerator(mixed_precision="no"),
    )
    groups = store.by_prompt("test")
    kls = []
    for holds_reference in (True, False):
        torch.manual_seed(0)
        prompts = [group[0].prompt_ids for group in groups]
        sampler = GenerateSampler(accelerator)
        samples = sample_responses(sampler, policy, tokenizer, prompts, store.sampling, 2)
        responses = [sample.token_ids for sample in samples]
        found = measure_for_audit(
            accelerator,
            policy,
            tokenizer,
            store,
            groups,
            responses,
            holds_reference=holds_reference,
        )
        assert (found.reference_log_probs is not None) is holds_reference
        kls.append(audit_policy(accelerator, found, tokenizer, store, Sharding()))
    how = [kl["reverse"].pop("audit") for kl in kls]
    assert [words.split(" with ")[1] for words in how] == [
        "the policy's adapters switched off",
        "the reference model loaded",
    ]
    nats = [kl["reverse"]["nats"] for kl in kls]
    assert nats[0] == pytest.approx(nats[1], rel=1e-4)  # loaded, it packs what prompts share
    assert abs(nats[0]) > 0.01
