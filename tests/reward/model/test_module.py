import pytest
import torch

from reward.model.module import RewardModule
from rlhf.modeling.attention.layout import TrunkInputs, last_tokens
from rlhf.modeling.tokens import pad_right
from tests.reward.model.classifiers import FAMILIES, build_classifier


@pytest.mark.parametrize("family", FAMILIES)
def test_padded_rows_score_as_transformers_scores_each_alone(family):
    classifier = build_classifier(family)
    sequences = [[5, 6, 7, 8, 9], [10, 11], [12, 13, 14]]
    batch = pad_right(sequences, 0)
    with torch.no_grad():
        got = RewardModule(classifier)(TrunkInputs(batch.ids, last_tokens(batch.mask.sum(1), 5)))
        expected = [classifier(torch.tensor([s])).logits.item() for s in sequences]
    assert got.tolist() == pytest.approx(expected, abs=1e-6)


def test_a_response_that_ends_with_the_pad_token_is_read_there():
    classifier = build_classifier("llama")
    sequences = [[5, 6, 0], [5, 6]]
    batch = pad_right(sequences, 0)
    with torch.no_grad():
        with_pad, without = RewardModule(classifier)(
            TrunkInputs(batch.ids, last_tokens(batch.mask.sum(1), 3))
        )
        blind = classifier(batch.ids).logits[:, 0]
    assert blind[0].item() == pytest.approx(
        blind[1].item(), abs=1e-7
    )  # transformers cannot tell the two apart
    assert abs(with_pad - without) > 1e-4


def test_the_head_runs_in_float32_under_autocast():
    module = RewardModule(build_classifier("llama"))
    ids = torch.tensor([[5, 6, 7]])
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        reward = module(TrunkInputs(ids, torch.tensor([2])))
        hidden = module.classifier.base_model(input_ids=ids).last_hidden_state[:, -1].float()
    assert reward.dtype == torch.float32
    exact = (hidden @ module.classifier.score.weight.T)[:, 0]
    assert reward.tolist() == pytest.approx(exact.tolist(), abs=1e-7)
