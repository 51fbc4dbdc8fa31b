"""Weights of annotators: what they do to the gradient, to a whole training, and to its report."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from transformers import PreTrainedModel

from reward.data.annotators import AnnotatorWeights, weigh_annotators
from reward.data.batches import to_judgments, total_weight
from reward.data.groups import Group, Pair, TieredRanking
from reward.losses import Objective, sum_of_losses
from reward.model.module import RewardModule
from reward.training.step import TrainState, take_step
from reward.training.train import train_reward
from rlhf.modeling.models import new_reward_model
from rlhf.records.fingerprints import file_hash
from rlhf.records.schema import RankedPrompt
from rlhf.run.rundir import RunDir
from tests.reward.conftest import build_record, export, settings_for

LOSSES = ["bradley_terry", "plackett_luce", "regression"]
RESPONSES = ((20, 21, 22, 2), (23, 24, 2))


def judged(prompt: int, *weights: float) -> Group:
    """A prompt of two responses that were ranked once by an annotator of each weight."""
    return Group(
        str(prompt),
        (5, 6, prompt),
        RESPONSES,
        tuple(Pair(0, 1, 1.0, 0, f"a{n}", weight) for n, weight in enumerate(weights)),
        tuple(TieredRanking(((0,), (1,)), f"a{n}", weight) for n, weight in enumerate(weights)),
    )


def gradient(
    folder: Path, groups: Sequence[Group], objective: Objective, tokens: int = 400
) -> torch.Tensor:
    """What one step on these groups, the whole batch, goes along."""
    model: PreTrainedModel = new_reward_model(str(folder), 0, seed=1)
    module = RewardModule(model)
    before = [value.detach().clone() for value in module.parameters()]
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
    accelerator = Accelerator(cpu=True, mixed_precision="no")
    state = TrainState(accelerator, module, optimizer, 0, tokens, objective, shared=False)
    norm = take_step(state, groups, 1.0)["grad_norm"]
    moved = [(old - new).flatten() for old, new in zip(before, module.parameters(), strict=True)]
    return torch.cat(moved).detach() * max(1.0, norm)  # gradients are clipped to a norm of 1


@pytest.mark.parametrize("loss", LOSSES)
def test_where_each_prompt_has_one_annotator_a_tenth_of_the_weight_is_a_tenth_of_the_gradient(
    tiny_model, loss
):
    objective = Objective(loss, centering=0.1)
    first, second = (gradient(tiny_model, [judged(n, 1.0)], objective) for n in (30, 31))
    assert (first - second).abs().max() > 1e-2
    for tokens in (400, 1):  # all prompts in one forward pass, or each in its own
        found = gradient(tiny_model, [judged(30, 1.0), judged(31, 0.1)], objective, tokens)
        torch.testing.assert_close(found, (first + 0.1 * second) / 1.1, atol=2e-5, rtol=1e-4)


def test_weights_count_beside_each_other_alone(tiny_model):
    one, tenth = (
        gradient(tiny_model, [judged(30, w, w / 2), judged(31, w)], Objective()) for w in (1.0, 0.1)
    )
    torch.testing.assert_close(tenth, one, atol=2e-5, rtol=1e-4)


def test_a_judgment_counts_its_weight_whoever_else_judged_the_prompt():
    # each of two annotators has half of a prompt: the second's quarter of a half is an eighth
    groups = [judged(30, 1.0, 0.25), judged(31, 1.0)]
    rewards = torch.tensor([0.0, 1.0, 2.0, 0.0], requires_grad=True)
    judgments = to_judgments(groups, "bradley_terry", rewards.device)
    sum_of_losses(Objective(), judgments, rewards).backward()
    assert total_weight(groups, "bradley_terry") == 0.625 + 1
    lost, won = 0.7310585786300049, 0.11920292202211755  # σ(1), σ(−2)
    assert rewards.grad.tolist() == pytest.approx([-0.625 * lost, 0.625 * lost, -won, won])


def by(name: str, record: RankedPrompt) -> RankedPrompt:
    return replace(record, rankings=(replace(record.rankings[0], annotator=name),))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """An export in which ann and eve ranked a prompt each in turn, and one with ann's alone."""
    root = tmp_path_factory.mktemp("weights")
    records = [
        by(("eve", "ann")[n % 2], build_record(n, "test" if n % 8 < 2 else "train"))
        for n in range(24)
    ]
    return export(root / "both", records), export(root / "ann", records[1::2])


def test_a_weight_of_0_removes_an_annotator(folders, tiny_model, tmp_path):
    both, ann = folders
    report = train_reward(
        settings_for(both, tiny_model, tmp_path / "0", annotator_weights={"eve": 0.0})
    )
    train_reward(settings_for(ann, tiny_model, tmp_path / "ann"))
    files = [tmp_path / name / "model/model.safetensors" for name in ("0", "ann")]
    assert file_hash(files[0]) == file_hash(files[1])
    pairs = 9 * 6  # ann's training prompts, of four responses
    assert report["annotators"] == {
        "ann": {"weight": 1.0, "judgements": pairs, "share": 1.0},
        "eve": {"weight": 0.0, "judgements": 0, "share": 0.0},
    }


def test_a_weight_changes_a_training_in_which_each_prompt_has_one_annotator(
    folders, tiny_model, tmp_path
):
    both, _ = folders
    weights = {"ones": {"ann": 1.0, "eve": 1.0}, "tenth": {"eve": 0.1}}
    hashes = {}
    for name, given in weights.items():
        settings = settings_for(both, tiny_model, tmp_path / name, annotator_weights=given)
        report = train_reward(settings)
        hashes[name] = file_hash(tmp_path / name / "model/model.safetensors")
    assert hashes["ones"] != hashes["tenth"]
    assert report["annotators"]["eve"] == {"weight": 0.1, "judgements": 54, "share": 0.0909}
    page = RunDir(tmp_path / "tenth").report_html.read_text()
    assert '<th scope="row">eve</th><td>0.1</td><td>54</td><td>9.1 %</td>' in page


def test_shares_by_hand():
    # of prompt 1 ann has 1/2 and bob 1/4; of prompt 2 bob has 1/2: of 5/4, ann 2/5 and bob 3/5
    def named(prompt: int, **weights: float) -> Group:
        ranks = tuple(TieredRanking(((0,), (1,), (2,)), who, w) for who, w in weights.items())
        pairs = tuple(
            Pair(a, b, 1.0, 0, who, w)
            for who, w in weights.items()
            for a, b in ((0, 1), (0, 2), (1, 2))
        )
        return Group(str(prompt), (5,), ((6,), (7,), (8,)), pairs, ranks)

    groups = [named(1, ann=1.0, bob=0.5), named(2, bob=0.5)]
    found = weigh_annotators(groups, "bradley_terry", AnnotatorWeights({"bob": 0.5, "eve": 0.0}))
    assert found == {
        "ann": {"weight": 1.0, "judgements": 3, "share": 0.4},
        "bob": {"weight": 0.5, "judgements": 6, "share": 0.6},
        "eve": {"weight": 0.0, "judgements": 0, "share": 0.0},
    }
    whole = weigh_annotators(groups, "plackett_luce", AnnotatorWeights({"bob": 0.5}))
    assert whole["bob"] == {"weight": 0.5, "judgements": 2, "share": 0.6}
