"""Records that Argilla and Label Studio exported, with annotators and times.

Argilla 2: what `to_datasets` and the hub hold, with columns such as `preference.responses`, and the
nested records of `to_json` once every answer has its status, which `to_json` leaves out. Label
Studio: the JSON export, a task an object.

Neither says which of its fields is the prompt and which are responses; that is told by their names.
Where names leave it open, the record is refused: a guess would turn people's judgments around.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from labeling_app.data_io.lines.names import ending, is_items, prompt_name, response_names
from labeling_app.rankings.tiers import Tiers
from rlhf.errors import InputError, MisreadError
from rlhf.records.schema import JsonObject, is_finite_number
from rlhf.records.wording import counted

SIDES = (("1", "2"), ("0", "1"), ("a", "b"), ("left", "right"))
OWN_COLUMNS = ("id", "_server_id", "status")  # of Argilla
OTHER_PARTS = ("suggestions", "metadata", "vectors")  # of a nested record of Argilla
ANSWERS = ".responses"
EMPTY: tuple[Any, ...] = (None, "", [], {})
JUDGMENTS = ("pairwise", "ranker")  # types of results in Label Studio
JSON_MIN = {"annotation_id", "lead_time"}  # of Label Studio, beside the fields of a task
STATUSES = ("submitted", "draft", "discarded")
MOST_SECONDS = 7 * 86_400.0  # for one judgment
EXPORT_AGAIN = "Export the records again, and leave their fields as they are."


@dataclass(frozen=True, kw_only=True)
class Judgment:
    """One person's judgment, over positions of the responses."""

    annotator: str
    tiers: Tiers
    created_at: float | None = None
    """Seconds since 1970, where the record says it."""
    duration_ms: int | None = None


@dataclass(frozen=True, kw_only=True)
class Judged:
    """A prompt, as text or as messages, its responses, and who said what of them."""

    prompt: Any
    texts: tuple[str, ...]
    judgments: tuple[Judgment, ...]
    read: tuple[str, ...]
    """The fields of the prompt and the responses."""
    question: str = ""
    """The question, or control, whose answers are the judgments; empty without judgments."""
    ignored: tuple[str, ...] = ()
    """Fields, questions and other parts that hold something and were not read."""
    num_unfinished: int = 0
    """Answers that were left out: drafts, discarded and skipped ones."""


def read_exported(value: JsonObject) -> Judged | None:
    """Read a record of Argilla or Label Studio; None if it is neither.

    Raises:
        InputError: its fields do not say what is prompt and what is response, or which are
            judgments.
        UnusableContentError: it has no two responses.
    """
    if isinstance(value.get("data"), dict) and isinstance(value.get("annotations"), list):
        return _read_task(value)
    if value.keys() >= JSON_MIN:
        raise InputError(
            "This is Label Studio's JSON-MIN, in which judgments cannot be told from other fields",
            "Export the project as JSON.",
        )
    if isinstance(value.get("fields"), dict) and isinstance(value.get("responses"), dict):
        answers = {
            name: _objects(question_answers, name)
            for name, question_answers in value["responses"].items()
        }
        others = {name: value.get(name) for name in OTHER_PARTS}
        return _read_record(value["fields"], answers, others)
    questions = [name.removesuffix(ANSWERS) for name in value if name.endswith(ANSWERS)]
    if questions:
        fields = {name: content for name, content in value.items() if _is_field(name)}
        others = {
            name: content for name, content in value.items() if "." in name and ANSWERS not in name
        }
        return _read_record(fields, {name: _columns(value, name) for name in questions}, others)
    return None


# ----------------------------------------------------------------------------------------- Argilla


def _is_field(column: str) -> bool:
    """Whether a column of a flat record of Argilla may be a field rather than one of its own."""
    return "." not in column and column not in OWN_COLUMNS


def _columns(value: JsonObject, question: str) -> list[JsonObject]:
    """The answers to a question, whose values, users and statuses are columns."""
    names = [f"{question}{ANSWERS}{part}" for part in ("", ".users", ".status")]
    answers, users, status = (_list(value.get(name) or [], name) for name in names)
    status = status or [None] * len(answers)
    for column, name in ((users, names[1]), (status, names[2])):
        if len(column) != len(answers):
            raise InputError(
                f"{names[0]} has {counted(len(answers), 'answer')}, and {name} has {len(column)}",
                f"Keep the column {name} of the export as it is.",
            )
    rows = zip(answers, users, status, strict=True)
    return [{"value": answer, "user_id": user, "status": state} for answer, user, state in rows]


