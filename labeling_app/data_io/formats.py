"""Reads one line of a file: a prompt, its responses and their rankings.

Formats: our own objects, an exported `ranked` line, trl preference data (explicit or implicit
prompt, plain or conversational, unpaired), HH-RLHF strings, UltraFeedback, pairs over K responses,
and records of Argilla and Label Studio. Text is kept exactly as it stands.
"""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from labeling_app.data_io.fields import (
    OF_OUR_LINES,
    OF_PREFERENCES,
    OF_ULTRAFEEDBACK,
    ignored_fields,
    refuse_misspelled,
    require_bounded,
)
from labeling_app.data_io.other_tools import Judged, read_exported
from labeling_app.data_io.thumb_lines import thumb_rankings, with_responses
from labeling_app.db.tasks import CheckPurpose
from labeling_app.rankings.tiers import Tiers, checked_tiers, judgments_of_pairs, tiers_of_scores
from rlhf.errors import InputError, UnusableContentError
from rlhf.records.schema import (
    STRENGTHS,
    AnnotatorKind,
    JsonObject,
    Message,
    Prompt,
    RankedPrompt,
    Ranking,
    Response,
    Split,
    content_id,
    is_finite_number,
)
from rlhf.records.wording import counted

HH_TURN = re.compile(r"\n\n(Human|Assistant): ?")
EXAMPLES = (
    'Write {"prompt": "…"}, {"messages": […]}, with "responses": ["…", "…"] and "tiers": [[0], [1]]'
    ' or "scores": [0.9, 0.2] if you have them, or {"prompt": "…", "chosen": "…", "rejected": "…"}.'
)


@dataclass(frozen=True, kw_only=True)
class Defaults:
    """Values for what a line leaves out."""

    split: Split = "train"
    source: str = ""
    annotator: str = ""
    kind: AnnotatorKind | None = None


@dataclass(frozen=True, kw_only=True)
class Entry:
    """What one line holds."""

    prompt: Prompt
    responses: tuple[Response, ...] = ()
    rankings: tuple[Ranking, ...] = ()
    # A gold or training item: its one ranking is the right one, not somebody's judgment.
    check: CheckPurpose | None = None
    explanation: str = ""
    is_unnamed: bool = False
    """Whether people judged and the line names none: the same judgment again is another vote."""
    made: dict[str, dict[str, float]] = field(default_factory=dict)
    """`created_at` and `duration_ms` of rankings, by id, where the line says them."""
    ignored: tuple[str, ...] = ()
    """Fields that were not read. Exports of ours say none."""
    exported: Judged | None = None
    """The record of another tool that it comes from."""


@dataclass(frozen=True, kw_only=True)
class _Judged:
    """Responses in file order, their scores if any, and the judgments over their positions."""

    texts: Sequence[str]
    models: Sequence[str]
    judgments: Sequence[Tiers] = ()
    strengths: tuple[int, ...] = ()
    scores: Sequence[float] = ()
    kind: AnnotatorKind = "human"


def read_entry(value: JsonObject, defaults: Defaults) -> Entry:
    """Detect the format of one object and read it.

    Raises:
        InputError: no known format, or a field that cannot be used.
    """
    require_bounded(value)
    if isinstance(value.get("prompt"), dict):
        record = RankedPrompt.from_json(value)
        return Entry(prompt=record.prompt, responses=record.responses, rankings=record.rankings)
    exported = read_exported(value)
    if exported is not None:
        return _build_exported(exported, defaults)
    refuse_misspelled(value)
    if "chosen" in value and "rejected" in value:
        ignored = ignored_fields(value, OF_PREFERENCES)
        messages, judged = _read_preference(value)
    elif "completions" in value and "instruction" in value:
        ignored = ignored_fields(value, OF_ULTRAFEEDBACK)
        messages, judged = _read_ultrafeedback(value)
    elif "prompt" in value or "messages" in value:
        ignored = ignored_fields(value, OF_OUR_LINES)
        value = with_responses(value)
        messages, judged = _read_own(value)
    else:
        raise InputError(f"No known format has the fields {sorted(value)}", EXAMPLES)
    return replace(_build(value, messages, judged, defaults), ignored=ignored)


