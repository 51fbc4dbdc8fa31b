"""`POST /feedback`: the door for other programs, which bring a token instead of a cookie."""

import sqlite3
import time
from collections import defaultdict, deque

from anyio.to_thread import run_sync
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse

from labeling_app.bodies import BodyError, read_json
from labeling_app.feedback import store_feedback
from labeling_app.store import Store
from labeling_app.tokens import owner
from rlhf.errors import InputError

MAX_BODY_BYTES = 1_000_000
BAD_TOKENS = 10
WINDOW_SECONDS = 60.0
MAX_ADDRESSES = 10_000


class BadTokens:
    """Counts wrong tokens by address: after ten in a minute the address has to wait."""

    def __init__(self) -> None:
        self._times: defaultdict[str, deque[float]] = defaultdict(deque)

    def must_wait(self, address: str, now: float) -> bool:
        """Whether an address has used up its wrong tokens."""
        times = self._times.get(address, deque())
        while times and times[0] < now - WINDOW_SECONDS:
            times.popleft()
        return len(times) >= BAD_TOKENS

    def note(self, address: str, now: float) -> None:
        """One more wrong token."""
        if len(self._times) >= MAX_ADDRESSES:
            self._times.clear()
        self._times[address].append(now)


def add_feedback_route(app: FastAPI, store: Store) -> None:
    """Serve `POST /feedback`."""
    bad_tokens = BadTokens()

    @app.post("/feedback")
    async def feedback(request: Request) -> JSONResponse:
        address = request.client.host if request.client else ""
        if bad_tokens.must_wait(address, time.monotonic()):
            return _refuse(429, "Too many wrong tokens. Wait a minute.", {"retry-after": "60"})
        scheme, _, token = request.headers.get("authorization", "").partition(" ")
        program = await run_sync(owner, store, token) if scheme.lower() == "bearer" else None
        if program is None:
            bad_tokens.note(address, time.monotonic())
            problem = (
                "No program here has this token. Make one: rlhf users token"
                if token
                else "Send the header Authorization: Bearer TOKEN. Make a token: rlhf users token"
            )
            return _refuse(401, problem, {"www-authenticate": "Bearer"})
        try:
            payload = await read_json(request, MAX_BODY_BYTES)
            is_new = await run_sync(store_feedback, store, program, payload)
        except BodyError as error:
            return _refuse(error.status, error.problem)
        except InputError as error:
            return _refuse(400, f"{error.problem}. {error.remedy}")
        except sqlite3.DatabaseError as error:
            return _refuse(503, f"The database could not write ({error}). Send it again later.")
        return JSONResponse({"stored": is_new}, status_code=201 if is_new else 200)


def _refuse(status: int, problem: str, headers: dict[str, str] | None = None) -> JSONResponse:
    return JSONResponse({"error": problem}, status_code=status, headers=headers)
