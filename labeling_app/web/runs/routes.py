"""The Runs page, what its buttons send, and the reports of the rounds."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from anyio.to_thread import run_sync
from fastapi import Depends, FastAPI, HTTPException, Request
from fastapi.responses import FileResponse, HTMLResponse, JSONResponse

from labeling_app.annotators.users import User
from labeling_app.web.access.content_policy import HEADER, html_page, policy_of_report
from labeling_app.web.runs.loop_process import LoopProcess
from labeling_app.web.runs.page import runs_page, runs_state
from labeling_app.web.runs.progress import report_path
from rlhf.endpoints.request_bodies import BodyError, read_json
from rlhf.errors import InputError

FOLDER = Path(__file__).parents[1] / "pages" / "runs"
FILES = ("runs.css", "runs.js")
STAGES = ("evaluate", "reward")
MAX_BODY_BYTES = 20_000
MAX_ROUND = 100_000
REFUSED = "Only leads and admins can open the runs."

Payload = dict[str, Any]


def add_runs_routes(
    app: FastAPI, process: LoopProcess, sender_of: Callable[[Request], User]
) -> None:
    """Serve the Runs page to leads and admins.

    Args:
        app: gets the routes.
        process: the loop.
        sender_of: the person who sends a request.
    """

    def require_lead(request: Request) -> None:
        if sender_of(request).role == "annotator":
            raise HTTPException(status_code=403, detail=REFUSED)

    lead_only = [Depends(require_lead)]
    _add_pages(app, process, lead_only)

    @app.post("/runs", dependencies=lead_only)
    async def operation(request: Request) -> JSONResponse:
        try:
            payload = await read_json(request, MAX_BODY_BYTES)
        except BodyError as error:
            return JSONResponse({"ok": False, "error": error.problem}, status_code=error.status)
        name = sender_of(request).name
        return JSONResponse(await run_sync(answer, process, name, payload))


def _add_pages(app: FastAPI, process: LoopProcess, lead_only: Sequence[Any]) -> None:
    @app.get("/runs", dependencies=lead_only)
    def page() -> HTMLResponse:
        return _page(runs_page, process)

    @app.get("/runs/state", dependencies=lead_only)
    def state() -> HTMLResponse:
        return _page(runs_state, process)

    @app.get("/runs/files/{name}", dependencies=lead_only)
    def file(name: str) -> FileResponse:
        if name not in FILES:
            raise HTTPException(status_code=404)
        return FileResponse(FOLDER / name)

    @app.get("/runs/reports/{number}/{stage}", dependencies=lead_only)
    def report(number: int, stage: str) -> HTMLResponse:
        known = stage in STAGES and 0 <= number < MAX_ROUND
        run = report_path(process.file, number, stage) if known else None
        if run is None:
            raise HTTPException(status_code=404, detail="There is no such report.")
        text = run.report_html.read_text(encoding="utf-8")
        return HTMLResponse(text, headers={HEADER: policy_of_report(text)})


def _page(render: Callable[[LoopProcess], str], process: LoopProcess) -> HTMLResponse:
    try:
        return html_page(render(process))
    except InputError as error:
        raise HTTPException(status_code=500, detail=f"{error.problem}. {error.remedy}") from None


def answer(process: LoopProcess, name: str, payload: Payload) -> Payload:
    """Do what a button asks; the answer has `ok`, a refusal `error`.

    Args:
        process: the loop.
        name: of the lead.
        payload: `op`, and what it needs.
    """
    operations: dict[str, Callable[[], None]] = {
        "start": process.start,
        "pause": lambda: process.pause(name, stops_stage=payload.get("now") is True),
        "promote": lambda: process.promote(_round(payload), name),
        "rollback": lambda: process.roll_back(name),
        "change": lambda: process.change(_values(payload)),
    }
    operation = operations.get(str(payload.get("op")))
    if operation is None:
        return {"ok": False, "error": "Unknown operation. Reload the page."}
    try:
        operation()
    except InputError as error:
        return {"ok": False, "error": f"{error.problem}. {error.remedy}"}
    except OSError as error:
        return {"ok": False, "error": f"The server could not do that ({error.strerror})."}
    return {"ok": True}


def _round(payload: Payload) -> int:
    number = payload.get("round")
    if not isinstance(number, int) or isinstance(number, bool) or not 0 <= number < MAX_ROUND:
        raise InputError("There is no such round", "Reload the page.")
    return number


def _values(payload: Payload) -> Payload:
    values = payload.get("values")
    if not isinstance(values, dict):
        raise InputError("The values are missing", "Reload the page.")
    return values