def _build(
    value: JsonObject, messages: Sequence[Message], judged: _Judged, defaults: Defaults
) -> Entry:
    split = value.get("split") or defaults.split
    source = str(value.get("source") or defaults.source)
    prompt = Prompt.create(tuple(messages), split, source)
    responses = _responses(prompt.id, judged)
    kind = value.get("kind") or defaults.kind or judged.kind
    if kind not in ("human", "ai", "signal"):
        raise InputError(f"Unknown kind of annotator {kind!r}", "Use human, ai or signal.")
    unnamed = "imported" if kind == "human" else f"imported-{kind}"
    named = value.get("annotator") or defaults.annotator
    annotator = str(named or unnamed)
    rankings = []
    for judgment in judged.judgments:
        tiers = tuple(tuple(responses[i].id for i in tier) for tier in judgment)
        scores = [judged.scores[i] for tier in judgment for i in tier] if judged.scores else []
        ranking = Ranking(
            id=content_id("import", prompt.id, annotator, tiers, judged.strengths, *scores),
            prompt_id=prompt.id,
            annotator=annotator,
            kind=kind,
            tiers=tiers,
            strengths=judged.strengths,
            scores=tuple(scores),
        )
        rankings.append(ranking)
    rankings += thumb_rankings(value, responses, annotator, kind)
    check = _check(value, responses, rankings)
    explanation = str(value.get("explanation") or "")
    return Entry(
        prompt=prompt,
        responses=responses,
        rankings=tuple(rankings),
        check=check,
        explanation=explanation,
        is_unnamed=kind == "human" and not named and check is None,
    )


def _build_exported(found: Judged, defaults: Defaults) -> Entry:
    """The prompt of a record of another tool, with a ranking of each annotator."""
    messages = _prompt_messages({"prompt": found.prompt})
    prompt = Prompt.create(messages, defaults.split, defaults.source)
    models = ["imported"] * len(found.texts)
    responses = _responses(prompt.id, _Judged(texts=found.texts, models=models))
    rankings, made = [], {}
    for one in found.judgments:
        tiers = tuple(tuple(responses[i].id for i in tier) for tier in one.tiers)
        id_ = content_id("import", prompt.id, one.annotator, tiers, one.created_at)
        rankings.append(
            Ranking(
                id=id_,
                prompt_id=prompt.id,
                annotator=one.annotator,
                kind=defaults.kind or "human",
                tiers=tiers,
            )
        )
        times = {"created_at": one.created_at, "duration_ms": one.duration_ms}
        made[id_] = {name: time for name, time in times.items() if time is not None}
    return Entry(
        prompt=prompt,
        responses=responses,
        rankings=tuple(rankings),
        made=made,
        ignored=found.ignored,
        exported=found,
    )


def _check(
    value: JsonObject, responses: Sequence[Response], rankings: Sequence[Ranking]
) -> CheckPurpose | None:
    purpose = value.get("purpose")
    if purpose is None:
        return None
    num_ranked = sum(len(tier) for ranking in rankings for tier in ranking.tiers)
    if purpose not in ("gold", "training") or num_ranked < 2 or len(rankings) != 1:
        raise InputError(
            f"purpose is {purpose!r}, and tiers name {num_ranked} of "
            f"{counted(len(responses), 'response')}",
            'A check has "purpose": "gold" or "training", and an order of two or more responses as '
            '"tiers".',
        )
    known: CheckPurpose = purpose
    return known


def _responses(prompt_id: str, judged: _Judged) -> tuple[Response, ...]:
    seen: Counter[tuple[str, str]] = Counter()
    responses = []
    for index, (text, model) in enumerate(zip(judged.texts, judged.models, strict=True)):
        if not text.strip():
            raise UnusableContentError(
                f"Response {index} is empty", "Leave it out, and correct the positions after it."
            )
        responses.append(
            Response(
                id=content_id(prompt_id, model, text, seen[model, text]),
                prompt_id=prompt_id,
                text=text,
                model=model,
                sample_index=index,
            )
        )
        seen[model, text] += 1
    return tuple(responses)


def _text(value: Any, name: str) -> str:
    if not isinstance(value, str):
        raise InputError(f"{name} must be text, found {value!r:.80}", EXAMPLES)
    return value


def _list(value: JsonObject, name: str) -> list[Any]:
    found = value.get(name) or []
    if not isinstance(found, list):
        raise InputError(f"{name} must be a list, found {found!r:.80}", EXAMPLES)
    return found


def _messages(value: Any, name: str) -> tuple[Message, ...]:
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise InputError(f"{name} must be a list of messages, found {value!r:.80}", EXAMPLES)
    return tuple(Message.from_json(item) for item in value)


def _prompt_messages(value: JsonObject) -> tuple[Message, ...]:
    if value.get("messages") is not None:  # tables hold every column in every row
        return _messages(value["messages"], "messages")
    if isinstance(prompt := value.get("prompt"), list):
        return _messages(prompt, "prompt")
    return (Message(role="user", content=_text(prompt, "prompt")),)


# ---------------------------------------------------------------------------------- our own lines


