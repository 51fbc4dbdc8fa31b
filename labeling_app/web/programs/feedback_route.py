"""`POST /feedback`: feedback from other programs, which send a token instead of a cookie."""

import sqlite3
import time

from anyio.to_thread import run_sync
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse

from labeling_app.data_io.feedback import store_feedback
from labeling_app.data_io.tokens import owner
from labeling_app.db.store import Store
from labeling_app.web.access.attempts import Attempts, network_of
from labeling_app.web.request_bodies import json_errors
from rlhf.endpoints.request_bodies import read_json

MAX_BODY_BYTES = 1_000_000
BAD_TOKENS = 10
WINDOW_SECONDS = 60.0


def add_feedback_route(app: FastAPI, store: Store) -> None:
    """Serve `POST /feedback`.

    A valid token always passes, because programs behind an untrusted proxy share one address. After
    ten invalid tokens in a minute an address must wait.
    """
    attempts = Attempts(WINDOW_SECONDS)

    @app.post("/feedback")
    @json_errors
    async def feedback(request: Request) -> JSONResponse:
        address = network_of(request.client.host if request.client else "")
        before = attempts.add(address, time.monotonic())
        scheme, _, token = request.headers.get("authorization", "").partition(" ")
        program = await run_sync(owner, store, token) if scheme.lower() == "bearer" else None
        if program is None:
            if before >= BAD_TOKENS:
                problem = "Too many wrong tokens. Wait a minute and try again."
                return _refuse(429, problem, {"retry-after": "60"})
            problem = (
                "This token is not valid. Make a new one: rlhf users token"
                if token
                else "Send the header Authorization: Bearer TOKEN. Make a token: rlhf users token"
            )
            return _refuse(401, problem, {"www-authenticate": "Bearer"})
        attempts.take_back(address)
        payload = await read_json(request, MAX_BODY_BYTES)
        try:
            is_new = await run_sync(store_feedback, store, program, payload)
        except sqlite3.DatabaseError as error:
            return _refuse(503, f"The database could not write ({error}). Send it again later.")
        return JSONResponse({"stored": is_new}, status_code=201 if is_new else 200)


def _refuse(status: int, problem: str, headers: dict[str, str] | None = None) -> JSONResponse:
    return JSONResponse({"error": problem}, status_code=status, headers=headers)
