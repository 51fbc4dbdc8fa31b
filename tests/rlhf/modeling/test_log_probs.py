from pathlib import Path

import numpy as np
import pytest
import torch

from policies.reference.audit import score_responses
from rlhf.modeling.log_probs import (
    Sequences,
    entropy_of,
    log_probs_at,
    log_probs_of,
    response_logits,
    top_log_probs,
)
from rlhf.modeling.models import load_causal_lm
from rlhf.modeling.tokens import TokenBatch, load_tokenizer, pad_left, pad_right
from rlhf.parallel.distributed import start

PROMPTS = [[5, 6, 7], [8, 9, 10, 11, 12], [13]]
RESPONSES = [[20, 21, 22, 2], [23, 2], [24, 25, 26]]


def one_by_one(model: torch.nn.Module, temperature: float) -> list[np.ndarray]:
    """Log-probs from a plain forward of each sequence alone, in NumPy float64."""
    expected = []
    for prompt, response in zip(PROMPTS, RESPONSES, strict=True):
        with torch.no_grad():
            logits = (
                model(torch.tensor([prompt + response])).logits[0].double().numpy() / temperature
            )
        shifted = logits[len(prompt) - 1 : -1]
        top = shifted.max(axis=1)
        log_sum = np.log(np.exp(shifted - top[:, None]).sum(axis=1)) + top
        expected.append(shifted[np.arange(len(response)), response] - log_sum)
    return expected


def test_padded_batches_agree_with_single_sequences(tiny_model: Path) -> None:
    model, tokenizer = load_causal_lm(str(tiny_model)).eval(), load_tokenizer(str(tiny_model))
    for temperature in (1.0, 0.7):
        scored = score_responses(
            start("fp32", 0), model, tokenizer, PROMPTS, RESPONSES, temperature
        )
        for mine, theirs in zip(scored, one_by_one(model, temperature), strict=True):
            np.testing.assert_allclose(mine.numpy(), theirs, atol=2e-5)


def test_padding_is_zero_and_entropy_is_that_of_the_whole_distribution(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rlhf.modeling.log_probs.VOCABULARY_CHUNK", 100)
    model = load_causal_lm(str(tiny_model)).eval()
    sequences = Sequences(pad_left(PROMPTS, 0), pad_right(RESPONSES, 0))
    with torch.no_grad():
        logits = response_logits(model, sequences)
    log_probs = log_probs_of(logits, sequences.responses, 1.0)
    entropy = entropy_of(logits, sequences.responses, 1.0)
    padding = ~sequences.responses.mask
    assert (log_probs[padding] == 0).all()
    assert (entropy[padding] == 0).all()
    p = np.exp(logits[0, 0].double().numpy())
    p /= p.sum()
    np.testing.assert_allclose(entropy[0, 0].item(), -(p * np.log(p)).sum(), rtol=1e-5)


def test_trimming_drops_only_columns_of_padding() -> None:
    sequences = Sequences(pad_left(PROMPTS, 0), pad_right(RESPONSES, 0))
    trimmed = sequences.rows(torch.tensor([0, 2])).trimmed()
    assert trimmed.prompts.ids.tolist() == [[5, 6, 7], [0, 0, 13]]
    assert trimmed.responses.ids.tolist() == [[20, 21, 22, 2], [24, 25, 26, 0]]
    assert isinstance(trimmed.prompts, TokenBatch)


def test_the_gradient_of_several_tokens_a_place_is_that_of_log_softmax(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("rlhf.modeling.log_probs.VOCABULARY_CHUNK", 12)
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn((2, 3, 50), generator=generator).requires_grad_()
    ids = torch.randint(50, (2, 3, 4), generator=generator)
    weights = torch.randn((2, 3, 4), generator=generator)
    found = log_probs_at(logits, ids, 0.7)
    expected = (logits / 0.7).log_softmax(2).gather(2, ids)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    (mine,) = torch.autograd.grad((weights * found).sum(), logits)
    (theirs,) = torch.autograd.grad((weights * expected).sum(), logits)
    torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("size", [1, 7, 50, 64])
def test_the_size_of_the_chunks_changes_nothing(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Logits far apart, with impossible tokens: a whole chunk of −∞ and −∞ among finite ones."""
    generator = torch.Generator().manual_seed(0)
    logits = 30 * torch.randn((1, 6, 50), generator=generator)
    logits[:, 2:4, :14] = -torch.inf
    logits[:, 5, 20] = -torch.inf
    responses = pad_right([[19, 30, 21, 40, 49, 14]], 0)
    z = logits[0].double().numpy() / 0.7
    top = z.max(axis=1)
    log_sum = np.log(np.exp(z - top[:, None]).sum(axis=1)) + top
    p = np.exp(z - log_sum[:, None])
    monkeypatch.setattr("rlhf.modeling.log_probs.VOCABULARY_CHUNK", size)
    log_probs = log_probs_of(logits.requires_grad_(), responses, 0.7)
    chosen = z[np.arange(6), responses.ids[0].numpy()] - log_sum
    np.testing.assert_allclose(log_probs[0].detach().numpy(), chosen, rtol=1e-5, atol=1e-5)
    entropy = -np.where(p > 0, p * np.log(np.where(p > 0, p, 1)), 0).sum(axis=1)
    found = entropy_of(logits, responses, 0.7)[0]
    np.testing.assert_allclose(found.numpy(), entropy, rtol=1e-4, atol=1e-5)
    (gradient,) = torch.autograd.grad(log_probs.sum(), logits)
    expected = (np.eye(50)[responses.ids[0].numpy()] - p) / 0.7
    np.testing.assert_allclose(gradient[0].numpy(), expected, atol=1e-5)


def test_top_log_probs_and_their_log_sum_exp() -> None:
    logits = torch.randn((2, 3, 50), generator=torch.Generator().manual_seed(0))
    ids, log_probs, log_sum_exp = top_log_probs(logits, 5, 0.7)
    z = logits.double().numpy() / 0.7
    order = np.argsort(-z, axis=2)[:, :, :5]
    log_sum = np.log(np.exp(z).sum(axis=2))
    np.testing.assert_array_equal(ids.numpy(), order)
    expected = np.take_along_axis(z, order, axis=2) - log_sum[:, :, None]
    np.testing.assert_allclose(log_probs.numpy(), expected, atol=1e-5)
    np.testing.assert_allclose(log_sum_exp.numpy(), log_sum, atol=1e-5)
