"""Which fields are the prompt and the responses, told by their names.

Where names leave it open, a line is refused: a guess would turn people's judgments around.
"""

import re
from collections.abc import Collection, Iterable
from typing import NoReturn

from rlhf.errors import InputError, UnusableContentError
from rlhf.records.schema import JsonObject

PROMPTS = ("prompt", "instruction", "question", "input", "query", "context", "messages", "chat")
# response_1, answer-B, answerA, left
NUMBERED = re.compile(r"^(.*?)[\s_-]*(\d+|(?<=[\s_-])[A-Za-z]|(?<=[a-z])[A-Z]|[Ll]eft|[Rr]ight)$")


def ending(name: str) -> str:
    """The number, letter or side at the end of a name, or "": `b` of `answer-B`."""
    match = NUMBERED.match(name)
    return match[2].lower() if match else ""


def order(name: str) -> tuple[int, str]:
    """A key that sorts names by their endings: 2 before 10, a before b, left before right."""
    end = ending(name)
    return (int(end), "") if end.isdigit() else (0, end)


def response_names(fields: JsonObject) -> tuple[str, ...]:
    """The fields that hold responses: those that differ only in a number, letter or side.

    Raises:
        InputError: several groups of fields could be the responses.
        UnusableContentError: there are no two responses.
    """
    groups: dict[str, list[str]] = {}
    for name, text in fields.items():
        match = NUMBERED.match(name)
        if match and isinstance(text, str) and text.strip():
            groups.setdefault(match[1].lower(), []).append(name)
    many = [sorted(names, key=order) for names in groups.values() if len(names) > 1]
    if len(many) == 1:
        return tuple(many[0])
    if many:
        refuse_groups(many)
    raise UnusableContentError(
        f"None of the fields {sorted(fields)} are two responses to compare",
        "Call the responses response_1, response_2 and so on, and the prompt prompt.",
    )


def refuse_groups(groups: list[list[str]]) -> None:
    """Refuse fields of which several groups could be the responses.

    Raises:
        InputError: always.
    """
    raise InputError(
        f"Several groups of fields could be the responses: {groups}",
        "Keep one group of names that end in 1, 2, … or a, b, …, and rename the others.",
    )


def prompt_name(fields: JsonObject, names: Collection[str]) -> str:
    """The field that holds the prompt: one of `PROMPTS`, or the only one that may be.

    Args:
        fields: of the line.
        names: those that cannot be the prompt, such as the responses.

    Raises:
        InputError: none or several may be.
    """
    rest = {
        name: value
        for name, value in fields.items()
        if name not in names and isinstance(value, str | list) and value and not is_items(value)
    }
    known = [name for name in rest if name in PROMPTS]
    known = known or [name for name in rest if name.lower() in PROMPTS]
    if not known and len(rest) == 1:
        known = list(rest)
    if len(known) != 1:
        refuse_prompts(rest)
    return known[0]


def refuse_prompts(names: Iterable[str]) -> NoReturn:
    """Refuse fields of which none or several may be the prompt.

    Raises:
        InputError: always.
    """
    raise InputError(
        f"Which of the fields {sorted(names)} is the prompt?",
        f"Call it prompt, and leave no other called {', '.join(PROMPTS[1:])}.",
    )


def is_items(value: object) -> bool:
    """Whether this is what Label Studio calls items: responses as objects with ids."""
    return (
        isinstance(value, list)
        and len(value) > 1
        and all(isinstance(item, dict) and "id" in item for item in value)
    )
