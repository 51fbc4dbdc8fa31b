"""One step's experience: sample responses, score them, measure their log-probs, get advantages.

Each of these is a function here; `policies/ppo/train.py` calls them in this order. Letters: B
episodes (prompt and response) of this process, R response tokens. Every (B, R) tensor is 0 at
padding.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from accelerate import Accelerator
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from policies.formulas import (
    center,
    generalized_advantages,
    group_relative,
    leave_one_out,
    masked_moments,
    matches_sampler,
    place_at_end,
    sampler_weights,
    shape_rewards,
    whiten,
)
from policies.ppo.batches import PaddingMap, in_length_order
from policies.ppo.kl import ReferencePolicy, measure_reference
from policies.ppo.models.actor_critic import PolicyAndCritic, call_with_root_gathered
from policies.ppo.settings import PPOSettings
from policies.reference.store import ReferenceRow
from policies.rewards import Reward
from policies.sampling.generate import Sample, Sampler, sample_responses
from rlhf.modeling.log_probs import Sequences, response_log_probs
from rlhf.modeling.tokens import decode_response, send
from rlhf.parallel.distributed import global_sum
from rlhf.parallel.sharding import Sharding
from rlhf.records.schema import Sampling
from rlhf.run.watchdog import beat


@dataclass(frozen=True)
class RolloutContext:
    """What responses are sampled with and scored by; the same in every step.

    Attributes:
        accelerator: device, precision and processes.
        tokenizer: the policy's.
        reward: what the policy is trained against.
        reference_policy: log-probs of fresh samples under the original model; None where the KL
            term needs none.
        reference_rewards: rewards of each prompt's reference outputs, by prompt id.
        sampling: how the reference outputs were sampled.
        shaping: keyword arguments of `shape_rewards`.
        sampler: what samples.
        sampler_correction: how differences between sampler and trainer are corrected for.
        sharding: how policy and critic are held during a rollout.
    """

    accelerator: Accelerator
    tokenizer: PreTrainedTokenizerBase
    reward: Reward
    reference_policy: ReferencePolicy | None
    reference_rewards: dict[str, list[float]]
    sampling: Sampling
    shaping: Mapping[str, Any]
    sampler: Sampler
    sampler_correction: Literal["none", "token", "sequence"] = "none"
    sharding: Sharding = field(default_factory=Sharding)


@dataclass(frozen=True)
class Episodes:
    """Responses of the current policy; `prompts` has the reference rows of each one's prompt."""

    prompts: Sequence[tuple[ReferenceRow, ...]]
    sequences: Sequences
    finished: Bool[Tensor, " B"]
    texts: Sequence[str]
    sampler_log_probs: Float[Tensor, "B R"]
    """The sampler's log-probs of its tokens."""

    @property
    def mask(self) -> Bool[Tensor, "B R"]:
        """True at real response tokens."""
        return self.sequences.responses.mask


@dataclass(frozen=True)
class Scores:
    """Rewards of episodes."""

    raw: Float[Tensor, " B"]
    """As the reward gives them."""
    centered: Float[Tensor, " B"]
    """Minus the mean of the prompt's reference outputs."""
    shaped: Float[Tensor, " B"]
    """After `--rewards.shaping`, limits and penalties."""
    prompt_baseline: Float[Tensor, " B"]
    """The part that shaping has subtracted: the same for all responses to a prompt."""

    @property
    def for_advantages(self) -> Float[Tensor, " B"]:
        """Shaped, with the prompt baseline added back.

        A critic or other samples of the prompt take its place.
        """
        return self.shaped + self.prompt_baseline


@dataclass(frozen=True)
class TokenStats:
    """The outputs of policy, critic and reference for the episodes' tokens before the update."""

    log_probs: Float[Tensor, "B R"]
    entropy: Float[Tensor, "B R"]
    values: Float[Tensor, "B R"]
    critic_features: Float[Tensor, "B R d"] | None
    """The input of a critic's head on a frozen model of its own: updates need not compute it."""
    reference_log_probs: Float[Tensor, "B R"] | None = None


