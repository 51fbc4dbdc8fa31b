"""Working on the board outside of a server."""

from pathlib import Path
from typing import Any

from labeling_app.db.queue import Submission, TaskQueue
from labeling_app.db.store import Store
from labeling_app.web.board.screens import render
from labeling_app.web.board.session import Board, BoardRequest


def ask(
    board: Board, annotator: str, payload: dict[str, Any], *, may_lead: bool = False
) -> dict[str, Any]:
    """What the board answers, with every text as HTML."""
    return render(board.answer_all([BoardRequest(annotator, payload, may_lead)])[0])


def rank_next(db: Path, annotator: str, number: int) -> None:
    """Somebody ranks the next so many tasks of two responses."""
    with Store(db) as store:
        queue = TaskQueue(store)
        queue.add_annotator(annotator)
        for _ in range(number):
            task = queue.next_task(annotator)
            assert task is not None
            id_ = f"{annotator}{task.id}"
            queue.submit(annotator, Submission(id=id_, task_id=task.id, tiers=((0,), (1,))))
