import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config

from rlhf.modeling.attention.matmul import (
    future,
    product_attention,
    tail_attention,
    use_products,
)

SIZES = {
    "vocab_size": 40,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def random(*shapes):
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()
        for shape in shapes
    ]


@pytest.mark.parametrize(("heads", "groups"), [(4, 4), (6, 2), (3, 1)])
def test_tail_attention_is_causal_attention_of_the_last_queries(heads, groups):
    q, k, v = random((2, heads, 5, 8), (2, groups, 9, 8), (2, groups, 9, 8))
    visible = torch.ones(5, 9, dtype=torch.bool).tril(4)
    many = [x.repeat_interleave(heads // groups, dim=1) for x in (k, v)]
    expected = scaled_dot_product_attention(q, *many, attn_mask=visible, scale=0.3)
    hidden = future(5, q.device)
    torch.testing.assert_close(tail_attention(q, k, v, 0.3, hidden), expected)
    assert torch.autograd.gradcheck(lambda *x: tail_attention(*x, 0.3, hidden), (q, k, v))


def test_tail_attention_does_not_see_what_is_hidden():
    q, k, v = random((2, 2, 3, 8), (2, 2, 7, 8), (2, 2, 7, 8))
    visible = torch.ones(2, 1, 3, 7, dtype=torch.bool).tril(4)
    visible[1, :, :, :4] = False
    expected = scaled_dot_product_attention(q, k, v, attn_mask=visible, scale=0.3)
    hidden = ~visible[:, 0]
    torch.testing.assert_close(tail_attention(q, k, v, 0.3, hidden), expected)
    assert torch.autograd.gradcheck(lambda *x: tail_attention(*x, 0.3, hidden), (q, k, v))


@pytest.mark.skipif(torch.cuda.is_available(), reason="GPUs keep the fused kernel")
@pytest.mark.parametrize("make_config", [LlamaConfig, Qwen2Config])
@pytest.mark.parametrize("padding", ["none", "left", "right"])
def test_a_model_gives_the_same_logits_and_gradients(make_config, padding):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(make_config(**SIZES)).double()
    ids = torch.arange(24).view(2, 12)
    mask = torch.ones_like(ids)
    if padding != "none":
        mask[1, slice(0, 5) if padding == "left" else slice(7, 12)] = 0
    real = mask.bool()

    def outcome():
        model.zero_grad()
        logits = model(input_ids=ids, attention_mask=mask).logits[real]
        logits.square().sum().backward()
        return logits.detach(), [one.grad.clone() for one in model.parameters()]

    fused = outcome()
    use_products(model)
    assert model.config._attn_implementation == "products"
    torch.testing.assert_close(outcome(), fused)


@pytest.mark.skipif(torch.cuda.is_available(), reason="GPUs keep the fused kernel")
def test_float32_sampling_and_long_rows_use_the_fused_kernel_and_agree(monkeypatch):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(LlamaConfig(**SIZES)).double()
    ids = torch.arange(10).view(1, 10)

    def greedy():
        return model.generate(
            ids, max_new_tokens=8, do_sample=False, pad_token_id=0, eos_token_id=0
        )

    before = greedy()
    use_products(model)
    assert torch.equal(greedy(), before)
    monkeypatch.setattr("rlhf.modeling.attention.matmul.LONGEST", 4)
    assert torch.equal(greedy(), before)


@pytest.mark.skipif(torch.cuda.is_available(), reason="GPUs keep the fused kernel")
@pytest.mark.parametrize("padding", [0, 4])
@pytest.mark.parametrize(("heads", "groups"), [(4, 4), (6, 2)])
def test_a_single_bf16_query_gives_what_the_fused_kernel_gives_without_it(
    heads, groups, padding, monkeypatch
):
    q, k, v = (x.detach().bfloat16() for x in random((2, heads, 1, 8), *[(2, groups, 300, 8)] * 2))
    seen = None
    if padding:
        seen = torch.ones(2, 1, 1, 300, dtype=torch.bool)
        seen[1, ..., :padding] = False
    many = [x.repeat_interleave(heads // groups, dim=1).float() for x in (k, v)]
    expected = scaled_dot_product_attention(q.float(), *many, attn_mask=seen, scale=0.3)
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", None)
    found, _ = product_attention(torch.nn.Module(), q.float(), k, v, seen, scaling=0.3)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.float(), expected.transpose(1, 2), atol=0.01, rtol=0.02)


@pytest.mark.skipif(torch.cuda.is_available(), reason="GPUs keep the fused kernel")
def test_a_single_bf16_query_is_fused_for_few_keys_in_all_rows(monkeypatch):
    inputs = [x.detach().bfloat16() for x in random((9, 4, 1, 8), *[(9, 4, 64, 8)] * 2)]

    def attend(rows):
        return product_attention(module, *(x[:rows] for x in inputs), None, scaling=0.3)[0]

    module = torch.nn.Module()
    module.is_causal = True
    torch.testing.assert_close(attend(8), attend(9)[:8], atol=0.01, rtol=0.02)
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", None)
    assert attend(9).shape == (9, 1, 4, 8)
    with pytest.raises(TypeError, match="not callable"):
        attend(8)
