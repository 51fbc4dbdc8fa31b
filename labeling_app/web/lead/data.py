"""`/lead/data`: upload and preview before anything is stored, import, export, backup."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, get_args

from anyio import CapacityLimiter, move_on_after
from fastapi import FastAPI, Request
from fastapi.responses import FileResponse, HTMLResponse, JSONResponse, Response
from starlette.background import BackgroundTask

from labeling_app.annotators.users import User
from labeling_app.data_io.exporting import Format
from labeling_app.data_io.fields import ignored_in_words, read_in_words, unnamed_in_words
from labeling_app.data_io.importing import source_for
from labeling_app.db.board.overlap import num_for_everybody
from labeling_app.db.imports.unfinished import num_hidden
from labeling_app.db.rankings import ranking_counts
from labeling_app.db.store import Store
from labeling_app.web.lead.frame import LeadFrame, answer_json, read_form, sender_of
from labeling_app.web.lead.templates import PAGES
from labeling_app.web.lead.uploads import MAX_PIECE_BYTES, SUFFIXES, Upload, Uploads, run_job
from labeling_app.web.request_bodies import json_errors
from rlhf.endpoints.request_bodies import BodyError, read_body
from rlhf.errors import InputError
from rlhf.records.schema import AnnotatorKind
from rlhf.records.wording import counted

PATH = "/lead/data"
TEMPLATE = "lead/data.html"
FORMATS = get_args(Format)
NAMES = ("source", "annotator")
MAX_TEXT = 200
MAX_PREVIEW_SECONDS = 60
Payload = dict[str, Any]
Operation = Callable[[User, Payload], Awaitable[Payload]]


class DataPage:
    """The operations of the page.

    Args:
        store: the database.
        max_upload_bytes: the largest file.
    """

    def __init__(self, store: Store, max_upload_bytes: int) -> None:
        self.store = store
        self.uploads = Uploads(max_upload_bytes)
        # Reading files and packing exports take a processor: one at a time leaves the board the
        # other.
        self._turn = CapacityLimiter(1)
        self._running: set[asyncio.Task[None]] = set()

    async def upload(self, sender: User, payload: Payload) -> Payload:
        """Begin an upload: `name` and `size`."""
        name, size = payload.get("name"), payload.get("size")
        if not isinstance(name, str) or not isinstance(size, int):
            raise InputError("The request is malformed", "Reload the page.")
        begun = self.uploads.begin(sender.name, name, size)
        return {"id": begun.id, "piece": MAX_PIECE_BYTES}

    async def preview(self, sender: User, payload: Payload) -> Payload:
        """The first rows and the bad lines of an upload."""
        upload = self.uploads.require_complete(sender.name, payload.get("id"))
        job = {"do": "preview", **self._job(upload, payload)}
        async with self._turn:
            with move_on_after(MAX_PREVIEW_SECONDS):  # ends the process, too
                return await run_job(job)
        problem = f"Reading {upload.name} takes more than {MAX_PREVIEW_SECONDS} s."
        return {"error": f"{problem} Import it on the server: rlhf import FILE --db DB"}

    async def store_upload(self, sender: User, payload: Payload) -> Payload:
        """Begin to import an upload; `state` says when it has ended."""
        upload = self.uploads.require_complete(sender.name, payload.get("id"))
        if upload.is_importing:
            raise InputError(f"{upload.name} is being imported", "Wait until that has ended.")
        db = str(self.store.connections.path)
        job: Payload = {"do": "store", "db": db, **self._job(upload, payload)}
        job |= {name: payload.get(name) == "yes" for name in ("leave_out", "replace")}
        job["share"] = str(upload.share_file)
        failed = f"{upload.name} could not be imported. The server's log says why."
        upload.is_importing, upload.outcome = True, {"error": failed}
        running = asyncio.create_task(self._import(upload, job))
        self._running.add(running)
        running.add_done_callback(self._running.discard)
        return {"say": f"Importing {upload.name} …"}

    async def _import(self, upload: Upload, job: Payload) -> None:
        try:
            upload.outcome = {**await run_job(job), "replaces": job["replace"]}
        finally:
            upload.is_importing = False
        upload.share_file.unlink(missing_ok=True)
        if "error" not in upload.outcome:
            upload.remove()

    def _job(self, upload: Upload, payload: Payload) -> Payload:
        """The job of an upload, with the values that the person chose.

        Raises:
            InputError: a value that the page does not offer.
        """
        split, kind = payload.get("split", "train"), payload.get("kind") or None
        source, annotator = (str(payload.get(name) or "").strip() for name in NAMES)
        is_offered = split in ("train", "test") and kind in (None, *get_args(AnnotatorKind))
        if not is_offered or max(len(source), len(annotator)) > MAX_TEXT:
            raise InputError("The request is malformed", "Reload the page.")
        return {
            "path": str(upload.path),
            "name": upload.name,
            "split": split,
            "source": source or source_for(upload.name, self.store.connections.db),
            "annotator": annotator,
            "kind": kind,
        }

    def state(self, owner: str) -> Payload:
        """How far the owner's import is: rows that are stored and still hidden, or the outcome."""
        upload = self.uploads.last(owner)
        if upload is None or not (upload.is_importing or upload.outcome):
            return {"over": True, "error": "Nothing is being imported. Choose a file."}
        if upload.is_importing:
            rows = num_hidden(self.store.connections)
            return {"over": False, "name": upload.name, "share": upload.share, "rows": rows}
        if "error" in upload.outcome:
            return {"over": True, "error": upload.outcome["error"]}
        left_out = upload.outcome["first_bad"]
        return {"over": True, "say": _imported(upload.name, upload.outcome), "left_out": left_out}

    async def archive(self, format: str) -> Payload:
        """Pack an export. Returns its `archive`, or `error` if there is nothing to export.

        Raises:
            InputError: an unknown format.
        """
        if format not in FORMATS:
            raise InputError(f"There is no format {format!r:.40}", f"Use {', '.join(FORMATS)}.")
        db, folder = str(self.store.connections.path), str(self.uploads.new_folder())
        async with self._turn:
            return await run_job({"do": "archive", "db": db, "folder": folder, "format": format})

    async def backup(self, sender: User, payload: Payload) -> Payload:
        """Copy the database into `backups/` beside it.

        The copy stays on the server: it holds password hashes and the key that signs cookies.
        """
        path = self.store.connections.path
        name = f"{path.stem}-{time.strftime('%Y-%m-%d-%H%M%S')}{path.suffix}"
        out = path.parent / "backups" / name
        async with self._turn:
            outcome = await run_job({"do": "backup", "db": str(path), "out": str(out)})
        if "error" in outcome:
            return outcome
        held = f"{counted(outcome['prompts'], 'prompt')}, {counted(outcome['rankings'], 'ranking')}"
        return {"say": f"Saved backups/{name} beside the database: {held}."}


