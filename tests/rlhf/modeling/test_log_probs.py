from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.utils._python_dispatch import TorchDispatchMode

from policies.reference.audit import score_responses
from rlhf.modeling.attention.packing import pack_prefixes
from rlhf.modeling.log_probs import (
    Sequences,
    batches_by_prompt,
    reference_log_probs,
    response_log_probs,
)
from rlhf.modeling.models import load_causal_lm
from rlhf.modeling.tokens import TokenBatch, load_tokenizer, pad_left, pad_right
from rlhf.parallel.distributed import start
from tests.rlhf.modeling.padded import response_logits

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
        normalizer = np.log(np.exp(shifted - top[:, None]).sum(axis=1)) + top
        expected.append(shifted[np.arange(len(response)), response] - normalizer)
    return expected


def test_padded_batches_agree_with_single_sequences(tiny_model: Path) -> None:
    model, tokenizer = load_causal_lm(str(tiny_model)).eval(), load_tokenizer(str(tiny_model))
    for temperature in (1.0, 0.7):
        scored = score_responses(
            start("fp32", 0), model, tokenizer, PROMPTS, RESPONSES, temperature
        )
        for mine, theirs in zip(scored, one_by_one(model, temperature), strict=True):
            np.testing.assert_allclose(mine.numpy(), theirs, atol=2e-5)


def test_padding_is_zero_and_entropy_is_that_of_the_whole_distribution(tiny_model: Path) -> None:
    model = load_causal_lm(str(tiny_model)).eval()
    sequences = Sequences(pad_left(PROMPTS, 0), pad_right(RESPONSES, 0))
    with torch.no_grad():
        logits = response_logits(model, sequences)
        found = response_log_probs(model, sequences, 1.0)
    padding = ~sequences.responses.mask
    assert (found.first(sequences.responses.mask)[padding] == 0).all()
    p = np.exp(logits[0, 0].double().numpy())
    p /= p.sum()
    np.testing.assert_allclose(found.entropy[0, 0].item(), -(p * np.log(p)).sum(), rtol=1e-5)


def test_responses_to_one_prompt_share_a_batch() -> None:
    prompts = [[1, 2], [3], [1, 2], [3], [4, 5, 6]]
    lengths = [9, 4, 2, 5, 6]  # the longest to each prompt: 9, 5 and 6
    assert batches_by_prompt(prompts, lengths, 2) == [[1, 3], [4, 2], [0]]


def test_trimming_drops_only_columns_of_padding() -> None:
    sequences = Sequences(pad_left(PROMPTS, 0), pad_right(RESPONSES, 0))
    trimmed = sequences.rows(torch.tensor([0, 2])).trimmed()
    assert trimmed.prompts.ids.tolist() == [[5, 6, 7], [0, 0, 13]]
    assert trimmed.responses.ids.tolist() == [[20, 21, 22, 2], [24, 25, 26, 0]]
    assert isinstance(trimmed.prompts, TokenBatch)


class WidestResult(TorchDispatchMode):
    """Notes how many rows of the vocabulary's width the results of operations have."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.vocabulary = vocabulary
        self.rows: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and result.shape[-1:] == (self.vocabulary,):
            self.rows.add(result.numel() // self.vocabulary)
        return result


class Capped(nn.Module):
    """A model that caps its logits after the output layer, as Gemma 2 does."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model, self.config = model, model.config
        self.get_output_embeddings = model.get_output_embeddings

    def forward(self, **inputs: Any) -> Any:
        outputs = self.model(**inputs)
        outputs.logits = 0.2 * torch.tanh(outputs.logits / 0.2)
        return outputs


