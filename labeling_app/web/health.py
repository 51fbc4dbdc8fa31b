"""Whether the app can store what people do: its file is there, is its own, and is whole."""

import sqlite3
import threading
from time import monotonic

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse

from labeling_app.db.connection import Connections
from labeling_app.db.file import LostDatabaseError, find_damage, open_read_only
from rlhf.errors import InputError

# Reading a large file takes a while, and anybody may ask how the app is.
MAX_SHARE_OF_TIME = 0.05


class Health:
    """Looks at the file of a served database; what it finds ends all writing.

    Args:
        connections: to that database.
    """

    def __init__(self, connections: Connections) -> None:
        self._connections = connections
        self._board = _board_of(connections)
        self._looking = threading.Lock()
        self._next_look = 0.0

    def problem(self) -> str:
        """What keeps the app from storing anything, in words for whoever runs it; "" for nothing.

        Whether the file is there is seen every time. All of it is read only so often that this
        takes a twentieth of the time; while one thread reads, others get what was known before.
        """
        try:
            self._connections.require_whole()
        except LostDatabaseError as error:
            return str(error)
        if monotonic() >= self._next_look and self._looking.acquire(blocking=False):
            try:
                self._connections.damage = self._look()
            finally:
                self._looking.release()
        return self._connections.damage

    def _look(self) -> str:
        began = monotonic()
        path = self._connections.path
        damage = find_damage(path)
        if not damage and _board_of(self._connections) != self._board:
            damage = "another database was copied over its file"
        now = monotonic()
        self._next_look = now + (now - began) / MAX_SHARE_OF_TIME
        return f"its file is damaged ({damage})" if damage else ""


def add_health(app: FastAPI, connections: Connections) -> None:
    """Serve `GET /healthz`: 200, or 503 and why nothing can be stored.

    Every other route answers 503 as well where the database fails it.
    """
    health = Health(connections)

    @app.get("/healthz")
    def healthz() -> JSONResponse:
        problem = health.problem()
        status = {"status": "failed", "problem": problem} if problem else {"status": "ok"}
        return JSONResponse(status, status_code=503 if problem else 200)

    @app.exception_handler(sqlite3.DatabaseError)
    def unavailable(request: Request, error: sqlite3.DatabaseError) -> JSONResponse:
        problem = f"The database cannot be used ({error}). Try again later."
        return JSONResponse({"error": problem}, status_code=503)


def _board_of(connections: Connections) -> str:
    """The id of the database that is in the file now."""
    try:
        with open_read_only(connections.path) as db:
            row = db.execute("SELECT value FROM settings WHERE name = 'board'").fetchone()
    except sqlite3.DatabaseError:
        return ""
    return str(row[0]) if row else ""


def require_undamaged(connections: Connections) -> None:
    """Check a whole file before it is served.

    Raises:
        InputError: it is damaged.
    """
    damage = find_damage(connections.path)
    if damage:
        raise InputError(
            f"{connections.path} is damaged ({damage})",
            "Go back to a backup of yours, or save what can be read: "
            f"sqlite3 {connections.path} .recover",
        )
