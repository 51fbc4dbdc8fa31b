"""One step's experience: responses of the current policy with everything the update needs.

Letters: B episodes of this process, R response tokens.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from accelerate import Accelerator
from jaxtyping import Bool, Float
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from policies.ppo.advantages import (
    generalized_advantages,
    group_relative,
    leave_one_out,
    masked_moments,
    whiten,
)
from policies.ppo.guards import distinct_2
from policies.ppo.kl import ReferencePolicy, measure_reference
from policies.ppo.losses import matches_sampler, sampler_weights
from policies.ppo.micro_batches import arrange, refit, split_by_length
from policies.ppo.models.actor_critic import PolicyAndCritic
from policies.ppo.settings import PPOSettings
from policies.reference.store import ReferenceRow
from policies.rewards.shaping import center, place_at_end, shape_rewards
from policies.rewards.sources import Reward
from policies.sampling.generate import Sample, Sampler, sample_responses
from rlhf.modeling.log_probs import Sequences, entropy_of, log_probs_of, response_logits
from rlhf.modeling.tokens import decode_response, pad_left, pad_right
from rlhf.parallel.distributed import global_sum
from rlhf.records.schema import Sampling
from rlhf.run.watchdog import beat


@dataclass(frozen=True)
class Rollout:
    """Episodes of one step; every (B, R) tensor is 0 at padding."""

    sequences: Sequences
    loss_mask: Bool[Tensor, "B R"]
    """True at the response tokens that the policy and value losses learn from."""
    finished: Bool[Tensor, " B"]
    scores: Float[Tensor, " B"]
    centered: Float[Tensor, " B"]
    shaped: Float[Tensor, " B"]
    old_log_probs: Float[Tensor, "B R"]
    sampler_log_probs: Float[Tensor, "B R"]
    """What the sampler thought of its tokens."""
    reference_log_probs: Float[Tensor, "B R"] | None
    entropy: Float[Tensor, "B R"]
    old_values: Float[Tensor, "B R"]
    advantages: Float[Tensor, "B R"]
    returns: Float[Tensor, "B R"]
    sampled_at: float
    """On time's monotonic clock: what came before was sampling, what comes after is scoring."""
    sampler_weights: Float[Tensor, "B R"] | None = None
    """Importance weights of the policy loss; None where the sampler is not corrected for."""
    critic_features: Float[Tensor, "B R d"] | None = None
    """What a critic's head reads on a frozen model of its own: updates need not read it again."""

    @property
    def response_mask(self) -> Bool[Tensor, "B R"]:
        """True at real response tokens."""
        return self.sequences.responses.mask


@torch.no_grad()
def collect_rollout(
    accelerator: Accelerator,
    model: PolicyAndCritic,
    tokenizer: PreTrainedTokenizerBase,
    reward: Reward,
    reference: ReferencePolicy | None,
    references: Sequence[tuple[ReferenceRow, ...]],
    reference_rewards: dict[str, list[float]],
    sampling: Sampling,
    settings: PPOSettings,
    sampler: Sampler | None = None,
) -> Rollout:
    """Sample a response for each prompt, score it, and work out advantages.

    Args:
        accelerator: device, precision and processes.
        model: policy and critic, not wrapped.
        tokenizer: the policy's.
        reward: what the policy is to please.
        reference: gives the reference's log-probs of the samples, where the KL term wants them.
        references: the stored rows of each prompt, as often in a row as it is to be answered.
        reference_rewards: r(y0) of each prompt's rows, by prompt id.
        sampling: the settings that the reference outputs were sampled with.
        settings: shaping and GAE.
        sampler: who samples, if not transformers' plain `generate`.
    """
    prompts = [rows[0].prompt_ids for rows in references]
    samples, sequences = _sample(
        accelerator, model, tokenizer, prompts, sampling, settings, sampler
    )
    sampled_at = time.monotonic()
    device, mask = accelerator.device, sequences.responses.mask
    texts = [
        decode_response(tokenizer, sample.token_ids, ids)
        for sample, ids in zip(samples, prompts, strict=True)
    ]
    beat("scoring")
    scores = reward([rows[0].prompt for rows in references], texts, sequences.joined)
    stored = [reference_rewards[rows[0].prompt.id] for rows in references]
    reference_scores = torch.tensor(stored, device=device)
    finished = torch.tensor([sample.finished for sample in samples], device=device)
    shaped, baseline = shape_rewards(
        scores, reference_scores, finished, mask.sum(dim=1), **settings.shaping
    )
    beat("measuring")
    log_probs, entropy, values, critic_features = _measure(
        accelerator, model, sequences, sampling, settings
    )
    sampler_log_probs = _stack_log_probs(samples).to(device)
    loss_mask, weights = _loss_weights(finished, mask, log_probs, sampler_log_probs, settings)
    token_rewards, reference_log_probs = place_at_end(shaped + baseline, mask), None
    if reference is not None:
        rows = settings.batch.micro_batch_size
        reference_log_probs = measure_reference(accelerator, model, reference, sequences, rows)
        token_rewards -= settings.kl.coefficient * (log_probs - reference_log_probs) * mask
    advantages, returns = advantages_of(
        accelerator, token_rewards, values, mask, settings, loss_mask
    )
    return Rollout(
        sequences=sequences,
        loss_mask=loss_mask,
        finished=finished,
        scores=scores,
        centered=center(scores, reference_scores),
        shaped=shaped,
        old_log_probs=log_probs,
        sampler_log_probs=sampler_log_probs,
        sampler_weights=weights,
        reference_log_probs=reference_log_probs,
        entropy=entropy,
        old_values=values,
        critic_features=critic_features,
        advantages=advantages,
        returns=returns,
        sampled_at=sampled_at,
    )