def _read_record(
    fields: JsonObject, answers: Mapping[str, Sequence[JsonObject]], others: JsonObject
) -> Judged:
    names = response_names(fields)
    prompt = prompt_name(fields, names)
    submitted = {
        name: [answer for answer in question_answers if _is_submitted(answer)]
        for name, question_answers in answers.items()
    }
    of_questions = {
        name: list(_judgments(question_answers, names))
        for name, question_answers in submitted.items()
    }
    question = require_one_question(name for name, given in of_questions.items() if given)
    judgments = [judgment for given in of_questions.values() for judgment in given]
    if any(submitted.values()) and not judgments:
        raise InputError(
            f"No answer names the responses {list(names)}",
            "Read are answers to a ranking question over the names of the fields, and to a label "
            "question whose labels are these names.",
        )
    unread = [
        name
        for name, question_answers in submitted.items()
        if question_answers and not of_questions[name]
    ]
    return Judged(
        prompt=fields[prompt],
        texts=tuple(str(fields[name]) for name in names),
        judgments=tuple(judgments),
        read=(prompt, *names),
        question=question,
        ignored=(*_unread(fields, (prompt, *names)), *unread, *_unread(others, ())),
        num_unfinished=sum(map(len, answers.values())) - sum(map(len, submitted.values())),
    )


def require_one_question(judging: Iterable[str]) -> str:
    """Return the only question about the responses, or "" if there is none.

    Only one question can be a person's preference: "which is worst?" has the same answers. A record
    in which people answered one of two shows nothing; that its file holds both, others may show.

    Raises:
        MisreadError: there are several.
    """
    names = sorted(set(judging))
    if len(names) > 1:
        raise MisreadError(
            f"{len(names)} questions name the responses: {', '.join(names)}",
            "Keep the one that asks which response is better, and remove the others. If all of "
            "them ask it, give them the same name.",
        )
    return names[0] if names else ""


def _judgments(answers: Sequence[JsonObject], names: Sequence[str]) -> Iterator[Judgment]:
    """The judgments in the answers to one question; none where it asks for something else."""
    read = [(answer, _ranked(answer.get("value"), names)) for answer in answers]
    if not any(tiers for _, tiers in read):
        return
    for answer, tiers in read:
        if _may_be_a_choice(answer.get("value"), names):
            raise MisreadError(
                f"An answer of Argilla names some of the responses, without ranks: "
                f"{answer.get('value')!r:.80}",
                "If the question asks for an order, give each name its rank; if it lets people "
                "choose several, remove it.",
            )
        if not tiers:
            raise InputError(
                f"An answer of Argilla is {answer.get('value')!r:.80}, and others to the same "
                f"question name the responses {list(names)}",
                "Write an order of these names in its place (equal ranks tie), or remove it.",
            )
        if answer.get("user_id") is None:
            raise InputError(
                "An answer of Argilla has no user_id, so two people would be one", EXPORT_AGAIN
            )
        yield Judgment(annotator=f"argilla-{answer['user_id']}", tiers=tiers)


def _may_be_a_choice(value: Any, names: Sequence[str]) -> bool:
    """Whether a list of names says which are chosen, rather than in which order."""
    if not isinstance(value, list) or any(isinstance(item, dict) for item in value):
        return False
    return 0 < len(value) < len(names)


def _is_submitted(answer: JsonObject) -> bool:
    status = answer.get("status")
    if status not in STATUSES:
        raise InputError(
            f"An answer of Argilla has the status {status!r}, so it may be a draft",
            "Argilla's to_json leaves the status out. Export with to_datasets().to_json(…), or add "
            '"status": "submitted" to every answer that counts.',
        )
    return bool(status == "submitted")


def _ranked(value: Any, names: Sequence[str]) -> Tiers | None:
    """Tiers of an answer: an order of names, best first, or the name of the best alone."""
    positions = {name: position for position, name in enumerate(names)}
    if isinstance(value, str) and value in positions:
        others = [position for position in positions.values() if position != positions[value]]
        return [[positions[value]], others]
    if not isinstance(value, list) or not value:
        return None
    named: list[Any] = [item.get("value") if isinstance(item, dict) else item for item in value]
    if not all(isinstance(name, str) and name in positions for name in named):
        return None
    ranks: list[Any] = [item.get("rank") if isinstance(item, dict) else None for item in value]
    if all(is_finite_number(rank) for rank in ranks):  # equal ranks tie
        return [
            [positions[name] for name, own in zip(named, ranks, strict=True) if own == rank]
            for rank in sorted(set(ranks))
        ]
    if any(rank is not None for rank in ranks):
        raise InputError(
            f"An answer of Argilla has the ranks {ranks!r:.80}",
            "Give each response a number, 1 for the best, or none of them any.",
        )
    return [[positions[name]] for name in named]


# ------------------------------------------------------------------------------------ Label Studio


