"""Batches under a token budget: what is in them, and that they change nothing but speed."""

from pathlib import Path

import pytest
import torch

from policies.ppo.batches import PaddingMap, equalize_batch_count, split_by_length
from rlhf.modeling.log_probs import Sequences, response_log_probs
from rlhf.modeling.models import load_causal_lm
from rlhf.modeling.tokens import pad_left, pad_right
from rlhf.parallel.distributed import start
from tests.policies.ppo.updates import PROMPTS, RESPONSES, build_rows, weights_after_update

CPU = torch.device("cpu")


def test_batches_hold_as_many_rows_as_the_budget_takes() -> None:
    lengths = torch.tensor([4, 1, 9, 2, 3])
    parts = split_by_length(lengths, 0, 8)
    # sorted 1 2 3 | 4 | 9: three rows of 3 are 9 tokens, two of 4 are 8, and 9 is alone
    assert [lengths[part].tolist() for part in parts] == [[1, 2], [3, 4], [9]]
    assert [len(part) for part in split_by_length(lengths, 2, None)] == [2, 2, 1]


class ThreeProcesses:
    """What a process sees of a group whose processes have one, two and four batches."""

    device = torch.device("cpu")

    def gather(self, mine: torch.Tensor) -> torch.Tensor:
        return torch.tensor([1, int(mine), 4])


def test_all_processes_have_as_many_batches() -> None:
    parts = [torch.tensor([3, 1, 2]), torch.tensor([0])]
    found = equalize_batch_count(ThreeProcesses(), parts)
    assert [part.tolist() for part in found] == [[3], [1], [2], [0]]


def test_shifting_to_a_common_end_leaves_hardly_any_padding() -> None:
    both = Sequences(pad_left([[1, 2, 3, 4], [5]], 0), pad_right([[6], [7, 8, 9]], 0))
    shifted = both.end_aligned()
    assert shifted.joined.ids.tolist() == [[1, 2, 3, 4, 6], [0, 5, 7, 8, 9]]
    assert shifted.joined.mask.tolist() == [[True] * 5, [False, True, True, True, True]]
    assert shifted.responses.ids.tolist() == [[3, 4, 6], [7, 8, 9]]
    assert shifted.responses.mask.tolist() == [[False, False, True], [True] * 3]
    assert both.joined.ids.shape[1] == 7
    kept = shifted.rows(torch.tensor([1]))
    assert kept.joined.mask.tolist() == [[False, True, True, True, True]]


def test_values_follow_their_tokens() -> None:
    mask = torch.tensor([[True, False, False], [True, True, True]])
    other = torch.tensor([[False, False, False, True], [False, True, True, True]])
    values = torch.tensor([[1.0, 9.0, 9.0], [2.0, 3.0, 4.0]])
    assert PaddingMap.between(mask, other, CPU)(values).tolist() == [[0, 0, 0, 1], [0, 2, 3, 4]]
    swapped = PaddingMap.between(mask, other.flip(0), CPU, torch.tensor([1, 0]))
    assert swapped(values).tolist() == [[0, 2, 3, 4], [0, 0, 0, 1]]
    pairs = torch.stack([values, -values], dim=2)
    assert swapped(pairs)[1].tolist() == [[0, 0], [0, 0], [0, 0], [1, -1]]
    assert swapped(mask).dtype == torch.bool


def test_log_probs_do_not_depend_on_the_padding(tiny_model: Path) -> None:
    model = load_causal_lm(str(tiny_model))
    plain = Sequences(pad_left(PROMPTS, 0), pad_right(RESPONSES, 0))
    found = []
    for part in (plain, plain.end_aligned()):
        with torch.no_grad():
            log_probs = response_log_probs(model, part, 0.7).first(part.responses.mask)
        refit = PaddingMap.between(part.responses.mask, plain.responses.mask, CPU)
        found.append(refit(log_probs))
    torch.testing.assert_close(found[1], found[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("tokens", [1, 12, 30, 1000])
def test_the_token_budget_changes_nothing(tiny_model: Path, tokens: int) -> None:
    expected, statistics = weights_after_update(tiny_model, build_rows())
    weights, same = weights_after_update(tiny_model, build_rows(), micro_tokens=tokens)
    for name, value in expected.items():
        torch.testing.assert_close(weights[name], value, rtol=1e-5, atol=1e-6)
    assert same == pytest.approx(statistics, rel=1e-4)


def test_one_process_splits_as_it_likes() -> None:
    parts = [torch.tensor([0, 1])]
    assert equalize_batch_count(start("fp32", 0), parts) == parts
