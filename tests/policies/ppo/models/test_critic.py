"""Fitting the critic: least squares by hand, the right targets, and a critic that predicts."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from policies.ppo.models.actor_critic import PolicyAndCritic, PolicyHead
from policies.ppo.models.critic import (
    Moments,
    explained_share,
    explained_variance,
    fit_critic,
    ridge,
    warmup_targets,
)
from policies.ppo.rollout_metrics import value_metrics
from policies.ppo.settings import PPOSettings
from policies.reference.store import ReferenceRow
from rlhf.modeling.attention.packing import pack_prefixes
from rlhf.modeling.log_probs import Sequences
from rlhf.modeling.models import load_causal_lm, new_reward_model
from rlhf.modeling.tokens import pad_left, pad_right
from rlhf.parallel.distributed import start
from rlhf.parallel.sharding import Sharding
from rlhf.records.schema import Message, Prompt
from tests.policies.training import TrainingInputs, metrics_of, read_report
from tests.settings import changed

SETTINGS = PPOSettings(model="m", reward=("r",), reference=Path("ref"), out=Path("out"))


def build_rows(responses: list[list[int]], number: int = 0) -> tuple[ReferenceRow, ...]:
    prompt = Prompt.create((Message(role="user", content=f"x{number}"),), "train", "test")
    return tuple(
        ReferenceRow(
            prompt=prompt,
            sample_index=index,
            prompt_ids=[5, 6, 7 + number],
            response_ids=ids,
            text="",
            finished=ids[-1] == 2,
            reused=False,
            log_probs=[-1.0] * len(ids),
            log_probs_at_1=[-1.0] * len(ids),
            entropy=[1.0] * len(ids),
        )
        for index, ids in enumerate(responses)
    )


def test_the_fit_is_ridge_regression_with_a_free_constant() -> None:
    rng = np.random.default_rng(0)
    x, noise = rng.normal(size=(40, 3)), rng.normal(size=40)
    y = x @ [1.0, -2.0, 0.5] + 4.0 + 0.1 * noise
    # the constant goes free: centre both sides, solve, and put the means back
    added = 0.3 * (x**2).sum(axis=0).mean()
    xc, yc = x - x.mean(axis=0), y - y.mean()
    weight = np.linalg.solve(xc.T @ xc + added * np.eye(3), xc.T @ yc)
    expected = [*weight, y.mean() - x.mean(axis=0) @ weight]
    inputs = torch.tensor(np.c_[x, np.ones(40)])
    halves = [Moments.of(inputs[i::2], torch.tensor(y)[i::2]) for i in (0, 1)]
    found = ridge(halves[0] + halves[1], 0.3)
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-9)
    error = y - np.c_[x, np.ones(40)] @ expected
    assert explained_variance(halves[0] + halves[1], found) == pytest.approx(
        1 - error.var() / y.var(), rel=1e-9
    )


def test_a_constant_error_explains_as_much_as_none() -> None:
    inputs = torch.tensor([[0.0, 1.0], [1.0, 1.0], [2.0, 1.0]])
    moments = Moments.of(inputs, torch.tensor([0.0, 1.0, 2.0]))
    assert explained_variance(moments, torch.tensor([1.0, 9.0]).double()) == pytest.approx(1.0)
    assert explained_variance(moments, torch.tensor([0.0, 9.0]).double()) == pytest.approx(0.0)


@pytest.mark.parametrize("target", [0.0, -7.3])
def test_targets_that_do_not_vary_have_no_variance_to_explain(target: float) -> None:
    """0.1 · 30 is not 3 in floating point: rounding is no variance."""
    moments = Moments.of(torch.ones(30, 1), torch.full((30,), target / 10))
    assert explained_variance(moments, torch.tensor([5.0]).double()) is None
    assert explained_share(4.0, 1.0, 9.0) == -3.0  # worse than a constant is a number


def test_returns_that_do_not_vary_have_no_metric() -> None:
    mask = torch.tensor([[True, True, False], [True, False, False]])

    def described(returns: list[list[float]]) -> dict[str, float]:
        found = SimpleNamespace(
            response_mask=mask, returns=torch.tensor(returns), old_values=torch.zeros(2, 3)
        )
        return value_metrics(start("fp32", 0), found)

    assert described([[0.7, 0.7, 9.0], [0.7, 0.0, 0.0]]) == {}
    # values of 0 leave all of the variance
    assert described([[1.0, 2.0, 9.0], [3.0, 0.0, 0.0]]) == {"value/explained_variance": 0.0}


def test_a_critic_that_is_fitted_to_equal_rewards_says_so(
    tiny_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    critic = new_reward_model(str(tiny_model), 0, seed=1)
    model = PolicyAndCritic(load_causal_lm(str(tiny_model)), critic, 0.0)
    rows = build_rows([[9, 2], [8, 9, 2]])
    rewards = {rows[0].prompt.id: [1.0, 1.0]}
    fit = fit_critic(start("fp32", 0), model, [rows], rewards, SETTINGS, 0, Sharding())
    assert fit["explained_variance"] == {"before": None, "after": None}
    said = "Critic fitted: explained variance undefined, as all rewards are equal, on the same"
    assert said in capsys.readouterr().err


def test_targets_are_rewards_before_the_prompts_baseline_is_taken_off() -> None:
    prompts = [build_rows([[9, 2], [9, 9]], 0), build_rows([[8, 2]], 1)]
    rewards = {prompts[0][0].prompt.id: [1.0, 3.0], prompts[1][0].prompt.id: [5.0]}
    settings = changed(SETTINGS, missing_eos_penalty=0.5)
    assert warmup_targets(prompts, rewards, settings).tolist() == [1.0, 2.5, 5.0]


@pytest.mark.parametrize("kind", ["own", "head"])
def test_a_fitted_critic_predicts_and_an_unfitted_one_does_not(tiny_model: Path, kind: str) -> None:
    accelerator = start("fp32", 0)
    own, head = new_reward_model(str(tiny_model), 0, seed=1), PolicyHead(32, trains_policy=True)
    critic = own if kind == "own" else head
    model = PolicyAndCritic(load_causal_lm(str(tiny_model)), critic, 7.0).eval()
    generator = torch.Generator().manual_seed(0)
    prompts, rewards = [], {}
    for number in range(60):
        first = int(torch.randint(20, 24, (1,), generator=generator))
        rows = build_rows([[first, 30, 31, 2], [first, 40, 2]], number % 3)
        prompt = Prompt.create((Message(role="user", content=f"y{number}"),), "train", "test")
        rows = tuple(replace(row, prompt=prompt) for row in rows)
        prompts.append(rows)
        rewards[prompt.id] = [float(first), float(first)]
    fit = fit_critic(accelerator, model, prompts, rewards, SETTINGS, 0, Sharding())
    assert fit["rows"] == 120
    assert fit["explained_variance"]["before"] < 0.1
    # the first value of a row is read before its first token and cannot know it
    assert 0.4 < fit["explained_variance"]["after"] < 0.9
    sequences = Sequences(pad_left([[5, 6, 7]] * 2, 0), pad_right([[20, 30], [23, 30]], 0))
    with torch.no_grad():
        values = model.values(sequences)
    assert values[:, 0].tolist() == pytest.approx([21.5, 21.5], abs=0.6)
    assert values[:, 1].tolist() == pytest.approx([20.0, 23.0], abs=0.6)


def test_one_prompt_is_enough(tiny_model: Path) -> None:
    model = PolicyAndCritic(
        load_causal_lm(str(tiny_model)), new_reward_model(str(tiny_model), 0, seed=1), 0.0
    )
    rows = build_rows([[9, 2], [8, 9, 2]])
    rewards = {rows[0].prompt.id: [1.0, 2.0]}
    fit = fit_critic(start("fp32", 0), model, [rows], rewards, SETTINGS, 0, Sharding())
    assert fit["explained_variance"]["after"] > fit["explained_variance"]["before"]


def build_headed(folder: Path, *, trains_policy: bool = True) -> PolicyAndCritic:
    """A policy with a head on it, which says something."""
    critic = PolicyHead(32, trains_policy=trains_policy)
    torch.nn.init.normal_(critic.score.weight, generator=torch.Generator().manual_seed(0))
    return PolicyAndCritic(load_causal_lm(str(folder)), critic, 0.5)


SHORT = Sequences(pad_left([[5, 6, 7], [8]], 0), pad_right([[20, 30], [23, 30, 2]], 0))


def test_a_head_reads_the_policys_last_hidden_states(tiny_model: Path) -> None:
    model = build_headed(tiny_model).eval()
    with torch.no_grad():
        hidden = model.policy.model(torch.tensor([[8, 23, 30, 2]])).last_hidden_state
        expected = model.critic.score(hidden)[0, :3, 0] + 0.5
        together = model(SHORT, 2, 1.0)[1]
        alone = model.values(SHORT)
        first = model(SHORT, 1, 1.0)[1]
    torch.testing.assert_close(together[1], expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(alone, together, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(first, together[:1], rtol=1e-4, atol=1e-5)
    assert model(SHORT, 0, 1.0)[1] is None


def test_a_head_on_packed_rows_is_that_on_padded_ones(tiny_model: Path) -> None:
    """Packed, the output layer reads no padding: responses of different lengths show it."""
    prompts, responses = [[5, 6, 7, 8, 9, 10]] * 3, [[20, 30, 21, 2], [23, 2], [30]]
    sequences = Sequences(pad_left(prompts, 0), pad_right(responses, 0))
    padded, packed = build_headed(tiny_model).eval(), build_headed(tiny_model).eval()
    assert pack_prefixes(packed.policy) is None
    mask = sequences.responses.mask
    found = []
    for model in (padded, packed):
        log_probs, values, _ = model(sequences, 3, 1.0)
        (log_probs.sum() + values[mask].sum()).backward()
        found.append((log_probs, values[mask], model.critic.score.weight.grad))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("trains_policy", [True, False])
def test_the_value_loss_reaches_the_policy_where_that_is_asked(
    tiny_model: Path, trains_policy: bool
) -> None:
    model = build_headed(tiny_model, trains_policy=trains_policy)
    values = model(SHORT, 2, 1.0)[1]
    values.sum().backward()
    assert model.critic.score.weight.grad.abs().sum() > 0
    reached = [one for one in model.policy.parameters() if one.grad is not None]
    assert bool(reached) is trains_policy


def test_a_run_with_a_head_for_a_critic(training: TrainingInputs, tmp_path: Path) -> None:
    options = ("--critic", "head", "--save-every", "1")
    assert training.ppo(tmp_path / "ppo", *options, steps=3) == 0
    rows = metrics_of(tmp_path / "ppo")
    assert all(row["grad_norm/critic"] > 0 and row["loss/value"] > 0 for row in rows)
    fit = read_report(tmp_path / "ppo")["critic_fit"]["explained_variance"]
    assert fit["before"] == pytest.approx(0.0, abs=1e-6)  # a head that says 0
    plain = load_causal_lm(str(tmp_path / "ppo" / "policy"))
    assert not [name for name in plain.state_dict() if "score" in name]


def test_gae_without_a_critic_is_refused(
    training: TrainingInputs, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert training.ppo(tmp_path / "x", "--critic", "none") == 2
    assert 'Invalid value "none" for --critic.model. Choose from: "own"' in capsys.readouterr().err
