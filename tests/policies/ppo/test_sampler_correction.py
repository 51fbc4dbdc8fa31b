"""What the losses make of responses of another program, and of those cut at the length limit."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import Accelerator

from policies.ppo.models.actor_critic import PolicyAndCritic, PolicyHead
from policies.ppo.rollout import Episodes, Experience, RolloutContext
from policies.ppo.rollout_metrics import sampler_metrics
from policies.ppo.settings import PPOSettings
from policies.ppo.train import update
from policies.ppo.update import Learner, StepData, reference_batch
from policies.rewards import Reward
from policies.sampling.continuous import ContinuousSampler
from rlhf.errors import ConfigError
from rlhf.modeling.models import load_causal_lm
from rlhf.parallel.distributed import start
from rlhf.records.schema import Sampling
from tests.policies.ppo.bandits import PROMPT, WORDS, build_models, collect, stored_rows
from tests.policies.ppo.bandits import SETTINGS as BANDIT
from tests.policies.ppo.updates import SETTINGS, build_experience, build_model, build_rows
from tests.policies.training import TrainingInputs, metrics_of
from tests.settings import changed

FINISHED = torch.tensor([True, True, False, True])
KEPT = torch.tensor([0, 1, 3])  # the rows that end by themselves


def build_head(folder: Path) -> PolicyAndCritic:
    policy = load_causal_lm(str(folder))
    head = PolicyHead(policy.config.hidden_size, trains_policy=True)
    torch.nn.init.normal_(head.score.weight, generator=torch.Generator().manual_seed(0))
    return PolicyAndCritic(policy, head, 0.0)


def after_update(
    model: PolicyAndCritic, experience: Experience, **changes: Any
) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    learner = Learner(
        start("fp32", 0),
        model,
        optimizer,
        changed(SETTINGS, **changes),
        1.0,
        SETTINGS.kl.coefficient,
    )
    data = StepData(experience, reference_batch(build_rows(), 0, torch.device("cpu")))
    statistics = update(learner, data, torch.Generator().manual_seed(0))
    return {name: value.clone() for name, value in model.state_dict().items()}, statistics


@pytest.mark.parametrize("build", [build_model, build_head])
@pytest.mark.parametrize("arranged", [{"micro_batch_size": 2}, {"micro_tokens": 20}])
def test_a_masked_response_is_as_if_not_sampled_and_weights_scale_advantages(
    tiny_model: Path, build: Any, arranged: dict[str, int]
) -> None:
    experience = build_experience()
    mask = experience.response_mask
    weights = torch.rand(mask.shape, generator=torch.Generator().manual_seed(5)) * 2 * mask
    weighted = replace(experience, loss_mask=mask & FINISHED[:, None], sampler_weights=weights)
    rows = {
        name: getattr(experience, name)[KEPT]
        for name in ("loss_mask", "old_log_probs", "old_values", "returns")
    }
    fewer = replace(
        experience,
        sequences=experience.sequences.rows(KEPT),
        advantages=(experience.advantages * weights)[KEPT],
        **rows,
    )
    expected, statistics = after_update(build(tiny_model), fewer, **arranged)
    found, same_statistics = after_update(build(tiny_model), weighted, **arranged)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-6)
    assert same_statistics == pytest.approx(statistics, rel=1e-4)
    plain, _ = after_update(build(tiny_model), experience, **arranged)
    name = "policy.model.embed_tokens.weight"
    assert not torch.allclose(plain[name], found[name], atol=1e-4)


def test_the_clips_reach_the_loss(tiny_model: Path) -> None:
    experience = build_experience()
    # old log-probs as low as these make every ratio large
    experience = replace(
        experience, old_log_probs=experience.old_log_probs - 1.5 * experience.response_mask
    )
    losses = {
        name: after_update(build_model(tiny_model), experience, **changes)[1]["loss/policy"]
        for name, changes in {
            "plain": {},
            "high": {"clip_range_high": 1.0},
            "dual": {"dual_clip": 2.0},
        }.items()
    }
    good = experience.advantages.clamp(min=0).sum() / experience.response_mask.sum()
    bad = -experience.advantages.clamp(max=0).sum() / experience.response_mask.sum()
    # every ratio is above 2: the high clip takes good tokens from 1.2 to 2, the dual clip takes bad
    # ones to 2
    assert losses["high"] - losses["plain"] == pytest.approx(float(-0.8 * good), rel=1e-5)
    assert losses["dual"] == pytest.approx(float(-1.2 * good + 2 * bad), rel=1e-5)


def test_where_all_responses_are_masked_only_the_kl_term_trains(tiny_model: Path) -> None:
    experience = build_experience()
    experience = replace(experience, loss_mask=torch.zeros_like(experience.loss_mask))
    before = build_model(tiny_model).state_dict()
    after, statistics = after_update(build_model(tiny_model), experience)
    assert all(math.isfinite(value) for value in statistics.values())
    assert statistics["loss/policy"] == statistics["loss/value"] == 0
    moved = {name.split(".")[0] for name in before if not torch.equal(before[name], after[name])}
    assert moved == {"policy"}


def every_second_by_another(*given: Any) -> list[tuple[list[int], list[float]]]:
    """The sampler says of every second response that its tokens were e^1.5 times less likely."""
    found = ContinuousSampler(Accelerator(cpu=True))(*given)
    return [
        (ids, [one - 1.5 * (row % 2) for one in known]) for row, (ids, known) in enumerate(found)
    ]


def experience_of(settings: PPOSettings) -> tuple[Episodes, Experience, dict[str, float]]:
    """Eight responses of at most four tokens, half of them said to be another program's."""
    model, tokenizer = build_models(WORDS)
    accelerator = start("fp32", 0)
    context = RolloutContext(
        accelerator,
        tokenizer,
        Reward((lambda *batch: torch.arange(8.0),), (1.0,), "sum", {}, tuple),
        None,
        {PROMPT.id: [0.0]},
        Sampling(temperature=1.0, max_new_tokens=4, seed=0),
        settings.shaping,
        every_second_by_another,
        settings.sampler_correction,
    )
    episodes, *_, found = collect(context, model, [(stored_rows()[0],)] * 8, settings)
    return (
        episodes,
        found,
        sampler_metrics(context, episodes, found, settings.sampling.correction_cap),
    )


