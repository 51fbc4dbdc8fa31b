"""The labeling app: one Gradio component over the queue, served by one process.

Gradio evaluates templates as JavaScript, so templates never contain text from the database: the
component requests its task after it has loaded, as JSON from `board/route.py`.
"""

import os
from pathlib import Path

# Before gradio is imported: it reads these at import time.
os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import gradio as gr
from fastapi import FastAPI
from starlette.routing import Mount

from labeling_app.web.access.content_policy import GradioPolicy
from labeling_app.web.board.route import add_board_route
from labeling_app.web.board.session import Board
from labeling_app.web.health import add_health
from labeling_app.web.lead.data import add_data_page
from labeling_app.web.lead.frame import LeadFrame, add_frame, sender_of
from labeling_app.web.lead.people import add_people_page
from labeling_app.web.lead.quality import add_quality_page
from labeling_app.web.lead.rubric import add_rubric_page
from labeling_app.web.lead.served import Compare
from labeling_app.web.live.live import Live
from labeling_app.web.live.routes import add_live_routes
from labeling_app.web.programs.feedback_route import add_feedback_route
from labeling_app.web.runs.loop_process import LoopProcess
from labeling_app.web.runs.routes import add_page_without_loop, add_runs_page

BOARD_FILES = Path(__file__).parent / "pages" / "board"
SCRIPTS = ("ranking.js", "cards.js", "drag.js", "outbox.js", "drafts.js", "looking.js", "board.js")
PAGE_CSS = """
footer { display: none !important; }
:root { --body-background-fill: #f6f6f3; }
.dark { --body-background-fill: #151716; }
.gradio-container { overflow: visible !important; }
.gradio-container main, .gradio-container .main {
  padding: 0 !important; max-width: none !important;
}
#board .html-container { padding: 0 !important; }
"""
# What the page of the board requests.
GRADIO_ROUTES = frozenset(
    {"/", "/assets/{path:path}", "/static/{path:path}", "/theme.css", "/favicon.ico"}
)
SYSTEM_FONT = ["system-ui", "-apple-system", "Segoe UI", "Roboto", "sans-serif"]
CODE_FONT = ["ui-monospace", "SFMono-Regular", "Menlo", "Consolas", "monospace"]


def rank_board() -> gr.HTML:
    """The ranking board: HTML, CSS and JavaScript from `pages/board/`.

    Not a subclass: Gradio writes a .pyi file beside the source of every subclass of a component.
    """
    return gr.HTML(
        html_template=_read("board.html"),
        css_template=_read("board.css"),
        js_on_load="\n".join(_read(name) for name in SCRIPTS),
        apply_default_css=False,
        elem_id="board",
    )


def _read(name: str) -> str:
    return (BOARD_FILES / name).read_text(encoding="utf-8")


def build_app(
    board: Board,
    live: Live | None = None,
    loop: LoopProcess | None = None,
    *,
    max_upload_bytes: int = 10**9,
    compare: Compare | None = None,
) -> FastAPI:
    """The web application; `AuthMiddleware` around it sets the user of each request.

    Args:
        board: the ranking operations.
        live: live mode, if there are models to ask.
        loop: the loop of the Runs page, if there is one.
        max_upload_bytes: the largest file that a lead may upload.
        compare: compares the thumbs of two served policies.
    """
    with gr.Blocks(title="Rank responses", analytics_enabled=False) as page:
        rank_board()
    app = FastAPI(title="rlhf label", docs_url=None, redoc_url=None, openapi_url=None)

    add_health(app, board.store.connections)
    add_board_route(app, board, has_live=live is not None)
    add_feedback_route(app, board.store)
    if live is not None:
        add_live_routes(app, live, lambda request: sender_of(request).name)
    frame = add_lead_pages(app, board, max_upload_bytes, compare)
    if loop is None:
        add_page_without_loop(app, frame)
    else:
        add_runs_page(app, frame, loop, board.store.connections)
    gr.mount_gradio_app(
        app,
        page,
        path="/",
        ssr_mode=False,
        run_history=False,
        footer_links=[],
        show_error=False,
        pwa=False,
        enable_monitoring=False,
        theme=gr.themes.Default(font=SYSTEM_FONT, font_mono=CODE_FONT),
        css=PAGE_CSS,
    )
    _confine_gradio(app)
    return app


def add_lead_pages(
    app: FastAPI, board: Board, max_upload_bytes: int, compare: Compare | None = None
) -> LeadFrame:
    """The pages for leads and admins, in the order of the navigation."""
    frame = LeadFrame(has_sign_in=board.has_sign_in)
    add_frame(app, frame)
    add_data_page(app, frame, board.store, max_upload_bytes)
    add_people_page(app, frame, board.store, has_sign_in=board.has_sign_in)
    add_rubric_page(app, frame, board.store)
    add_quality_page(app, frame, board.store, compare)
    return frame


def _confine_gradio(app: FastAPI) -> None:
    """Give Gradio's page its policy and remove its other routes: uploads, queues, files, more."""
    [gradio] = [route.app for route in app.routes if isinstance(route, Mount)]
    assert isinstance(gradio, FastAPI)
    routes = [route for route in gradio.routes if getattr(route, "path", "") in GRADIO_ROUTES]
    gradio.router.routes[:] = routes
    gradio.add_middleware(GradioPolicy)