def test_the_output_layer_of_a_packed_row_reads_no_padding(tiny_model: Path) -> None:
    model = load_causal_lm(str(tiny_model)).eval()
    assert pack_prefixes(model) is None
    prompt = [5, 6, 7, 8, 9, 10]
    responses = [[20, 21, 22, 23, 24], [25], [26, 2]]
    sequences = Sequences.of([prompt] * 3, responses, 0)
    read = []
    model.get_output_embeddings().register_forward_pre_hook(
        lambda _, hidden: read.append(hidden[0].numel() // hidden[0].shape[-1])
    )
    with torch.no_grad():
        found = response_log_probs(model, sequences, 1.0)
        stored = reference_log_probs(model, sequences, 1.0)
    assert read == [5 + 1 + 2] * 2
    mask = sequences.responses.mask
    alone = [response_log_probs(model, Sequences.of([prompt], [one], 0), 1.0) for one in responses]
    expected = torch.cat([one.log_probs.flatten() for one in alone])
    torch.testing.assert_close(found.log_probs[:, :, 0][mask], expected, rtol=0, atol=2e-5)
    torch.testing.assert_close(stored.log_probs[mask], expected, rtol=0, atol=2e-5)
    assert not found.log_probs[~mask].any()


def test_a_model_that_caps_its_logits_keeps_its_own(tiny_model: Path) -> None:
    model = Capped(load_causal_lm(str(tiny_model)).eval())
    sequences = Sequences(pad_left(PROMPTS, 0), pad_right(RESPONSES, 0))
    logits = response_logits(model, sequences)
    expected = (logits / 0.7).log_softmax(2).gather(2, sequences.responses.ids[:, :, None])
    for _ in range(2):  # found out in the first forward, known in the second
        found = response_log_probs(model, sequences, 0.7)
        torch.testing.assert_close(found.log_probs, expected, rtol=1e-5, atol=1e-5)


def test_no_logits_of_the_whole_vocabulary_are_kept(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither for a forward nor for its gradient does a tensor of N × V come into being."""
    monkeypatch.setattr("rlhf.modeling.logits.blocks.SMALLEST_BLOCK", 16)
    monkeypatch.setattr("rlhf.modeling.logits.blocks.BLOCK_ELEMENTS", 1)
    model = load_causal_lm(str(tiny_model)).eval()
    sequences = Sequences(pad_left(PROMPTS, 0), pad_right(RESPONSES, 0))
    with WidestResult(model.config.vocab_size) as found:
        response_log_probs(model, sequences, 0.7).log_probs.sum().backward()
    assert not found.rows
    with WidestResult(model.config.vocab_size) as found:
        response_logits(model, sequences)
    assert 12 in found.rows


@pytest.fixture
def process_group(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("process_group")
def test_a_sharded_model_keeps_no_logits_either(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between forwards the weights of the output layer are a part; within one they are whole."""
    monkeypatch.setattr("rlhf.modeling.logits.blocks.SMALLEST_BLOCK", 16)
    monkeypatch.setattr("rlhf.modeling.logits.blocks.BLOCK_ELEMENTS", 1)
    sequences = Sequences(pad_left(PROMPTS, 0), pad_right(RESPONSES, 0))
    model = load_causal_lm(str(tiny_model)).eval()
    expected = reference_log_probs(model, sequences, 0.7)
    fully_shard(model)
    with WidestResult(model.config.vocab_size) as widest:
        found = reference_log_probs(model, sequences, 0.7)
    assert 12 not in widest.rows
    torch.testing.assert_close(found.log_probs, expected.log_probs)


def test_the_most_likely_tokens_and_the_log_sum_exp_give_the_logits_back(tiny_model: Path) -> None:
    model = load_causal_lm(str(tiny_model)).eval()
    sequences = Sequences(pad_left(PROMPTS, 0), pad_right(RESPONSES, 0))
    found = reference_log_probs(model, sequences, 0.7, top_k=5)
    with torch.no_grad():
        z = response_logits(model, sequences).double().numpy()
    order = np.argsort(-z, axis=2)[:, :, :5]
    np.testing.assert_array_equal(found.top_ids.numpy(), order)
    logits = 0.7 * (found.top_log_probs + found.log_sum_exp[:, :, None])
    np.testing.assert_allclose(logits.numpy(), np.take_along_axis(z, order, axis=2), atol=1e-5)
    for temperature, log_probs in ((0.7, found.log_probs), (1.0, found.log_probs_at_1)):
        expected = response_log_probs(model, sequences, temperature).log_probs[:, :, 0]
        torch.testing.assert_close(log_probs, expected, rtol=1e-5, atol=1e-6)
