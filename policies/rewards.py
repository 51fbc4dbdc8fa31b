"""Where rewards come from: reward models, functions and HTTP endpoints, alone or combined."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, Protocol

import torch
from accelerate import Accelerator
from jaxtyping import Float
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from reward.scoring.scorer import TOKENS_PER_BATCH, load_scorer, member_folders
from reward.scoring.texts import SIGNAL, load_text_reward, require_numbers
from reward.settings import Combine
from rlhf.modeling.heads import reads_pairs
from rlhf.modeling.log_probs import SCORE_BATCH
from rlhf.modeling.models import (
    describe_for_all,
    describe_model,
    load_config,
    model_folder,
    require_same_tokenizer,
)
from rlhf.modeling.readers import described_kwargs, reward_kwargs
from rlhf.modeling.tokens import TokenBatch, pad_right
from rlhf.parallel.distributed import from_main
from rlhf.parallel.sharding import Sharding
from rlhf.ranks import is_main_process
from rlhf.records.schema import Prompt, Response
from rlhf.run.watchdog import beat

Combination = Literal["sum", "mean", "worst"]
Source = Callable[[Sequence[Prompt], Sequence[str], TokenBatch], Float[Tensor, " B"]]


class ReferenceOutput(Protocol):
    """The fields of a stored reference output that a reward needs."""

    @property
    def prompt(self) -> Prompt:
        """The prompt."""

    @property
    def prompt_ids(self) -> list[int]:
        """Its token ids."""

    @property
    def response_ids(self) -> list[int]:
        """Token ids of the response."""

    @property
    def text(self) -> str:
        """The response."""


@dataclass(frozen=True)
class Reward:
    """One or several sources as one number for each response.

    `equal_calls` repeats batches until all processes have equally many, where models are sharded.
    """

    sources: tuple[Source, ...]
    weights: tuple[float, ...]
    combination: Combination
    description: dict[str, str]
    equal_calls: Callable[..., Sequence[tuple[int, bool]]]

    def __call__(
        self, prompts: Sequence[Prompt], texts: Sequence[str], batch: TokenBatch
    ) -> Float[Tensor, " B"]:
        """Rewards of responses, as text and as the token ids of prompt and response.

        Raises:
            InputError: a reward is not a number.
        """
        scores = torch.stack([source(prompts, texts, batch) for source in self.sources])
        weights = torch.tensor(self.weights, device=scores.device)
        return combine(scores, weights, self.combination)

    def score_rows(
        self,
        rows: Sequence[ReferenceOutput],
        tokenizer: PreTrainedTokenizerBase,
        device: torch.device,
        batch_size: int = SCORE_BATCH,
        share: tuple[int, int] = (0, 1),
    ) -> list[float]:
        """The reward of reference outputs, in the order given.

        `share` (i, n) scores every n-th batch, from the i-th; other rows get 0.
        """
        pad_id, (offset, step) = int(tokenizer.pad_token_id), share
        rewards = [0.0] * len(rows)
        mine = range(0, len(rows), batch_size)[offset::step]
        for first, is_own in self.equal_calls(mine, [0]):
            beat()
            part = rows[first : first + batch_size]
            batch = pad_right([row.prompt_ids + row.response_ids for row in part], pad_id)
            scores = self(
                [row.prompt for row in part], [row.text for row in part], batch.to(device)
            )
            if is_own:
                rewards[first : first + len(part)] = scores.tolist()
        return rewards


def combine(
    scores: Float[Tensor, "S B"], weights: Float[Tensor, " S"], combination: Combination
) -> Float[Tensor, " B"]:
    """Combine the rewards of S sources: Σ w·r, (Σ w·r) / S, or min w·r.

    The worst case of an ensemble is hard to hack: all its members must be fooled at once
    (arXiv 2310.02743).
    """
    weighted = scores * weights[:, None]
    if combination == "worst":
        return weighted.amin(dim=0)
    return weighted.sum(dim=0) if combination == "sum" else weighted.mean(dim=0)


def is_model(name: str) -> bool:
    """Whether a reward is a model, not a function or an endpoint."""
    return not name.startswith((SIGNAL, "http://", "https://"))


def reward_key(reward: Mapping[str, str], precision: str | None) -> str:
    """The same for rewards that give the same scores: the hash, of a model also the precision.

    Args:
        reward: its description, with `path` and `hash`.
        precision: bf16 or fp32; None where nobody recorded it.
    """
    return f"{reward['hash']} {precision}" if is_model(reward["path"]) else reward["hash"]


def reads_tokens(name: str) -> bool:
    """Whether a reward is a model that reads the policy's own tokens.

    Functions and endpoints read text, and so do classifiers of text pairs.

    Raises:
        InputError: there is no such model, or its stage did not finish.
    """
    return is_model(name) and not reads_pairs(load_config(model_folder(name, "reward", "model")))


def reward_models(names: Sequence[str]) -> list[str]:
    """The folders of those that read tokens, every member of an ensemble by itself.

    Raises:
        InputError: the stage of one did not finish.
    """
    return [folder for name in names if reads_tokens(name) for folder in member_folders(name)]


def encoder_models(names: Sequence[str]) -> list[str]:
    """As `reward_models`, the folders of the models that read text pairs.

    Raises:
        InputError: the stage of one did not finish.
    """
    encoders = (name for name in names if is_model(name) and not reads_tokens(name))
    return [folder for name in encoders for folder in member_folders(name)]


def describe_reward(name: str, given: dict[str, Any] | None = None) -> dict[str, str]:
    """The record of a reward in manifests; a function or an endpoint has its name as its hash.

    Args:
        name: of the reward.
        given: the policy's --chat-template-kwargs, for another program's model that records none.

    Raises:
        InputError: there is no such model, or its stage did not finish.
    """
    if is_model(name):
        kwargs = reward_kwargs(name, given or {})
        return describe_model(model_folder(name, "reward", "model"), kwargs)
    return {"path": name, "hash": name}


def describe_rewards(names: Sequence[str], policy: dict[str, str]) -> dict[str, dict[str, str]]:
    """The rewards as inputs of a stage, each under its name; all processes call this.

    Raises:
        InputError: there is no such model, or it reads text differently from the policy.
    """
    described = {}
    for number, name in enumerate(names, start=1):
        if is_model(name):
            kwargs = reward_kwargs(name, described_kwargs(policy))
            description, *_ = [describe_for_all(folder, kwargs) for folder in member_folders(name)]
        else:
            description = describe_reward(name)
        if reads_tokens(name):
            require_same_tokenizer(description, policy)
        described["reward" if number == 1 else f"reward {number}"] = description
    return described


def load_reward(
    names: Sequence[str],
    accelerator: Accelerator,
    *,
    weights: Sequence[float] = (),
    combination: Combination = "sum",
    sharding: Sharding | None = None,
    base: PreTrainedModel | None = None,
    given: dict[str, Any] | None = None,
) -> Reward:
    """Load every source.

    Args:
        names: reward models, `signal:package.module:function`, or http(s):// addresses.
        accelerator: gives device and precision.
        weights: one for each; all 1 when empty.
        combination: how several become one.
        sharding: of the stage, which reward models follow where it shards weights.
        base: a frozen language model on which the reward models are adapters.
        given: the policy's --chat-template-kwargs, for other programs' models that record none.

    Raises:
        InputError: a source cannot be loaded.
    """
    parts = [describe_reward(name, given) for name in names]
    used = tuple(weights) or (1.0,) * len(names)
    members: Combine = "worst" if combination == "worst" else "mean"
    models = [*reward_models(names), *encoder_models(names)]
    worst_member = members == "worst" and len(models) > 1  # stores have the mean
    whole = parts[0]
    if len(names) > 1 or used != (1.0,) or worst_member:
        hashes = [part["hash"] for part in parts]
        whole = {"path": ", ".join(names), "hash": f"{combination} {used} {hashes}"}
    sharding = sharding or Sharding()
    sources = tuple(_load(name, accelerator, members, sharding, base, given) for name in names)
    equal_calls = partial(sharding.equal_calls, accelerator)
    return Reward(sources, used, combination, whole, equal_calls)


def _load(
    name: str,
    accelerator: Accelerator,
    members: Combine,
    sharding: Sharding,
    base: PreTrainedModel | None,
    given: dict[str, Any] | None,
) -> Source:
    if reads_tokens(name):
        scorer = load_scorer(name, accelerator, members, sharding, base, given=given)

        def read(prompts: Sequence[Prompt], texts: Sequence[str], batch: TokenBatch) -> Tensor:
            batch = scorer.without_thinking(prompts, texts, batch)
            rewards = scorer(batch, prompts=[prompt.id for prompt in prompts])
            require_numbers(name, list(zip(prompts, rewards.tolist(), strict=True)))
            return rewards

        return read
    reward = load_text_reward(name, accelerator, TOKENS_PER_BATCH, members, given=given)

    def score(prompts: Sequence[Prompt], texts: Sequence[str], batch: TokenBatch) -> Tensor:
        responses = [
            (prompt, (Response(id="", prompt_id=prompt.id, text=text, model=""),))
            for prompt, text in zip(prompts, texts, strict=True)
        ]
        once = sharding.is_tensor_parallel  # the same responses in all processes
        mine = not once or is_main_process()
        rewards = [row[0] for row in reward(responses)] if mine else []
        rewards = from_main(rewards) if once else rewards
        return torch.tensor(rewards, dtype=torch.float32, device=batch.ids.device)

    return score
