"""Live mode's page, its operations, and the stream of answers."""

import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import anyio
from anyio.to_thread import run_sync
from fastapi import FastAPI, HTTPException, Request
from fastapi.responses import FileResponse, HTMLResponse, JSONResponse, StreamingResponse

from labeling_app.web.access.content_policy import html_page
from labeling_app.web.live.live import Live, RunningQuestion
from labeling_app.web.live.payloads import split_texts
from labeling_app.web.request_bodies import require_sender
from rlhf.endpoints.request_bodies import BodyError, read_json

PAGE = Path(__file__).parents[1] / "pages" / "live"
FILES = {
    "live.css": PAGE / "live.css",
    "live.js": PAGE / "live.js",
    "talk.js": PAGE / "talk.js",
    "outbox.js": Path(__file__).parents[1] / "pages" / "board" / "outbox.js",
}
MAX_BODY_BYTES = 200_000
POLL_SECONDS = 0.1
KEEPALIVE_SECONDS = 10.0  # send a line at least this often, or proxies close the connection


def add_live_routes(app: FastAPI, live: Live, name_of: Callable[[Request], str]) -> None:
    """Serve live mode.

    Args:
        app: gets the routes.
        live: the questions.
        name_of: the name of the person who sends a request.
    """

    @app.get("/live")
    def page() -> HTMLResponse:
        return html_page((PAGE / "live.html").read_text(encoding="utf-8"))

    @app.get("/live/{name}")
    def file(name: str) -> FileResponse:
        if name not in FILES:
            raise HTTPException(status_code=404)
        return FileResponse(FILES[name])

    @app.post("/live")
    async def operation(request: Request) -> JSONResponse:
        try:
            payload = await read_json(request, MAX_BODY_BYTES)
            require_sender(payload, name_of(request))
        except BodyError as error:
            refusal = {"ok": False, "error": error.problem, "retry": False}
            return JSONResponse(refusal, status_code=error.status)
        return JSONResponse(await run_sync(live.answer, name_of(request), payload))

    @app.get("/live/stream/{turn_id}")
    def stream(turn_id: str, request: Request) -> StreamingResponse:
        lines = _lines(live, name_of(request), turn_id)
        return StreamingResponse(lines, media_type="application/x-ndjson")


async def _lines(live: Live, annotator: str, turn_id: str) -> AsyncIterator[str]:
    """The texts so far whenever they have changed, then the whole question as stored."""
    question = live.question(annotator, turn_id)
    if question is not None:
        async for texts in _updates(question):
            yield _line(split_texts(texts))
        if question.problem:
            yield _line({"over": True, "problem": question.problem})
            return
    screen = await run_sync(live.find, annotator, turn_id)
    yield _line({"over": True, "problem": "", **screen})


async def _updates(question: RunningQuestion) -> AsyncIterator[list[str]]:
    seen: list[str] | None = None
    silence = 0.0
    while not question.over:
        texts = list(question.texts)
        if texts != seen or silence >= KEEPALIVE_SECONDS:
            seen, silence = texts, 0.0
            yield texts
        await anyio.sleep(POLL_SECONDS)
        silence += POLL_SECONDS


def _line(value: dict[str, Any]) -> str:
    return json.dumps(value) + "\n"