@pytest.mark.parametrize("correction", ["none", "token", "sequence"])
def test_a_rollout_knows_how_far_its_sampler_was_off(correction: str) -> None:
    settings = changed(BANDIT, samples_per_prompt=8, sampler_correction=correction)
    _, experience, described = experience_of(settings)
    mask = experience.response_mask.numpy()
    other = mask & (np.arange(8) % 2 == 1)[:, None]
    mine, theirs = (mask & ~other).sum(), other.sum()
    if correction == "none":
        assert experience.sampler_weights is None
        assert described == {}
        assert experience.loss_mask.equal(experience.response_mask)
        return
    assert experience.sampler_weights is not None
    weights = experience.sampler_weights.numpy()
    np.testing.assert_allclose(weights[mask & ~other], 1.0, atol=1e-4)
    np.testing.assert_array_equal(weights[other], 2.0)  # e^1.5 is 4.48
    if correction == "token":
        assert described == pytest.approx(
            {
                "sampler/capped_fraction": theirs / mask.sum(),
                "sampler/effective_sample_size": (mine + 2 * theirs) ** 2
                / (mask.sum() * (mine + 4 * theirs)),
            },
            rel=1e-4,
        )
        assert experience.loss_mask.equal(experience.response_mask)
    else:
        assert described == pytest.approx(
            {
                "sampler/capped_fraction": 0.0,
                "sampler/effective_sample_size": 1.0,
                "sampler/masked_fraction": 0.5,
            },
            abs=1e-4,
        )
        np.testing.assert_array_equal(experience.loss_mask.numpy(), mask & ~other)


def test_truncated_responses_are_masked_and_advantages_whitened_over_the_rest() -> None:
    settings = changed(BANDIT, samples_per_prompt=1, advantages="gae", mask_truncated=True)
    episodes, experience, described = experience_of(settings)
    assert described == {}
    finished = episodes.finished
    assert 0 < finished.sum() < 8
    assert experience.loss_mask.equal(experience.response_mask & finished[:, None])
    learned = experience.advantages[experience.loss_mask]
    assert learned.mean().item() == pytest.approx(0, abs=1e-5)
    assert learned.std(correction=0).item() == pytest.approx(1, abs=1e-3)


def test_auto_corrects_the_engines_that_are_other_programs() -> None:
    assert BANDIT.sampler_correction == "none"
    assert changed(BANDIT, engine="continuous").sampler_correction == "token"
    for named in ("none", "sequence"):
        settings = changed(BANDIT, engine="continuous", sampler_correction=named)
        assert settings.sampler_correction == named


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("clip_range_high", 0.0, "--loss.clip-range-high is 0\n  Give a value of more than 0."),
        ("dual_clip", 1.0, "--loss.dual-clip is 1\n  Give a value of more than 1."),
        ("sampler_cap", 0.5, "--sampling.correction-cap is 0.5\n  Give a value of more than 1."),
    ],
)
def test_clips_out_of_range_are_refused(name: str, value: float, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        changed(BANDIT, **{name: value})
    assert str(caught.value) == words


def test_a_run_with_another_program_as_its_sampler_says_how_far_it_was_off(
    training: TrainingInputs, tmp_path: Path
) -> None:
    options = ("--engine", "continuous", "--sampler-correction", "sequence", "--dual-clip", "3")
    more = ("--mask-truncated", "--clip-range-high", "0.28", "--minibatches", "2", "--epochs", "2")
    assert training.ppo(tmp_path / "a", *options, *more, "--micro-tokens", "64", steps=2) == 0
    for row in metrics_of(tmp_path / "a"):
        assert row["sampler/effective_sample_size"] == pytest.approx(1, abs=1e-3)
        assert row["sampler/capped_fraction"] == row["sampler/masked_fraction"] == 0
    assert training.ppo(tmp_path / "b", "--engine", "continuous") == 0
    (row,) = metrics_of(tmp_path / "b")
    assert row["sampler/effective_sample_size"] == pytest.approx(1, abs=1e-6)
    assert "sampler/masked_fraction" not in row
