"""The setting `--chat-template-kwargs`: values that a chat template is rendered with.

The usual value is `{"enable_thinking": false}`. Imports no torch.
"""

import json
from collections.abc import Collection
from typing import Annotated, Any

import yaml
from cyclopts import Parameter

from rlhf.config import read_object
from rlhf.errors import ConfigError

FLAG = "--chat-template-kwargs"
EXAMPLE = f"{FLAG} '{{\"enable_thinking\": false}}'"
NAME = "chat_template_kwargs"
# Arguments of `apply_chat_template` that this project sets.
RESERVED = (
    "conversation",
    "chat_template",
    "add_generation_prompt",
    "continue_final_message",
    "tokenize",
    "return_dict",
    "return_tensors",
)


def are_template_kwargs(value: Any) -> bool:
    """Whether a JSON value is an object without reserved names."""
    return isinstance(value, dict) and not value.keys() & set(RESERVED)


def as_one_token(values: dict[str, Any], others: Collection[str] = ()) -> dict[str, Any]:
    """The settings of a file with this mapping, and those named by `others`, as JSON text.

    The parser would turn every value into text, and confuse `false` with `"false"`.
    """
    return {
        key: json.dumps(value)
        if key.replace("-", "_") in (NAME, *others) and isinstance(value, dict)
        else value
        for key, value in values.items()
    }


def read_template_kwargs(kind: Any, tokens: Any) -> dict[str, Any]:
    """The values from a JSON object, or from several `--chat-template-kwargs.NAME VALUE`.

    Raises:
        ConfigError: it is not a JSON object, or has reserved names.
    """
    if isinstance(tokens, dict):
        kwargs = {name: _plain(value) for name, value in tokens.items()}
    else:
        kwargs = read_object(FLAG, EXAMPLE, tokens[-1].value)
    reserved = sorted(kwargs.keys() & set(RESERVED))
    if reserved:
        raise ConfigError(
            f"{FLAG} names {reserved[0]}, which is not for the template",
            f"Name variables of the template, for example {EXAMPLE}.",
        )
    return kwargs


def _plain(value: Any) -> Any:
    """The value of `--chat-template-kwargs.NAME`, read as YAML."""
    if isinstance(value, dict):
        return {name: _plain(nested) for name, nested in value.items()}
    values = [_read_word(token.value) for token in value]
    return values[0] if len(values) == 1 else values


def _read_word(word: str) -> Any:
    try:
        return yaml.safe_load(word)
    except yaml.YAMLError:
        return word


TemplateKwargs = Annotated[
    dict[str, Any], Parameter(converter=read_template_kwargs, n_tokens=1, accepts_keys=True)
]