def _read_own(value: JsonObject) -> tuple[tuple[Message, ...], _Judged]:
    listed, strengths = _list(value, "responses"), _list(value, "strengths")
    models = _list(value, "models") or ["imported"] * len(listed)
    if len(models) != len(listed):
        raise InputError("responses and models must be lists of the same length", EXAMPLES)
    texts, names = [], []
    for index, (item, model) in enumerate(zip(listed, models, strict=True)):
        given = item if isinstance(item, dict) else {"text": item}
        texts.append(_text(given.get("text"), f"response {index}"))
        names.append(str(given.get("model", model)))
    scores = _checked_scores(value["scores"], len(texts)) if value.get("scores") else []
    if value.get("pairs"):
        judgments = judgments_of_pairs(value["pairs"], len(texts))
    elif value.get("tiers"):
        judgments = [checked_tiers(value["tiers"], len(texts))]
    else:
        judgments = [tiers_of_scores(scores, 0.0)] if len(scores) > 1 else []
    judged = _Judged(
        texts=texts,
        models=names,
        judgments=judgments,
        strengths=tuple(strengths) if value.get("tiers") else (),
        scores=scores,
    )
    return _prompt_messages(value), judged


def _checked_scores(scores: Any, num_responses: int) -> list[float]:
    """Scores by position; in a line without tiers they give the tiers, and equal scores tie."""
    is_list = isinstance(scores, list) and len(scores) == num_responses
    if not is_list or not all(map(is_finite_number, scores)):
        raise InputError(
            f"scores must hold a finite number for each of the "
            f"{counted(num_responses, 'response')}, found {scores!r:.80}",
            EXAMPLES,
        )
    return list(scores)


# ----------------------------------------------------------------------------- other people's lines


def _read_preference(value: JsonObject) -> tuple[tuple[Message, ...], _Judged]:
    """Trl's preference formats and HH-RLHF: a chosen and a rejected response."""
    chosen, rejected = value["chosen"], value["rejected"]
    if isinstance(chosen, list) and isinstance(rejected, list):
        messages, texts = _conversations(value, _messages(chosen, "chosen"), rejected)
    elif value.get("prompt") is not None:
        messages = _prompt_messages({"prompt": value["prompt"]})
        texts = (_text(chosen, "chosen"), _text(rejected, "rejected"))
    elif HH_TURN.match(_text(chosen, "chosen")):
        better, worse = _hh_turns(chosen), _hh_turns(_text(rejected, "rejected"))
        messages, texts = _same_start(better, worse)
    else:
        messages, texts = _split_common_start(chosen, _text(rejected, "rejected"))
    models = [str(value.get(f"{side}_model") or "imported") for side in ("chosen", "rejected")]
    return messages, _Judged(
        texts=texts,
        models=models,
        judgments=[[[0], [1]]],
        strengths=_strengths_of(value.get("margin")),
    )


def _strengths_of(margin: Any) -> tuple[int, ...]:
    """A margin as the strength that we export as one; others are differences of rewards, say."""
    known = {str(strength): strength for strength in STRENGTHS}  # a cell of a CSV file is text
    found = known.get(str(margin).removesuffix(".0"))
    return () if found is None else (found,)


def _conversations(
    value: JsonObject, chosen: tuple[Message, ...], rejected: Any
) -> tuple[tuple[Message, ...], tuple[str, str]]:
    """Chosen and rejected turns after those of `prompt`, which they may repeat."""
    worse = _messages(rejected, "rejected")
    given = value.get("prompt")
    prompt = _messages(given, "prompt") if isinstance(given, list) else ()
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
    """A prompt and the turns after it, which may repeat the prompt or its end."""
    if any(turns[first : first + len(prompt)] == prompt for first in range(len(turns))):
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


def _read_ultrafeedback(value: JsonObject) -> tuple[tuple[Message, ...], _Judged]:
    """UltraFeedback: completions with an overall score by GPT-4, if any; equal scores tie."""
    completions = value["completions"]
    if not isinstance(completions, list) or not all(isinstance(c, dict) for c in completions):
        raise InputError("completions must be a list of objects", EXAMPLES)
    scores = [completion.get("overall_score") for completion in completions]
    texts = [_text(completion.get("response"), "a response") for completion in completions]
    models = [str(completion.get("model") or "imported") for completion in completions]
    messages = (Message(role="user", content=_text(value["instruction"], "instruction")),)
    scored = [place for place, score in enumerate(scores) if isinstance(score, int | float)]
    if not all(is_finite_number(scores[place]) for place in scored):
        raise InputError(f"overall_score is not a number: {scores}", EXAMPLES)
    if len(scored) < 2:
        return messages, _Judged(texts=texts, models=models)
    ordered = tiers_of_scores([scores[place] for place in scored], 0.0)
    tiers = [[scored[place] for place in tier] for tier in ordered]
    return messages, _Judged(
        texts=texts, models=models, judgments=[tiers], scores=scores, kind="ai"
    )
