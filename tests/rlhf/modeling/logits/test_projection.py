from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from rlhf.modeling.log_probs import Sequences, response_log_probs
from rlhf.modeling.logits.projection import float32_logits, float32_product
from rlhf.modeling.models import load_causal_lm
from rlhf.modeling.tokens import pad_left, pad_right
from tests.rlhf.modeling.padded import response_logits

SEQUENCES = Sequences(pad_left([[5, 6, 7], [8, 9]], 0), pad_right([[20, 21, 2], [22, 23, 24]], 0))


def loud_model(folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    """The tiny model with a head whose logits reach beyond 16, where bf16 has steps of 1/8."""
    model = load_causal_lm(str(folder), dtype).eval()
    head = nn.Linear(model.config.hidden_size, model.config.vocab_size, bias=False)
    nn.init.normal_(head.weight, std=2.0, generator=torch.Generator().manual_seed(0))
    model.set_output_embeddings(head.to(dtype))
    return model


def read_head_input(model: Any) -> tuple[Tensor, Tensor]:
    """Logits of the responses, and the hidden states that the head made them from."""
    seen: list[Tensor] = []
    hook = model.lm_head.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    logits = response_logits(model, SEQUENCES)
    hook.remove()
    return logits, seen[0]


def exact(tensor: Tensor) -> np.ndarray:
    return tensor.detach().double().numpy()


def rounded(tensor: Tensor) -> np.ndarray:
    return tensor.detach().bfloat16().double().numpy()


def expected_log_probs(hidden: np.ndarray, weight: np.ndarray) -> np.ndarray:
    z = hidden @ weight.T
    assert np.abs(z).max() > 16
    normalizer = np.log(np.exp(z).sum(axis=2, keepdims=True))
    ids = SEQUENCES.responses.ids.numpy()[:, :, None]
    return np.take_along_axis(z - normalizer, ids, axis=2)[:, :, 0]


@pytest.mark.parametrize("held", [torch.float32, torch.bfloat16])
def test_bf16_logits_are_not_rounded(tiny_model: Path, held: torch.dtype) -> None:
    """Under autocast, and of weights that are held in bf16: log-probs by NumPy in float64.

    A CPU that multiplies bf16 may round the factors, another multiplies them as they are.
    """
    model = loud_model(tiny_model, held)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=held == torch.float32):
        logits, hidden = read_head_input(model)
        in_blocks = response_log_probs(model, SEQUENCES, 1.0).log_probs[:, :, 0]
    log_probs = logits.log_softmax(2).gather(2, SEQUENCES.responses.ids[:, :, None])[:, :, 0]
    torch.testing.assert_close(in_blocks, log_probs, rtol=0, atol=1e-5)
    log_probs = log_probs.numpy()
    assert logits.dtype == torch.float32
    weight = model.lm_head.weight
    errors = [
        np.abs(log_probs - expected_log_probs(read(hidden), read(weight))).max()
        for read in (exact, rounded)
    ]
    assert min(errors) < 1e-4


def test_gradients_are_those_of_the_logits(tiny_model: Path) -> None:
    model = loud_model(tiny_model)
    for parameter in model.parameters():
        parameter.requires_grad_(parameter is model.lm_head.weight)
    with torch.autocast("cpu", torch.bfloat16):
        logits, hidden = read_head_input(model)
    logits.log_softmax(2).gather(2, SEQUENCES.responses.ids[:, :, None]).sum().backward()
    z = rounded(hidden) @ rounded(model.lm_head.weight).T
    p = np.exp(z) / np.exp(z).sum(axis=2, keepdims=True)
    slopes = np.eye(z.shape[2])[SEQUENCES.responses.ids.numpy()] - p
    expected = np.einsum("brv,brd->vd", slopes, rounded(hidden))
    gradient = model.lm_head.weight.grad.double().numpy()
    # factors may be bf16: 8 bits
    np.testing.assert_allclose(gradient, expected, atol=0.01 * np.abs(expected).max())


def test_hidden_states_get_their_gradient() -> None:
    model: Any = nn.Module()
    model.lm_head = nn.Linear(8, 50, bias=True)
    model.get_output_embeddings = lambda: model.lm_head
    hidden = torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(0)).requires_grad_()
    with float32_logits(model), torch.autocast("cpu", torch.bfloat16):
        logits = model.lm_head(hidden)
    bias = exact(model.lm_head.bias)
    errors = [
        np.abs(read(hidden) @ read(model.lm_head.weight).T + bias - exact(logits)).max()
        for read in (exact, rounded)
    ]
    assert min(errors) < 1e-5
    logits.sum().backward()
    assert hidden.grad is not None
    expected = exact(model.lm_head.weight).sum(axis=0)
    np.testing.assert_allclose(hidden.grad[0, 0].numpy(), expected, atol=0.02)
    np.testing.assert_allclose(model.lm_head.bias.grad.numpy(), [6.0] * 50)


def test_float32_stays_as_it_is_and_the_model_too(tiny_model: Path) -> None:
    model = loud_model(tiny_model)
    plain = model.lm_head(torch.ones(1, 2, model.config.hidden_size))
    with float32_logits(model), float32_logits(model):
        assert torch.equal(model.lm_head(torch.ones(1, 2, model.config.hidden_size)), plain)
    assert "forward" not in vars(model.lm_head)


@pytest.mark.parametrize("weights", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("states", [torch.float32, torch.bfloat16])
def test_gradients_have_the_types_of_their_tensors(
    weights: torch.dtype, states: torch.dtype
) -> None:
    model: Any = nn.Module()
    model.lm_head = nn.Linear(8, 50, bias=False).to(weights)
    model.get_output_embeddings = lambda: model.lm_head
    hidden = torch.ones(2, 3, 8, dtype=states, requires_grad=True)
    with float32_logits(model), torch.autocast("cpu", torch.bfloat16):
        model.lm_head(hidden).sum().backward()
    assert hidden.grad is not None
    assert (hidden.grad.dtype, model.lm_head.weight.grad.dtype) == (states, weights)
    torch.testing.assert_close(model.lm_head.weight.grad.float(), torch.full((50, 8), 6.0))


def test_frozen_weights_are_cast_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model: Any = nn.Module()
    model.lm_head = nn.Linear(8, 50, bias=False).bfloat16()
    model.get_output_embeddings = lambda: model.lm_head
    hidden = torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(0)).bfloat16()
    with torch.no_grad(), float32_logits(model):
        expected = model.lm_head(hidden)
    with torch.no_grad(), float32_logits(model, frozen=True):
        first = model.lm_head(hidden)
        monkeypatch.setattr(model.lm_head.weight, "data", torch.zeros(50, 8).bfloat16())
        second = model.lm_head(hidden)
    assert expected.dtype == torch.float32
    assert torch.equal(first, expected)
    assert torch.equal(second, expected)  # of the copy


def test_a_large_vocabulary_goes_chunk_by_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlhf.modeling.logits.projection.WEIGHT_ROWS", 30)
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(n, 16, generator=generator).bfloat16() for n in (7, 100))
    expected = hidden.double() @ weight.double().T
    torch.testing.assert_close(
        float32_product(hidden, weight).double(), expected, atol=1e-5, rtol=0
    )
    assert torch.backends.mkldnn.matmul.fp32_precision == "none"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_cuda_the_sums_are_float32_too() -> None:
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(n, 64, generator=generator).bfloat16() for n in (7, 100))
    found = float32_product(hidden.cuda(), weight.cuda()).cpu().double()
    torch.testing.assert_close(found, hidden.double() @ weight.double().T, atol=1e-4, rtol=0)
