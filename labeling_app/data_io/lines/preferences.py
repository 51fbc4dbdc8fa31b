"""Lines with preferences of other people's formats: trl's, HH-RLHF strings and UltraFeedback."""

import re
from typing import Any

from labeling_app.data_io.lines.names import PROMPTS, refuse_prompts
from labeling_app.data_io.lines.stated import (
    EXAMPLES,
    Stated,
    messages_of,
    prompt_messages,
    text_of,
)
from labeling_app.rankings.tiers import tiers_of_scores
from rlhf.errors import InputError, UnusableContentError
from rlhf.records.schema import STRENGTHS, JsonObject, Message, is_finite_number

NUMBER = r"[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?"
HH_TURN = re.compile(r"\n\n(Human|Assistant): ?")


def read_preference(value: JsonObject) -> tuple[tuple[Message, ...], Stated]:
    """Trl's preference formats and HH-RLHF: a chosen and a rejected response.

    Raises:
        InputError: they are neither text nor messages.
        UnusableContentError: they do not answer the same conversation.
    """
    chosen, rejected = value["chosen"], value["rejected"]
    if isinstance(chosen, list) and isinstance(rejected, list):
        messages, texts = _conversations(value, messages_of(chosen, "chosen"), rejected)
    elif value.get("prompt") is not None:
        messages = prompt_messages({"prompt": value["prompt"]})
        texts = (text_of(chosen, "chosen"), text_of(rejected, "rejected"))
    elif HH_TURN.match(text_of(chosen, "chosen")):
        better, worse = _hh_turns(chosen), _hh_turns(text_of(rejected, "rejected"))
        messages, texts = _same_start(better, worse)
    else:
        messages, texts = _split_common_start(chosen, text_of(rejected, "rejected"))
    models = [str(value.get(f"{side}_model") or "imported") for side in ("chosen", "rejected")]
    return messages, Stated(
        texts=texts,
        models=models,
        judgments=[[[0], [1]]],
        strengths=_strengths_of(value.get("margin")),
        names=("chosen", "rejected"),
    )


def with_prompt(value: JsonObject) -> JsonObject:
    """A line of chosen and rejected texts with its prompt under that name, as `question` is one.

    Without any such field the prompt is what both texts begin with, or in their turns.

    Raises:
        InputError: several fields may be the prompt.
    """
    chosen = value["chosen"]
    if value.get("prompt") or not isinstance(chosen, str) or HH_TURN.match(chosen):
        return value
    named = [name for name in value if name.lower() in PROMPTS]
    filled = [name for name in named if value[name]]
    if len(filled) > 1:
        refuse_prompts(filled)
    rest = {name: content for name, content in value.items() if name not in named}
    return {**rest, "prompt": value[filled[0]] if filled else ""} if named else value


def _strengths_of(margin: Any) -> tuple[int, ...]:
    """A margin as the strength that we export as one; others are differences of rewards, say."""
    known = {str(strength): strength for strength in STRENGTHS}  # a cell of a CSV file is text
    strength = known.get(str(margin).removesuffix(".0"))
    return () if strength is None else (strength,)


def _conversations(
    value: JsonObject, chosen: tuple[Message, ...], rejected: Any
) -> tuple[tuple[Message, ...], tuple[str, str]]:
    """Chosen and rejected turns after those of `prompt`, which they may repeat."""
    worse = messages_of(rejected, "rejected")
    given = value.get("prompt")
    prompt = messages_of(given, "prompt") if isinstance(given, list) else ()
    return _same_start(chosen, worse, prompt)


def _same_start(
    chosen: tuple[Message, ...], rejected: tuple[Message, ...], prompt: tuple[Message, ...] = ()
) -> tuple[tuple[Message, ...], tuple[str, str]]:
    turns = _joined(prompt, chosen[:-1])
    if chosen[:-1] != rejected[:-1] or not turns or len(chosen) != len(rejected):
        raise UnusableContentError(
            "chosen and rejected do not answer the same conversation",
            "They must have the same turns except for the last one.",
        )
    return turns, (chosen[-1].content, rejected[-1].content)


def _joined(prompt: tuple[Message, ...], turns: tuple[Message, ...]) -> tuple[Message, ...]:
    """A prompt and the turns after it, which may repeat the prompt or its end.

    Turns that begin with the assistant's lack a beginning, so the prompt comes before them.
    """
    has_start = bool(turns) and turns[0].role != "assistant"
    if has_start and any(
        turns[first : first + len(prompt)] == prompt for first in range(len(turns))
    ):
        return turns
    shared = min(len(prompt), len(turns))
    while prompt[len(prompt) - shared :] != turns[:shared]:
        shared -= 1
    return prompt + turns[shared:]


def _hh_turns(text: str) -> tuple[Message, ...]:
    pieces = HH_TURN.split(text)[1:]
    roles = {"Human": "user", "Assistant": "assistant"}
    pairs = zip(pieces[::2], pieces[1::2], strict=True)
    return tuple(Message(role=roles[name], content=content) for name, content in pairs)


def _split_common_start(chosen: str, rejected: str) -> tuple[tuple[Message, ...], tuple[str, str]]:
    """The implicit prompt: what both texts begin with, as in trl's `extract_prompt`."""
    length = 0
    while length < min(len(chosen), len(rejected)) and chosen[length] == rejected[length]:
        length += 1
    if length and chosen[length - 1] == " ":
        length -= 1
    start = (Message(role="user", content=chosen[:length]),)
    return start, (chosen[length:], rejected[length:])


def read_ultrafeedback(value: JsonObject) -> tuple[tuple[Message, ...], Stated]:
    """UltraFeedback: completions with an overall score by GPT-4, if any; equal scores tie.

    Raises:
        InputError: completions that are no objects with a response, or a score that is no number.
    """
    completions = value["completions"]
    if not isinstance(completions, list) or not all(isinstance(c, dict) for c in completions):
        raise InputError("completions must be a list of objects", EXAMPLES)
    scores = [completion.get("overall_score") for completion in completions]
    texts = [text_of(completion.get("response"), "a response") for completion in completions]
    models = [str(completion.get("model") or "imported") for completion in completions]
    messages = (Message(role="user", content=text_of(value["instruction"], "instruction")),)
    scored = [index for index, score in enumerate(scores) if not _is_absent(score)]
    if not all(is_finite_number(scores[index]) for index in scored):
        raise InputError(f"overall_score is not a number: {scores}", EXAMPLES)
    if len(scored) < 2:
        return messages, Stated(texts=texts, models=models)
    ordered = tiers_of_scores([scores[index] for index in scored], 0.0)
    tiers = [[scored[index] for index in tier] for tier in ordered]
    return messages, Stated(texts=texts, models=models, judgments=[tiers], scores=scores, kind="ai")


def _is_absent(score: Any) -> bool:
    """Whether there is no score: UltraFeedback writes N/A. A number as text is a mistake."""
    is_number = isinstance(score, str) and re.fullmatch(NUMBER, score.strip()) is not None
    return score is None or (isinstance(score, str) and not is_number)
