"""The Runs page, what its buttons send, and the reports of the rounds."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from anyio.to_thread import run_sync
from fastapi import FastAPI, HTTPException, Request
from fastapi.responses import HTMLResponse, JSONResponse

from labeling_app.db.connection import Connections
from labeling_app.web.access.content_policy import HEADER, policy_of_report
from labeling_app.web.lead.frame import LeadFrame, sender_of
from labeling_app.web.request_bodies import json_errors
from labeling_app.web.runs.loop_process import LoopProcess
from labeling_app.web.runs.page import FILTERS, content
from labeling_app.web.runs.progress import report_path
from rlhf.diagnose import as_input_error
from rlhf.endpoints.request_bodies import read_json
from rlhf.errors import InputError, RlhfError
from rlhf.records.documents import REMEDY
from rlhf.records.wording import counted, num_people

PATH = "/lead/runs"
FILES = Path(__file__).parents[1] / "pages" / "runs"
STAGES = ("evaluate", "reward")
WAY_BACK = (
    '<nav aria-label="Pages for leads" style="max-width: 1080px; margin: 0 auto; '
    f'padding: 16px 24px 0"><a href="{PATH}">Back to Runs</a></nav>'
)
MAX_BODY_BYTES = 20_000
MAX_ROUND = 100_000

Payload = dict[str, Any]


def add_runs_page(
    app: FastAPI, frame: LeadFrame, process: LoopProcess, connections: Connections
) -> None:
    """Serve the page.

    Args:
        app: gets the routes.
        frame: of the pages for leads.
        process: the loop.
        connections: the label database.
    """
    frame.add_to_navigation("Runs", PATH)
    frame.add_files(FILES / "runs.css", FILES / "runs.js")
    frame.add_filters(**FILTERS)
    _add_reports(app, frame, process)

    @app.get(PATH)
    def page(request: Request) -> HTMLResponse:
        try:
            return frame.page(request, "runs/runs.html", **_content(process, connections))
        except InputError as error:
            return frame.broken_page(request, "Runs", error)

    @app.get(f"{PATH}/state")
    def state() -> HTMLResponse:
        template = frame.templates.get_template("runs/state.html")
        try:
            return HTMLResponse(template.render(_content(process, connections)))
        except InputError as error:  # the page shows it beside what it has
            raise HTTPException(
                status_code=500, detail=f"{error.problem}. {error.remedy}"
            ) from None

    @app.post(PATH)
    @json_errors
    async def operation(request: Request) -> JSONResponse:
        payload = await read_json(request, MAX_BODY_BYTES)
        return JSONResponse(await run_sync(answer, process, sender_of(request).name, payload))


def add_page_without_loop(app: FastAPI, frame: LeadFrame) -> None:
    """Say at the address of the page how to start the board with a loop."""

    @app.get(PATH)
    def page(request: Request) -> HTMLResponse:
        error = InputError(
            "This board was started without a loop",
            "Whoever runs it stops it and starts it again with the loop's settings file: "
            "rlhf label --loop loop.yaml, with the other settings as before.",
        )
        return frame.broken_page(request, "Runs", error, status_code=404)


def _add_reports(app: FastAPI, frame: LeadFrame, process: LoopProcess) -> None:
    @app.get(PATH + "/{number}/{stage}")
    def report(request: Request, number: int, stage: str) -> HTMLResponse:
        known = stage in STAGES and 0 <= number < MAX_ROUND
        try:
            text = _read_report(process, number, stage) if known else None
        except InputError as error:
            return frame.broken_page(request, "Runs", error)
        if text is None:
            raise HTTPException(status_code=404, detail="There is no such report.")
        return HTMLResponse(_with_way_back(text), headers={HEADER: policy_of_report(text)})


def _with_way_back(report: str) -> str:
    """A report with a link to the page; the file itself has none, since it is read alone, too."""
    return report.replace("<body>", f"<body>\n{WAY_BACK}", 1)


def _content(process: LoopProcess, connections: Connections) -> Payload:
    """The values of the page.

    Raises:
        InputError: a file of the loop is broken, also one whose JSON has other content.
    """
    with as_input_error(f"A file in {process.file.out} is not what rlhf loop writes", REMEDY):
        try:
            return content(process, connections)
        except RlhfError:
            raise
        except Exception:  # perhaps a bug here, not in the file: the log needs the traceback
            logging.getLogger(__name__).exception("The page Runs cannot be made")
            raise


def _read_report(process: LoopProcess, number: int, stage: str) -> str | None:
    """The page of a stage's report; None where there is none.

    Raises:
        InputError: it cannot be read, or the stage's stage.json cannot.
    """
    run = report_path(process.file, number, stage)
    if run is None:
        return None
    with as_input_error(f"{run.report_html} cannot be read", REMEDY):
        return run.report_html.read_text(encoding="utf-8")


def answer(process: LoopProcess, name: str, payload: Payload) -> Payload:
    """Do what a button asks; a refusal has an `error`, and some successes have a `say`.

    Args:
        process: the loop.
        name: of the lead.
        payload: `op`, and what it needs.
    """
    operations: dict[str, Callable[[], str | None]] = {
        "start": process.start,
        "pause": lambda: process.pause(name, stops_stage=payload.get("now") is True),
        "train": lambda: process.train_now(name),
        "promote": lambda: process.promote(_round(payload), name),
        "rollback": lambda: process.roll_back(name),
        "ask": lambda: _asked(process, _round(payload)),
        "votes": lambda: _counted(process, _round(payload)),
        "change": lambda: process.change(_values(payload)),
        "unset": lambda: process.unset(payload.get("setting")),
    }
    operation = operations.get(str(payload.get("op")))
    if operation is None:
        return {"error": "Unknown operation. Reload the page."}
    try:
        message = operation()
    except InputError as error:
        return {"error": f"{error.problem}. {error.remedy}"}
    except OSError as error:
        return {"error": f"The server could not do that ({error.strerror})."}
    return {"say": message} if message else {}


def _asked(process: LoopProcess, number: int) -> str:
    new, people = process.ask_people(number)
    if not new:
        return f"All pairs of round {number} are on the board already."
    verb = "is" if new == 1 else "are"
    return (
        f"{counted(new, 'pair')} of round {number} {verb} on the board now, each for "
        f"{num_people(people)}."
    )


def _counted(process: LoopProcess, number: int) -> str:
    process.count_votes(number)
    return f"The votes on round {number} are counted."


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
