"""Thinking: the text inside think tags, before the answer.

People judge the answer and see the thinking collapsed; reward models do not read it unless they
were trained to (`--data.reads-thinking`).
"""

OPENING, CLOSING = "<think>", "</think>"
NO_THOUGHT = f"\n{CLOSING}\n\n"  # after an opening tag, as templates write it


def split_thinking(text: str) -> tuple[str, str]:
    """The thinking and the answer of a response; text without think tags is all answer.

    Thinking that is never closed has no answer. Some templates open the tag in the prompt, so text
    before a first closing tag is thinking. A tag that opens inside the answer and is never closed
    is part of the answer: the rest would be hidden otherwise.
    """
    if CLOSING not in text:
        begun = text.lstrip()
        return (begun[len(OPENING) :].strip(), "") if begun.startswith(OPENING) else ("", text)
    if CLOSING in text.partition(OPENING)[0]:
        text = OPENING + text
    *pieces, rest = text.split(CLOSING)
    thoughts, answers = list[str](), list[str]()
    for piece in pieces:
        before, tag, thought = piece.partition(OPENING)
        thoughts.append(thought.strip())
        answers.append(before if tag else piece + CLOSING)
    return "\n\n".join(filter(None, thoughts)), "".join((*answers, rest)).strip()


def after_opening_tag(text: str) -> str:
    """The text of a response that continues a prompt with an open think tag."""
    begun = text.lstrip()
    if begun.startswith(OPENING):
        return begun.removeprefix(OPENING).removeprefix("\n")
    return text if has_thinking(text) else NO_THOUGHT + text


def has_thinking(text: str) -> bool:
    """Whether a response has think tags, even empty ones."""
    return split_thinking(text)[1] != text
