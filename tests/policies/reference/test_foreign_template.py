"""Another program's reward model reads prompts with the policy's --chat-template-kwargs."""

from pathlib import Path

import pytest
import torch

from policies.rewards import describe_rewards, load_reward
from rlhf.commands.labels.prioritize import Settings as PrioritizeSettings
from rlhf.errors import InputError
from rlhf.modeling.chat_template import template_kwargs
from rlhf.modeling.models import describe_model, new_reward_model, save_model
from rlhf.modeling.readers import described_kwargs, reward_kwargs
from rlhf.modeling.tokens import load_tokenizer, pad_right
from rlhf.parallel.distributed import start
from rlhf.records.schema import Message, Prompt
from tests.families import FAMILIES, build_family_model

PROMPT = Prompt.create((Message(role="user", content="Hi?"),), "train", "test")
NO_THINKING = {"enable_thinking": False}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A policy, and reward models of its tokenizer: foreign, of ours, and one with values."""
    folder = tmp_path_factory.mktemp("foreign")
    policy = str(build_family_model(folder / "policy", FAMILIES["qwen"]))
    tokenizer = load_tokenizer(policy)
    model = new_reward_model(policy, int(tokenizer.pad_token_id), seed=0)
    save_model(model, tokenizer, folder / "foreign")
    save_model(model, load_tokenizer(policy, {"enable_thinking": True}), folder / "recorded")
    model.config.reward_bias, model.config.reads_thinking = 0.5, False
    save_model(model, tokenizer, folder / "ours")
    return folder


def test_a_foreign_reward_model_takes_the_policys_values(folder: Path) -> None:
    policy = describe_model(str(folder / "policy"), NO_THINKING)
    name = str(folder / "foreign")
    described = describe_rewards([name], policy)["reward"]
    assert described["tokenizer"] == policy["tokenizer"]
    assert described_kwargs(described) == NO_THINKING
    reward = load_reward([name], start("fp32", 0), given=described_kwargs(policy))
    assert reward.description == described
    batch = pad_right([[5, 6, 7]], 0)
    assert torch.isfinite(reward([PROMPT], ["Yes"], batch)).all()


def test_one_that_knows_how_it_reads_keeps_to_that(folder: Path) -> None:
    policy = describe_model(str(folder / "policy"), NO_THINKING)
    for name in ("ours", "recorded"):
        assert reward_kwargs(str(folder / name), NO_THINKING) == {}
        with pytest.raises(InputError, match="different tokenizers or chat templates"):
            describe_rewards([str(folder / name)], policy)
    kept = template_kwargs(load_tokenizer(str(folder / "recorded")))
    assert kept == {"enable_thinking": True}
    assert reward_kwargs(str(folder / "foreign"), NO_THINKING) == NO_THINKING


def test_prioritize_takes_values_for_a_template(folder: Path) -> None:
    settings = PrioritizeSettings(
        db=folder / "l.db",
        reward=str(folder / "foreign"),
        chat_template_kwargs=NO_THINKING,
    )
    assert settings.chat_template_kwargs == NO_THINKING
