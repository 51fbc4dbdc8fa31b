"""Lines with thumbs: `"thumbs": "up"` on our own lines, and trl's unpaired preferences.

{"prompt": "Hi?", "response": "Hello!", "thumbs": "up"}
{"prompt": "Hi?", "responses": ["Hello!", "What?"], "thumbs": ["up", null]}
{"prompt": "Hi?", "completion": "Hello!", "label": true}
"""

from collections.abc import Sequence
from typing import Any

from labeling_app.rankings.verdicts import THUMB_WORDS
from rlhf.errors import InputError
from rlhf.records.schema import AnnotatorKind, JsonObject, Ranking, Response, content_id
from rlhf.records.wording import counted

LABEL_WORDS = {"true": "up", "false": "down"}
UNPAIRED = ("prompt", "completion", "label")
SINGLE = ("completion", "response")  # of a line with one answer
EXAMPLE = 'Write {"prompt": "…", "response": "…", "thumbs": "up"}, or "down".'


def with_responses(value: JsonObject) -> JsonObject:
    """One of our own lines, or of trl's unpaired ones, with lists of `responses` and `thumbs`.

    A cell that a table leaves empty is None or "", and counts as absent.

    Raises:
        InputError: a label that is neither true nor false, a completion of several messages, or
        more than one of `response`, `completion` and `responses`.
    """
    if all(value.get(name) is not None for name in UNPAIRED):
        thumb = LABEL_WORDS.get(str(value["label"]).lower())  # a cell of a CSV file is text
        if thumb is None:
            raise InputError(
                f"label is {value['label']!r:.80}", "Write true for good and false for bad."
            )
        value = {**_without(value, "label"), "thumbs": thumb}
    # an empty response is wrong only if it is judged
    is_judged = value.get("thumbs") not in (None, "")
    given = [
        name for name in SINGLE if value.get(name) or (is_judged and value.get(name) is not None)
    ]
    if given:
        text = _text(value[given[0]])
        if len(given) > 1 or value.get("responses"):
            both = " and ".join([*given, "responses"][:2])
            raise InputError(f"The line has both {both}", "Leave out one of them.")
        value = {**_without(value, *SINGLE), "responses": [text]}
    thumbs = value.get("thumbs")
    if thumbs in (None, ""):
        return _without(value, "thumbs")
    return value if isinstance(thumbs, list) else {**value, "thumbs": [thumbs]}


def _without(value: JsonObject, *names: str) -> JsonObject:
    return {name: content for name, content in value.items() if name not in names}


def thumb_rankings(
    value: JsonObject, responses: Sequence[Response], annotator: str, kind: AnnotatorKind
) -> list[Ranking]:
    """The thumbs of a line that `with_responses` gave, one ranking for each.

    Raises:
        InputError: not one thumb for each response, or a word that is no thumb.
    """
    thumbs: list[Any] = value.get("thumbs") or []
    if thumbs and len(thumbs) != len(responses):
        problem = f"{counted(len(thumbs), 'thumb')} for {counted(len(responses), 'response')}"
        raise InputError(problem, EXAMPLE)
    rankings = []
    for response, word in zip(responses, thumbs, strict=False):
        if word is None:
            continue
        flag = THUMB_WORDS.get(str(word))
        if flag is None:
            raise InputError(f"thumbs is {word!r:.80}", EXAMPLE)
        tiers, flags = ((response.id,),), (flag,)
        ranking = Ranking(
            id=content_id("import", response.prompt_id, annotator, tiers, flags),
            prompt_id=response.prompt_id,
            annotator=annotator,
            kind=kind,
            tiers=tiers,
            flags=flags,
        )
        rankings.append(ranking)
    return rankings


def _text(completion: Any) -> Any:
    """The text of a completion, which may be a list of one message."""
    if not isinstance(completion, list):
        return completion
    match completion:
        case [{"role": "assistant", "content": text}]:
            return text
    raise InputError(
        f"completion must be text or one assistant message, found {completion!r:.80}",
        'Write "completion": [{"role": "assistant", "content": "…"}].',
    )
