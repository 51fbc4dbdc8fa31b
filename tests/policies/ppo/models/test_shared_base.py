"""One frozen model under all roles gives what separate models give, and weighs less."""

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from policies.ppo.models.actor_critic import PolicyAndCritic
from policies.ppo.models.critic import new_critic
from policies.ppo.models.shared_base import critic_on, load_base, policy_on
from policies.ppo.settings import PPOSettings
from rlhf.modeling.adapters import add_adapters, load_reward_model_on, merged_weights, save_adapters
from rlhf.modeling.heads import empty_reward_model
from rlhf.modeling.log_probs import Sequences
from rlhf.modeling.models import (
    describe_model,
    load_causal_lm,
    new_reward_model,
    save_model,
)
from rlhf.modeling.tokens import load_tokenizer, pad_left, pad_right
from rlhf.parallel.distributed import start
from tests.policies.training import TrainingInputs, metrics_of, read_report
from tests.servers.interrupted import kill_when
from tests.settings import changed, ppo_settings

BATCH = Sequences(pad_left([[5, 6, 7], [8]], 0), pad_right([[20, 30], [23, 30, 2]], 0))
SHARED = ("--share-base", "--lora-rank", "4")
LORA = ("--lora-rank", "4", "--kl.source", "adapter")


@dataclass(frozen=True)
class Adapted:
    """The inputs of a training whose reward model keeps its adapters."""

    training: TrainingInputs
    reward: str


@pytest.fixture(scope="module")
def adapted(training: TrainingInputs, tmp_path_factory: pytest.TempPathFactory) -> Adapted:
    folder, model = tmp_path_factory.mktemp("adapted") / "reward", str(training.model)
    classifier = new_reward_model(model, 0, seed=1)
    add_adapters(classifier, rank=4, alpha=8, seed=1)
    generator = torch.Generator().manual_seed(1)
    for name, value in classifier.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(value, std=0.1, generator=generator)
    state = classifier.state_dict()
    merged = empty_reward_model(classifier.config, bias=0.25)
    save_model(merged, load_tokenizer(model), folder, merged_weights(classifier, state))
    save_adapters(folder, classifier, state, describe_model(model))
    return Adapted(training, str(folder))


def settings_for(adapted: Adapted, **changes: object) -> PPOSettings:
    plain = ppo_settings(
        model=str(adapted.training.model),
        reward=(adapted.reward,),
        reference=adapted.training.reference,
        out=Path("out"),
        lora_rank=4,
        share_base=True,
    )
    return changed(plain, **changes)


def grown(model: PolicyAndCritic) -> PolicyAndCritic:
    """The model with policy adapters that say something."""
    generator = torch.Generator().manual_seed(3)
    for name, value in model.policy.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(value, std=0.1, generator=generator)
    return model.eval()


def gradients(model: PolicyAndCritic) -> dict[str, torch.Tensor]:
    log_probs, values = model(BATCH, 2, 1.0)[:2]
    (log_probs.sum() + (values**2).sum()).backward()
    return {n: one.grad for n, one in model.named_parameters() if one.grad is not None}


def test_values_and_gradients_are_those_of_separate_models(adapted: Adapted) -> None:
    settings = settings_for(adapted)
    base = load_base(settings, start("fp32", 0))
    shared = grown(PolicyAndCritic(policy_on(base, settings), *critic_on(base, settings, 0)))
    policy = load_causal_lm(settings.model)
    add_adapters(policy, 4, 8, settings.seed)
    critic = load_reward_model_on(load_causal_lm(settings.model), adapted.reward)
    apart = grown(PolicyAndCritic(policy, critic, 0.25))
    with torch.no_grad():
        for mine, theirs in zip(shared(BATCH, 2, 1.0)[:2], apart(BATCH, 2, 1.0)[:2], strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)
    found, expected = gradients(shared), gradients(apart)
    assert found.keys() >= {name for name in expected if "lora" in name or "score" in name}
    assert all("lora" in name or "score" in name for name in found)
    for name, value in found.items():
        torch.testing.assert_close(value, expected[name], rtol=1e-4, atol=1e-6)
    held = {one.data_ptr(): one.nbytes for one in shared.parameters() if not one.requires_grad}
    assert sum(held.values()) == sum(one.nbytes for one in base.parameters())


