"""One step's experience: responses of the current policy with everything the update needs.

Letters: B episodes of this process, R response tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from accelerate import Accelerator
from jaxtyping import Bool, Float
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from policies.actor_critic import PolicyAndCritic
from policies.advantages import generalized_advantages, masked_moments, whiten
from policies.generate import sample_responses
from policies.log_probs import Sequences, entropy_of, log_probs_of, response_logits
from policies.reference_store import ReferenceRow
from policies.rewards import center, penalize_missing_eos, place_at_end
from policies.settings import PPOSettings
from reward.scoring import Scorer
from rlhf.distributed import global_sum
from rlhf.records import Sampling
from rlhf.tokens import pad_left, pad_right


@dataclass(frozen=True)
class Rollout:
    """Episodes of one step; every (B, R) tensor is 0 at padding."""

    sequences: Sequences
    finished: Bool[Tensor, " B"]
    scores: Float[Tensor, " B"]
    centered: Float[Tensor, " B"]
    shaped: Float[Tensor, " B"]
    old_log_probs: Float[Tensor, "B R"]
    entropy: Float[Tensor, "B R"]
    old_values: Float[Tensor, "B R"]
    advantages: Float[Tensor, "B R"]
    returns: Float[Tensor, "B R"]

    @property
    def response_mask(self) -> Bool[Tensor, "B R"]:
        """True at real response tokens."""
        return self.sequences.responses.mask


@torch.no_grad()
def collect_rollout(
    accelerator: Accelerator,
    model: PolicyAndCritic,
    tokenizer: PreTrainedTokenizerBase,
    scorer: Scorer,
    references: Sequence[tuple[ReferenceRow, ...]],
    reference_rewards: dict[str, list[float]],
    sampling: Sampling,
    settings: PPOSettings,
) -> Rollout:
    """Sample a response for each prompt, score it, and work out advantages.

    Args:
        accelerator: device, precision and processes.
        model: policy and critic, not wrapped.
        tokenizer: the policy's.
        scorer: the reward model.
        references: the stored rows of each prompt of this process.
        reference_rewards: r(y0) of each prompt's rows, by prompt id.
        sampling: the settings that the reference outputs were sampled with.
        settings: shaping and GAE.
    """
    prompts = [rows[0].prompt_ids for rows in references]
    samples = sample_responses(
        accelerator, model.policy, tokenizer, prompts, sampling, settings.sample_batch_size
    )
    pad_id = int(tokenizer.pad_token_id)
    sequences = Sequences(
        pad_left(prompts, pad_id), pad_right([s.token_ids for s in samples], pad_id)
    ).to(accelerator.device)
    device = accelerator.device
    finished = torch.tensor([sample.finished for sample in samples], device=device)
    baseline = torch.tensor(
        [reference_rewards[rows[0].prompt.id] for rows in references], device=device
    )
    parts = [
        _measure(accelerator, model, scorer, sequences.rows(rows), sampling.temperature)
        for rows in torch.arange(len(prompts)).split(settings.micro_batch_size)
    ]
    scores, log_probs, entropy, values = (torch.cat(part) for part in zip(*parts, strict=True))
    centered = center(scores, baseline)
    shaped = centered if settings.reward_shaping == "centered" else scores
    shaped = penalize_missing_eos(shaped, finished, settings.missing_eos_penalty)
    mask = sequences.responses.mask
    advantages, returns = generalized_advantages(
        place_at_end(shaped, mask),
        values,
        mask,
        gamma=settings.gamma,
        gae_lambda=settings.gae_lambda,
    )
    count, total, squares = global_sum(accelerator, masked_moments(advantages, mask)).tolist()
    mean = total / count
    advantages = whiten(advantages, mask, mean, squares / count - mean**2)
    return Rollout(
        sequences,
        finished,
        scores,
        centered,
        shaped,
        log_probs,
        entropy,
        values,
        advantages,
        returns,
    )


def _measure(
    accelerator: Accelerator,
    model: PolicyAndCritic,
    scorer: Scorer,
    sequences: Sequences,
    temperature: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Scores (b,), and log-probs, entropy and values (b, R) of a few rows."""
    scores = scorer(sequences.joined)
    with accelerator.autocast():
        logits = response_logits(model.policy, sequences, temperature)
        values = model.values(sequences)
    log_probs = log_probs_of(logits, sequences.responses)
    entropy = entropy_of(logits, sequences.responses)
    return scores, log_probs, entropy, values * sequences.responses.mask
