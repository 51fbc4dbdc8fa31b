"""The Runs page, what its buttons send, and the reports of the rounds."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from anyio.to_thread import run_sync
from fastapi import FastAPI, HTTPException, Request
from fastapi.responses import HTMLResponse, JSONResponse

from labeling_app.web.access.content_policy import HEADER, policy_of_report
from labeling_app.web.lead.frame import LeadFrame, sender_of
from labeling_app.web.runs.loop_process import LoopProcess
from labeling_app.web.runs.page import FILTERS, content
from labeling_app.web.runs.progress import report_path
from rlhf.endpoints.request_bodies import BodyError, read_json
from rlhf.errors import InputError

PATH = "/lead/runs"
FILES = Path(__file__).parents[1] / "pages" / "runs"
STAGES = ("evaluate", "reward")
MAX_BODY_BYTES = 20_000
MAX_ROUND = 100_000

Payload = dict[str, Any]


def add_runs_page(app: FastAPI, frame: LeadFrame, process: LoopProcess) -> None:
    """Serve the page.

    Args:
        app: gets the routes.
        frame: of the pages for leads.
        process: the loop.
    """
    frame.add_to_navigation("Runs", PATH)
    frame.add_files(FILES / "runs.css", FILES / "runs.js")
    frame.add_filters(**FILTERS)

    @app.get(PATH)
    def page(request: Request) -> HTMLResponse:
        return frame.page(request, "runs/runs.html", **_content(process))

    @app.get(f"{PATH}/state")
    def state() -> HTMLResponse:
        template = frame.templates.get_template("runs/state.html")
        return HTMLResponse(template.render(_content(process)))

    @app.get(PATH + "/{number}/{stage}")
    def report(number: int, stage: str) -> HTMLResponse:
        known = stage in STAGES and 0 <= number < MAX_ROUND
        try:
            run = report_path(process.file, number, stage) if known else None
        except InputError as error:
            raise _broken(error) from None
        if run is None:
            raise HTTPException(status_code=404, detail="There is no such report.")
        text = run.report_html.read_text(encoding="utf-8")
        return HTMLResponse(text, headers={HEADER: policy_of_report(text)})

    @app.post(PATH)
    async def operation(request: Request) -> JSONResponse:
        try:
            payload = await read_json(request, MAX_BODY_BYTES)
        except BodyError as error:
            return JSONResponse({"error": error.problem}, status_code=error.status)
        return JSONResponse(await run_sync(answer, process, sender_of(request).name, payload))


def _content(process: LoopProcess) -> Payload:
    try:
        return content(process)
    except InputError as error:
        raise _broken(error) from None


def _broken(error: InputError) -> HTTPException:
    return HTTPException(status_code=500, detail=f"{error.problem}. {error.remedy}")


def answer(process: LoopProcess, name: str, payload: Payload) -> Payload:
    """Do what a button asks; a refusal has an `error`.

    Args:
        process: the loop.
        name: of the lead.
        payload: `op`, and what it needs.
    """
    operations: dict[str, Callable[[], None]] = {
        "start": process.start,
        "pause": lambda: process.pause(name, stops_stage=payload.get("now") is True),
        "train": lambda: process.train_now(name),
        "promote": lambda: process.promote(_round(payload), name),
        "rollback": lambda: process.roll_back(name),
        "change": lambda: process.change(_values(payload)),
        "unset": lambda: process.unset(payload.get("setting")),
    }
    operation = operations.get(str(payload.get("op")))
    if operation is None:
        return {"error": "Unknown operation. Reload the page."}
    try:
        operation()
    except InputError as error:
        return {"error": f"{error.problem}. {error.remedy}"}
    except OSError as error:
        return {"error": f"The server could not do that ({error.strerror})."}
    return {}


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