def test_a_base_in_bf16_says_what_separate_models_in_float32_say(adapted: Adapted) -> None:
    """Under autocast both multiply in bf16; the base's norms and embeddings are rounded, too."""
    settings = settings_for(adapted)
    read = []
    for dtype, share in ((torch.bfloat16, True), (torch.float32, False)):
        base = load_causal_lm(settings.model, dtype).requires_grad_(False)
        critic = critic_on(base if share else load_causal_lm(settings.model), settings, 0)
        model = grown(PolicyAndCritic(policy_on(base, settings), *critic))
        with torch.autocast("cpu", torch.bfloat16):
            log_probs, values = model(BATCH, 2, 1.0)[:2]
        (log_probs.sum() + (values**2).sum()).backward()
        trained = [(n, one.grad) for n, one in model.named_parameters() if one.grad is not None]
        read.append((log_probs, values, torch.cat([value.flatten() for _, value in trained])))
        assert {one.dtype for one in base.parameters()} == {dtype}
    for mine, theirs in zip(*read, strict=True):
        error = (mine - theirs).norm() / theirs.norm()
        assert 0 < error < 0.03  # bf16 has 8 bits: .004 for each operation


def test_a_critic_of_a_function_gets_an_adapter_of_its_own(adapted: Adapted) -> None:
    signal = ("signal:tests.pipeline.signals:count_vowels",)
    settings = settings_for(adapted, reward=signal, critic_trains="head")
    base = load_base(settings, start("fp32", 0))
    critic, bias = critic_on(base, settings, 0)
    assert bias == 0.0
    assert [n for n, one in critic.named_parameters() if one.requires_grad] == ["score.weight"]
    plain, _ = new_critic(changed(settings, share_base=False), load_tokenizer(settings.model))
    torch.testing.assert_close(critic.score.weight, plain.score.weight)


def test_a_run_on_a_shared_base_is_the_run_of_separate_models(
    adapted: Adapted, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ("--reward", adapted.reward, *LORA, "--critic-trains", "head")
    training = adapted.training
    assert training.ppo(tmp_path / "apart", *options, steps=3) == 0
    capsys.readouterr()
    assert training.ppo(tmp_path / "shared", *options, "--share-base", steps=3) == 0
    assert "shared by all roles; a copy for each would be" in capsys.readouterr().err
    rows = zip(metrics_of(tmp_path / "shared"), metrics_of(tmp_path / "apart"), strict=True)
    for mine, theirs in rows:
        assert mine == pytest.approx(theirs, rel=1e-3, abs=1e-5)
    weights = [
        load_file(tmp_path / name / "policy" / "model.safetensors") for name in ("shared", "apart")
    ]
    original = load_file(training.model / "model.safetensors")
    assert weights[0].keys() == weights[1].keys() == original.keys()
    moved = "model.layers.0.self_attn.q_proj.weight"
    assert not torch.allclose(weights[0][moved], original[moved], atol=1e-5)
    for name, value in weights[1].items():
        torch.testing.assert_close(weights[0][name], value, rtol=1e-3, atol=1e-5)
    held = read_report(tmp_path / "shared")["frozen_bytes"]
    one = sum(value.nbytes for value in original.values())
    assert held == {"shared": one, "separate": 3 * one}  # tied: the trunk is the whole model
    assert read_report(tmp_path / "apart")["frozen_bytes"] is None


def test_a_killed_run_on_a_shared_base_goes_on_exactly(adapted: Adapted, tmp_path: Path) -> None:
    options = ("--reward", adapted.reward, *LORA, "--share-base", "--save-every", "1")
    training, straight, killed = adapted.training, tmp_path / "straight", tmp_path / "killed"
    assert training.ppo(straight, *options, steps=4) == 0
    kill_when(training.arguments(killed, *options, steps=4), killed / "metrics.jsonl", lines=2)
    assert training.ppo(killed, *options, "--resume", steps=4) == 0
    assert metrics_of(killed) == metrics_of(straight)
    weights = [load_file(out / "policy" / "model.safetensors") for out in (straight, killed)]
    assert all(weights[0][name].equal(weights[1][name]) for name in weights[0])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--share-base",), "Add --lora.rank 16"),
        (("--lora-rank", "4", "--four-bit-base"), "--lora.four-bit-base without --lora.share-base"),
        ((*SHARED, "--four-bit-base"), "with --kl.source reference"),
        (
            (*SHARED, "--four-bit-base", "--kl.source", "none", "--kl.audit-every", "1"),
            "--lora.four-bit-base with --kl.audit-every",
        ),
        (("--share-base", *LORA), "has no adapters to use on a shared base"),
    ],
)
def test_what_cannot_be_shared_is_refused(
    training: TrainingInputs,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    options: tuple[str, ...],
    words: str,
) -> None:
    assert training.ppo(tmp_path / "x", *options) == 2
    assert words in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "x").exists()
