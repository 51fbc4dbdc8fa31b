"""Feedback on answers to apps, by the id that the app got with the answer."""

from typing import Any

from labeling_app.data_io.feedback import MAX_CHARACTERS, MAX_ID, MAX_RESPONSES, require_text
from labeling_app.db.answers.served import count_thumb, find_served, put_verdict
from labeling_app.db.people.users import find_user
from labeling_app.db.store import Store
from labeling_app.rankings.verdicts import EDITED, PERSON, THUMB_WORDS, pick
from rlhf.errors import InputError
from rlhf.records.schema import Ranking, Response, content_id
from rlhf.records.served import NotKeptError, ServedResponse

EXAMPLE = 'for example {"id": "chatcmpl-…", "thumbs": "up"}'
FORMS = {
    "thumbs": ("id", "thumbs", "note"),
    "pick": ("ids", "pick", "note"),
    "text": ("id", "text", "note"),
}


def store_served_feedback(store: Store, program: str, payload: dict[str, Any]) -> bool:
    """Store a thumb, a pick or a correction; False if the program said the same before.

    Later feedback on the same takes the place of earlier.

    Raises:
        NotKeptError: there is no such answer.
        InputError: the program has the name of a person, or a field is missing, unknown, of the
            wrong type or too long.
    """
    form = next((name for name in FORMS if name in payload), "thumbs")
    unknown = sorted(set(payload) - set(FORMS[form]))
    if unknown:
        raise InputError(f"Unknown field {unknown[0]!r:.60}", f"Send {', '.join(FORMS[form])}.")
    note = ""
    if payload.get("note"):
        note = require_text(payload["note"], "note", MAX_CHARACTERS, EXAMPLE)
    with store.connections.write():
        if find_user(store.connections, program) is not None:  # of an app that has no token
            raise InputError(
                f"{program!r} is a person who signs in, and would give this feedback",
                "Send the token of a program: rlhf users token NAME --db DB",
            )
        if form == "thumbs":
            return _thumb(store, program, payload, note)
        if form == "pick":
            return _pick(store, program, payload, note)
        return _correct(store, program, payload, note)


def _thumb(store: Store, program: str, payload: dict[str, Any], note: str) -> bool:
    flag = THUMB_WORDS.get(str(payload.get("thumbs")))
    if flag is None:
        raise InputError(f"thumbs is {payload.get('thumbs')!r:.60}", f"Send up or down, {EXAMPLE}.")
    served = _require_served(store, payload.get("id"), "id")
    tiers = ((served.response.id,),)
    ranking = _ranking(served, program, tiers, (flag,), note)
    is_new = put_verdict(store, program, f"thumb {served.id}", ranking, [served])
    if is_new:
        count_thumb(store.connections.db, served, is_up=payload["thumbs"] == "up")
    return is_new


def _pick(store: Store, program: str, payload: dict[str, Any], note: str) -> bool:
    ids = payload.get("ids")
    if not isinstance(ids, list) or not 2 <= len(ids) <= MAX_RESPONSES:
        raise InputError(
            f"ids must be a list of 2 to {MAX_RESPONSES} ids",
            'For example {"ids": ["chatcmpl-…", "chatcmpl-…"], "pick": 0}.',
        )
    shown = [_require_served(store, id_, f"ids[{index}]") for index, id_ in enumerate(ids)]
    if len({served.id for served in shown}) < len(shown):
        raise InputError("Two of the ids are the same", "Send each id once.")
    if len({served.prompt.id for served in shown}) > 1:
        raise InputError(
            "The responses answer different conversations",
            "Send the ids of responses to the same messages.",
        )
    tiers, flags = pick([served.response.id for served in shown], payload["pick"])
    ranking = _ranking(shown[0], program, tiers, flags, note)
    subject = " ".join(["pick", *sorted(served.id for served in shown)])
    return put_verdict(store, program, subject, ranking, shown)


def _correct(store: Store, program: str, payload: dict[str, Any], note: str) -> bool:
    text = require_text(payload["text"], "text", MAX_CHARACTERS, EXAMPLE)
    served = _require_served(store, payload.get("id"), "id")
    if text.strip() == served.response.text.strip():
        raise InputError(
            "text is the response as it was", "Send thumbs up if the response needs no correction."
        )
    written = Response(
        id=content_id("served", served.id, PERSON, text),
        prompt_id=served.prompt.id,
        text=text,
        model=PERSON,
    )
    store.add_prompts([served.prompt])
    store.add_responses([written], queue=False)
    tiers = ((written.id,), (served.response.id,))
    ranking = _ranking(served, program, tiers, (EDITED,), note)
    return put_verdict(store, program, f"text {served.id}", ranking, [served])


def _ranking(
    served: ServedResponse,
    program: str,
    tiers: tuple[tuple[str, ...], ...],
    flags: tuple[str, ...],
    note: str,
) -> Ranking:
    return Ranking(
        id="",
        prompt_id=served.prompt.id,
        annotator=program,
        kind="human",
        tiers=tiers,
        flags=flags,
        note=note,
    )


def _require_served(store: Store, served_id: Any, name: str) -> ServedResponse:
    served = find_served(store.connections.db, require_text(served_id, name, 4 * MAX_ID, EXAMPLE))
    if served is None:
        raise NotKeptError(
            f"No response with the id {served_id!r} is kept",
            "Send the id of the chat completion. Only kept responses take feedback: "
            "see --keep.share and --keep.days of rlhf serve.",
        )
    return served
