"""Fitting the critic: least squares by hand, the right targets, and a critic that predicts."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from policies.actor_critic import PolicyAndCritic
from policies.critic import Moments, explained_variance, fit_critic, ridge, warmup_targets
from policies.log_probs import Sequences
from policies.reference_store import ReferenceRow
from policies.settings import PPOSettings
from rlhf.distributed import start
from rlhf.models import load_causal_lm, new_reward_model
from rlhf.records import Message, Prompt
from rlhf.tokens import pad_left, pad_right

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


def test_targets_are_rewards_before_the_prompts_baseline_is_taken_off() -> None:
    prompts = [build_rows([[9, 2], [9, 9]], 0), build_rows([[8, 2]], 1)]
    rewards = {prompts[0][0].prompt.id: [1.0, 3.0], prompts[1][0].prompt.id: [5.0]}
    settings = replace(SETTINGS, missing_eos_penalty=0.5)
    assert warmup_targets(prompts, rewards, settings).tolist() == [1.0, 2.5, 5.0]


def test_a_fitted_critic_predicts_and_the_reward_head_does_not(tiny_model: Path) -> None:
    accelerator = start("fp32", 0)
    model = PolicyAndCritic(
        load_causal_lm(str(tiny_model)), new_reward_model(str(tiny_model), 0, seed=1), 7.0
    ).eval()
    generator = torch.Generator().manual_seed(0)
    prompts, rewards = [], {}
    for number in range(60):
        first = int(torch.randint(20, 24, (1,), generator=generator))
        rows = build_rows([[first, 30, 31, 2], [first, 40, 2]], number % 3)
        prompt = Prompt.create((Message(role="user", content=f"y{number}"),), "train", "test")
        rows = tuple(replace(row, prompt=prompt) for row in rows)
        prompts.append(rows)
        rewards[prompt.id] = [float(first), float(first)]
    fit = fit_critic(accelerator, model, prompts, rewards, SETTINGS, 0)
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
    fit = fit_critic(start("fp32", 0), model, [rows], rewards, SETTINGS, 0)
    assert fit["explained_variance"]["after"] > fit["explained_variance"]["before"]
