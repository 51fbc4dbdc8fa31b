"""Bandits: PPO's parts find the optimum that can be worked out by hand.

One prompt, responses of one token. Where a KL term moves the optimum the language model has eight
tokens, and the reference is a table, so that nothing but sampling is left to chance.
"""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from scipy.optimize import brentq
from tokenizers import pre_tokenizers

from policies.ppo.kl import ReferencePolicy
from policies.ppo.rollout import (
    RolloutContext,
)
from policies.ppo.rollout_metrics import sample_metrics
from policies.ppo.setting_groups import KLSettings
from policies.ppo.settings import PPOSettings
from policies.ppo.train import update
from policies.ppo.update import Learner, StepData, reference_batch
from policies.rewards import Reward
from policies.sampling.continuous import ContinuousSampler
from policies.sampling.generate import GenerateSampler, Sampler
from rlhf.modeling.tokens import TokenBatch
from rlhf.parallel.distributed import start
from rlhf.records.schema import Sampling
from tests.policies.ppo.bandits import (
    EOS,
    PAD,
    PROMPT,
    REFERENCE,
    SETTINGS,
    WORDS,
    build_models,
    collect,
    stored_rows,
)
from tests.settings import changed

BYTES = {"<pad>": PAD, "<eos>": EOS} | {
    byte: 2 + i for i, byte in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))
}
REWARDS = np.array([0.0, 0.1, 0.2, 0.9, 0.4, 0.5, 0.8, 1.0])


def trained_policy(
    settings: PPOSettings,
    arms: np.ndarray,
    *,
    steps: int,
    reference: ReferencePolicy | None = None,
    sampler: Sampler | None = None,
    learning_rate: float = 0.02,
) -> np.ndarray:
    """The probabilities of all tokens after so many steps."""
    model, tokenizer = build_models(WORDS if len(arms) == len(WORDS) else BYTES)
    accelerator = start("fp32", 0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, weight_decay=0.0)
    if not settings.has_critic:
        model.critic = None
    model, optimizer = accelerator.prepare(model, optimizer)
    values = torch.tensor(arms, dtype=torch.float32)

    def score(prompts: object, texts: object, batch: TokenBatch) -> torch.Tensor:
        return values[batch.ids[:, -1]]

    context = RolloutContext(
        accelerator,
        tokenizer,
        Reward((score,), (1.0,), "sum", {}, tuple),
        reference,
        {PROMPT.id: [0.0]},
        Sampling(temperature=1.0, max_new_tokens=1, seed=0),
        settings.shaping,
        sampler or GenerateSampler(accelerator),
        settings.sampler_correction,
    )
    rows = stored_rows()
    used = rows if settings.kl.source == "reference" else []
    generator = torch.Generator().manual_seed(0)
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate * (1 - step / steps)
        prompts = [(rows[0],)] * settings.batch.episodes_per_step
        *_, experience = collect(context, model, prompts, settings)
        data = StepData(experience, reference_batch(used, PAD, accelerator.device))
        update(
            Learner(accelerator, model, optimizer, settings, 1.0, settings.kl.coefficient),
            data,
            generator,
        )
    with torch.no_grad():
        logits = model.policy(torch.tensor([[2, 3]])).logits[0, -1]
    return logits.double().softmax(0).numpy()


def total_variation(first: np.ndarray, second: np.ndarray) -> float:
    return float(np.abs(first - second).sum() / 2)


@pytest.mark.parametrize("advantages", ["gae", "rloo", "grpo"])
def test_the_reward_of_one_byte_is_learned(advantages: str) -> None:
    settings = changed(SETTINGS, advantages=advantages, critic_learning_rate=1e-2)
    wanted = BYTES["r"]  # one of 258: about one of the first step's 256 responses
    assert trained_policy(settings, np.eye(len(BYTES))[wanted], steps=60)[wanted] > 0.95


def test_a_gap_between_sampler_and_trainer_is_measured() -> None:
    model, tokenizer = build_models(WORDS)
    accelerator = start("fp32", 0)
    plain = ContinuousSampler(accelerator)

    def sampler(*given: Any) -> list[tuple[list[int], list[float]]]:
        return [(ids, [one + 0.25 for one in known]) for ids, known in plain(*given)]

    reward = Reward((lambda *batch: torch.zeros(8),), (1.0,), "sum", {}, tuple)
    rows = [(stored_rows()[0],)] * 8
    sampling = Sampling(temperature=1.0, max_new_tokens=4, seed=0)
    settings = changed(SETTINGS, samples_per_prompt=8)
    for by, gap in ((plain, 0.0), (sampler, 0.25)):
        context = RolloutContext(
            accelerator, tokenizer, reward, None, {PROMPT.id: [0.0]}, sampling, settings.shaping, by
        )
        *found, _ = collect(context, model, rows, settings)
        assert sample_metrics(accelerator, *found)["sampler_gap"] == pytest.approx(gap, abs=1e-5)


