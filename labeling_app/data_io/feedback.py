"""Thumbs and picks that other programs send: from their JSON to a prompt, responses, a ranking."""

from typing import Any

from labeling_app.db.board.submission_ids import is_stored
from labeling_app.db.store import Store
from labeling_app.rankings.verdicts import THUMB_WORDS, pick
from rlhf.errors import InputError
from rlhf.records.schema import Message, Prompt, Ranking, Response, content_id

SOURCE = "feedback"
COMMON = ("id", "prompt", "note")
THUMB = ("response", "thumbs")
PICK = ("responses", "pick")
MAX_ID = 64
MAX_MODEL = 200
MAX_CHARACTERS = 100_000
MAX_MESSAGES = 200
MAX_RESPONSES = 10
EXAMPLE = 'for example {"id": "…", "prompt": "Hi?", "response": "Hello!", "thumbs": "up"}'


def store_feedback(store: Store, program: str, payload: dict[str, Any]) -> bool:
    """Store what a program sent; False when that id of this program is stored already.

    Raises:
        InputError: a field is missing, unknown, of the wrong type or too long, or other feedback of
        this program has that id.
    """
    wanted = (*COMMON, *(PICK if "responses" in payload else THUMB))
    unknown = sorted(set(payload) - set(wanted))
    if unknown:
        raise InputError(f"Unknown field {unknown[0]!r}", f"Send {', '.join(wanted)}.")
    prompt = _prompt(payload.get("prompt"))
    judged = _pick(payload, prompt) if "responses" in payload else _thumb(payload, prompt)
    responses, tiers, flags = judged
    ranking = Ranking(
        id=content_id(SOURCE, program, require_text(payload.get("id"), "id", MAX_ID)),
        prompt_id=prompt.id,
        annotator=program,
        kind="human",
        tiers=tiers,
        flags=flags,
        note=require_text(payload["note"], "note", MAX_CHARACTERS) if payload.get("note") else "",
    )
    with store.connections.write() as db:
        if is_stored(db, ranking):
            return False
        store.add_prompts([prompt])
        store.add_responses(responses, queue=False)
        store.add_rankings([ranking])
    return True


Judged = tuple[list[Response], tuple[tuple[str, ...], ...], tuple[str, ...]]


def _thumb(payload: dict[str, Any], prompt: Prompt) -> Judged:
    response = _response(payload.get("response"), "response", prompt)
    flag = THUMB_WORDS.get(str(payload.get("thumbs")))
    if flag is None:
        raise InputError(f"thumbs is {payload.get('thumbs')!r:.60}", f"Send up or down, {EXAMPLE}.")
    return [response], ((response.id,),), (flag,)


def _pick(payload: dict[str, Any], prompt: Prompt) -> Judged:
    values = payload["responses"]
    if not isinstance(values, list) or not 2 <= len(values) <= MAX_RESPONSES:
        raise InputError(
            f"responses must be a list of 2 to {MAX_RESPONSES}",
            "For one response send response and thumbs.",
        )
    responses = [_response(v, f"responses[{n}]", prompt) for n, v in enumerate(values)]
    ids = [response.id for response in responses]
    if len(set(ids)) < len(ids):
        raise InputError("Two of the responses are the same", "Send each response once.")
    tiers, flags = pick(ids, payload.get("pick", "nothing"))
    return responses, tiers, flags


def _prompt(value: Any) -> Prompt:
    if isinstance(value, list) and 0 < len(value) <= MAX_MESSAGES:
        messages = tuple(Message.from_json(message) for message in value)
        require_text("".join(message.content for message in messages), "prompt", MAX_CHARACTERS)
    else:
        messages = (Message(role="user", content=require_text(value, "prompt", MAX_CHARACTERS)),)
    return Prompt.create(messages, "train", SOURCE)


def _response(value: Any, name: str, prompt: Prompt) -> Response:
    """A response given as text, or as {"text": …, "model": …}."""
    given = value if isinstance(value, dict) else {"text": value}
    if set(given) - {"text", "model"}:
        raise InputError(f"{name} has unknown fields", 'Send text, or {"text": …, "model": …}.')
    text = require_text(given.get("text"), name, MAX_CHARACTERS)
    model = require_text(given.get("model", "unknown"), f"{name}.model", MAX_MODEL)
    return Response(
        id=content_id(prompt.id, model, text), prompt_id=prompt.id, text=text, model=model
    )


def require_text(value: Any, name: str, limit: int, example: str = EXAMPLE) -> str:
    """A field that must be text.

    Raises:
        InputError: it is not, is empty, or is longer than `limit`; the message has the example.
    """
    if not isinstance(value, str) or not value.strip():
        raise InputError(f"{name} must be text that is not empty", f"Send it, {example}.")
    if len(value) > limit:
        raise InputError(f"{name} has {len(value)} characters", f"Send at most {limit}.")
    return value
