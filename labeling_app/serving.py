"""`rlhf label`: start the app on a port and say where it is."""

import socket
from pathlib import Path

import uvicorn
from rich.console import Console

from labeling_app.queue import TaskQueue
from labeling_app.session import Board
from labeling_app.store import Store
from rlhf.errors import InputError

LOOPBACK = ("127.0.0.1", "localhost", "::1")


def serve(db: Path, *, host: str, port: int, annotator: str, overlap: int) -> dict[str, int]:
    """Serve the board until it is interrupted, then say how many rankings were made meanwhile.

    Raises:
        InputError: no database, nothing to rank, a port in use, or a host others can reach.
    """
    if host not in LOOPBACK:
        raise InputError(
            f"--host is {host}, which other machines can reach, and this database has no users",
            "Leave --host out to label on this machine as one person.",
        )
    with Store(db, must_exist=True) as store:
        _require_tasks(store, db)
        queue = TaskQueue(store)
        queue.add_annotator(annotator)
        queue.set_overlap(overlap)
        before = store.counts()["rankings"]
        _require_free_port(host, port)
        _run(Board(store, queue), host, port, annotator)
        counts = store.counts()
    return {"new_rankings": counts["rankings"] - before, "open_tasks": counts["open"]}


def _run(board: Board, host: str, port: int, annotator: str) -> None:
    from labeling_app.app import build_app

    app = build_app(board, annotator)
    Console(stderr=True, highlight=False).print(
        f"Label as [bold]{annotator}[/] at [bold]http://{host}:{port}[/]  (Ctrl+C stops)"
    )
    uvicorn.run(app, host=host, port=port, log_level="warning")


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
