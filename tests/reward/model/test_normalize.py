import pytest
import torch
from accelerate import Accelerator
from torch import nn

from reward.data.annotators import AnnotatorWeights
from reward.data.groups import Group
from reward.data.loading import Data
from reward.losses import Objective
from reward.model.normalize import fit_scale, fold_into_head
from reward.training.save import measure_scale
from reward.training.step import TrainState
from rlhf.errors import GuardError
from tests.reward.conftest import stored


def test_scale_by_hand():
    scale = fit_scale([1.0, 3.0], "reference outputs")  # mean 2, standard deviation 1
    assert (scale.gain, scale.bias, scale.responses) == (1.0, -2.0, 2)
    scale = fit_scale([0.0, 10.0], "reference outputs")  # mean 5, standard deviation 5
    assert (scale.gain, scale.bias) == (0.2, -1.0)


@pytest.mark.parametrize("rewards", [[1.0, 1.0], [2.0], [float("nan"), 1.0]])
def test_rewards_that_do_not_differ_stop_the_run(rewards):
    with pytest.raises(GuardError, match="the same reward"):
        fit_scale(rewards, "held-out ranked responses")


def test_gain_goes_into_weight_and_bias_of_the_head_only():
    state = {"score.weight": torch.ones(1, 2), "score.bias": torch.ones(1), "x": torch.ones(1)}
    folded = fold_into_head(state, "score", 3.0)
    assert folded["score.weight"].tolist() == [[3.0, 3.0]]
    assert folded["score.bias"].tolist() == [3.0]
    assert folded["x"].tolist() == [1.0]
    assert state["score.weight"].tolist() == [[1.0, 1.0]]


@pytest.mark.parametrize(
    ("outputs", "fitted_on"),
    [
        (0, "held-out ranked responses"),
        (1, "held-out ranked responses (the original model has only 1 in the dataset)"),
        (31, "held-out ranked responses (the original model has only 31 in the dataset)"),
        (32, "the original model's responses in the dataset"),
    ],
)
def test_few_reference_outputs_set_no_scale(outputs, fitted_on):
    class LastToken(nn.Module):
        """Its reward is the last token."""

        def forward(self, inputs):
            return inputs.ids.flatten()[inputs.reads].float()

    accelerator = Accelerator(mixed_precision="no")
    unused = torch.optim.SGD([torch.zeros(1)])
    state = TrainState(accelerator, LastToken(), unused, 0, 2048, Objective(), shared=False)
    # rewards 0 and 1 in turn: mean 1/2, deviation 1/2
    reference = [Group(str(number), (5,), ((number % 2,),)) for number in range(outputs)]
    data = Data(stored([]), [], [], reference, "test prompts", {}, AnnotatorWeights({}))
    scale, normalized = measure_scale(state, data, [[1.0, 3.0]])  # mean 2, deviation 1
    assert scale.fitted_on == fitted_on
    if outputs < 32:
        assert (scale.gain, scale.bias, scale.responses) == (1.0, -2.0, 2)
        assert normalized == [-1.0, 1.0]
    else:
        assert (scale.gain, scale.bias, scale.responses) == (2.0, -1.0, 32)
        assert normalized == [-1.0, 1.0] * 16
