"""Tokens of a prompt and a response for a classifier that reads them as a text pair.

The tokens of a pair are those of the prompt alone, such as `[CLS] prompt [SEP]`, followed by those
that the response adds, such as `response [SEP]`. So here, too, a sequence is a prompt's tokens
followed by a response's.
"""

from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rlhf.errors import InputError
from rlhf.modeling.chat_template import set_end_tokens

PAIRS = "reads_pairs"
# of the difference between two texts; rounding gave up to 1e-5, ConvBERT's padding a tenth
TOLERANCE = 0.01
ROUNDED = 0.05  # where weights are rounded to fewer bits


def is_for_pairs(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether `set_pair_tokens` was called for this tokenizer."""
    return tokenizer.init_kwargs.get(PAIRS) is True


def set_pair_tokens(tokenizer: PreTrainedTokenizerBase) -> None:
    """Make a tokenizer read prompts and responses as pairs, which its separator ends.

    Raises:
        InputError: it has no separator, or does not write a pair as prompt, then response.
    """
    if tokenizer.sep_token_id is None:
        raise InputError(
            f"The tokenizer of {tokenizer.name_or_path} has no separator, which its model needs to "
            "tell prompt and response apart",
            "Set `sep_token` in its tokenizer_config.json.",
        )
    tokenizer.init_kwargs[PAIRS] = True
    set_end_tokens(tokenizer, [int(tokenizer.sep_token_id)])
    encoded: Any = tokenizer("a", "b")["input_ids"]
    if encoded != first_of_pair(tokenizer, "a") + second_of_pair(tokenizer, "b"):
        raise InputError(
            f"The tokenizer of {tokenizer.name_or_path} does not write a pair as the tokens of its "
            "first text, then of its second",
            "Use another model, or this one as a function: --reward "
            "signal:package.module:function.",
        )


def has_token_types(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether a tokenizer tells its model which tokens are those of the second text."""
    return is_for_pairs(tokenizer) and "token_type_ids" in tokenizer("a", "b")


def first_of_pair(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Token ids of the first text with those around it, such as `[CLS] text [SEP]`."""
    ids: list[int] = tokenizer(text)["input_ids"]
    return ids


def second_of_pair(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Token ids that a second text adds to a pair, such as `text [SEP]`."""
    both: list[int] = tokenizer("", text)["input_ids"]
    return both[len(first_of_pair(tokenizer, "")) :]


def parts_of_pairs(
    ids: Int[Tensor, "B T"], mask: Bool[Tensor, "B T"], separator: int
) -> Int[Tensor, "B T"]:
    """For right-padded pairs 1 at the first text's tokens, 2 at the second's and 0 at padding.

    The first text ends with the first separator.
    """
    separators = (ids == separator).long()
    second = separators.cumsum(dim=1) > separators
    return mask.long() * (1 + second.long())


@torch.no_grad()
def require_padding_ignored(name: str, model: PreTrainedModel) -> None:
    """Refuse a classifier whose output for a text changes with the padding beside it.

    A trial decides: two rows of token ids, one of them alone and padded.

    Raises:
        InputError: it does, as in FNet and ConvBERT.
    """
    long, short = [[*range(5, 17)]], [[*range(17, 24)]]
    padding = [int(model.config.pad_token_id)] * 5
    was_training = model.training
    model.eval()
    together = _logits(model, [*long, short[0] + padding], [[1] * 12, [1] * 7 + [0] * 5])
    alone = _logits(model, short, [[1] * 7])
    model.train(was_training)
    spread = float((together[0] - together[1]).abs())
    change = float((together[1] - alone[0]).abs())
    if change > (TOLERANCE if model.dtype == torch.float32 else ROUNDED) * spread:
        raise InputError(
            f"Padding changes what {name} ({type(model).__name__}) says of a text, by "
            f"{change / spread:.0%} of the difference between two texts",
            "Use another model, or this one as a function: --reward "
            "signal:package.module:function.",
        )


def _logits(model: PreTrainedModel, ids: list[list[int]], mask: list[list[int]]) -> Tensor:
    device = model.device
    outputs: Any = model(
        input_ids=torch.tensor(ids, device=device), attention_mask=torch.tensor(mask, device=device)
    )
    logits: Tensor = outputs.logits
    return logits.float()
