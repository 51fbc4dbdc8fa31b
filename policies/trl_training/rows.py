"""Examples in the form in which trl's trainers take them."""

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from rlhf.modeling.chat_template import TEMPLATE_KWARGS, closes_turns, template_kwargs
from rlhf.records.jsonl import JsonObject


def trl_rows(
    rows: Sequence[JsonObject], tokenizer: PreTrainedTokenizerBase, response_fields: Sequence[str]
) -> list[JsonObject]:
    """Conversations with the values of the chat template, each response with an end.

    trl renders conversations by the template alone. Where that closes a turn with no special token,
    the model would never learn to stop, so the tokenizer's end token is put after the response.

    Args:
        rows: each with a list of messages, the response last, in the fields `response_fields`.
        tokenizer: of the model that is trained.
        response_fields: names of these fields.
    """
    kwargs = template_kwargs(tokenizer)
    given = {TEMPLATE_KWARGS: kwargs} if kwargs else {}
    end = "" if closes_turns(tokenizer) else str(tokenizer.eos_token)
    return [
        {**row, **{name: _ended(row[name], end) for name in response_fields}, **given}
        for row in rows
    ]


def _ended(messages: Sequence[JsonObject], end: str) -> list[JsonObject]:
    *earlier, response = messages
    return [*earlier, {**response, "content": response["content"] + end}]
