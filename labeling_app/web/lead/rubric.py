"""`/lead/rubric`: edit the instructions for judging, with a preview; every version is kept."""

from datetime import datetime
from typing import Any

from anyio.to_thread import run_sync
from fastapi import FastAPI, Request
from fastapi.responses import HTMLResponse

from labeling_app.annotators.users import User
from labeling_app.db.board.rubrics import rubric_versions, save_rubric
from labeling_app.db.store import Store
from labeling_app.web.board.rendering import to_html
from labeling_app.web.lead.frame import LeadFrame, answer_json
from labeling_app.web.lead.templates import PAGES
from rlhf.errors import InputError

PATH = "/lead/rubric"
TEMPLATE = "lead/rubric.html"
MAX_CHARACTERS = 20_000
Payload = dict[str, Any]


def add_rubric_page(app: FastAPI, frame: LeadFrame, store: Store) -> None:
    """Serve the page, the preview, and saving."""
    frame.add_to_navigation("Rubric", PATH)
    frame.add_files(PAGES / "lead" / "rubric.js")
    frame.add_filters(day_and_time=_day_and_time)

    @app.get(PATH)
    def page(request: Request) -> HTMLResponse:
        versions = rubric_versions(store.connections)
        text = versions[0].text if versions else ""
        values: Payload = {"versions": versions, "text": text, "most": MAX_CHARACTERS}
        return frame.page(request, TEMPLATE, **values)

    async def preview(sender: User, payload: Payload) -> Payload:
        return {"html": await run_sync(to_html, _text(payload))}

    async def save(sender: User, payload: Payload) -> Payload:
        is_new = await run_sync(save_rubric, store.connections, _text(payload), sender.name)
        return {"say": "Saved. The board shows it with the next task." if is_new else "No change."}

    answer_json(app, f"{PATH}/preview", preview)
    answer_json(app, f"{PATH}/save", save)


def _text(payload: Payload) -> str:
    text = payload.get("text")
    if not isinstance(text, str):
        raise InputError("The request is malformed", "Reload the page.")
    text = text.replace("\r\n", "\n").strip()
    if len(text) > MAX_CHARACTERS:
        raise InputError(
            f"The rubric has {len(text):,} characters", f"Use at most {MAX_CHARACTERS:,}."
        )
    return text


def _day_and_time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds).strftime("%Y-%m-%d %H:%M")