@dataclass(frozen=True)
class Experience:
    """The data that the update learns from."""

    sequences: Sequences
    loss_mask: Bool[Tensor, "B R"]
    """True at the response tokens that the policy and value losses learn from."""
    old_log_probs: Float[Tensor, "B R"]
    old_values: Float[Tensor, "B R"]
    advantages: Float[Tensor, "B R"]
    returns: Float[Tensor, "B R"]
    sampler_weights: Float[Tensor, "B R"] | None = None
    """Importance weights of the policy loss; None where the sampler is not corrected for."""
    critic_features: Float[Tensor, "B R d"] | None = None

    @property
    def response_mask(self) -> Bool[Tensor, "B R"]:
        """True at real response tokens."""
        return self.sequences.responses.mask


@torch.no_grad()
def sample_episodes(
    context: RolloutContext,
    policy: PreTrainedModel,
    prompts: Sequence[tuple[ReferenceRow, ...]],
    batch_size: int,
) -> Episodes:
    """Sample a response for each prompt.

    Args:
        context: tokenizer, sampling settings and sampler.
        policy: samples; not wrapped.
        prompts: the reference rows of each prompt, repeated as often as it is to be answered.
        batch_size: sequences sampled at once.
    """
    tokenizer, device = context.tokenizer, context.accelerator.device
    prompt_ids = [rows[0].prompt_ids for rows in prompts]
    samples = sample_responses(
        context.sampler,
        policy,
        tokenizer,
        prompt_ids,
        context.sampling,
        batch_size,
    )
    pad_id = int(tokenizer.pad_token_id)
    responses = [sample.token_ids for sample in samples]
    return Episodes(
        prompts=prompts,
        sequences=Sequences.of(prompt_ids, responses, pad_id).to(device),
        finished=torch.tensor([sample.finished for sample in samples], device=device),
        texts=[
            decode_response(tokenizer, sample.token_ids, ids)
            for sample, ids in zip(samples, prompt_ids, strict=True)
        ],
        sampler_log_probs=_stack_log_probs(samples).to(device),
    )


def _stack_log_probs(samples: Sequence[Sample]) -> Float[Tensor, "B R"]:
    return pad_sequence([torch.tensor(sample.log_probs) for sample in samples], batch_first=True)


@torch.no_grad()
def score_episodes(context: RolloutContext, episodes: Episodes) -> Scores:
    """Score the responses, and shape the scores with the rewards of the reference outputs."""
    beat("scoring")
    prompts = [rows[0].prompt for rows in episodes.prompts]
    raw = context.reward(prompts, episodes.texts, episodes.sequences.joined)
    stored = [context.reference_rewards[prompt.id] for prompt in prompts]
    reference_scores = torch.tensor(stored, device=context.accelerator.device)
    shaped, prompt_baseline = shape_rewards(
        raw,
        reference_scores,
        episodes.finished,
        episodes.mask.sum(dim=1),
        **context.shaping,
    )
    return Scores(raw, center(raw, reference_scores), shaped, prompt_baseline)


@torch.no_grad()
def measure_episodes(
    context: RolloutContext, model: PolicyAndCritic, episodes: Episodes, settings: PPOSettings
) -> TokenStats:
    """Log-probs, entropy and values of the tokens, and the reference's log-probs where needed."""
    beat("measuring")
    return call_with_root_gathered(model, lambda: _measure(context, model, episodes, settings))


def _measure(
    context: RolloutContext, model: PolicyAndCritic, episodes: Episodes, settings: PPOSettings
) -> TokenStats:
    accelerator, sequences, batch = context.accelerator, episodes.sequences, settings.batch
    temperature = context.sampling.temperature
    shape = sequences.responses.ids.shape
    log_probs, entropy, values = torch.zeros((3, *shape), device=accelerator.device)
    features: Tensor | None = None
    parts = list(in_length_order(sequences, batch.micro_batch_size, batch.micro_tokens))
    with accelerator.autocast():
        for (rows, part), _ in context.sharding.equal_calls(accelerator, parts):
            mask = sequences.on_host.responses.mask[rows]
            to_rollout = PaddingMap.between(part.responses.mask, mask, accelerator.device)
            here, part = send(rows, accelerator.device), part.to(accelerator.device)
            real = part.responses.mask
            if model.reads_frozen_features:
                read = model.critic_features(part)
                token_log_probs = response_log_probs(model.policy, part, temperature)
                new_values: Tensor | None = model.apply_value_head(read)
                if features is None:
                    features = read.new_zeros((*shape, read.shape[2]))
                features[here] = to_rollout(read)
            else:
                token_log_probs, new_values = model.read(part, len(rows), temperature)
            log_probs[here] = to_rollout(token_log_probs.first(real))
            entropy[here] = to_rollout(token_log_probs.entropy * real)
            if new_values is not None:
                values[here] = to_rollout(new_values)
    reference_log_probs = None
    if context.reference_policy is not None:
        reference_log_probs = measure_reference(
            accelerator,
            model,
            context.reference_policy,
            sequences,
            batch.micro_batch_size,
            context.sharding,
        )
    return TokenStats(log_probs, entropy, values, features, reference_log_probs)


