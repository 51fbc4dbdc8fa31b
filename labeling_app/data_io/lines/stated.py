"""The contents of a line before they become records, and checked values of its fields."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from labeling_app.rankings.tiers import Tiers
from rlhf.errors import InputError
from rlhf.records.schema import AnnotatorKind, JsonObject, Message

EXAMPLES = (
    'Write {"prompt": "…"}, {"messages": […]}, with "responses": ["…", "…"] and "tiers": [[0], [1]]'
    ' or "scores": [0.9, 0.2] if you have them, or {"prompt": "…", "chosen": "…", "rejected": "…"}.'
)

COLUMNS_EXAMPLE = (
    "Name the columns prompt, answer_a, answer_b and preferred (a, b or tie), or prompt, chosen "
    "and rejected, or prompt alone."
)


@dataclass(frozen=True, kw_only=True)
class Stated:
    """Responses in file order, their scores if any, and the judgments over their positions."""

    texts: Sequence[str]
    models: Sequence[str]
    judgments: Sequence[Tiers] = ()
    strengths: tuple[int, ...] = ()
    scores: Sequence[float] = ()
    kind: AnnotatorKind = "human"
    names: Sequence[str] = ()
    """The fields of the responses, where each has one."""


def text_of(value: Any, name: str) -> str:
    """The text of the field `name`.

    Raises:
        InputError: it is no text.
    """
    if not isinstance(value, str):
        raise InputError(f"{name} must be text, found {value!r:.80}", EXAMPLES)
    return value


def list_of(value: JsonObject, name: str) -> list[Any]:
    """The list under `name`, empty where there is nothing.

    Raises:
        InputError: it is no list.
    """
    items = value.get(name) or []
    if not isinstance(items, list):
        raise InputError(f"{name} must be a list, found {items!r:.80}", EXAMPLES)
    return items


def messages_of(value: Any, name: str) -> tuple[Message, ...]:
    """The messages of the field `name`.

    Raises:
        InputError: it is no list of messages.
    """
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise InputError(f"{name} must be a list of messages, found {value!r:.80}", EXAMPLES)
    return tuple(Message.from_json(item) for item in value)


def prompt_messages(value: JsonObject) -> tuple[Message, ...]:
    """The prompt of a line: `messages`, or `prompt` as messages or as text.

    Raises:
        InputError: there is none.
    """
    if value.get("messages") is not None:  # tables hold every column in every row
        return messages_of(value["messages"], "messages")
    if isinstance(prompt := value.get("prompt"), list):
        return messages_of(prompt, "prompt")
    return (Message(role="user", content=text_of(prompt, "prompt")),)
