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
    """A line with thumbs as one that has `responses` and a list of `thumbs`; others as they are.

    Raises:
        InputError: a label that is neither true nor false, or a completion of several messages.
    """
    if all(value.get(name) is not None for name in UNPAIRED):
        rest = {name: found for name, found in value.items() if name not in UNPAIRED[1:]}
        thumb = LABEL_WORDS.get(str(value["label"]).lower())  # a cell of a CSV file is text
        if thumb is None:
            raise InputError(
                f"label is {value['label']!r:.80}", "Write true for good and false for bad."
            )
        return {**rest, "responses": [_text(value["completion"])], "thumbs": [thumb]}
    if value.get("thumbs") is None:  # tables hold every column in every row
        return value
    rest = {name: found for name, found in value.items() if name != "response"}
    thumbs = value["thumbs"] if isinstance(value["thumbs"], list) else [value["thumbs"]]
    own = {"responses": [value["response"]]} if value.get("response") is not None else {}
    return {**rest, **own, "thumbs": thumbs}


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
