from typing import Any

import numpy as np
import pytest
import torch

from policies import formulas

MASK = torch.tensor([[True, True, False], [True, False, False]])


def rows(*values: list[float]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_policy_loss_by_hand() -> None:
    old = torch.zeros(2, 3, dtype=torch.float64)
    new = rows([np.log(1.5), np.log(0.5), 9.0], [np.log(0.5), 9.0, 9.0])
    advantages = rows([1.0, 1.0, 9.0], [-2.0, 9.0, 9.0])
    # 1.5 clipped to 1.2: −1.2; 0.5 not clipped upwards for a good token: −0.5;
    # bad token at 0.5: max(1, 1.6) = 1.6
    loss = formulas.policy_loss(new, old, advantages, MASK, 0.2)
    assert loss.item() == pytest.approx(-1.2 - 0.5 + 1.6)


def test_policy_loss_gradient_pushes_good_tokens_up_and_stops_at_the_clip() -> None:
    new = torch.tensor([[0.0, 0.5, 0.0]], requires_grad=True)
    advantages = torch.tensor([[1.0, 1.0, -1.0]])
    mask = torch.ones(1, 3, dtype=torch.bool)
    formulas.policy_loss(new, torch.zeros(1, 3), advantages, mask, 0.2).backward()
    assert new.grad is not None
    assert torch.allclose(new.grad, torch.tensor([[-1.0, 0.0, 1.0]]))


def policy_loss_of(
    ratio: np.ndarray,
    advantages: np.ndarray,
    weights: np.ndarray,
    low: float,
    high: float,
    dual: float,
) -> float:
    """Token by token, as the papers' cases say it: which of its pieces each token is on."""
    total = 0.0
    for rho, a, w in zip(ratio.flat, advantages.flat, weights.flat, strict=True):
        kept = min(rho, 1 + high) if a >= 0 else min(max(rho, 1 - low), dual)
        total -= w * a * kept
    return total


def test_policy_loss_with_its_clips_and_weights_is_the_papers() -> None:
    rng = np.random.default_rng(0)
    ratio, advantages = np.exp(rng.normal(size=(40, 5))), rng.normal(size=(40, 5))
    weights = rng.uniform(0, 2, size=(40, 5))
    mask = rng.random((40, 5)) < 0.8
    found = formulas.policy_loss(
        *(torch.tensor(one) for one in (np.log(ratio) - 1, np.full((40, 5), -1.0), advantages)),
        torch.tensor(mask),
        0.2,
        clip_range_high=0.28,
        dual_clip=3.0,
        weights=torch.tensor(weights),
    )
    expected = policy_loss_of(ratio, advantages, weights * mask, 0.2, 0.28, 3.0)
    assert found.item() == pytest.approx(expected, rel=1e-9)
    for low, high, dual in ((0.2, 0.2, 3.0), (0.2, 0.28, np.inf), (0.28, 0.28, 3.0)):
        other = policy_loss_of(ratio, advantages, weights * mask, low, high, dual)
        assert abs(expected - other) > 1e-2  # the tokens lie on all pieces


def test_a_high_clip_and_a_dual_clip_bound_the_gradient_where_they_should() -> None:
    ratios = torch.tensor([[1.25, 1.3, 0.75, 2.9, 3.1]])
    new = ratios.log().requires_grad_()
    advantages = torch.tensor([[1.0, 1.0, -1.0, -1.0, -1.0]])
    mask, weights = torch.ones(1, 5, dtype=torch.bool), torch.tensor([[2.0] * 5])
    old = torch.zeros(1, 5)
    formulas.policy_loss(new, old, advantages, mask, 0.2, 0.28, 3.0, weights).backward()
    assert new.grad is not None
    # d(−A ρ)/d log π = −A ρ: 1.25 is inside 1.28, 1.3 is not; .75 is below .8; 3.1 is above 3
    torch.testing.assert_close(new.grad, 2 * torch.tensor([[-1.25, 0.0, 0.0, 2.9, 0.0]]))
    # without the two, 1.25 is clipped and 3.1 is not
    again = ratios.log().requires_grad_()
    formulas.policy_loss(again, old, advantages, mask, 0.2).backward()
    assert again.grad is not None
    torch.testing.assert_close(again.grad, torch.tensor([[0.0, 0.0, 0.0, 2.9, 3.1]]))


def test_sampler_weights_by_hand() -> None:
    trainer = rows([np.log(0.5), np.log(0.3), 0.0], [np.log(0.1), 0.0, 0.0])
    sampler = rows([np.log(0.4), np.log(0.1), 0.0], [np.log(0.8), 0.0, 0.0])
    # .5/.4, .3/.1 → 2, .1/.8; padding, where both are 0, weighs 1
    expected = rows([1.25, 2.0, 1.0], [0.125, 1.0, 1.0])
    torch.testing.assert_close(formulas.sampler_weights(trainer, sampler, 2.0), expected)
    impossible = rows([-np.inf, np.log(0.1), 0.0], [np.log(0.8), 0.0, 0.0])
    assert formulas.sampler_weights(trainer, impossible, 2.0)[0, 0] == 2.0


def test_sampler_weights_make_means_over_the_sampler_those_of_the_trainer() -> None:
    rng = np.random.default_rng(0)
    trainer, sampler = rng.dirichlet(np.ones(8)), rng.dirichlet(np.ones(8))
    ratio = (trainer / sampler).max()
    values = rng.normal(size=8)
    both = (torch.tensor(np.log(one))[None] for one in (trainer, sampler))
    weights = formulas.sampler_weights(*both, float(ratio) + 1).numpy()[0]
    assert (sampler * weights * values).sum() == pytest.approx((trainer * values).sum())
    assert abs((sampler * values).sum() - (trainer * values).sum()) > 0.1


def test_responses_match_their_sampler_by_the_geometric_mean_of_their_ratios() -> None:
    sampler = rows([0.0, 0.0, 0.0], [0.0, 0.0, 0.0], [0.0, 0.0, 0.0], [0.0, 0.0, 0.0])
    mask = torch.tensor([[True] * 3, [True] * 3, [True, False, False], [True, True, False]])
    # geometric means: (3 · 3 · 1/3)^⅓ = 1.44; (3 · 3 · 1)^⅓ = 2.08; 1/2.1; √(4 · .9) = 1.90
    ratios = rows([3.0, 3.0, 1 / 3], [3.0, 3.0, 1.0], [1 / 2.1, 1.0, 1.0], [4.0, 0.9, 99.0])
    found = formulas.matches_sampler(ratios.log(), sampler, mask, 2.0)
    assert found.tolist() == [True, False, False, True]


def test_value_loss_by_hand() -> None:
    values, old = rows([1.0, 3.0, 9.0], [0.1, 9.0, 9.0]), rows([0.0, 3.0, 0.0], [0.0, 0.0, 0.0])
    returns = rows([1.0, 1.0, 9.0], [1.0, 9.0, 9.0])
    # V = 1 clipped to 0.2: ½ max(0, .64) = .32; ½·4 = 2; 0.1 is inside the range: ½·.81
    loss = formulas.value_loss(values, old, returns, MASK, 0.2)
    assert loss.item() == pytest.approx(0.32 + 2.0 + 0.405)


def test_forward_kl_k3_by_hand_and_never_negative() -> None:
    policy, reference = (
        rows([-1.0, -2.0, 5.0], [-3.0, 5.0, 5.0]),
        rows([-2.0, -1.0, 0], [-3.0, 0, 0]),
    )
    # log r = 1, −1, 0: (e − 1 − 1) + (1/e − 1 + 1) + 0
    expected = np.e - 2 + 1 / np.e
    assert formulas.forward_kl_k3(policy, reference, MASK).item() == pytest.approx(expected)
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(2, 3, generator=generator)
    assert formulas.forward_kl_k3(noise, -noise, MASK) > 0


def test_forward_kl_k3_is_unbiased_over_an_enumerated_vocabulary() -> None:
    reference = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
    policy = torch.tensor([0.2, 0.3, 0.5], dtype=torch.float64)
    exact = (reference * (reference / policy).log()).sum()
    mask = torch.ones(1, 1, dtype=torch.bool)
    terms = [
        formulas.forward_kl_k3(policy[i].log().view(1, 1), reference[i].log().view(1, 1), mask)
        for i in range(3)
    ]
    assert (reference * torch.stack(terms)).sum().item() == pytest.approx(exact.item())


def test_forward_kl_k3_gradient_is_zero_at_the_reference_and_pulls_back_elsewhere() -> None:
    policy = torch.tensor([[-1.0, -1.5, -0.5]], requires_grad=True)
    reference = torch.full((1, 3), -1.0)
    formulas.forward_kl_k3(policy, reference, torch.ones(1, 3, dtype=torch.bool)).backward()
    assert policy.grad is not None
    # d/dx (e^x − 1 − x) = e^x − 1
    assert torch.allclose(
        policy.grad, torch.tensor([[0.0, np.exp(-0.5) - 1, np.exp(0.5) - 1]]).float()
    )


def test_one_runaway_token_is_clamped() -> None:
    loss = formulas.forward_kl_k3(
        torch.zeros(1, 1), torch.full((1, 1), -200.0), torch.ones(1, 1, dtype=torch.bool)
    )
    assert loss.item() == pytest.approx(np.exp(10) - 11, rel=1e-5)


@pytest.mark.parametrize("log_ratio", [-5.0, -20.0, -100.0])
def test_an_abandoned_token_keeps_its_pull(log_ratio: float) -> None:
    """d/dx (e^x − 1 − x) = e^x − 1, and d/dx (x e^x − e^x + 1) = x e^x, however small x is."""
    mask, reference = torch.ones(1, 1, dtype=torch.bool), torch.full((1, 1), -2.0).double()
    for loss, slope in (
        (formulas.forward_kl_k3, np.exp(log_ratio) - 1),
        (formulas.token_reverse_kl, log_ratio * np.exp(log_ratio)),
    ):
        policy = (reference + log_ratio).requires_grad_()
        loss(policy, reference, mask).backward()
        assert policy.grad is not None
        assert policy.grad.item() == pytest.approx(slope, rel=1e-12)


@pytest.mark.parametrize("loss", [formulas.forward_kl_k3, formulas.token_reverse_kl])
def test_a_token_with_a_clamped_log_ratio_has_no_gradient(loss: Any) -> None:
    policy = torch.tensor([[10.5]], requires_grad=True)
    loss(policy, torch.zeros(1, 1), torch.ones(1, 1, dtype=torch.bool)).backward()
    assert policy.grad is not None
    assert policy.grad.item() == 0.0


def test_the_forward_kl_brings_an_abandoned_arm_back() -> None:
    """A bandit whose policy gives one of four arms e^−20: its probability returns to a quarter.

    With log r clamped from below, too, the dead arm has no gradient, and the three others, which
    share what it has lost, balance: nothing moves.
    """
    reference = torch.full((4,), 0.25, dtype=torch.float64).log()
    mask = torch.ones(4, 1, dtype=torch.bool)
    logits = torch.tensor([-20.0, 0.0, 0.0, 0.0], dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.SGD([logits], lr=1.0)
    for _ in range(200):
        optimizer.zero_grad()
        log_probs = logits.log_softmax(0)
        (formulas.forward_kl_k3(log_probs[:, None], reference[:, None], mask) / 4).backward()
        optimizer.step()
    np.testing.assert_allclose(logits.detach().softmax(0).numpy(), [0.25] * 4, atol=1e-6)


def test_clamped_and_abandoned_tokens_are_counted_apart_at_real_tokens() -> None:
    # log r = 10 (neither), 11, 99 at padding | −10.5, and padding
    policy, reference = rows([0.0, 1.0, 99.0], [-11.5, 0.0, 0.0]), rows([-10.0] * 3, [-1.0] * 3)
    assert formulas.clamped_tokens(policy, reference, MASK).item() == 1.0
    assert formulas.abandoned_tokens(policy, reference, MASK).item() == 1.0
    assert formulas.clamped_tokens(-policy, -reference, MASK).item() == 1.0


def test_reverse_kl_estimators_by_hand() -> None:
    policy, reference = (
        rows([-1.0, -2.0, 5.0], [-3.0, 5.0, 5.0]),
        rows([-2.0, -1.0, 0], [-3.5, 0, 0]),
    )
    # s = 1, −1 | 0.5
    k1 = formulas.reverse_kl_k1(policy, reference, MASK)
    assert torch.allclose(k1, torch.tensor([0.0, 0.5], dtype=torch.float64))
    k3 = formulas.reverse_kl_k3(policy, reference, MASK)
    expected = rows([1 / np.e + np.e - 2, np.exp(-0.5) - 0.5])[0]
    assert torch.allclose(k3, expected)


def test_approximate_kl_and_clip_count_by_hand() -> None:
    old = torch.zeros(2, 3)
    new = torch.tensor([[0.1, 0.3, 9.0], [-0.4, 9.0, 9.0]])
    assert formulas.approximate_kl(new, old, MASK).item() == pytest.approx(
        0.5 * (0.01 + 0.09 + 0.16)
    )
    # e^.1 = 1.105 inside, e^.3 = 1.35 and e^−.4 = .67 outside
    assert formulas.clipped_tokens(new, old, MASK, 0.2).item() == 2.0
    assert formulas.clipped_tokens(new, old, MASK, 0.2, 0.4).item() == 1.0


def test_kl_estimators_on_stored_responses_by_hand() -> None:
    mine, reference = (
        rows([np.log(0.5), 0.0, 9.0], [np.log(2.0), 9.0, 9.0]),
        rows([0.0] * 3, [0.0] * 3),
    )
    # −log r = log 2, 0, −log 2;  r log r − r + 1 = ½ − ½ log 2, 0, 2 log 2 − 1
    assert formulas.forward_kl_k1(mine, reference, MASK).item() == pytest.approx(0.0)
    expected = 0.5 - 0.5 * np.log(2) + 2 * np.log(2) - 1
    assert formulas.token_reverse_kl(mine, reference, MASK).item() == pytest.approx(expected)


def test_the_token_reverse_kl_is_unbiased_with_its_gradient() -> None:
    reference = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
    logits = torch.tensor([0.3, -0.2, 0.1], dtype=torch.float64, requires_grad=True)
    policy = logits.log_softmax(0)
    exact = (policy.exp() * (policy - reference.log())).sum()
    mask = torch.ones(1, 1, dtype=torch.bool)
    expected = sum(
        p * formulas.token_reverse_kl(mine.view(1, 1), p.log().view(1, 1), mask)
        for p, mine in zip(reference, policy, strict=True)
    )
    assert expected.item() == pytest.approx(exact.item(), rel=1e-9)
    gradients = [torch.autograd.grad(x, logits, retain_graph=True)[0] for x in (expected, exact)]
    torch.testing.assert_close(*gradients)


def top_k_kl_of(p: np.ndarray, q: np.ndarray, k: int) -> float:
    """KL(p ‖ q) of distributions (N, V) where all but the k most likely tokens of p are one."""
    total = 0.0
    for one, other in zip(p, q, strict=True):
        kept = np.argsort(-one)[:k]
        buckets = np.append(one[kept], 1 - one[kept].sum())
        others = np.append(other[kept], 1 - other[kept].sum())
        total += (buckets * np.log(buckets / others)).sum()
    return total


@pytest.mark.parametrize("k", [1, 4, 10])
def test_forward_kl_top_k_is_the_kl_of_the_kept_tokens_and_one_bucket(k: int) -> None:
    rng = np.random.default_rng(0)
    p, q = (rng.dirichlet(np.ones(11), size=6) for _ in range(2))
    ids = np.argsort(-p, axis=1)[:, :k]
    kept, mine = (torch.tensor(np.log(np.take_along_axis(one, ids, axis=1))) for one in (p, q))
    found = formulas.forward_kl_top_k(mine.view(2, 3, k), kept.view(2, 3, k), MASK)
    real = MASK.flatten().numpy()
    assert found.item() == pytest.approx(top_k_kl_of(p[real], q[real], k), rel=1e-9)
    exact = (p[real] * np.log(p[real] / q[real])).sum()
    assert found.item() <= exact + 1e-12
    if k == 10:  # the bucket holds a single token
        assert found.item() == pytest.approx(exact, rel=1e-9)


def test_forward_kl_top_k_has_no_gradient_at_the_reference_and_the_exact_one_elsewhere() -> None:
    rng = np.random.default_rng(1)
    p, logits = rng.dirichlet(np.ones(5), size=1), torch.tensor(rng.normal(size=(1, 5)))
    ids = torch.tensor(np.argsort(-p)[:, :4].copy())
    kept = torch.tensor(p).log().gather(1, ids)[:, None]
    mask = torch.ones(1, 1, dtype=torch.bool)
    for start, expected in ((torch.tensor(p).log(), np.zeros((1, 5))), (logits, None)):
        z = start.clone().requires_grad_()
        formulas.forward_kl_top_k(z.log_softmax(1).gather(1, ids)[:, None], kept, mask).backward()
        assert z.grad is not None
        # d KL(p ‖ softmax z) / dz = softmax z − p
        wanted = start.softmax(1).numpy() - p if expected is None else expected
        np.testing.assert_allclose(z.grad.numpy(), wanted, atol=1e-9)


def test_forward_kl_top_k_with_all_the_probability_kept_is_finite() -> None:
    kept = torch.tensor([[[0.5, 0.5]]]).log()
    mask = torch.ones(1, 1, dtype=torch.bool)
    policy = torch.tensor([[[0.5, 0.3]]]).log().requires_grad_()
    loss = formulas.forward_kl_top_k(policy, kept, mask)
    loss.backward()
    assert loss.item() == pytest.approx(0.5 * np.log(0.5 / 0.3), abs=1e-4)
    assert policy.grad is not None
    assert policy.grad.isfinite().all()
