"""A GPU works ahead: neither training nor scoring waits for it in a forward pass."""

from dataclasses import replace
from itertools import groupby
from pathlib import Path

import pytest
import torch

from reward.data.groups import Group, Pair, Pointwise, TieredRanking
from reward.data.thresholds import Thresholds
from reward.losses import Objective
from reward.model.module import RewardModule
from reward.scoring.scorer import load_scorer
from reward.training.step import TrainState, score_groups, take_step
from rlhf.modeling.attention.shared_prefix import share_prompts
from rlhf.modeling.models import new_reward_model, save_model
from rlhf.modeling.tokens import load_tokenizer, pad_right
from rlhf.parallel.distributed import start
from tests.reward.conftest import stored
from tests.rlhf.fake_device import DEVICE, numbers, on_device, use_device, waiting

GROUPS = [
    Group(
        str(number),
        (5, 6, 7 + number),
        ((20, 21, 2), (22 + number, 2), (23, 2)),
        (Pair(0, 1, 1.0, 1, "a", 1.0), Pair(2, 1, 0.5, 1, "a", 1.0)),
        rankings=(TieredRanking(((0,), (1, 2)), "a"),),
    )
    for number in range(3)
]
THUMBS = (Pointwise(0, True, "b", "thumbs"), Pointwise(1, False, "b", "thumbs"))
GROUPS.append(replace(GROUPS[0], prompt_id="3", pairs=(), rankings=(), pointwise=THUMBS))


@pytest.fixture(scope="module")
def scoring_model(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("waiting") / "model"
    save_model(new_reward_model(str(tiny_model), 0, 3), load_tokenizer(str(tiny_model)), folder)
    return folder


def build_state(folder: Path, loss: str, tokens: int, *, shared: bool = True) -> TrainState:
    classifier = new_reward_model(str(folder), 0, seed=1)
    assert not shared or share_prompts(classifier) is None
    module = RewardModule(classifier)
    return TrainState(
        start("fp32", 0),
        module,
        torch.optim.SGD(module.parameters(), lr=0.1),
        0,
        tokens,
        Objective(loss, 0.1, 0.1),
        shared=shared,
        thresholds=Thresholds(stored(GROUPS)),
    )


@pytest.mark.parametrize("loss", ["bradley_terry", "plackett_luce", "regression"])
def test_a_training_step_waits_after_its_forward_passes(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch, loss: str
) -> None:
    expected = take_step(build_state(tiny_model, loss, 1), GROUPS, 0.1)
    state = build_state(tiny_model, loss, 1)
    accelerator = use_device(monkeypatch)
    on_device(state.module)
    state.optimizer.param_groups[0]["params"] = list(state.module.parameters())
    with waiting() as waits:
        state.module.register_forward_hook(lambda *_: waits.append("forward"))
        row = take_step(replace(state, accelerator=accelerator), GROUPS, 0.1)
    assert row == pytest.approx(expected, rel=1e-5)
    # thumbs: the batch is scored first; then comes training
    assert waits.count("forward") == 2 * len(GROUPS)
    assert [is_forward for is_forward, _ in groupby(waits, "forward".__eq__)] == [True, False] * 2


@pytest.mark.parametrize("shared", [True, False])
def test_scoring_waits_after_its_forward_passes(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch, shared: bool
) -> None:
    state = build_state(tiny_model, "bradley_terry", 1, shared=shared)
    expected = score_groups(state, GROUPS)
    accelerator = use_device(monkeypatch)
    on_device(state.module)
    with waiting() as waits:
        state.module.register_forward_hook(lambda *_: waits.append("forward"))
        found = score_groups(replace(state, accelerator=accelerator), GROUPS)
    for mine, other in zip(found, expected, strict=True):
        assert mine == pytest.approx(other, abs=1e-6)
    if not shared:  # transformers looks for packed sequences in the positions of every pass
        waits = waits[2 * len(GROUPS) - 1 :]
    assert [is_forward for is_forward, _ in groupby(waits, "forward".__eq__)] == [True, False]


@pytest.mark.parametrize("alike", [True, False])
def test_a_reward_model_scores_a_rollout_without_waiting(
    scoring_model: Path, monkeypatch: pytest.MonkeyPatch, alike: bool
) -> None:
    first = [5, 6, 7, 8, 9] if alike else []
    rows = [[*first, 20, 2], [*first, 21], [*first, 22, 2]]
    expected = load_scorer(str(scoring_model), start("fp32", 0))(pad_right(rows, 0), 10)
    scorer = load_scorer(str(scoring_model), start("fp32", 0))
    accelerator = use_device(monkeypatch)
    [(module, _)] = scorer._members
    on_device(module)
    scorer._accelerator = accelerator
    with waiting() as waits:
        batch = pad_right(rows, 0).to(DEVICE)
        module.register_forward_hook(lambda *_: waits.append("forward"))
        found = scorer(batch, 10)
    # the rollout comes to main memory once
    assert waits[:2] == ["aten._to_copy.default from the device"] * 2
    assert waits[2:] == ["forward"] * (2 if alike else 1)
    torch.testing.assert_close(numbers(found), expected, rtol=0, atol=1e-6)