def _sample(
    accelerator: Accelerator,
    model: PolicyAndCritic,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[list[int]],
    sampling: Sampling,
    settings: PPOSettings,
    sampler: Sampler | None,
) -> tuple[list[Sample], Sequences]:
    samples = sample_responses(
        accelerator,
        model.policy,
        tokenizer,
        prompts,
        sampling,
        settings.sampling.batch_size,
        sampler=sampler,
    )
    pad_id = int(tokenizer.pad_token_id)
    responses = pad_right([sample.token_ids for sample in samples], pad_id)
    return samples, Sequences(pad_left(prompts, pad_id), responses).to(accelerator.device)


def _stack_log_probs(samples: Sequence[Sample]) -> Float[Tensor, "B R"]:
    width = max(len(sample.token_ids) for sample in samples)
    log_probs = torch.zeros((len(samples), width))
    for row, sample in enumerate(samples):
        assert sample.log_probs is not None
        log_probs[row, : len(sample.log_probs)] = torch.tensor(sample.log_probs)
    return log_probs


def _loss_weights(
    finished: Bool[Tensor, " B"],
    mask: Bool[Tensor, "B R"],
    log_probs: Float[Tensor, "B R"],
    sampler_log_probs: Float[Tensor, "B R"],
    settings: PPOSettings,
) -> tuple[Bool[Tensor, "B R"], Float[Tensor, "B R"] | None]:
    """The tokens that the losses learn from, and their weights in the policy loss."""
    kept = finished if settings.rewards.mask_truncated else torch.ones_like(finished)
    if settings.sampler_correction == "none":
        return mask & kept[:, None], None
    both, cap = (log_probs, sampler_log_probs), settings.sampling.correction_cap
    if settings.sampler_correction == "sequence":
        kept = kept & matches_sampler(*both, mask, cap)
    return mask & kept[:, None], sampler_weights(*both, cap)


def advantages_of(
    accelerator: Accelerator,
    token_rewards: Float[Tensor, "B R"],
    values: Float[Tensor, "B R"],
    mask: Bool[Tensor, "B R"],
    settings: PPOSettings,
    loss_mask: Bool[Tensor, "B R"] | None = None,
) -> tuple[Float[Tensor, "B R"], Float[Tensor, "B R"]]:
    """Advantages, which with a critic are whitened over the tokens of all processes, and returns.

    Args:
        accelerator: of the processes.
        token_rewards: 0 at padding.
        values: the critic's.
        mask: real tokens.
        settings: the kind of advantages, γ and λ.
        loss_mask: the tokens to whiten over, all real ones when not given.
    """
    if not settings.has_critic:
        totals = token_rewards.sum(dim=1).view(-1, settings.batch.samples_per_prompt)
        if settings.advantages == "rloo":
            each = leave_one_out(totals)
        else:
            each = group_relative(totals, scale=settings.loss.grpo_std)
        return each.flatten()[:, None] * mask, values
    advantages, returns = generalized_advantages(
        token_rewards, values, mask, gamma=settings.loss.gamma, gae_lambda=settings.loss.gae_lambda
    )
    moments = masked_moments(advantages, mask if loss_mask is None else loss_mask)
    count, total, squares = global_sum(accelerator, moments).tolist()
    count = max(count, 1)  # no token is learned from where all responses were truncated
    mean = total / count
    return whiten(advantages, mask, mean, squares / count - mean**2), returns


