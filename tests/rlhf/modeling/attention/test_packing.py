"""A packed row gives what every sequence gives alone: logits, features, gradients, samples."""

from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from policies.sampling.generate import GenerateSampler, sample_responses
from rlhf.modeling.attention.packing import (
    pack_if_shorter,
    pack_prefixes,
    pack_sequences,
)
from rlhf.modeling.log_probs import Sequences, features, response_log_probs
from rlhf.modeling.models import load_causal_lm, new_reward_model
from rlhf.modeling.tokens import load_tokenizer, pad_left, pad_right
from rlhf.parallel.distributed import start
from rlhf.records.schema import Sampling

PROMPTS = [[5, 6, 7, 8], [5, 6, 9, 10, 11, 12], [5, 6, 13]]
RESPONSES = [[20, 21, 22, 2], [23, 2], [24, 25, 26]]
WEIGHTS = torch.tensor([[0.3, -1.0, 0.5, 2.0], [1.0, 0.7, 9.0, 9.0], [-0.2, 0.4, 1.1, 9.0]])


def sequences_of(prompts: list[list[int]], responses: list[list[int]]) -> Sequences:
    return Sequences(pad_left(prompts, 0), pad_right(responses, 0))


@pytest.fixture
def packing_model(tiny_model: Path) -> PreTrainedModel:
    model = load_causal_lm(str(tiny_model)).eval()
    assert pack_prefixes(model) is None
    return model


def measure(model: PreTrainedModel, sequences: Sequences) -> tuple[Tensor, Tensor]:
    """Log-probs and the gradient of their weighted sum."""
    model.zero_grad()
    log_probs = response_log_probs(model, sequences, 0.7).first(sequences.responses.mask)
    (log_probs * WEIGHTS).sum().backward()
    gradients = [p.grad.flatten() for p in model.parameters() if p.grad is not None]
    return log_probs.detach(), torch.cat(gradients)


def test_a_common_prefix_length_is_laid_once() -> None:
    sequences = sequences_of(PROMPTS, RESPONSES)
    row = pack_sequences(sequences.joined, sequences.responses.mask)
    # 5 6 | 7 8 20 21 22 2 | 9 10 11 12 23 2 | 13 24 25 26
    expected = [5, 6, 7, 8, 20, 21, 22, 2, 9, 10, 11, 12, 23, 2, 13, 24, 25, 26]
    assert row.ids.tolist() == [expected]
    assert row.positions.tolist() == [[0, 1, 2, 3, 4, 5, 6, 7, 2, 3, 4, 5, 6, 7, 2, 3, 4, 5]]
    # the token before each response token; 0 at padding
    assert row.reads.tolist() == [[3, 4, 5, 6], [11, 12, 0, 0], [14, 15, 16, 0]]
    assert [(one.prompt, one.responses) for one in row.layout] == [(2, (6, 6, 4))]


def test_equal_prompts_are_laid_once_each() -> None:
    prompts = [[5, 6, 7, 8], [9, 10, 11, 12], [5, 6, 7, 8], [9, 10, 11, 12]]
    responses = [[20], [21, 22], [23], [24]]
    sequences = sequences_of(prompts, responses)
    row = pack_sequences(sequences.joined, sequences.responses.mask)
    assert row.ids.tolist() == [[5, 6, 7, 8, 20, 23, 9, 10, 11, 12, 21, 22, 24]]
    assert row.reads.tolist() == [[3, 0], [9, 10], [3, 0], [9, 0]]
    assert [(one.prompt, one.responses) for one in row.layout] == [(4, (1, 1)), (4, (2, 1))]


@pytest.mark.parametrize("alike", ["beginnings", "prompts"])
@pytest.mark.parametrize("shifted", [False, True])
def test_log_probs_and_gradients_are_those_of_padded_rows(
    packing_model: PreTrainedModel, tiny_model: Path, alike: str, shifted: bool
) -> None:
    prompts = PROMPTS if alike == "beginnings" else [[5, 6, 7, 8]] * 3
    sequences = sequences_of(prompts, RESPONSES)
    expected, slopes = measure(load_causal_lm(str(tiny_model)).eval(), sequences)
    assert pack_if_shorter(packing_model, sequences.joined, sequences.responses.mask) is not None
    if shifted:  # responses end in the last column: fewer columns, other places
        sequences = sequences.end_aligned()
        mask = sequences.responses.mask
        log_probs = response_log_probs(packing_model, sequences, 0.7).first(mask)
        real = expected[pad_right(RESPONSES, 0).mask]
        torch.testing.assert_close(log_probs[mask], real, rtol=0, atol=2e-5)
        return
    log_probs, gradient = measure(packing_model, sequences)
    torch.testing.assert_close(log_probs, expected, rtol=0, atol=2e-5)
    torch.testing.assert_close(gradient, slopes, rtol=1e-3, atol=2e-5)


def test_what_a_critic_reads_is_that_of_padded_rows(tiny_model: Path) -> None:
    sequences = sequences_of(PROMPTS, RESPONSES)
    plain, packing = (new_reward_model(str(tiny_model), 0, seed=0).eval() for _ in range(2))
    assert pack_prefixes(packing) is None
    mask = sequences.responses.mask
    with torch.no_grad():
        expected, found = (features(m, sequences) for m in (plain, packing))
    assert found.shape == (3, 4, plain.config.hidden_size)
    torch.testing.assert_close(found[mask], expected[mask], rtol=0, atol=2e-5)


def test_without_much_in_common_rows_stay_padded(packing_model: PreTrainedModel) -> None:
    sequences = sequences_of([[5, 6, 7, 8], [9, 6, 7, 8]], [[20, 21], [22, 23]])
    assert pack_if_shorter(packing_model, sequences.joined, sequences.responses.mask) is None


def test_the_same_model_samples_from_padded_batches(
    packing_model: PreTrainedModel, tiny_model: Path
) -> None:
    tokenizer = load_tokenizer(str(tiny_model))
    found = []
    for model in (load_causal_lm(str(tiny_model)).eval(), packing_model):
        sampler = GenerateSampler(start("fp32", 0))
        sampling = Sampling(temperature=1.0, max_new_tokens=6, seed=0)
        found.append(sample_responses(sampler, model, tokenizer, PROMPTS, sampling, 3))
    assert found[0] == found[1]
