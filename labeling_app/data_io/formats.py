"""Reads one line of a file: a prompt, its responses and their rankings.

Formats: our own objects, an exported `ranked` line, trl preference data (explicit or implicit
prompt, plain or conversational, unpaired), HH-RLHF strings, UltraFeedback, pairs over K responses,
answers in columns, and records of Argilla and Label Studio. Text is kept exactly as it stands.
"""

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
from labeling_app.data_io.lines.answer_columns import with_answer_columns
from labeling_app.data_io.lines.other_tools import Judged, read_exported
from labeling_app.data_io.lines.preferences import (
    read_preference,
    read_ultrafeedback,
    with_prompt,
)
from labeling_app.data_io.lines.stated import EXAMPLES, Stated, list_of, prompt_messages, text_of
from labeling_app.data_io.lines.thumb_lines import thumb_rankings, with_responses
from labeling_app.db.tasks import CheckPurpose
from labeling_app.rankings.tiers import Tiers, checked_tiers, judgments_of_pairs, tiers_of_scores
from rlhf.errors import InputError, UnusableContentError
from rlhf.records.schema import (
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


@dataclass(frozen=True, kw_only=True)
class Defaults:
    """Values for what a line leaves out."""

    split: Split = "train"
    source: str = ""
    annotator: str = ""
    kind: AnnotatorKind | None = None


@dataclass(frozen=True, kw_only=True)
class Entry:
    """The contents of one line."""

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
    value = with_answer_columns(value)
    refuse_misspelled(value)
    if "chosen" in value and "rejected" in value:
        value = with_prompt(value)
        ignored = ignored_fields(value, OF_PREFERENCES)
        messages, judged = read_preference(value)
    elif "completions" in value and "instruction" in value:
        ignored = ignored_fields(value, OF_ULTRAFEEDBACK)
        messages, judged = read_ultrafeedback(value)
    elif "prompt" in value or "messages" in value:
        ignored = ignored_fields(value, OF_OUR_LINES)
        value = with_responses(value)
        messages, judged = _read_own(value)
    else:
        raise InputError(f"No known format has the fields {sorted(value)}", EXAMPLES)
    return replace(_build(value, messages, judged, defaults), ignored=ignored)


def _build(
    value: JsonObject, messages: Sequence[Message], judged: Stated, defaults: Defaults
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
    _refuse_equal(judged.texts, judged.judgments)
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


def _build_exported(record: Judged, defaults: Defaults) -> Entry:
    """The prompt of a record of another tool, with a ranking of each annotator."""
    messages = prompt_messages({"prompt": record.prompt})
    prompt = Prompt.create(messages, defaults.split, defaults.source)
    models = ["imported"] * len(record.texts)
    responses = _responses(prompt.id, Stated(texts=record.texts, models=models))
    _refuse_equal(record.texts, [judgment.tiers for judgment in record.judgments])
    rankings, times_by_id = [], {}
    for judgment in record.judgments:
        tiers = tuple(tuple(responses[i].id for i in tier) for tier in judgment.tiers)
        id_ = content_id("import", prompt.id, judgment.annotator, tiers, judgment.created_at)
        rankings.append(
            Ranking(
                id=id_,
                prompt_id=prompt.id,
                annotator=judgment.annotator,
                kind=defaults.kind or "human",
                tiers=tiers,
            )
        )
        times = {"created_at": judgment.created_at, "duration_ms": judgment.duration_ms}
        times_by_id[id_] = {name: time for name, time in times.items() if time is not None}
    return Entry(
        prompt=prompt,
        responses=responses,
        rankings=tuple(rankings),
        made=times_by_id,
        ignored=record.ignored,
        exported=record,
    )


def _refuse_equal(texts: Sequence[str], judgments: Sequence[Tiers]) -> None:
    """Check that no response is preferred to an equal one; in one tier they may stand.

    Rounds and votes leave equal texts out for the same reason.
    """
    for tiers in judgments:
        seen: set[str] = set()
        for tier in tiers:
            of_tier = {texts[index] for index in tier}
            if equal := next(iter(seen & of_tier), None):
                raise UnusableContentError(
                    f"Two responses have the same text {equal!r:.40}, and one is preferred",
                    "Nobody can prefer one of them: tie them, or leave the line out.",
                )
            seen |= of_tier


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


def _responses(prompt_id: str, judged: Stated) -> tuple[Response, ...]:
    seen: Counter[tuple[str, str]] = Counter()
    responses = []
    for index, (text, model) in enumerate(zip(judged.texts, judged.models, strict=True)):
        if not text.strip() and judged.names:
            raise UnusableContentError(
                f"{judged.names[index]} is empty", "Fill it in, or leave the line out."
            )
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


# ---------------------------------------------------------------------------------- our own lines


def _read_own(value: JsonObject) -> tuple[tuple[Message, ...], Stated]:
    listed, strengths = list_of(value, "responses"), list_of(value, "strengths")
    models = list_of(value, "models") or ["imported"] * len(listed)
    if len(models) != len(listed):
        raise InputError("responses and models must be lists of the same length", EXAMPLES)
    texts, names = [], []
    for index, (item, model) in enumerate(zip(listed, models, strict=True)):
        given = item if isinstance(item, dict) else {"text": item}
        texts.append(text_of(given.get("text"), f"response {index}"))
        names.append(str(given.get("model", model)))
    scores = _checked_scores(value["scores"], len(texts)) if value.get("scores") else []
    if value.get("pairs"):
        judgments = judgments_of_pairs(value["pairs"], len(texts))
    elif value.get("tiers"):
        judgments = [checked_tiers(value["tiers"], len(texts))]
    else:
        judgments = [tiers_of_scores(scores, 0.0)] if len(scores) > 1 else []
    judged = Stated(
        texts=texts,
        models=names,
        judgments=judgments,
        strengths=tuple(strengths) if value.get("tiers") else (),
        scores=scores,
    )
    return prompt_messages(value), judged


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
