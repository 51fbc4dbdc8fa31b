"""`POST /board`: the board's requests, answered for many people at once.

Not a Gradio server function: the dozen layers it passes cost more than storing a ranking does.
"""

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse

from labeling_app.annotators.users import User
from labeling_app.web.access.middleware import USER
from labeling_app.web.batching import RequestBatcher
from labeling_app.web.board.screens import ScreenRenderer
from labeling_app.web.board.session import Board, BoardRequest, refusal
from labeling_app.web.request_bodies import require_sender
from rlhf.endpoints.request_bodies import BodyError, read_json

MAX_BODY_BYTES = 1_000_000


def add_board_route(app: Starlette, board: Board, *, has_live: bool) -> None:
    """Serve the board's operations.

    Args:
        app: gets the route.
        board: the ranking operations.
        has_live: whether there are models to ask.
    """
    batcher = RequestBatcher(board.answer_all)
    renderer = ScreenRenderer()

    async def operation(request: Request) -> JSONResponse:
        sender: User = request.scope[USER]
        may_lead = sender.role != "annotator"
        try:
            payload = await read_json(request, MAX_BODY_BYTES)
            require_sender(payload, sender.name)
        except BodyError as error:
            return JSONResponse(refusal(error.problem), status_code=error.status)
        screen = await batcher.answer(BoardRequest(sender.name, payload, may_lead))
        screen = await renderer.render(screen)
        return JSONResponse({**screen, "may_lead": may_lead, "has_live": has_live})

    app.add_route("/board", operation, methods=["POST"])
