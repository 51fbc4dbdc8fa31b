"""The page of live mode and its two routes: operations, and the answers as they come."""

import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import anyio
from anyio.to_thread import run_sync
from fastapi import FastAPI, HTTPException, Request
from fastapi.responses import FileResponse, HTMLResponse, JSONResponse, StreamingResponse

from labeling_app.web.access.content_policy import html_page
from labeling_app.web.live.live import Answering, Live, growing
from labeling_app.web.request_bodies import BodyError, read_json, require_sender

PAGE = Path(__file__).parents[1] / "pages" / "live"
FILES = {
    "live.css": PAGE / "live.css",
    "live.js": PAGE / "live.js",
    "talk.js": PAGE / "talk.js",
    "outbox.js": Path(__file__).parents[1] / "pages" / "board" / "outbox.js",
}
MAX_BODY_BYTES = 200_000
PAUSE_SECONDS = 0.1
BREATH_SECONDS = 10.0  # a line at least so often, or proxies take the silence for the end


def add_live_routes(app: FastAPI, live: Live, name_of: Callable[[Request], str]) -> None:
    """Serve live mode.

    Args:
        app: gets the routes.
        live: the questions.
        name_of: who sends a request.
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
    """The texts so far whenever they have grown, then the whole question as it was stored."""
    question = live.question(annotator, turn_id)
    if question is not None:
        async for texts in _growing(question):
            yield _line(growing(texts))
        if question.problem:
            yield _line({"over": True, "problem": question.problem})
            return
    screen = await run_sync(live.find, annotator, turn_id)
    yield _line({"over": True, "problem": "", **screen})


async def _growing(question: Answering) -> AsyncIterator[list[str]]:
    seen: list[str] | None = None
    silence = 0.0
    while not question.over:
        texts = list(question.texts)
        if texts != seen or silence >= BREATH_SECONDS:
            seen, silence = texts, 0.0
            yield texts
        await anyio.sleep(PAUSE_SECONDS)
        silence += PAUSE_SECONDS


def _line(value: dict[str, Any]) -> str:
    return json.dumps(value) + "\n"
