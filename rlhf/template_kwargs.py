"""The setting `--chat-template-kwargs`: values that a chat template is rendered with; torch-free.

`{"enable_thinking": false}` is what most people give.
"""

import json
from typing import Annotated, Any

import yaml
from cyclopts import Parameter

from rlhf.errors import ConfigError

FLAG = "--chat-template-kwargs"
# What `apply_chat_template` is given by this project alone.
RESERVED = (
    "conversation",
    "chat_template",
    "add_generation_prompt",
    "continue_final_message",
    "tokenize",
    "return_dict",
    "return_tensors",
)


def read_template_kwargs(kind: Any, tokens: Any) -> dict[str, Any]:
    """The values from a JSON object on the command line, or a mapping in a settings file.

    Raises:
        ConfigError: it is no JSON object, or names what is not the template's.
    """
    if isinstance(tokens, dict):
        found = {name: _plain(value) for name, value in tokens.items()}
    else:
        found = _read_object(tokens[-1].value)
    reserved = sorted(found.keys() & set(RESERVED))
    if reserved:
        raise ConfigError(
            f"{FLAG} names {reserved[0]}, which is not for the template",
            f"Name variables of the template, for example {FLAG} '{{\"enable_thinking\": false}}'.",
        )
    return found


def _plain(value: Any) -> Any:
    """A value of a settings file, which the parser hands on as text."""
    if isinstance(value, dict):
        return {name: _plain(one) for name, one in value.items()}
    found = [_read_word(token.value) for token in value]
    return found[0] if len(found) == 1 else found


def _read_word(word: str) -> Any:
    try:
        return yaml.safe_load(word)
    except yaml.YAMLError:
        return word


def _read_object(word: str) -> dict[str, Any]:
    try:
        value = json.loads(word)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise ConfigError(
            f"{FLAG} is {word!r}, not a JSON object",
            f"For example: {FLAG} '{{\"enable_thinking\": false}}'.",
        )
    return value


TemplateKwargs = Annotated[
    dict[str, Any], Parameter(converter=read_template_kwargs, n_tokens=1, accepts_keys=True)
]
