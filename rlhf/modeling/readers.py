"""How a model reads text, from what was recorded of it: its tokenizer, and for rewards thinking."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from rlhf.errors import InputError
from rlhf.modeling.chat_template import (
    TEMPLATE_KWARGS,
    opens_thinking,
    set_end_tokens,
    template_kwargs,
)
from rlhf.modeling.models import load_config, model_folder
from rlhf.modeling.template_kwargs import are_template_kwargs
from rlhf.modeling.tokens import encode_response, load_tokenizer
from rlhf.records.documents import REMEDY
from rlhf.records.schema import Response


def described_kwargs(description: dict[str, str]) -> dict[str, Any]:
    """The --chat-template-kwargs of a model, as `describe_model` gave them."""
    kwargs: dict[str, Any] = json.loads(description.get(TEMPLATE_KWARGS, "{}"))
    return kwargs


def kwargs_for(name: str, given: dict[str, Any]) -> dict[str, Any]:
    """The --chat-template-kwargs to give a model that another one is used with.

    Args:
        name: model folder or hub name.
        given: the other's; none of them where this one records its own.
    """
    return given if given and not template_kwargs(load_tokenizer(name)) else {}


def reward_kwargs(name: str, given: dict[str, Any]) -> dict[str, Any]:
    """The --chat-template-kwargs to give a reward model beside a policy.

    Args:
        name: a reward stage of ours, which knows with which values it was trained, be it none; or
            another program's model.
        given: the policy's.

    Raises:
        InputError: there is no such model, or its stage did not finish.
    """
    if not given:
        return {}
    folder = model_folder(name, "reward", "model")
    is_ours = hasattr(load_config(folder), "reward_bias")
    return {} if is_ours else kwargs_for(folder, given)


def require_described_kwargs(description: dict[str, str], place: str) -> None:
    """Refuse a model's description that holds no JSON object of --chat-template-kwargs.

    Raises:
        InputError: names the place and what it holds.
    """
    text = description.get(TEMPLATE_KWARGS, "{}")
    try:
        valid = are_template_kwargs(json.loads(text))
    except (ValueError, TypeError, RecursionError):
        valid = False
    if not valid:
        raise InputError(
            f"{place} has {TEMPLATE_KWARGS!r} as {str(text)[:80]!r}, not as a JSON object of "
            "values for a chat template",
            REMEDY,
        )


def tokenizer_of(description: dict[str, str]) -> PreTrainedTokenizerBase:
    """The tokenizer of a model that `rlhf.modeling.models.describe_model` described."""
    return load_tokenizer(description["path"], described_kwargs(description))


@dataclass(frozen=True)
class Reader:
    """How a reward model reads: its tokenizer, and whether it reads the text in think tags."""

    tokenizer: PreTrainedTokenizerBase
    reads_thinking: bool

    def encode(self, response: Response, fingerprint: str, prompt_ids: Sequence[int]) -> list[int]:
        """Token ids of a response as this model reads it; see `encode_response`."""
        return encode_response(
            self.tokenizer,
            response,
            fingerprint,
            reads_thinking=self.reads_thinking,
            opened=opens_thinking(self.tokenizer, prompt_ids),
        )


def reads_thinking(name: str) -> bool:
    """Whether a reward model reads the text in think tags: what its config.json says.

    Raises:
        InputError: there is no such model.
    """
    config = load_config(name)
    return bool(getattr(config, "reads_thinking", _is_early(config)))


def _is_early(config: PreTrainedConfig) -> bool:
    return hasattr(config, "reward_bias") and not hasattr(config, "reads_thinking")


def load_reader(description: dict[str, str]) -> Reader:
    """How a reward model reads that `rlhf.modeling.models.describe_model` described.

    One of ours that does not say whether it reads thinking is from a version that trained on all
    text, closed by `tokenizer.eos_token`: it goes on reading so. Another program's model reads
    thinking if its config.json says `"reads_thinking": true`.

    Raises:
        InputError: there is no such model.
    """
    name, tokenizer = description["path"], tokenizer_of(description)
    if _is_early(load_config(name)):
        set_end_tokens(tokenizer, [int(tokenizer.eos_token_id)])
    return Reader(tokenizer, reads_thinking(name))
