"""The door to a trained reward model: token batches in, rewards out."""

from typing import final

import torch
from accelerate import Accelerator
from jaxtyping import Float
from torch import Tensor

from reward.model import Inputs, RewardModule, last_tokens
from rlhf.errors import GuardError
from rlhf.models import describe_model, load_reward_model, model_folder
from rlhf.tokens import TokenBatch, close, load_tokenizer

TOKENS_PER_BATCH = 4096


@final
class Scorer:
    """A loaded reward model. `description` has its path, hash and tokenizer fingerprint."""

    def __init__(
        self,
        module: RewardModule,
        bias: float,
        description: dict[str, str],
        eos_id: int,
        accelerator: Accelerator,
    ) -> None:
        self._module = module
        self._bias = bias
        self._eos_id = eos_id
        self._accelerator = accelerator
        self.description = description

    def __call__(
        self, batch: TokenBatch, tokens_per_batch: int = TOKENS_PER_BATCH
    ) -> Float[Tensor, " B"]:
        """Rewards of whole sequences (prompt and response), on the device of the batch, in float32.

        Args:
            batch: token ids padded on any side; rows that were cut short are closed here.
            tokens_per_batch: tokens, padding included, in one forward pass.

        Raises:
            GuardError: a reward is not a number.
        """
        lengths = batch.mask.sum(dim=1)
        order = lengths.argsort(descending=True, stable=True)
        rewards = torch.zeros(len(lengths), dtype=torch.float32, device=batch.ids.device)
        start = 0
        while start < len(order):
            rows = max(1, tokens_per_batch // max(1, int(lengths[order[start]])))
            part = order[start : start + rows]
            rewards[part] = self._score(TokenBatch(batch.ids[part], batch.mask[part]))
            start += rows
        if not rewards.isfinite().all():
            bad = int((~rewards.isfinite()).sum())
            raise GuardError(
                f"{self.description['path']} gave {bad} of {len(rewards)} responses a reward that "
                "is not a number",
                "Its weights are broken: train it again with a smaller --learning-rate.",
            )
        return rewards

    def _score(self, batch: TokenBatch) -> Tensor:
        batch = close(batch, self._eos_id).to(self._accelerator.device)
        reads = last_tokens(batch.mask.sum(dim=1), batch.ids.shape[1])
        with torch.no_grad(), self._accelerator.autocast():
            rewards: Tensor = self._module(Inputs(batch.ids, reads))
        return rewards + self._bias


def load_scorer(name: str, accelerator: Accelerator) -> Scorer:
    """Load a reward model to score with.

    Args:
        name: a finished reward stage of ours, or the Hugging Face folder of a one-label classifier.
        accelerator: gives device and precision.

    Raises:
        InputError: there is no such model, it is not a reward model, or its stage did not finish.
    """
    module, bias, description = load_module(name, accelerator)
    eos_id = int(load_tokenizer(description["path"]).eos_token_id)
    return Scorer(module, bias, description, eos_id, accelerator)


def load_module(name: str, accelerator: Accelerator) -> tuple[RewardModule, float, dict[str, str]]:
    """A reward model ready to score, the bias to add to its outputs, and its description.

    Raises:
        InputError: there is no such model, it is not a reward model, or its stage did not finish.
    """
    folder = model_folder(name, "reward", "model")
    classifier = load_reward_model(folder)
    bias = float(getattr(classifier.config, "reward_bias", 0.0))
    module = RewardModule(classifier).to(accelerator.device).eval().requires_grad_(False)
    return module, bias, describe_model(folder)