def _imported(name: str, report: Payload) -> str:
    new = [
        counted(report[f"new_{noun}s"], noun)
        for noun in ("prompt", "response", "ranking", "check")
        if report[f"new_{noun}s"]
    ]
    message = f"Imported {name}: {', '.join(new)}." if new else f"{name}: nothing in it is new."
    if report["bad_lines"]:
        message += f" Lines left out: {report['bad_lines']:,}."
    if report["returned"]:
        message += f" {counted(report['returned'], 'replaced ranking')} counted again."
    if report["replaces"]:
        message += f" {_replaced(report)}"
    if before := report["unnamed_before"]:
        message += f" {unnamed_in_words(before, 'a column annotator')}"
    if report["checks_not_made"]:
        refused = counted(report["checks_not_made"], "check")
        message += f" {refused} not made: {report['first_not_made'][0]}"
    read = read_in_words(report)
    return " ".join(filter(None, (message, read, ignored_in_words(report["ignored_fields"]))))


def _replaced(report: Payload) -> str:
    if report["other_sources"]:
        others = ", ".join(report["other_sources"])
        return (
            "Nothing was replaced: no earlier import has this source. To replace another one, name "
            f"it as the source: {others}."
        )
    return (
        f"Earlier rankings of this source: {report['replaced']:,} replaced and no longer counted, "
        f"{report['unchanged']:,} unchanged."
    )


def add_data_page(app: FastAPI, frame: LeadFrame, store: Store, max_upload_bytes: int) -> None:
    """Serve the page and its operations."""
    page = DataPage(store, max_upload_bytes)
    frame.add_to_navigation("Data", PATH)
    frame.add_files(PAGES / "lead" / "data.js")

    def shown(request: Request, problem: str = "", status: int = 200) -> HTMLResponse:
        counts = store.counts() | {"tasks": num_for_everybody(store.connections)}
        values: Payload = {"counts": counts, "formats": FORMATS, "problem": problem}
        values |= {"rankings": ranking_counts(store.connections.db)}
        values |= {"max_bytes": page.uploads.max_bytes, "suffixes": SUFFIXES}
        state = page.state(sender_of(request).name)
        values |= {"is_importing": not state["over"], "last": state}
        answer = frame.page(request, TEMPLATE, **values)
        answer.status_code = status
        return answer

    @app.get(PATH)
    def data(request: Request) -> HTMLResponse:
        return shown(request)

    @app.get(f"{PATH}/import")
    def state(request: Request) -> JSONResponse:
        return JSONResponse(page.state(sender_of(request).name))

    @app.post(f"{PATH}/upload/{{upload_id}}/{{offset}}")
    @json_errors
    async def piece(request: Request, upload_id: str, offset: int) -> JSONResponse:
        body = await read_body(request, MAX_PIECE_BYTES)
        try:
            upload = page.uploads.append(sender_of(request).name, upload_id, offset, body)
        except OSError as error:
            problem = f"The server could not store the file: {error.strerror}."
            remedy = "Ask whoever runs the server to make room, then try again."
            return JSONResponse({"error": f"{problem} {remedy}"}, status_code=507)
        return JSONResponse({"received": upload.received})

    _add_export(app, page, shown)
    operations: dict[str, Operation] = {
        "upload": page.upload,
        "preview": page.preview,
        "import": page.store_upload,
        "backup": page.backup,
    }
    for name, operation in operations.items():
        answer_json(app, f"{PATH}/{name}", operation)


def _add_export(app: FastAPI, page: DataPage, shown: Callable[..., HTMLResponse]) -> None:
    @app.post(f"{PATH}/export")
    async def export(request: Request) -> Response:
        try:
            form = await read_form(request)
            outcome = await page.archive(form.get("format", ""))
        except BodyError as error:
            return shown(request, error.problem, error.status)
        except InputError as error:
            return shown(request, f"{error.problem}. {error.remedy}", 400)
        if "error" in outcome:
            return shown(request, outcome["error"], 400)
        packed = Path(outcome["archive"])
        name = f"rankings-{form['format']}.zip"
        return FileResponse(packed, filename=name, background=BackgroundTask(packed.unlink))
