"""The lead's pages with one user of each role, and a way to send requests as one of them."""

from collections.abc import Callable

import httpx
import pytest
from fastapi import FastAPI

from labeling_app.annotators.users import ROLES, Users
from labeling_app.web.access.cookies import make_cookie
from labeling_app.web.access.middleware import AuthMiddleware, user_of_cookie
from labeling_app.web.access.sign_in import COOKIE
from labeling_app.web.app import add_lead_pages
from labeling_app.web.board.session import Board
from labeling_app.web.runs import routes
from policies.serving.thumbs.comparison import compare_thumbs
from tests.labeling_app.conftest import run_async

Requests = list[tuple[str, str, object]]


@pytest.fixture
def ask(store, queue) -> Callable[..., list[httpx.Response]]:
    """Send requests one after the other in one event loop: method, path, JSON or bytes."""
    users = Users(store)
    for role in ROLES:
        users.add(role, role, "long enough")

    async def send_all(
        requests: Requests | Callable, sender: str, has_loop: bool
    ) -> list[httpx.Response]:
        app = FastAPI()  # without Gradio's page, which takes seconds
        board = Board(store, queue, has_sign_in=True)
        frame = add_lead_pages(app, board, 3_000_000, compare_thumbs)
        if has_loop:
            frame.add_to_navigation("Runs", routes.PATH)
        else:
            routes.add_page_without_loop(app, frame)
        find = user_of_cookie(users, store.secret)
        protected = AuthMiddleware(app, find_user=find, users=users, secret=store.secret)
        transport = httpx.ASGITransport(protected)
        async with httpx.AsyncClient(transport=transport, base_url="http://label") as client:
            if sender:
                cookie = make_cookie(store.secret, sender, users.get(sender).epoch)
                client.cookies.set(COOKIE, cookie)
            if callable(requests):
                return await requests(client)
            answers = []
            for method, path, body in requests:
                sent = {"content": body} if isinstance(body, bytes) else {"json": body}
                answers.append(await client.request(method, path, **sent if body else {}))
            return answers

    def send(
        requests: Requests | Callable, sender: str = "lead", *, has_loop: bool = False
    ) -> list[httpx.Response]:
        return run_async(send_all(requests, sender, has_loop))

    return send
