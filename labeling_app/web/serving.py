"""`rlhf label` and `rlhf chat`: serve the app on a port and print its address."""

import gc
import getpass
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape

from labeling_app.annotators.users import User, Users
from labeling_app.db.board.checks import CheckRates
from labeling_app.db.board.overlap import num_open, set_another_below, set_overlap
from labeling_app.db.files.label_file import empty_database
from labeling_app.db.imports.unfinished import recover
from labeling_app.db.queue import TaskQueue
from labeling_app.db.reports import num_made_since
from labeling_app.db.store import Store
from labeling_app.web.board.session import FLAGS, Board
from labeling_app.web.health import require_undamaged
from labeling_app.web.http_server import serve_app
from labeling_app.web.lead.served import Compare
from labeling_app.web.live.live import ChatModel, Live, Note
from labeling_app.web.runs.loop_file import LoopFile
from labeling_app.web.runs.loop_process import LoopProcess
from rlhf.config import read_text
from rlhf.endpoints.urls import LOOPBACK, http_address, listen, require_free_port
from rlhf.errors import InputError

if TYPE_CHECKING:
    from labeling_app.web.access.middleware import AuthMiddleware


@dataclass(frozen=True, kw_only=True)
class BoardOptions:
    """How the board is served; `rlhf label --help` explains each."""

    host: str = "127.0.0.1"
    port: int = 7860
    annotator: str | None = None
    """Who labels where nobody signs in; None: the login name."""
    overlap: int | None = None
    """None keeps what the database says; so does `another_below`."""
    another_below: float | None = None
    rubric: Path | None = None
    flags: tuple[str, ...] = FLAGS
    checks: CheckRates = field(default_factory=CheckRates)
    max_upload_bytes: int = 10**9
    compare: Compare | None = None
    """Compares the thumbs of two served policies."""


@dataclass(frozen=True, kw_only=True)
class LiveOptions:
    """The models of live mode."""

    models: Sequence[ChatModel]
    num_responses: int = 2
    note: Note | None = None
    """What is shown under the answers after a vote."""
    is_first: bool = False
    """People come for live mode (`rlhf chat`), so that its address is the one to open."""


def serve(
    db: Path,
    options: BoardOptions,
    live_options: LiveOptions | None = None,
    loop: LoopFile | None = None,
) -> dict[str, int]:
    """Serve the board until it is interrupted. Returns how many rankings people made meanwhile.

    With live mode or a loop the database may be new. If the database has users, everybody signs in;
    if not, one person labels on this machine.

    Raises:
        InputError: no database, a damaged one, nothing to rank, a port in use, a host that others
            can reach and no users to sign in, or an annotator named where people sign in.
    """
    may_be_new = live_options is not None or loop is not None
    with Store(db, must_exist=not may_be_new) as store:
        require_undamaged(store.connections)
        recover(store.connections)
        users = Users(store)
        if not may_be_new and not users.all():  # a lead who signs in can import
            _require_tasks(store, db)
        local = None if users.all() else (options.annotator or getpass.getuser())
        _require_fitting_access(options, local, db)
        queue = TaskQueue(store, checks=options.checks)
        if local:
            queue.add_annotator(local)
        require_free_port(options.host, options.port)
        if options.overlap is not None:
            set_overlap(store.connections, options.overlap)
        if options.another_below is not None:
            set_another_below(store.connections, options.another_below)
        began = time.time()
        board = Board(
            store,
            queue,
            has_sign_in=local is None,
            rubric=read_text(options.rubric, "--rubric"),
            flags=options.flags,
        )
        live = None
        if live_options is not None:
            live = Live(
                store,
                live_options.models,
                num_responses=live_options.num_responses,
                has_sign_in=local is None,
                note=live_options.note,
            )
        process = None if loop is None else LoopProcess(loop)
        app = _protected_app(board, live, process, users, local, options)
        listening = listen(options.host, options.port)
        _print_address(options, local, live_options, has_runs=loop is not None)
        # Imported modules stay; a full garbage collection over them would delay every request.
        gc.freeze()
        serve_app(app, listening)
        if live is not None:
            live.close()
        new, left = num_made_since(store.connections, began), num_open(store.connections)
        return {"new_rankings": new, "open_tasks": left, "rankings": store.counts()["rankings"]}


def _protected_app(
    board: Board,
    live: Live | None,
    loop: LoopProcess | None,
    users: Users,
    local: str | None,
    options: BoardOptions,
) -> "AuthMiddleware":
    """The app, and in front of it sign-in, or the one local person."""
    from labeling_app.web.access.middleware import AuthMiddleware, user_of_cookie
    from labeling_app.web.app import build_app

    app = build_app(
        board, live, loop, max_upload_bytes=options.max_upload_bytes, compare=options.compare
    )
    secret = board.store.secret
    if local is None:
        return AuthMiddleware(
            app, find_user=user_of_cookie(users, secret), users=users, secret=secret
        )
    alone = User(name=local, role="admin", disabled=False, epoch=0)
    return AuthMiddleware(
        app,
        find_user=lambda request: alone,
        users=None,
        secret=secret,
        hosts=frozenset(LOOPBACK),
    )


def _print_address(
    options: BoardOptions, local: str | None, live: LiveOptions | None, *, has_runs: bool
) -> None:
    """One address, the one to open; the app's other pages by their paths."""
    who = f"as [bold]{escape(local)}[/] " if local else ""
    address = http_address(options.host, options.port)
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    if live is not None and live.is_first:
        console.print(f"Ask the models {who}at [bold]{address}/live[/]  (Ctrl+C stops)")
    else:
        console.print(f"Label {who}at [bold]{address}[/]  (Ctrl+C stops)")
        others = ["/live asks the models"] if live is not None else []
        others += ["/lead/runs is for leads"] if has_runs else []
        if others:
            console.print(f"Also there: {'; '.join(others)}.")
    if options.host not in LOOPBACK:
        console.print(
            "Passwords are sent unencrypted: on an open network put an https proxy in front."
        )


def _require_fitting_access(options: BoardOptions, local: str | None, db: Path) -> None:
    if local and options.host not in LOOPBACK:
        raise InputError(
            f"--host is {options.host}, which other machines can reach, and {db} has no users",
            f"Add the first user: rlhf users add NAME --role admin --db {db}",
        )
    if options.annotator and not local:
        raise InputError(
            f"--annotator is {options.annotator!r}, and in {db} people sign in",
            "Leave --annotator out; `rlhf users list` shows who may sign in.",
        )


def _require_tasks(store: Store, db: Path) -> None:
    counts = store.counts()
    if counts["tasks"]:
        return
    if not counts["prompts"]:
        raise empty_database(db)
    raise InputError(
        f"{db} has no prompt with two responses to compare",
        f"Sample some first: rlhf generate --db {db} --model MODEL -k 4",
    )
