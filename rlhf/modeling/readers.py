"""How a model reads text: its tokenizer and, for a reward model, whether it reads thinking."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from rlhf.config.template_kwargs import are_template_kwargs
from rlhf.errors import InputError
from rlhf.modeling.chat_template import (
    TEMPLATE_KWARGS,
    opens_thinking,
    set_end_tokens,
    template_kwargs,
)
from rlhf.modeling.models import load_config, model_folder
from rlhf.modeling.tokens import encode_response, load_tokenizer
from rlhf.records.documents import REMEDY
from rlhf.records.schema import Response


def described_kwargs(description: dict[str, str]) -> dict[str, Any]:
    """The --chat-template-kwargs of a model described by `describe_model`."""
    kwargs: dict[str, Any] = json.loads(description.get(TEMPLATE_KWARGS, "{}"))
    return kwargs


def used_kwargs(name: str, given: dict[str, Any]) -> dict[str, Any]:
    """The --chat-template-kwargs of a model: those it records, else `given`."""
    return template_kwargs(load_tokenizer(name, given))


def kwargs_for(name: str, given: dict[str, Any]) -> dict[str, Any]:
    """The --chat-template-kwargs for a second model: `given`, unless it records its own."""
    return given if given and not template_kwargs(load_tokenizer(name)) else {}


def reward_kwargs(name: str, given: dict[str, Any]) -> dict[str, Any]:
    """The --chat-template-kwargs for a reward model that scores a policy.

    They are the policy's, `given`, except for our own reward models, which record theirs.

    Raises:
        InputError: there is no such model, or its stage did not finish.
    """
    if not given:
        return {}
    folder = model_folder(name, "reward", "model")
    is_ours = hasattr(load_config(folder), "reward_bias")
    return {} if is_ours else kwargs_for(folder, given)


def require_described_kwargs(description: dict[str, str], location: str) -> None:
    """Refuse a model's description whose --chat-template-kwargs are not a JSON object.

    Raises:
        InputError: names the location and the value.
    """
    text = description.get(TEMPLATE_KWARGS, "{}")
    try:
        valid = are_template_kwargs(json.loads(text))
    except (ValueError, TypeError, RecursionError):
        valid = False
    if not valid:
        raise InputError(
            f"{location} has {TEMPLATE_KWARGS!r} as {str(text)[:80]!r}, not as a JSON object of "
            "values for a chat template",
            REMEDY,
        )


def tokenizer_of(description: dict[str, str]) -> PreTrainedTokenizerBase:
    """The tokenizer of a model that `rlhf.modeling.models.describe_model` described."""
    return load_tokenizer(description["path"], described_kwargs(description))


@dataclass(frozen=True)
class Reader:
    """The tokenizer of a reward model, and whether it reads the text in think tags."""

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
    """Whether a reward model reads the text in think tags, by its config.json.

    Raises:
        InputError: there is no such model.
    """
    config = load_config(name)
    return bool(getattr(config, "reads_thinking", _is_early(config)))


def _is_early(config: PreTrainedConfig) -> bool:
    return hasattr(config, "reward_bias") and not hasattr(config, "reads_thinking")


def load_reader(description: dict[str, str]) -> Reader:
    """The reader of a reward model that `rlhf.modeling.models.describe_model` described.

    A model of this project without `reads_thinking` in its config.json comes from a version that
    trained on all text, closed by `tokenizer.eos_token`, and keeps reading so. Another program's
    model reads thinking if its config.json has `"reads_thinking": true`.

    Raises:
        InputError: there is no such model.
    """
    name, tokenizer = description["path"], tokenizer_of(description)
    if _is_early(load_config(name)):
        set_end_tokens(tokenizer, [int(tokenizer.eos_token_id)])
    return Reader(tokenizer, reads_thinking(name))
