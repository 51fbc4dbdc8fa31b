"""One frozen model under policy, critic and reward models: `--lora.share-base`.

Every role has modules of its own with LoRA adapters on them, but all modules hold the same frozen
tensors. So no adapter is ever switched over: a role is a plain model, and the reference is the
policy without its adapters.
"""

import torch
from accelerate import Accelerator
from transformers import PreTrainedModel

from policies.ppo.settings import PPOSettings
from policies.rewards import reward_models
from rlhf.errors import ConfigError
from rlhf.modeling.adapters import (
    add_adapters,
    four_bits,
    load_reward_model_on,
    require_adapters,
    share_weights,
)
from rlhf.modeling.heads import put_head_on, reward_head, start_head
from rlhf.modeling.models import load_causal_lm
from rlhf.parallel.sharding import Sharding


def require_shared_base(settings: PPOSettings, model: dict[str, str], sharding: Sharding) -> None:
    """Refuse reward models that cannot use the policy's base.

    Args:
        settings: of the run.
        model: what `describe_model` says of the policy.
        sharding: as chosen.

    Raises:
        ConfigError: the base is to be sharded.
        InputError: one has no adapter, or its adapter was trained on other weights or another
            precision of these.
    """
    if sharding.is_sharded and settings.lora.share_base:
        raise ConfigError(
            f"--lora.share-base leaves little to shard with --sharding {sharding.strategy}",
            "Leave --sharding out: every process holds the one frozen model.",
        )
    for folder in reward_models(settings.reward) if settings.lora.share_base else ():
        require_adapters(folder, model, four_bits=settings.lora.four_bit_base)


def load_base(settings: PPOSettings, accelerator: Accelerator) -> PreTrainedModel | None:
    """The frozen model; None where every role has weights of its own.

    Raises:
        InputError: there is no such model.
        ConfigError: 4 bits are wanted where they cannot be.
    """
    if not settings.lora.share_base:
        return None
    dtype = torch.bfloat16 if accelerator.mixed_precision == "bf16" else torch.float32
    packing = None
    if settings.lora.four_bit_base:
        packing = four_bits(dtype, "--lora.four-bit-base", "--lora.share-base alone")
    return load_causal_lm(settings.model, dtype, packing).requires_grad_(False)


def add_policy_adapters(model: PreTrainedModel, settings: PPOSettings) -> None:
    """Add LoRA adapters of `--lora.rank` that change nothing yet; their alpha is twice the rank."""
    rank = settings.lora.rank
    assert rank
    add_adapters(model, rank, 2 * rank, settings.seed)


def policy_on(base: PreTrainedModel, settings: PPOSettings) -> PreTrainedModel:
    """The policy: the base with adapters that change nothing yet."""
    policy: PreTrainedModel = share_weights(base)
    add_policy_adapters(policy, settings)
    return policy


def critic_on(
    base: PreTrainedModel, settings: PPOSettings, pad_token_id: int
) -> tuple[PreTrainedModel, float]:
    """A critic that starts as the first reward model's adapter, else with one of its own.

    Returns:
        The critic, and the constant added to its values.
    """
    if models := reward_models(settings.reward):
        critic = load_reward_model_on(base, models[0])
        bias = float(critic.config.reward_bias)
    else:
        critic, bias = put_head_on(share_weights(base.base_model), pad_token_id), 0.0
        add_policy_adapters(critic, settings)
        start_head(reward_head(critic), settings.seed)
    if settings.critic.trains == "head":
        critic.requires_grad_(False)
        reward_head(critic).requires_grad_(True)
    return critic.eval(), bias


def frozen_bytes(base: PreTrainedModel, settings: PPOSettings) -> dict[str, int]:
    """The bytes of the frozen weights, and what they would be with a copy for every role."""
    whole = sum(weight.nbytes for weight in base.parameters())
    trunk = sum(weight.nbytes for weight in base.base_model.parameters())
    roles = len(reward_models(settings.reward))
    roles += settings.has_critic and settings.critic.model == "own"
    return {"shared": whole, "separate": whole + roles * trunk}
