"""`rlhf label`: start the app on a port and say where it is."""

import getpass
import socket
from pathlib import Path

import uvicorn
from rich.console import Console
from rich.markup import escape

from labeling_app.checks import CheckRates
from labeling_app.queue import TaskQueue
from labeling_app.session import Board
from labeling_app.store import Store
from labeling_app.users import User, Users
from rlhf.errors import InputError

LOOPBACK = ("127.0.0.1", "localhost", "::1")


def serve(
    db: Path,
    *,
    host: str,
    port: int,
    annotator: str | None,
    overlap: int,
    rubric: Path | None,
    flags: tuple[str, ...],
    checks: CheckRates,
) -> dict[str, int]:
    """Serve the board until it is interrupted, then say how many rankings were made meanwhile.

    With users in the database everybody signs in; without, one person labels on this machine.

    Raises:
        InputError: no database, nothing to rank, a port in use, a host that others can reach and no
            users to sign in, or an annotator named where people sign in.
    """
    with Store(db, must_exist=True) as store:
        _require_tasks(store, db)
        users = Users(store)
        local = None if users.all() else (annotator or getpass.getuser())
        _require_fitting_access(host, annotator, local, db)
        queue = TaskQueue(store, checks=checks)
        if local:
            queue.add_annotator(local)
        queue.set_overlap(overlap)
        before = store.counts()["rankings"]
        _require_free_port(host, port)
        board = Board(
            store, queue, has_sign_in=local is None, rubric=_read_rubric(rubric), flags=flags
        )
        _run(board, users, local, host, port)
        counts = store.counts()
    return {"new_rankings": counts["rankings"] - before, "open_tasks": counts["open"]}


def _run(board: Board, users: Users, local: str | None, host: str, port: int) -> None:
    from labeling_app.access import Door, user_of_cookie
    from labeling_app.app import build_app

    secret = board.store.secret
    if local is None:
        door = Door(
            build_app(board), find_user=user_of_cookie(users, secret), users=users, secret=secret
        )
    else:
        alone = User(name=local, role="admin", disabled=False, epoch=0)
        door = Door(
            build_app(board),
            find_user=lambda request: alone,
            users=None,
            secret=secret,
            hosts=frozenset(LOOPBACK),
        )
    who = f"as [bold]{escape(local)}[/] " if local else ""
    address = f"[{host}]" if ":" in host else host
    console = Console(stderr=True, highlight=False)
    console.print(f"Label {who}at [bold]http://{address}:{port}[/]  (Ctrl+C stops)")
    if host not in LOOPBACK:
        console.print("Passwords travel in the clear: put a TLS proxy in front on an open network.")
    uvicorn.run(door, host=host, port=port, log_level="warning")


def _read_rubric(path: Path | None) -> str:
    if path is None:
        return ""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(
            f"The rubric {path} cannot be read ({error})", "Give --rubric a markdown file."
        ) from None


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
