"""What a chat template decides beside the words: its values, and the tokens that end a turn.

A model may end a turn with several tokens, and with one that is not `tokenizer.eos_token`. The set
and the template's values are kept in `tokenizer.init_kwargs`, which `save_pretrained` writes to
tokenizer_config.json: they travel with every folder that is saved here.
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
TAIL = 8  # tokens; a think tag and a line break are at most so many


def end_token_ids(tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """All tokens that end a response; the one that the chat template closes a turn with is first.

    Sampling stops at each of them, and a reward model's input is closed with the first.
    """
    return recorded_end_tokens(tokenizer) or find_end_tokens(tokenizer)


def recorded_end_tokens(tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """What a folder of ours, or `set_end_tokens`, says of them; empty where nothing does."""
    recorded = tokenizer.init_kwargs.get(END_TOKENS)
    if not isinstance(recorded, list) or not all(type(one) is int for one in recorded):
        return ()
    return tuple(recorded)


def find_end_tokens(
    tokenizer: PreTrainedTokenizerBase, others: Iterable[int] = ()
) -> tuple[int, ...]:
    """The template's closing token, the tokenizer's end token and `others`, each once."""
    eos = int(tokenizer.eos_token_id)
    closing = _closing_token(tokenizer)
    return tuple(dict.fromkeys((eos if closing is None else closing, eos, *others)))


def set_end_tokens(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> None:
    """Let a tokenizer end responses with these tokens, the closing one first."""
    tokenizer.init_kwargs[END_TOKENS] = list(ids)


def tell_end_tokens(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """Add the end tokens to a model's generation_config, by which other programs sample.

    Those that it knows already stay. A classifier has no generation_config.
    """
    config = getattr(model, "generation_config", None)
    if config is None:
        return
    known = config.eos_token_id if isinstance(config.eos_token_id, list) else [config.eos_token_id]
    ends = end_token_ids(tokenizer)
    if not set(ends) <= set(known):
        config.eos_token_id = list(
            dict.fromkeys((*ends, *(one for one in known if one is not None)))
        )


def template_kwargs(tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """The values that the chat template is rendered with; usually none."""
    recorded = tokenizer.init_kwargs.get(TEMPLATE_KWARGS)
    return dict(recorded) if isinstance(recorded, dict) else {}


def set_template_kwargs(
    tokenizer: PreTrainedTokenizerBase, name: str, given: dict[str, Any]
) -> None:
    """Let a tokenizer render its template with `given` values.

    Args:
        tokenizer: of the model `name`.
        name: as errors call it.
        given: may be empty, where what the folder records stays.

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
    """Token ids of a conversation that is ready for the assistant's answer.

    Raises:
        TemplateError: the template refuses the conversation.
    """
    encoded: Any = tokenizer.apply_chat_template(
        messages,
        add_generation_prompt=True,
        tokenize=True,
        return_dict=True,
        **template_kwargs(tokenizer),
    )
    return list(encoded["input_ids"])


def end_tokens_of_model(name: str) -> tuple[int, ...]:
    """The end tokens of a model's generation_config.json, or of its config.json without one.

    Raises:
        InputError: its generation_config.json is broken.
    """
    try:
        given: Any = GenerationConfig.from_pretrained(name).eos_token_id
    except (OSError, TypeError):
        if (Path(name) / GENERATION_CONFIG_NAME).is_file():
            raise InputError(
                f"{name} has a {GENERATION_CONFIG_NAME} that is no JSON object",
                "Copy or download the model again: that file says which tokens end a response.",
            ) from None
        try:
            config, _ = PreTrainedConfig.get_config_dict(name)
        except OSError:
            return ()  # a tokenizer alone
        text = config.get("text_config") or {}
        given = config.get("eos_token_id", text.get("eos_token_id"))
    ids = given if isinstance(given, list) else [given]
    return tuple(one for one in ids if type(one) is int)


def opens_thinking(tokenizer: PreTrainedTokenizerBase, prompt_ids: Sequence[int]) -> bool:
    """Whether a prompt ends with an open think tag, so that the response begins inside of it."""
    return str(tokenizer.decode(list(prompt_ids[-TAIL:]))).rstrip().endswith(OPENING)


def _closing_token(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """The first added token behind an assistant's words; None where the template puts none."""
    messages = [{"role": "user", "content": WORDS}, {"role": "assistant", "content": WORDS}]
    if not tokenizer.chat_template:
        return None
    text = ""
    # a template is a program, which may want other conversations; `encode_prompt` tells its errors
    with suppress(InputError), as_input_error("The chat template failed", "Fix the template."):
        text = str(
            tokenizer.apply_chat_template(messages, tokenize=False, **template_kwargs(tokenizer))
        )
    if WORDS not in text:
        return None
    added = set(tokenizer.get_added_vocab().values())
    tail: list[int] = tokenizer(text.rpartition(WORDS)[2], add_special_tokens=False)["input_ids"]
    return next((one for one in tail if one in added), None)
