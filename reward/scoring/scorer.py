"""Scores token batches with a trained reward model, or with an ensemble of them.

An ensemble is the folder of its first member with the others inside, as member-1, member-2, …:
other programs load the first member, this module loads all.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, final

import torch
from accelerate import Accelerator
from jaxtyping import Bool, Float, Int
from torch import Tensor
from transformers import PreTrainedModel

from reward.model.module import RewardModule
from reward.scoring.passes import pack_pass, packed_passes, padded_passes
from reward.settings import Combine
from rlhf.modeling.adapters import load_reward_model_on
from rlhf.modeling.attention.layout import TrunkInputs, last_tokens
from rlhf.modeling.attention.shared_prefix import share_prompts
from rlhf.modeling.chat_template import end_token_ids
from rlhf.modeling.models import describe_model, load_reward_model, model_folder
from rlhf.modeling.pairs import has_token_types, is_for_pairs, parts_of_pairs
from rlhf.modeling.readers import Reader, load_reader, reward_kwargs, tokenizer_of
from rlhf.modeling.thinking import has_thinking
from rlhf.modeling.tokens import TokenBatch, close, encode_prompt, pad_right, send
from rlhf.parallel.sharding import Sharding, shard_frozen
from rlhf.planning.flops import count_flops
from rlhf.records.schema import Prompt, Response
from rlhf.run.watchdog import beat

TOKENS_PER_BATCH = 4096
MEMBERS = "member-*"


@final
class Scorer:
    """A loaded reward model. `description` has its path, hash and tokenizer fingerprint."""

    def __init__(
        self,
        members: Sequence[tuple[RewardModule, float]],
        description: dict[str, str],
        reader: Reader,
        accelerator: Accelerator,
        combine: Combine,
        *,
        sharding: Sharding,
        shared: bool = False,
    ) -> None:
        self._members = members
        self._reader = reader
        self._ends = end_token_ids(reader.tokenizer)
        self._accelerator = accelerator
        self._combine = combine
        self._sharding = sharding
        self._shared = shared
        self.description = description

    def __call__(
        self,
        batch: TokenBatch,
        tokens_per_batch: int = TOKENS_PER_BATCH,
        prompts: Sequence[str] | None = None,
    ) -> Float[Tensor, " B"]:
        """Rewards of whole sequences (prompt and response), on the device of the batch, in float32.

        Args:
            batch: token ids padded on any side; rows without an end token get one.
            tokens_per_batch: tokens, padding included, in one forward pass.
            prompts: of each row the id of its prompt; rows of one prompt are read together.
        """
        return combine_members(self.each(batch, tokens_per_batch, prompts), self._combine)

    def each(
        self,
        batch: TokenBatch,
        tokens_per_batch: int = TOKENS_PER_BATCH,
        prompts: Sequence[str] | None = None,
    ) -> Float[Tensor, "M B"]:
        """The rewards of every member of an ensemble; a single model is an ensemble of one.

        Arguments as in `__call__`.
        """
        device, there = batch.ids.device, self._accelerator.device
        batch = close(batch.to(torch.device("cpu")), self._ends)  # planned there
        shape = (len(self._members), len(batch.ids))
        rewards = torch.zeros(shape, dtype=torch.float32, device=there)
        for rows, inputs in self._passes(batch, tokens_per_batch, prompts):
            rewards[:, send(torch.tensor(rows), there)] = self._score(inputs)
            beat()
        return rewards.to(device)

    def without_thinking(
        self, prompts: Sequence[Prompt], texts: Sequence[str], batch: TokenBatch
    ) -> TokenBatch:
        """The sequences without the text in think tags, unless this model reads thinking.

        Args:
            prompts: of each sequence.
            texts: of each response.
            batch: prompts with responses, padded on any side.
        """
        if self._reader.reads_thinking or not any(map(has_thinking, texts)):
            return batch
        rows = [ids[mask].tolist() for ids, mask in zip(batch.ids, batch.mask, strict=True)]
        tokenizer = self._reader.tokenizer
        for row, (prompt, text) in enumerate(zip(prompts, texts, strict=True)):
            if has_thinking(text):
                response = Response(id="", prompt_id=prompt.id, text=text, model="")
                prompt_ids = encode_prompt(tokenizer, prompt)
                rows[row] = prompt_ids + self._reader.encode(response, "", prompt_ids)
        return pad_right(rows, int(tokenizer.pad_token_id)).to(batch.ids.device)

    def _passes(
        self, batch: TokenBatch, tokens_per_batch: int, prompts: Sequence[str] | None
    ) -> Iterator[tuple[list[int], TrunkInputs]]:
        """The rows of each forward pass with its inputs: packed if that saves much, else padded.

        Every process of a sharded model makes as many passes.
        """
        if self._shared:
            both = zip(batch.ids, batch.mask, strict=True)
            sequences = [ids[mask].tolist() for ids, mask in both]
            packed = packed_passes(sequences, prompts, tokens_per_batch)
            if packed is not None:
                for groups in packed:
                    yield (
                        [row for group in groups for row in group.rows],
                        pack_pass(groups, sequences),
                    )
                return
        lengths = batch.mask.sum(dim=1)
        padded = padded_passes(lengths.tolist(), tokens_per_batch)
        for rows, _ in self._sharding.equal_calls(self._accelerator, padded):
            width = int(lengths[rows].max())
            yield rows, self._pad(batch.ids[rows, :width], batch.mask[rows, :width])

    def _pad(self, ids: Int[Tensor, "B T"], mask: Bool[Tensor, "B T"]) -> TrunkInputs:
        reads = last_tokens(mask.sum(dim=1), ids.shape[1])
        if is_for_pairs(self._reader.tokenizer):
            return TrunkInputs(ids, reads, parts=parts_of_pairs(ids, mask, self._ends[0]))
        return TrunkInputs(ids, reads)

    def _score(self, inputs: TrunkInputs) -> Float[Tensor, "M B"]:
        inputs = inputs.to(self._accelerator.device)
        with torch.no_grad(), self._accelerator.autocast():
            return torch.stack([module(inputs) + bias for module, bias in self._members])


def combine_members(rewards: Float[Tensor, "M N"], combine: Combine) -> Float[Tensor, " N"]:
    """Combine the members' rewards into one: their mean, or the lowest of them.

    With the lowest, a policy gains only if every member agrees, so the mistakes of one member are
    harder to exploit (arXiv 2310.02743).
    """
    return rewards.mean(dim=0) if combine == "mean" else rewards.amin(dim=0)


def load_scorer(
    name: str,
    accelerator: Accelerator,
    combine: Combine = "mean",
    sharding: Sharding | None = None,
    base: PreTrainedModel | None = None,
    *,
    given: dict[str, Any] | None = None,
) -> Scorer:
    """Load a reward model, or all members of an ensemble, to score with.

    Args:
        name: a finished reward stage of ours, or the Hugging Face folder of a one-label classifier.
        accelerator: gives device and precision.
        combine: how the rewards of an ensemble are combined.
        sharding: of the stage; if it shards weights, the reward model is sharded too, and all
            processes score at the same time.
        base: a language model with the frozen weights of the reward model, of which then only the
            adapter is loaded.
        given: the policy's --chat-template-kwargs, for models that record none.

    Raises:
        InputError: there is no such model, it is not a reward model, or its stage did not finish.
    """
    sharding = sharding or Sharding()
    kwargs = reward_kwargs(name, given or {})
    folders = member_folders(name)
    loaded = [load_module(folder, accelerator, sharding, base, given=kwargs) for folder in folders]
    description = loaded[0][2]
    members = [(module, bias) for module, bias, _ in loaded]
    # a shared base keeps the policy's attention
    can_share = base is None and not sharding.shards_weights
    shared = can_share and not any([share_prompts(module.classifier) for module, _ in members])
    reader = load_reader(description)
    return Scorer(
        members, description, reader, accelerator, combine, sharding=sharding, shared=shared
    )


def member_folders(name: str) -> list[str]:
    """The folder of a reward model, or of every member of an ensemble.

    Raises:
        InputError: its stage did not finish.
    """
    return members_in(model_folder(name, "reward", "model"))


def members_in(folder: str) -> list[str]:
    """The folder of a model, and those of the other members if it is an ensemble."""
    others = sorted(Path(folder).glob(MEMBERS), key=lambda path: int(path.name.rpartition("-")[2]))
    return [folder, *map(str, others)]


def load_module(
    name: str,
    accelerator: Accelerator,
    sharding: Sharding | None = None,
    base: PreTrainedModel | None = None,
    *,
    given: dict[str, Any] | None = None,
) -> tuple[RewardModule, float, dict[str, str]]:
    """A reward model ready to score, the bias to add to its outputs, and its description.

    Arguments as in `load_scorer`, for one model.

    Raises:
        InputError: there is no such model, it is not a reward model, or its stage did not finish.
    """
    folder = model_folder(name, "reward", "model")
    sharding = sharding or Sharding()
    if base is None:
        classifier = load_reward_model(folder, held=sharding.held(trained=False))
    else:
        classifier = load_reward_model_on(base, folder)
    bias = float(getattr(classifier.config, "reward_bias", 0.0))
    description = describe_model(folder, given)
    token_types = has_token_types(tokenizer_of(description))
    count_flops(classifier)
    module = RewardModule(classifier, token_types=token_types).eval().requires_grad_(False)
    shard_frozen(accelerator, module, sharding)
    return module, bias, description
