"""A request to the board outside of a server."""

from typing import Any

from labeling_app.web.board.screens import render
from labeling_app.web.board.session import Board, BoardRequest


def ask(
    board: Board, annotator: str, payload: dict[str, Any], *, may_lead: bool = False
) -> dict[str, Any]:
    """What the board answers, with every text as HTML."""
    return render(board.answer_all([BoardRequest(annotator, payload, may_lead)])[0])
