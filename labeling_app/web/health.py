"""Whether the app can store rankings: the database file exists, is the same, and is undamaged."""

import sqlite3
import threading
from time import monotonic

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse

from labeling_app.db.connection import Connections
from labeling_app.db.files.label_file import LostDatabaseError, find_damage, read_board_id
from rlhf.errors import InputError

# Reading a large file takes a while, and anybody may request /healthz.
MAX_SHARE_OF_TIME = 0.05


class Health:
    """Checks the file of a served database; when it finds damage, writing stops.

    Args:
        connections: to that database.
    """

    def __init__(self, connections: Connections) -> None:
        self._connections = connections
        self._board = read_board_id(connections.path)
        self._checking = threading.Lock()
        self._next_check = 0.0

    def problem(self) -> str:
        """Why the app cannot store anything, for the person who runs it; "" if it can.

        Every call checks that the file exists. Reading all of it is limited to a twentieth of the
        time; while one thread reads, others get the last result.
        """
        try:
            self._connections.require_whole()
        except LostDatabaseError as error:
            return str(error)
        if monotonic() >= self._next_check and self._checking.acquire(blocking=False):
            try:
                self._connections.damage = self._check()
            except sqlite3.OperationalError as error:
                return f"its file cannot be checked now ({error})"
            finally:
                self._checking.release()
        return self._connections.damage

    def _check(self) -> str:
        began = monotonic()
        path = self._connections.path
        try:
            damage = find_damage(path)
            if not damage and read_board_id(path) != self._board:
                damage = "another database was copied over its file"
        finally:
            now = monotonic()
            self._next_check = now + (now - began) / MAX_SHARE_OF_TIME
        return f"its file is damaged ({damage})" if damage else ""


def add_health(app: FastAPI, connections: Connections) -> None:
    """Serve `GET /healthz`: 200, or 503 with the reason why nothing can be stored.

    Every other route also answers 503 when it cannot use the database.
    """
    health = Health(connections)

    @app.get("/healthz")
    def healthz() -> JSONResponse:
        problem = health.problem()
        status = {"status": "failed", "problem": problem} if problem else {"status": "ok"}
        return JSONResponse(status, status_code=503 if problem else 200)

    @app.exception_handler(sqlite3.DatabaseError)
    def unavailable(request: Request, error: sqlite3.DatabaseError) -> JSONResponse:
        return JSONResponse({"error": unusable_database(error)}, status_code=503)


def unusable_database(error: sqlite3.DatabaseError) -> str:
    """The sentence that every page and route shows when it cannot use the database."""
    return f"The database cannot be used ({error}). Try again later."


def require_undamaged(connections: Connections) -> None:
    """Check a whole file before it is served.

    Raises:
        InputError: it is damaged.
    """
    damage = find_damage(connections.path)
    if damage:
        raise InputError(
            f"{connections.path} is damaged ({damage})",
            f"Restore a backup, or save what can be read: sqlite3 {connections.path} .recover",
        )
