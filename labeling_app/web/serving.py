"""`rlhf label`: start the app on a port and say where it is."""

import gc
import getpass
import socket
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from labeling_app.annotators.users import User, Users
from labeling_app.db.queue import TaskQueue
from labeling_app.db.store import Store
from labeling_app.db.unfinished import recover
from labeling_app.quality.checks import CheckRates
from labeling_app.quality.history import num_made_since
from labeling_app.quality.overlap import num_open, set_another_below, set_overlap
from labeling_app.web.board.session import Board
from labeling_app.web.health import require_undamaged
from labeling_app.web.http_server import serve_app
from labeling_app.web.live.live import ChatModel, Live, Note
from rlhf.config import read_text
from rlhf.errors import InputError

LOOPBACK = ("127.0.0.1", "localhost", "::1")


def serve(
    db: Path,
    *,
    host: str,
    port: int,
    annotator: str | None,
    overlap: int | None,
    another_below: float | None,
    rubric: Path | None,
    flags: tuple[str, ...],
    checks: CheckRates,
    voices: Sequence[ChatModel] = (),
    live_responses: int = 2,
    note: Note | None = None,
) -> dict[str, int]:
    """Serve the board until it is interrupted, then say how many rankings people made meanwhile.

    With voices people can ask them, and the database may be new. With users in it everybody signs
    in; without, one person labels on this machine.

    Raises:
        InputError: no database, a damaged one, nothing to rank, a port in use, a host that others
            can reach and no users to sign in, or an annotator named where people sign in.
    """
    with Store(db, must_exist=not voices) as store:
        require_undamaged(store.connections)
        recover(store.connections)
        if not voices:
            _require_tasks(store, db)
        users = Users(store)
        local = None if users.all() else (annotator or getpass.getuser())
        _require_fitting_access(host, annotator, local, db)
        queue = TaskQueue(store, checks=checks)
        if local:
            queue.add_annotator(local)
        _require_free_port(host, port)
        if overlap is not None:
            set_overlap(store.connections, overlap)
        if another_below is not None:
            set_another_below(store.connections, another_below)
        began = time.time()
        board = Board(
            store,
            queue,
            has_sign_in=local is None,
            rubric=read_text(rubric, "--rubric"),
            flags=flags,
        )
        live = Live(
            store, voices, num_responses=live_responses, has_sign_in=local is None, note=note
        )
        _run(board, live if voices else None, users, local, host, port)
        live.close()
        new, left = num_made_since(store.connections, began), num_open(store.connections)
    return {"new_rankings": new, "open_tasks": left}


def _run(
    board: Board, live: Live | None, users: Users, local: str | None, host: str, port: int
) -> None:
    from labeling_app.web.access.middleware import AuthMiddleware, user_of_cookie
    from labeling_app.web.app import build_app

    app = build_app(board, live)
    secret = board.store.secret
    if local is None:
        door = AuthMiddleware(
            app, find_user=user_of_cookie(users, secret), users=users, secret=secret
        )
    else:
        alone = User(name=local, role="admin", disabled=False, epoch=0)
        door = AuthMiddleware(
            app,
            find_user=lambda request: alone,
            users=None,
            secret=secret,
            hosts=frozenset(LOOPBACK),
        )
    who = f"as [bold]{escape(local)}[/] " if local else ""
    address = f"[{host}]" if ":" in host else host
    console = Console(stderr=True, highlight=False)
    if live is not None:
        console.print(f"Ask the models at [bold]http://{address}:{port}/live[/]")
    console.print(f"Label {who}at [bold]http://{address}:{port}[/]  (Ctrl+C stops)")
    if host not in LOOPBACK:
        console.print("Passwords travel in the clear: put a TLS proxy in front on an open network.")
    # What was imported stays: a full collection that walked it would keep everybody waiting.
    gc.freeze()
    serve_app(door, host, port)


def _require_fitting_access(host: str, annotator: str | None, local: str | None, db: Path) -> None:
    if local and host not in LOOPBACK:
        raise InputError(
            f"--host is {host}, which other machines can reach, and {db} has no users",
            f"Add the first user: rlhf users add NAME --role admin --db {db}",
        )
    if annotator and not local:
        raise InputError(
            f"--annotator is {annotator!r}, and in {db} people sign in",
            "Leave --annotator out; `rlhf users list` shows who may sign in.",
        )


def _require_tasks(store: Store, db: Path) -> None:
    counts = store.counts()
    if counts["tasks"]:
        return
    if not counts["prompts"]:
        raise InputError(f"{db} is empty", f"Begin with: rlhf import prompts.jsonl --db {db}")
    raise InputError(
        f"{db} has no prompt with two responses to compare",
        f"Sample some first: rlhf generate --db {db} --model MODEL -k 4",
    )


def _require_free_port(host: str, port: int) -> None:
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise InputError(
                f"Port {port} of {host} cannot be used ({error.strerror})",
                f"Choose another: --port {port + 1}",
            ) from None