@torch.no_grad()
def build_experience(
    context: RolloutContext,
    episodes: Episodes,
    scores: Scores,
    measured: TokenStats,
    settings: PPOSettings,
    kl_coefficient: float,
) -> Experience:
    """Token rewards, then advantages, loss mask and sampler weights: what updates learn from.

    The score is the reward of the last token. With a reverse KL term, β (log π − log π_ref) is
    subtracted at every token; β is `kl_coefficient`.
    """
    mask = episodes.mask
    loss_mask, weights = _loss_weights(context, episodes, measured.log_probs, settings)
    token_rewards = place_at_end(scores.for_advantages, mask)
    if measured.reference_log_probs is not None:
        log_ratio = measured.log_probs - measured.reference_log_probs
        token_rewards -= kl_coefficient * log_ratio * mask
    advantages, returns = compute_advantages(
        context.accelerator, token_rewards, measured.values, mask, settings, loss_mask
    )
    return Experience(
        sequences=episodes.sequences,
        loss_mask=loss_mask,
        old_log_probs=measured.log_probs,
        old_values=measured.values,
        advantages=advantages,
        returns=returns,
        sampler_weights=weights,
        critic_features=measured.critic_features,
    )


def _loss_weights(
    context: RolloutContext,
    episodes: Episodes,
    log_probs: Float[Tensor, "B R"],
    settings: PPOSettings,
) -> tuple[Bool[Tensor, "B R"], Float[Tensor, "B R"] | None]:
    """The tokens that the losses learn from, and their weights in the policy loss."""
    mask, finished = episodes.mask, episodes.finished
    kept = finished if settings.rewards.mask_truncated else torch.ones_like(finished)
    if context.sampler_correction == "none":
        return mask & kept[:, None], None
    sampled, cap = episodes.sampler_log_probs, settings.sampling.correction_cap
    if context.sampler_correction == "sequence":
        kept = kept & matches_sampler(log_probs, sampled, mask, cap)
    return mask & kept[:, None], sampler_weights(log_probs, sampled, cap)


def compute_advantages(
    accelerator: Accelerator,
    token_rewards: Float[Tensor, "B R"],
    values: Float[Tensor, "B R"],
    mask: Bool[Tensor, "B R"],
    settings: PPOSettings,
    loss_mask: Bool[Tensor, "B R"] | None = None,
) -> tuple[Float[Tensor, "B R"], Float[Tensor, "B R"]]:
    """Advantages and returns of every token; gae's advantages are whitened over all processes.

    Args:
        accelerator: adds up over processes.
        token_rewards: the reward of every token; 0 at padding.
        values: the critic's; without a critic they are passed through as the returns.
        mask: real tokens.
        settings: the kind of advantages, γ and λ.
        loss_mask: the tokens to whiten over, all real ones when not given.
    """
    if settings.advantages != "gae":
        totals = token_rewards.sum(dim=1).view(-1, settings.batch.samples_per_prompt)
        is_rloo, scale = settings.advantages == "rloo", settings.loss.grpo_std
        of_responses = leave_one_out(totals) if is_rloo else group_relative(totals, scale=scale)
        return of_responses.flatten()[:, None] * mask, values  # without a critic no returns
    advantages, returns = generalized_advantages(
        token_rewards, values, mask, gamma=settings.loss.gamma, gae_lambda=settings.loss.gae_lambda
    )
    moments = masked_moments(advantages, mask if loss_mask is None else loss_mask)
    count, total, squares = global_sum(accelerator, moments).tolist()
    count = max(count, 1)  # no token is learned from where all responses were truncated
    mean = total / count
    return whiten(advantages, mask, mean, squares / count - mean**2), returns