def _read_task(value: JsonObject) -> Judged:
    data, annotations = value["data"], value["annotations"]
    read: tuple[str, ...]
    items = next((name for name, content in data.items() if is_items(content)), None)
    if items is not None:
        names = tuple(str(item["id"]) for item in data[items])
        texts = tuple(_item_text(item) for item in data[items])
        read = (prompt_name(data, ()), items)
    else:
        names = response_names(data)
        texts = tuple(str(data[name]) for name in names)
        read = (prompt_name(data, names), *names)
    finished = [
        annotation
        for annotation in annotations
        if isinstance(annotation, dict) and not annotation.get("was_cancelled")
    ]
    others = {"predictions": value.get("predictions")}
    results = [
        result
        for annotation in finished
        for result in _objects(annotation.get("result") or [], "result")
    ]
    question = require_one_question(
        str(result.get("from_name", "")) for result in results if result.get("type") in JUDGMENTS
    )
    return Judged(
        prompt=data[read[0]],
        texts=texts,
        judgments=tuple(
            judgment for annotation in finished for judgment in _results(annotation, names)
        ),
        read=read,
        question=question,
        ignored=(*_unread(data, read), *_other_controls(finished), *_unread(others, ())),
        num_unfinished=len(annotations) - len(finished),
    )


def _other_controls(annotations: Sequence[JsonObject]) -> list[str]:
    """The names of controls whose results are no judgments of responses, such as a comment."""
    results = [result for annotation in annotations for result in annotation.get("result") or []]
    others = [result for result in results if result.get("type") not in JUDGMENTS]
    return list(
        dict.fromkeys(str(result.get("from_name") or result.get("type")) for result in others)
    )


def _item_text(item: JsonObject) -> str:
    text = item.get("body") or item.get("html") or item.get("title")
    if not isinstance(text, str):
        raise InputError(
            f"The item {item.get('id')!r} of Label Studio has no body, html or title",
            "Leave it out of the task.",
        )
    return text


def _results(annotation: JsonObject, names: Sequence[str]) -> Iterator[Judgment]:
    for result in _objects(annotation.get("result") or [], "result"):
        tiers = _result_tiers(result, names)
        if tiers:
            yield Judgment(
                annotator=_annotator(annotation.get("completed_by")),
                tiers=tiers,
                created_at=_seconds(annotation.get("created_at")),
                duration_ms=_milliseconds(annotation.get("lead_time")),
            )


def _result_tiers(result: JsonObject, names: Sequence[str]) -> Tiers | None:
    value = result.get("value")
    if result.get("type") not in JUDGMENTS:
        return None
    if not isinstance(value, dict):
        raise InputError(f"A result of Label Studio has the value {value!r:.80}", EXPORT_AGAIN)
    if result["type"] == "pairwise":
        selected = value.get("selected")
        if selected not in ("left", "right"):
            raise InputError(
                f"A pairwise result of Label Studio selects {selected!r}", "Use left or right."
            )
        _require_sides(names)
        return [[0], [1]] if selected == "left" else [[1], [0]]
    order = value.get("ranker")
    if isinstance(order, dict):
        buckets = [name for name in order if name != "_"]
        if len(buckets) != 1:
            raise InputError(
                f"A ranker result of Label Studio has the buckets {buckets}, whose order the "
                "export does not say",
                'Write tiers for these tasks: {"prompt": …, "responses": […], "tiers": …}.',
            )
        order = order[buckets[0]]
    order = [str(name) for name in _list(order or [], "ranker")]
    tiers = _ranked(order, names)
    if order and not tiers:
        raise InputError(
            f"A ranker result of Label Studio orders {order!r:.80}, and the responses are called "
            f"{list(names)!r:.80}",
            EXPORT_AGAIN,
        )
    return tiers


def _require_sides(names: Sequence[str]) -> None:
    endings = tuple(ending(name) for name in names)
    if endings not in SIDES:
        raise InputError(
            f"A pairwise result says left or right, and the fields are called {list(names)}",
            "Rename the field that was shown left to answer1, and the other to answer2.",
        )


def _annotator(who: Any) -> str:
    if isinstance(who, dict):
        return str(who.get("email") or f"label-studio-{who.get('id')}")
    return f"label-studio-{who}"


def _milliseconds(seconds: Any) -> int | None:
    """How long a judgment took; None where the export says nothing that can be true."""
    is_likely = is_finite_number(seconds) and 0 <= seconds <= MOST_SECONDS
    return round(1000 * seconds) if is_likely else None


def _seconds(text: Any) -> float | None:
    """A time as Label Studio writes it, such as 2024-03-09T22:16:08.728353Z."""
    if not isinstance(text, str):
        return None
    try:
        return datetime.fromisoformat(text).timestamp()
    except (ValueError, OverflowError):
        return None


# ------------------------------------------------------------------------------------ both of them


def _list(value: Any, name: str) -> list[Any]:
    if not isinstance(value, list):
        raise InputError(f"{name} must be a list, found {value!r:.80}", EXPORT_AGAIN)
    return value


def _objects(value: Any, name: str) -> list[JsonObject]:
    items = _list(value, name)
    if not all(isinstance(item, dict) for item in items):
        raise InputError(f"{name} must be a list of objects, found {value!r:.80}", EXPORT_AGAIN)
    return items


def _unread(values: JsonObject, read: Collection[str]) -> list[str]:
    """The names under which there is something that was not read."""
    return [name for name, content in values.items() if name not in read and content not in EMPTY]
