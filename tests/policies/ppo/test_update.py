"""The update on a tiny model: what must not change the gradient does not, and what must, does."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from policies.ppo.models.actor_critic import PolicyAndCritic
from policies.ppo.setting_groups import KLSettings
from policies.ppo.train import update
from policies.ppo.update import Learner, StepData, concatenate, reference_batch, split_minibatches
from policies.reference.store import ReferenceRow, TopTokens
from rlhf.modeling.log_probs import Sequences
from rlhf.modeling.models import load_causal_lm, new_reward_model
from rlhf.modeling.tokens import TokenBatch, pad_left, pad_right
from rlhf.parallel.distributed import start
from rlhf.parallel.gathered_model import GatheredModel
from tests.policies.ppo.updates import (
    PROMPTS,
    RESPONSES,
    SETTINGS,
    build_experience,
    build_model,
    build_rows,
    weights_after_update,
)
from tests.settings import changed


@pytest.mark.parametrize("micro_tokens", [None, 20])
def test_a_frozen_critic_is_not_read_again(tiny_model: Path, micro_tokens: int | None) -> None:
    experience = build_experience()
    assert not build_model(tiny_model).reads_frozen_features
    models = []
    for _ in range(2):
        critic = new_reward_model(str(tiny_model), 0, seed=1)
        critic.base_model.requires_grad_(False)
        models.append(PolicyAndCritic(load_causal_lm(str(tiny_model)), critic, value_bias=0.25))
        assert models[-1].reads_frozen_features
    frozen, again = models
    with torch.no_grad():
        features = frozen.critic_features(experience.sequences)
    reads = []
    frozen.critic.base_model.register_forward_hook(lambda *_: reads.append(1))
    heads = []
    for model, known in ((frozen, features), (again, None)):
        trained = [one for one in model.parameters() if one.requires_grad]
        settings = changed(SETTINGS, micro_batch_size=2, micro_tokens=micro_tokens)
        optimizer = torch.optim.SGD(trained, lr=0.1)
        references = reference_batch(build_rows(), 0, torch.device("cpu"))
        data = StepData(replace(experience, critic_features=known), references)
        learner = Learner(
            start("fp32", 0), model, optimizer, settings, 1.0, settings.kl.coefficient
        )
        update(learner, data, torch.Generator().manual_seed(0))
        heads.append(model.critic.score.weight.detach().clone())
    assert not reads
    torch.testing.assert_close(*heads)
    assert not torch.equal(heads[0], build_model(tiny_model).critic.score.weight)


def test_a_copy_to_sample_from_does_not_take_a_trained_critic_for_a_frozen_one(
    tiny_model: Path,
) -> None:
    model_copy = GatheredModel(build_model(tiny_model), torch.device("cpu"), is_copy=True)
    assert all(one.requires_grad for one in model_copy.module.parameters())
    assert not model_copy.module.reads_frozen_features


@pytest.mark.parametrize("size", [1, 3, 16])
def test_the_micro_batch_size_changes_nothing(tiny_model: Path, size: int) -> None:
    expected, statistics = weights_after_update(tiny_model, build_rows(), micro_batch_size=2)
    weights, same_statistics = weights_after_update(tiny_model, build_rows(), micro_batch_size=size)
    for name, value in expected.items():
        torch.testing.assert_close(weights[name], value, rtol=1e-5, atol=1e-6)
    assert same_statistics == pytest.approx(statistics, rel=1e-4)


def test_the_stored_log_probs_and_the_coefficient_are_used(tiny_model: Path) -> None:
    base, statistics = weights_after_update(tiny_model, build_rows())
    corrupted, changed = weights_after_update(tiny_model, build_rows(shift=-2.0))
    assert changed["kl/forward_k3_per_token"] > 2 * statistics["kl/forward_k3_per_token"]
    weaker, _ = weights_after_update(tiny_model, build_rows(), kl=KLSettings(coefficient=0.01))
    name = "policy.model.embed_tokens.weight"
    assert not torch.allclose(base[name], corrupted[name], atol=1e-5)
    assert not torch.allclose(base[name], weaker[name], atol=1e-5)


def test_the_order_of_the_store_changes_nothing(tiny_model: Path) -> None:
    expected, _ = weights_after_update(tiny_model, build_rows())
    weights, _ = weights_after_update(tiny_model, build_rows()[::-1])
    for name, value in expected.items():
        torch.testing.assert_close(weights[name], value, rtol=1e-5, atol=1e-6)


def test_without_stored_rows_the_kl_term_is_absent(tiny_model: Path) -> None:
    _, statistics = weights_after_update(tiny_model, [], kl=KLSettings(source="none"))
    assert not any(name.startswith("kl/") for name in statistics)


def test_the_forward_kl_statistic_is_the_k3_formula(tiny_model: Path) -> None:
    rows = build_rows()
    model = load_causal_lm(str(tiny_model))
    total = tokens = 0.0
    for row in rows:
        logits = model(torch.tensor([row.prompt_ids + row.response_ids])).logits[0].double()
        log_probs = logits.log_softmax(-1)[len(row.prompt_ids) - 1 : -1]
        ours = log_probs[torch.arange(len(row.response_ids)), torch.tensor(row.response_ids)]
        log_ratio = ours - torch.tensor(row.log_probs)
        total += (log_ratio.exp() - 1 - log_ratio).sum().item()
        tokens += len(row.response_ids)
    _, statistics = weights_after_update(tiny_model, rows)
    assert statistics["kl/forward_k3_per_token"] == pytest.approx(total / tokens, rel=1e-5)
    assert statistics["kl/clamped_fraction"] == 0.0


def test_the_share_of_clamped_log_ratios_is_reported(tiny_model: Path) -> None:
    rows = build_rows()
    rows[0].log_probs[1] = -100.0
    rows[1].log_probs[0] = rows[2].log_probs[0] = 90.0
    tokens = sum(len(row.response_ids) for row in rows)
    _, statistics = weights_after_update(tiny_model, rows)
    assert statistics["kl/clamped_fraction"] == pytest.approx(1 / tokens)
    assert statistics["kl/abandoned_fraction"] == pytest.approx(2 / tokens)
    kl = replace(SETTINGS.kl, estimator="k1")
    _, statistics = weights_after_update(tiny_model, rows, kl=kl)
    assert "kl/clamped_fraction" not in statistics
    assert statistics["kl/abandoned_fraction"] == pytest.approx(2 / tokens)


def test_an_update_that_moves_too_far_stops(tiny_model: Path) -> None:
    before = build_model(tiny_model).state_dict()
    weights, statistics = weights_after_update(tiny_model, build_rows(), max_approx_kl=1e-9)
    assert statistics["updates"] == 0
    assert all(torch.equal(weights[name], value) for name, value in before.items())


def test_minibatches_use_every_episode_and_row_once() -> None:
    tokens, row_tokens = torch.arange(8), torch.ones(3, dtype=torch.long)
    parts = split_minibatches(tokens, row_tokens, 4, torch.Generator().manual_seed(0), texts=5)
    assert [len(part.episodes) for part in parts] == [2, 2, 2, 2]
    assert sorted(torch.cat([part.episodes for part in parts]).tolist()) == list(range(8))
    assert sorted(torch.cat([part.reference_rows for part in parts]).tolist()) == [0, 1, 2]
    assert torch.cat([part.texts for part in parts]).tolist() == [0, 1, 2, 3, 4]


def test_minibatches_learn_from_as_many_tokens() -> None:
    generator = torch.Generator().manual_seed(0)
    for episodes, minibatches in ((16, 2), (64, 4), (30, 4)):
        tokens = (torch.rand(episodes, generator=generator).pow(4) * 500).long() + 1
        parts = split_minibatches(tokens, tokens, minibatches, generator)
        for kind in ("episodes", "reference_rows"):
            dealt = [getattr(part, kind) for part in parts]
            sums = [int(tokens[places].sum()) for places in dealt]
            assert max(sums) - min(sums) <= int(tokens.max())
            assert max(map(len, dealt)) - min(map(len, dealt)) <= 1


def test_every_shuffle_deals_other_minibatches() -> None:
    """Of two neighbors in length either may come first, and each is where chance puts it."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.tensor([7, 5, 3, 1])
    found = {
        tuple(sorted(split_minibatches(tokens, tokens, 2, generator)[0].episodes.tolist()))
        for _ in range(50)
    }
    assert found == {(0, 2), (0, 3), (1, 2), (1, 3)}


