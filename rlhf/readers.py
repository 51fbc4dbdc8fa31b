"""How a model reads text, from what was recorded of it: its tokenizer, and for rewards thinking."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from rlhf.chat_template import TEMPLATE_KWARGS, opens_thinking, set_end_tokens
from rlhf.models import load_config
from rlhf.records import Response
from rlhf.tokens import encode_response, load_tokenizer


def described_kwargs(description: dict[str, str]) -> dict[str, Any]:
    """The --chat-template-kwargs of a model that `rlhf.models.describe_model` described."""
    kwargs: dict[str, Any] = json.loads(description.get(TEMPLATE_KWARGS, "{}"))
    return kwargs


def tokenizer_of(description: dict[str, str]) -> PreTrainedTokenizerBase:
    """The tokenizer of a model that `rlhf.models.describe_model` described."""
    return load_tokenizer(description["path"], described_kwargs(description))


@dataclass(frozen=True)
class Reader:
    """How a reward model reads: its tokenizer, and whether it reads the text in think tags."""

    tokenizer: PreTrainedTokenizerBase
    reads_thinking: bool

    def encode(self, response: Response, fingerprint: str, prompt_ids: Sequence[int]) -> list[int]:
        """Token ids of a response as this model reads it; see `rlhf.tokens.encode_response`."""
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
    """How a reward model reads that `rlhf.models.describe_model` described.

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
