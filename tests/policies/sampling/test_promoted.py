"""Live mode's model of a loop changes with its promotions."""

from pathlib import Path

import pytest
from accelerate.state import AcceleratorState

from policies.sampling.promoted import PromotedModel
from rlhf.errors import InputError
from rlhf.records.schema import Message, Prompt, Sampling
from rlhf.run.loops.promotion import promote, roll_back
from tests.conftest import build_tiny_model
from tests.rlhf.run.loops.folders import make_loop, make_round

PROMPT = Prompt.create((Message(role="user", content="How?"),), "train", "test")


@pytest.fixture(autouse=True)
def _own_precision():
    AcceleratorState._reset_state(True)  # other tests choose another precision
    yield
    AcceleratorState._reset_state(True)


def answered_by(model: PromotedModel) -> str:
    [response] = model.answer(PROMPT, ["r"], 0, lambda place, text: True)
    return response.model


def test_the_next_answer_is_that_of_the_policy_promoted_meanwhile(
    tmp_path: Path, tiny_model: Path
) -> None:
    out = tmp_path / "loop"
    model = PromotedModel(out, Sampling(max_new_tokens=2), {}, str(tiny_model))  # not started yet
    assert answered_by(model) == str(tiny_model)
    make_loop(out, str(tiny_model))
    policy = build_tiny_model(make_round(out, 0) / "ppo" / "policy", seed=7)
    promote(out, 0, "lea")
    assert answered_by(model) == str(policy)
    loaded = model._model()
    assert model._model() is loaded  # loaded once
    roll_back(out, "lea")
    assert answered_by(model) == str(tiny_model)


def test_a_policy_that_cannot_be_loaded_is_tried_again(tmp_path: Path, tiny_model: Path) -> None:
    out = make_loop(tmp_path / "loop", str(tiny_model))
    model = PromotedModel(out, Sampling(max_new_tokens=2), {})
    folder = make_round(out, 0) / "ppo" / "policy"
    promote(out, 0, "lea")
    with pytest.raises(InputError, match="is not a model"):
        answered_by(model)
    build_tiny_model(folder, seed=7)
    assert answered_by(model) == str(folder)
