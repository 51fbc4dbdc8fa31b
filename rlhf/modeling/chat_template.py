"""The values that a chat template is rendered with, and the tokens that end a turn.

A model may end a turn with several tokens, and with one that is not `tokenizer.eos_token`. The end
tokens and the template's values are kept in `tokenizer.init_kwargs`, which `save_pretrained` writes
to tokenizer_config.json.
"""

from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from transformers import (
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import GENERATION_CONFIG_NAME

from rlhf.diagnose import as_input_error
from rlhf.errors import InputError
from rlhf.modeling.thinking import OPENING

END_TOKENS = "end_token_ids"
TEMPLATE_KWARGS = "chat_template_kwargs"
WORDS = "WORDS"
TAIL = 8  # tokens; a think tag and a line break have at most this many


def end_token_ids(tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """All tokens that end a response; first the one with which the chat template closes a turn.

    Sampling stops at each of them, and a reward model's input is closed with the first.
    """
    return recorded_end_tokens(tokenizer) or find_end_tokens(tokenizer)


def recorded_end_tokens(tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """The end tokens that the tokenizer's folder or `set_end_tokens` has recorded; else empty."""
    recorded = tokenizer.init_kwargs.get(END_TOKENS)
    if not isinstance(recorded, list) or not all(type(token_id) is int for token_id in recorded):
        return ()
    return tuple(recorded)


def find_end_tokens(
    tokenizer: PreTrainedTokenizerBase, others: Iterable[int] = ()
) -> tuple[int, ...]:
    """The template's closing token, the tokenizer's end token and `others`, each once."""
    eos = int(tokenizer.eos_token_id)
    closing = _closing_token(tokenizer)
    return tuple(dict.fromkeys((eos if closing is None else closing, eos, *others)))


def closes_turns(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether the chat template ends an assistant's turn with a special token."""
    return _closing_token(tokenizer) is not None


def set_end_tokens(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> None:
    """Record the tokens that end responses, the closing one first."""
    tokenizer.init_kwargs[END_TOKENS] = list(ids)


def add_end_tokens(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """Add the end tokens to a model's generation_config, which other programs read to sample.

    Those already in it are kept. A classifier has no generation_config.
    """
    config = getattr(model, "generation_config", None)
    if config is None:
        return
    known = config.eos_token_id if isinstance(config.eos_token_id, list) else [config.eos_token_id]
    end_ids = end_token_ids(tokenizer)
    if not set(end_ids) <= set(known):
        config.eos_token_id = list(
            dict.fromkeys((*end_ids, *(token_id for token_id in known if token_id is not None)))
        )


def template_kwargs(tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """The values that the chat template is rendered with; usually none."""
    recorded = tokenizer.init_kwargs.get(TEMPLATE_KWARGS)
    return dict(recorded) if isinstance(recorded, dict) else {}


def set_template_kwargs(
    tokenizer: PreTrainedTokenizerBase, name: str, given: dict[str, Any]
) -> None:
    """Set the values that a tokenizer renders its template with.

    If none are given, those that the folder records are kept.

    Raises:
        InputError: the folder records other values.
    """
    recorded = template_kwargs(tokenizer)
    if given and recorded and given != recorded:
        raise InputError(
            f"{name} was made with --chat-template-kwargs {recorded}, not {given}",
            "Leave --chat-template-kwargs out: the folder knows its own.",
        )
    if given:
        tokenizer.init_kwargs[TEMPLATE_KWARGS] = given


def render_prompt(tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, str]]) -> list[int]:
    """Token ids of a conversation, up to where the assistant's answer begins.

    Raises:
        TemplateError: the template refuses the conversation.
    """
    (ids,) = render_prompts(tokenizer, [messages])
    return ids


def render_prompts(
    tokenizer: PreTrainedTokenizerBase, conversations: list[list[dict[str, str]]]
) -> list[list[int]]:
    """`render_prompt` of many conversations, which takes less time.

    Raises:
        TemplateError: the template refuses one of them.
    """
    encoded: Any = tokenizer.apply_chat_template(
        conversations,
        add_generation_prompt=True,
        tokenize=True,
        return_dict=True,
        **template_kwargs(tokenizer),
    )
    return [list(ids) for ids in encoded["input_ids"]]


def end_tokens_of_model(name: str) -> tuple[int, ...]:
    """The end tokens from a model's generation_config.json, else from its config.json.

    Raises:
        InputError: its generation_config.json is broken.
    """
    try:
        given: Any = GenerationConfig.from_pretrained(name).eos_token_id
    except (OSError, TypeError):
        if (Path(name) / GENERATION_CONFIG_NAME).is_file():
            raise InputError(
                f"{name} has a {GENERATION_CONFIG_NAME} that is not a JSON object",
                "Copy or download the model again: that file says which tokens end a response.",
            ) from None
        try:
            config, _ = PreTrainedConfig.get_config_dict(name)
        except OSError:
            return ()  # a tokenizer alone
        text = config.get("text_config") or {}
        given = config.get("eos_token_id", text.get("eos_token_id"))
    ids = given if isinstance(given, list) else [given]
    return tuple(token_id for token_id in ids if type(token_id) is int)


def opens_thinking(tokenizer: PreTrainedTokenizerBase, prompt_ids: Sequence[int]) -> bool:
    """Whether a prompt ends with an open think tag, so that the response starts inside it."""
    return str(tokenizer.decode(list(prompt_ids[-TAIL:]))).rstrip().endswith(OPENING)


def _closing_token(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """The first special token after an assistant's text; None where the template has none."""
    messages = [{"role": "user", "content": WORDS}, {"role": "assistant", "content": WORDS}]
    if not tokenizer.chat_template:
        return None
    text = ""
    # a template is a program that may refuse this conversation; `encode_prompt` reports its errors
    with suppress(InputError), as_input_error("The chat template failed", "Fix the template."):
        text = str(
            tokenizer.apply_chat_template(messages, tokenize=False, **template_kwargs(tokenizer))
        )
    if WORDS not in text:
        return None
    added = set(tokenizer.get_added_vocab().values())
    tail: list[int] = tokenizer(text.rpartition(WORDS)[2], add_special_tokens=False)["input_ids"]
    return next((token_id for token_id in tail if token_id in added), None)