def test_stacking_pads_prompts_left_and_responses_right() -> None:
    first = Sequences(pad_left([[1, 2, 3]], 0), pad_right([[4]], 0))
    second = Sequences(pad_left([[5]], 0), pad_right([[6, 7]], 0))
    stacked = concatenate(first, second)
    assert stacked.prompts.ids.tolist() == [[1, 2, 3], [0, 0, 5]]
    assert stacked.prompts.mask.tolist() == [[True, True, True], [False, False, True]]
    assert stacked.responses.ids.tolist() == [[4, 0], [6, 7]]
    assert isinstance(stacked.responses, TokenBatch)


def test_values_are_the_reward_head_read_before_each_token(tiny_model: Path) -> None:
    model = build_model(tiny_model).eval()
    sequences = Sequences(pad_left(PROMPTS, 0), pad_right(RESPONSES, 0))
    with torch.no_grad():
        values = model.values(sequences)
        ids = torch.tensor([PROMPTS[1] + RESPONSES[1]])
        hidden = model.critic.base_model(ids).last_hidden_state
        expected = model.critic.score(hidden)[0, len(PROMPTS[1]) - 1 : -1, 0] + 0.25
    torch.testing.assert_close(values[1, :2], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("arranged", [{"micro_batch_size": 1}, {"micro_tokens": 24}])
def test_the_top_k_statistic_is_the_kl_of_the_kept_tokens(
    tiny_model: Path, arranged: dict[str, int]
) -> None:
    rows = [replace(row, top=random_top(row, seed)) for seed, row in enumerate(build_rows())]
    model = load_causal_lm(str(tiny_model))
    total = 0.0
    for row in rows:
        with torch.no_grad():
            logits = model(torch.tensor([row.prompt_ids + row.response_ids])).logits[0].double()
        policy = logits.softmax(-1)[len(row.prompt_ids) - 1 : -1].numpy()
        assert row.top is not None
        p, q = np.exp(row.top.log_probs), np.take_along_axis(policy, row.top.ids, axis=1)
        for part, other in ((p, q), (1 - p.sum(1), 1 - q.sum(1))):
            total += (part * np.log(part / other)).sum()
    kl = KLSettings(estimator="top_k", coefficient=0.3)
    weights, statistics = weights_after_update(tiny_model, rows, kl=kl, **arranged)
    tokens = sum(len(row.response_ids) for row in rows)
    assert statistics["kl/forward_top_k_per_token"] == pytest.approx(total / tokens, rel=1e-5)
    weaker, _ = weights_after_update(tiny_model, rows, kl=replace(kl, coefficient=0.0), **arranged)
    name = "policy.model.embed_tokens.weight"
    assert not torch.allclose(weights[name], weaker[name], atol=1e-5)


def random_top(row: ReferenceRow, seed: int) -> TopTokens:
    """Four tokens at each place that have most, but not all, of the probability."""
    rng = np.random.default_rng(seed)
    length = len(row.response_ids)
    ids = np.array([rng.permutation(300)[:4] for _ in range(length)])
    shares = rng.dirichlet(np.ones(5), size=length)[:, :4]
    return TopTokens(ids, np.log(shares).astype(np.float32), np.zeros(length))