def test_a_resident_reference_leads_to_the_tilted_distribution() -> None:
    # max E[r] − β KL(π ‖ π_ref):  π* ∝ π_ref exp(r / β)
    beta = 0.4
    expected = REFERENCE * np.exp(REWARDS / beta)
    expected /= expected.sum()
    assert total_variation(expected, REFERENCE) > 0.2
    table = torch.tensor(np.log(REFERENCE), dtype=torch.float32)
    settings = replace(SETTINGS, kl=KLSettings(source="resident", coefficient=beta))
    found = trained_policy(
        settings, REWARDS, steps=200, reference=lambda _, rows: table[rows.responses.ids]
    )
    assert total_variation(found, expected) < 0.05


SLOW_ESTIMATORS = [pytest.param(name, marks=pytest.mark.slow) for name in ("k1", "top_k")]


@pytest.mark.parametrize("estimator", ["k3", *SLOW_ESTIMATORS])
def test_stored_outputs_lead_to_the_optimum_of_the_forward_kl(estimator: str) -> None:
    # max E[r] − β KL(π_ref ‖ π):  π*_i = β π_ref,i / (λ − r_i), λ > max r so that they add up to 1
    beta = 0.4

    def optimum(multiplier: float) -> np.ndarray:
        return beta * REFERENCE / (multiplier - REWARDS)

    top = REWARDS.max()
    multiplier = brentq(lambda x: optimum(x).sum() - 1, top + 1e-9, top + 10 * beta)
    expected = optimum(multiplier)
    assert total_variation(expected, REFERENCE) > 0.1
    kl = KLSettings(source="reference", coefficient=beta, estimator=estimator)
    found = trained_policy(replace(SETTINGS, kl=kl), REWARDS, steps=200)
    assert total_variation(found, expected) < 0.05


def sampler_off_by(shift: np.ndarray) -> Sampler:
    """Samples one token from the policy whose logits another program has shifted, and says so."""

    def sample(model: Any, prompts: Any, *_: object) -> list[Any]:
        logits = model(torch.tensor(prompts[:1])).logits[0, -1]
        log_probs = (logits + torch.tensor(shift, dtype=torch.float32)).log_softmax(0)
        ids = log_probs.exp().multinomial(len(prompts), replacement=True).tolist()
        return [([token], [float(log_probs[token])]) for token in ids]

    return sample


def stationary_point(shift: np.ndarray, beta: float) -> np.ndarray:
    """Where the mean gradient of tokens sampled from μ ∝ π exp(shift) is that of β KL(π_ref ‖ π).

    Without weights a logit's is μ_i (r_i − Σ μ r) − β (π_i − π_ref,i).
    """
    logits = np.log(REFERENCE)
    for _ in range(2000):
        policy = np.exp(logits) / np.exp(logits).sum()
        sampled = policy * np.exp(shift) / (policy * np.exp(shift)).sum()
        gain = sampled * (REWARDS - sampled @ REWARDS)
        logits = logits + 2 * (gain - beta * (policy - REFERENCE))
    return policy


# The sampler gives the token that the optimum wants most half as much weight as it should have.
SHIFT = np.where(np.arange(len(REWARDS)) == 3, -math.log(2), 0.0)


@pytest.mark.parametrize(
    "correction", ["none", "token", pytest.param("sequence", marks=pytest.mark.slow)]
)
def test_a_shifted_sampler_leads_astray_unless_it_is_corrected_for(correction: str) -> None:
    beta = 0.4
    right, wrong = stationary_point(0 * SHIFT, beta), stationary_point(SHIFT, beta)
    assert total_variation(right, wrong) > 0.15
    settings = changed(
        SETTINGS,
        kl=KLSettings(source="reference", coefficient=beta),
        sampler_correction=correction,
    )
    found = trained_policy(
        settings, REWARDS, steps=60, sampler=sampler_off_by(SHIFT), learning_rate=0.03
    )
    assert total_variation(found, wrong if correction == "none" else right) < 0.05
