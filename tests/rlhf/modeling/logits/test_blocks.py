import numpy as np
import pytest
import torch
from torch import Tensor

from rlhf.modeling.logits.blocks import (
    Distributions,
    chosen_log_probs,
    most_likely,
    statistics,
)

VOCABULARY = 50
NEEDS_GPU = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]


@pytest.fixture(params=[1, 7, 50, 64])
def block(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The vocabulary in blocks of several sizes; with most of them the last block is short."""
    monkeypatch.setattr("rlhf.modeling.logits.blocks.SMALLEST_BLOCK", request.param)
    monkeypatch.setattr("rlhf.modeling.logits.blocks.BLOCK_ELEMENTS", 1)


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def expected(z: np.ndarray, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Log-probs of the ids, entropies and probabilities, in float64."""
    top = z.max(axis=1, keepdims=True)
    log_p = z - top - np.log(np.exp(z - top).sum(axis=1, keepdims=True))
    p = np.exp(log_p)
    entropy = -np.where(p > 0, p * np.where(p > 0, log_p, 0), 0).sum(axis=1)
    return np.take_along_axis(log_p, ids, axis=1), entropy, p


def slopes(p: np.ndarray, ids: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """The gradient of the weighted sum of log-probs by z: Σ_k w_k (1[v = k] − p_v)."""
    return (np.eye(VOCABULARY)[ids] * weights[:, :, None]).sum(axis=1) - weights.sum(
        axis=1, keepdims=True
    ) * p


@pytest.mark.usefixtures("block")
def test_logits_far_apart_and_impossible_tokens() -> None:
    """A whole block of −∞, and −∞ among finite logits."""
    logits = 30 * random(6, VOCABULARY)
    logits[2:4, :14] = -torch.inf
    logits[5, 20] = -torch.inf
    ids = torch.tensor([[19, 3], [30, 30], [21, 14], [40, 20], [49, 0], [14, 13]])
    z = logits.double().numpy() / 0.7
    log_probs, entropy, p = expected(z, ids.numpy())
    found = chosen_log_probs(Distributions(logits.requires_grad_()), ids, 0.7)
    np.testing.assert_allclose(found[0].detach().numpy(), log_probs, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(found[1].numpy(), entropy, rtol=1e-4, atol=2e-5)
    weights = random(6, 2, seed=1)
    (gradient,) = torch.autograd.grad((weights * found[0]).sum(), logits)
    wanted = slopes(p, ids.numpy(), weights.double().numpy()) / 0.7
    np.testing.assert_allclose(gradient.numpy(), wanted, atol=1e-5)


def test_an_impossible_block_leaves_the_entropy_finite_at_any_temperature(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("rlhf.modeling.logits.blocks.SMALLEST_BLOCK", 4096)
    logits = torch.zeros(1, 4098)
    logits[:, :4096] = -torch.inf
    (found,) = statistics(Distributions(logits), torch.tensor([[4097]]), [1e-7])
    assert found.entropy.item() == pytest.approx(np.log(2))
    assert found.log_probs.item() == pytest.approx(-np.log(2))


@pytest.mark.usefixtures("block")
@pytest.mark.parametrize("biased", [False, True])
def test_log_probs_and_gradients_from_hidden_states(biased: bool) -> None:
    hidden, weight = 3 * random(7, 16), random(VOCABULARY, 16, seed=1)
    bias = random(VOCABULARY, seed=2) if biased else None
    ids = torch.randint(VOCABULARY, (7, 3), generator=torch.Generator().manual_seed(3))
    tensors = [one for one in (hidden, weight, bias) if one is not None]
    h, w, *rest = [one.double().numpy() for one in tensors]
    log_probs, entropy, p = expected((h @ w.T + sum(rest)) / 0.7, ids.numpy())
    for one in tensors:
        one.requires_grad_()
    found = chosen_log_probs(Distributions(hidden, weight, bias), ids, 0.7)
    np.testing.assert_allclose(found[0].detach().numpy(), log_probs, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(found[1].numpy(), entropy, rtol=1e-4, atol=1e-5)
    weights = random(7, 3, seed=4)
    gradients = torch.autograd.grad((weights * found[0]).sum(), tensors)
    dz = slopes(p, ids.numpy(), weights.double().numpy()) / 0.7
    for gradient, wanted in zip(gradients, (dz @ w, dz.T @ h, dz.sum(axis=0)), strict=False):
        np.testing.assert_allclose(gradient.numpy(), wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.usefixtures("block")
def test_two_temperatures_and_the_most_likely_tokens() -> None:
    hidden, weight = 3 * random(7, 16), random(VOCABULARY, 16, seed=1)
    ids = torch.randint(VOCABULARY, (7, 3), generator=torch.Generator().manual_seed(3))
    z = hidden.double().numpy() @ weight.double().numpy().T
    distributions = Distributions(hidden, weight)
    for scale, found in zip((0.7, 1.0), statistics(distributions, ids, [0.7, 1.0]), strict=True):
        log_probs, entropy, _ = expected(z / scale, ids.numpy())
        np.testing.assert_allclose(found.log_probs.numpy(), log_probs, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(found.entropy.numpy(), entropy, rtol=1e-4, atol=1e-5)
        log_sum_exp = np.log(np.exp(z / scale).sum(axis=1))
        np.testing.assert_allclose(found.log_sum_exp.numpy(), log_sum_exp, rtol=1e-5)
    np.testing.assert_array_equal(most_likely(distributions, 5).numpy(), np.argsort(-z)[:, :5])


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=NEEDS_GPU)])
@pytest.mark.parametrize("held", [torch.float32, torch.bfloat16])
def test_bf16_factors_have_float32_sums(device: str, held: torch.dtype) -> None:
    """Logits reach beyond 16, where bf16 has steps of 1/8; gradients have their tensors' types.

    A CPU that multiplies bf16 may round the factors, another multiplies them as they are.
    """
    hidden = (3 * random(7, 64)).to(device, held).requires_grad_()
    weight = random(VOCABULARY, 64, seed=1).to(device, held).requires_grad_()
    ids = torch.arange(7, device=device)[:, None]
    distributions = Distributions(hidden, weight, dtype=torch.bfloat16)
    found, _ = chosen_log_probs(distributions, ids, 1.0)
    found.sum().backward()
    both = hidden.detach().cpu(), weight.detach().cpu()
    exact, rounded = (
        [one.to(kind).double().numpy() for one in both] for kind in (held, torch.bfloat16)
    )
    errors = []
    for h, w in (exact, rounded):
        log_probs, _, p = expected(h @ w.T, ids.cpu().numpy())
        assert np.abs(h @ w.T).max() > 16
        errors.append(np.abs(found.detach().cpu().numpy() - log_probs).max())
        dz = slopes(p, ids.cpu().numpy(), np.ones((7, 1)))
    assert min(errors) < 1e-4
    assert hidden.grad is not None
    assert weight.grad is not None
    assert (hidden.grad.dtype, weight.grad.dtype) == (held, held)
    for gradient, wanted in ((hidden.grad, dz @ w), (weight.grad, dz.T @ h)):
        np.testing.assert_allclose(  # factors are bf16: 8 bits
            gradient.float().cpu().numpy(), wanted, atol=0.02 * np.abs(wanted).max()
        )
