"""Policy and critic as one module, so that one engine shards, wraps and steps both.

Letters: B sequences, R response tokens, d hidden size.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch
from accelerate import Accelerator
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rlhf.modeling.adapters import save_merged, save_sharded
from rlhf.modeling.heads import capture_input, reward_head
from rlhf.modeling.log_probs import (
    Sequences,
    TokenLogProbs,
    by_response,
    features,
    response_log_probs,
)
from rlhf.parallel.gathered_model import is_shard
from rlhf.parallel.sharding import reshard

POLICY = "policy."  # before the names of its weights

Result = TypeVar("Result")


class PolicyHead(nn.Module):
    """A critic that is a linear head on the policy's last hidden states, 0 until it is fitted.

    Args:
        width: the policy's hidden size.
        trains_policy: whether the value loss reaches the policy's weights through the head.
    """

    def __init__(self, width: int, *, trains_policy: bool) -> None:
        super().__init__()
        self.score = nn.Linear(width, 1, bias=False)
        nn.init.zeros_(self.score.weight)
        self.trains_policy = trains_policy


class PolicyAndCritic(nn.Module):
    """A language model and what predicts its rewards: a copy of the reward model, or a head on it.

    Args:
        policy: the language model.
        critic: a reward model; its head, read at every token instead of the last, gives the values.
            Or a head on the policy. None where advantages come without a critic.
        value_bias: the reward model's constant, added to every value; kept in checkpoints.

    `reads_frozen_features`: the critic is a head on a frozen model of its own, so that model runs
    once per rollout.
    """

    def __init__(
        self,
        policy: PreTrainedModel,
        critic: PreTrainedModel | PolicyHead | None,
        value_bias: float,
    ) -> None:
        super().__init__()
        self.policy = policy
        self.critic: Any = critic
        self.value_bias: Tensor
        self.register_buffer("value_bias", torch.tensor(value_bias))
        self.reads_frozen_features = isinstance(critic, PreTrainedModel) and not any(
            parameter.requires_grad for parameter in critic.base_model.parameters()
        )

    @property
    def parts(self) -> dict[str, Any]:
        """The models that are trained, by name."""
        critic = {} if self.critic is None else {"critic": self.critic}
        return {"policy": self.policy, **critic}

    @property
    def fp32_modules(self) -> list[nn.Module]:
        """The modules that stay float32 beside bf16 weights: the critic's head."""
        return [] if self.critic is None else [reward_head(self.critic)]

    def forward(
        self,
        sequences: Sequences,
        num_episodes: int,
        temperature: float,
        ids: Int[Tensor, "S R K"] | None = None,
        critic_features: Float[Tensor, "E R d"] | None = None,
    ) -> tuple[Float[Tensor, "B R"], Float[Tensor, "E R"] | None, Float[Tensor, "S R K"] | None]:
        """Log-probs of every response token, and values before each token of the first rows.

        All in one forward, because data-parallel wrappers synchronize gradients per forward of
        the module.

        Args:
            sequences: episodes, followed by rows of the reference store.
            num_episodes: how many of the rows are episodes; only they need values.
            temperature: sampling temperature.
            ids: K tokens to look up at every position of the S reference rows.
            critic_features: what the critic's head reads, where that is known already.

        Returns:
            Log-probs of all rows; values of the first `num_episodes` rows, None without a critic or
            without episodes; log-probs of `ids`.
        """
        looked_up = sequences.responses.ids[:, :, None]
        if ids is not None:
            padding = ids.new_zeros(num_episodes, *ids.shape[1:])
            looked_up = torch.cat([looked_up, torch.cat([padding, ids])], dim=2)
        if critic_features is None:
            token_log_probs, values = self.read(sequences, num_episodes, temperature, looked_up)
        else:
            token_log_probs = response_log_probs(self.policy, sequences, temperature, looked_up)
            values = self.apply_value_head(critic_features)
        ids_log_probs = None if ids is None else token_log_probs.log_probs[num_episodes:, :, 1:]
        return token_log_probs.first(sequences.responses.mask), values, ids_log_probs

    def call_gathered(self, function: Callable[[], Result]) -> Result:
        """Call a function; FSDP treats this as a forward pass: see `call_with_root_gathered`."""
        return function()

    def read(
        self,
        sequences: Sequences,
        num_episodes: int,
        temperature: float,
        ids: Int[Tensor, "B R K"] | None = None,
    ) -> tuple[TokenLogProbs, Float[Tensor, "E R"] | None]:
        """Log-probs of the response tokens, or of `ids`, and values of the first rows.

        Arguments and results are those of `forward`.
        """
        if not isinstance(self.critic, PolicyHead):
            log_probs = response_log_probs(self.policy, sequences, temperature, ids)
            if self.critic is None or not num_episodes:
                return log_probs, None
            return log_probs, self.values(sequences.rows(slice(0, num_episodes)))
        # what the output matrix reads is what the head reads
        with capture_input(self.policy.get_output_embeddings()) as read:
            log_probs = response_log_probs(self.policy, sequences, temperature, ids)
        hidden = read[-1] if self.critic.trains_policy else read[-1].detach()
        hidden = by_response(hidden.flatten(0, 1), sequences)
        return log_probs, self.apply_value_head(hidden[:num_episodes]) if num_episodes else None

    def values(self, sequences: Sequences) -> Float[Tensor, "B R"]:
        """The critic's value before each response token."""
        return self.apply_value_head(self.critic_features(sequences))

    def apply_value_head(self, hidden: Float[Tensor, "B R d"]) -> Float[Tensor, "B R"]:
        """The values that the critic's head computes from features."""
        head = reward_head(self.critic)
        with torch.autocast(hidden.device.type, enabled=False):
            values: Tensor = head(hidden.to(head.weight.dtype)).squeeze(2)
        return values.float() + self.value_bias

    def critic_features(self, sequences: Sequences) -> Float[Tensor, "B R d"]:
        """The features that the critic's head reads before each response token."""
        model: Any = self.policy if isinstance(self.critic, PolicyHead) else self.critic
        return features(model, sequences)


def call_with_root_gathered(model: PolicyAndCritic, function: Callable[[], Result]) -> Result:
    """Call a function that uses the policy or the critic alone; returns what it returns.

    Under FSDP what belongs to neither a layer nor a matrix, such as norms and heads, is gathered
    meanwhile. FSDP gathers it around methods only, so this is no context manager. All ranks must
    call a sharded model equally often.
    """
    result = model.call_gathered(function)
    reshard(model)
    return result


def save_policy(
    accelerator: Accelerator,
    trained: PolicyAndCritic,
    tokenizer: PreTrainedTokenizerBase,
    folder: Path,
) -> None:
    """Save the policy as a plain model, with its adapters merged in; all processes call it."""
    named = trained.state_dict(keep_vars=True).items()
    state = {name.removeprefix(POLICY): tensor for name, tensor in named if name.startswith(POLICY)}
    if any(map(is_shard, state.values())):
        save_sharded(accelerator, trained.policy, state, tokenizer, folder)
    elif accelerator.is_main_process:
        save_merged(trained.policy, tokenizer, folder)