def _measure(
    accelerator: Accelerator,
    model: PolicyAndCritic,
    sequences: Sequences,
    sampling: Sampling,
    settings: PPOSettings,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Log-probs, entropy and values (B, R), in batches of like length; no critic, no values.

    Fourth, what the critic's head reads (B, R, d), where it reads a frozen model of its own.
    """
    shape = sequences.responses.ids.shape
    measured = torch.zeros((3, *shape), device=accelerator.device)
    features: Tensor | None = None
    lengths = sequences.joined.mask.sum(dim=1)
    with accelerator.autocast():
        for rows in split_by_length(
            lengths, settings.batch.micro_batch_size, settings.batch.micro_tokens
        ):
            part, mask = sequences.rows(rows), sequences.responses.mask[rows]
            part = arrange(part, settings.batch.micro_tokens)
            responses = part.responses
            if model.reads_frozen_features:
                logits, read = response_logits(model.policy, part), model.critic_features(part)
                values: Tensor | None = model.values_of(read)
                if features is None:
                    features = read.new_zeros((*shape, read.shape[2]))
                features[rows] = refit(read, responses.mask, mask)
            else:
                logits, values = model.read(part, len(rows))
            found = [
                log_probs_of(logits, responses, sampling.temperature),
                entropy_of(logits, responses, sampling.temperature),
            ]
            if values is not None:
                found.append(values)
            for kind, numbers in enumerate(found):
                measured[kind, rows] = refit(numbers, responses.mask, mask)
    return measured[0], measured[1], measured[2], features


def describe_rollout(accelerator: Accelerator, rollout: Rollout) -> dict[str, float]:
    """Means over all episodes, and over all tokens, of all processes."""
    mask = rollout.response_mask
    rows = zip(rollout.sequences.responses.ids.tolist(), mask.sum(dim=1).tolist(), strict=True)
    answers = [ids[:length] for ids, length in rows]
    sums = global_sum(
        accelerator,
        torch.stack(
            [
                torch.tensor(float(len(rollout.scores))).to(accelerator.device),
                mask.sum(),
                rollout.scores.sum(),
                rollout.centered.sum(),
                rollout.shaped.sum(),
                rollout.finished.sum(),
                rollout.entropy.sum(),
                torch.tensor(sum(map(distinct_2, answers))).to(accelerator.device),
                (rollout.sampler_log_probs - rollout.old_log_probs)[mask].abs().sum(),
            ]
        ),
    ).tolist()
    episodes, tokens = sums[0], sums[1]
    return {
        "reward/mean": sums[2] / episodes,
        "reward/centered": sums[3] / episodes,
        "reward/shaped": sums[4] / episodes,
        "eos_rate": sums[5] / episodes,
        "length": tokens / episodes,
        "entropy": sums[6] / tokens,
        "distinct_2": sums[7] / episodes,
        "sampler_gap": sums[8] / tokens,
    }


def describe_correction(
    accelerator: Accelerator, rollout: Rollout, settings: PPOSettings
) -> dict[str, float]:
    """How far the sampler was corrected for, over all processes; nothing where it was not.

    The effective sample size is Kish's, (Σ w)² / Σ w², as a share of the tokens.
    """
    weights, mask = rollout.sampler_weights, rollout.loss_mask
    if weights is None:
        return {}
    moments = global_sum(accelerator, masked_moments(weights, mask))
    count, total, squares = moments.clamp(min=1e-12).tolist()
    capped = global_sum(accelerator, ((weights >= settings.sampling.correction_cap) & mask).sum())
    found = {
        "sampler/capped_fraction": float(capped) / count,
        "sampler/effective_sample_size": total**2 / (count * squares),
    }
    if settings.sampler_correction == "sequence":
        near = matches_sampler(
            rollout.old_log_probs,
            rollout.sampler_log_probs,
            rollout.response_mask,
            settings.sampling.correction_cap,
        )
        left, responses = global_sum(
            accelerator, torch.stack([(~near).sum(), torch.ones_like(near).sum()])
        ).tolist()
        found["sampler/masked_fraction"] = left / responses
    return found


def describe_values(accelerator: Accelerator, rollout: Rollout) -> dict[str, float]:
    """How much of the returns the critic foresaw, over all processes."""
    mask = rollout.response_mask
    moments = [
        global_sum(accelerator, masked_moments(values, mask))
        for values in (rollout.returns, rollout.returns - rollout.old_values)
    ]
    returns, residual = (
        float(squares / count - (total / count) ** 2) for count, total, squares in moments
    )
    return {"value/explained_variance": 1 - residual / max(returns, 1e-12)}
