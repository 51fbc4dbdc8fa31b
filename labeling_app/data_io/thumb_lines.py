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

LABEL_WORDS = {"true": "up", "false": "down"}
UNPAIRED = ("prompt", "completion", "label")
EXAMPLE = 'Write {"prompt": "…", "response": "…", "thumbs": "up"}, or "down".'


def with_responses(value: JsonObject) -> JsonObject:
    """A line with one answer, or with thumbs, as one with lists of both.

    What a table has in no row is None there, and as good as absent.

    Raises:
        InputError: a label that is neither true nor false, a completion of several messages, or
        both `response` and `responses`.
    """
    if all(value.get(name) is not None for name in UNPAIRED):
        thumb = LABEL_WORDS.get(str(value["label"]).lower())  # a cell of a CSV file is text
        if thumb is None:
            raise InputError(
                f"label is {value['label']!r:.80}", "Write true for good and false for bad."
            )
        value = {**_without(value, "response", "responses", "label"), "thumbs": thumb}
    if value.get("response") is not None:
        if value.get("responses"):
            raise InputError("The line has both response and responses", EXAMPLE)
        value = {**_without(value, "response"), "responses": [value["response"]]}
    if value.get("completion") is not None and not value.get("responses"):
        value = {**_without(value, "completion"), "responses": [_text(value["completion"])]}
    thumbs = value.get("thumbs")
    return value if thumbs is None or isinstance(thumbs, list) else {**value, "thumbs": [thumbs]}


def _without(value: JsonObject, *names: str) -> JsonObject:
    return {name: found for name, found in value.items() if name not in names}


def thumb_rankings(
    value: JsonObject, responses: Sequence[Response], annotator: str, kind: AnnotatorKind
) -> list[Ranking]:
    """The thumbs of a line that `with_responses` gave, one ranking for each.

    Raises:
        InputError: not one thumb for each response, or a word that is no thumb.
    """
    thumbs: list[Any] = value.get("thumbs") or []
    if thumbs and len(thumbs) != len(responses):
        raise InputError(f"{len(thumbs)} thumbs for {len(responses)} responses", EXAMPLE)
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
