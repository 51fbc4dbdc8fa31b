"""Every route, every method and everybody who might send it, against one table: routes.txt."""

from collections import defaultdict
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import httpx
import pytest
from fastapi import FastAPI
from starlette.routing import Mount, Route

from labeling_app.annotators.users import ROLES, Users
from labeling_app.data_io.tokens import make_token
from labeling_app.web.access.cookies import make_cookie
from labeling_app.web.access.middleware import AuthMiddleware, user_of_cookie
from labeling_app.web.access.sign_in import COOKIE, PASSWORD_PATH, SIGN_IN_PATHS
from labeling_app.web.app import build_app
from labeling_app.web.board.session import Board
from labeling_app.web.live.live import Live
from labeling_app.web.runs.loop_file import LoopFile
from labeling_app.web.runs.loop_process import LoopProcess
from tests.labeling_app.conftest import run_async
from tests.rlhf.run.loops.folders import make_loop, make_round

METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE")
ROLE_COLUMNS = ("anonymous", *ROLES, "token")
BODIES = {
    "/board": '{"op": "next"}',
    "/live": '{"op": "state"}',
    "/feedback": "{}",
    "/lead/runs": '{"op": "none"}',
}
TABLE = Path(__file__).parent / "routes.txt"


def read_table() -> dict[str, dict[str, tuple[str, list[int]]]]:
    """route → method → (the address that is asked for, the status for each role)."""
    [gradio] = find_spec(
        "gradio"
    ).submodule_search_locations  # labeling_app.web.app imports it first
    script = min(Path(gradio).glob("templates/frontend/assets/*.js"))
    table: dict[str, dict[str, tuple[str, list[int]]]] = defaultdict(dict)
    for line in TABLE.read_text(encoding="utf-8").splitlines():
        if not line or line.startswith("#"):
            continue
        route, address, methods, *statuses = line.split()
        assert len(statuses) == len(ROLE_COLUMNS), line
        others = [method for method in METHODS if method not in table[route]]
        row = address.replace("*.js", script.name), [int(status) for status in statuses]
        table[route] |= dict.fromkeys(others if methods == "*" else methods.split(","), row)
    return table


def routes_of(app: FastAPI) -> set[tuple[str, str]]:
    """Every path that a web application serves with its methods, whatever is mounted in it."""
    found = set()
    for route in app.routes:
        if isinstance(route, Mount):
            assert route.path == ""
            found |= routes_of(route.app)
        else:
            # Of any other kind it is not known what it serves: teach this function first.
            assert isinstance(route, Route), type(route)
            found |= {(route.path, method) for method in route.methods}
    return found


@pytest.fixture
def app(store, queue, tmp_path):
    live = Live(store, [], num_responses=2, has_sign_in=True, note=None)
    out = make_loop(tmp_path / "loop", model="m")
    for folder in (out, make_round(out, 0) / "ppo"):
        (folder / "report.html").write_text("not for a browser")
    file = LoopFile(
        path=tmp_path / "loop.yaml",
        out=out,
        open=(),
        first=(),
        later=(),
        rounds=1,
        stop_without_gain=True,
    )

    async def build() -> FastAPI:  # without a running loop Gradio makes one and never closes it
        return build_app(Board(store, queue, has_sign_in=True), live, LoopProcess(file))

    yield run_async(build())
    live.close()


@pytest.fixture
def ask(app, store):
    users = Users(store)
    for role in ROLES:
        users.add(role, role, "long enough")
    token = make_token(store, "shop")
    find = user_of_cookie(users, store.secret)
    protected = AuthMiddleware(app, find_user=find, users=users, secret=store.secret)

    async def send(client: httpx.AsyncClient, role: str, method: str, address: str) -> int:
        headers = {}
        if role == "token":
            headers = {"authorization": f"Bearer {token}"}
        elif role != "anonymous":
            cookie = make_cookie(store.secret, role, users.get(role).epoch)
            headers = {"cookie": f"{COOKIE}={cookie}"}
        content = BODIES.get(address, "")
        answer = await client.request(method, address, headers=headers, content=content)
        return answer.status_code

    async def send_all(requests: Sequence[tuple[str, str, str]]) -> list[int]:
        transport = httpx.ASGITransport(protected)
        async with httpx.AsyncClient(transport=transport, base_url="http://label") as client:
            return [await send(client, *request) for request in requests]

    return lambda requests: run_async(send_all(requests))


def test_every_route_and_method_has_a_row(app):
    of_middleware = (*SIGN_IN_PATHS, PASSWORD_PATH)
    served = routes_of(app) | {(path, method) for path in of_middleware for method in METHODS}
    table = read_table()
    missing = {(path, m) for path, m in served if m not in table[path]}
    assert missing == set(), "Add rows to routes.txt that say who gets what."
    paths = {path for path, _ in served}
    gone = [route for route in table if not route.startswith("-") and route not in paths]
    assert gone == []
    incomplete = [route for route, rows in table.items() if set(rows) != set(METHODS)]
    assert incomplete == []


def test_everybody_gets_what_the_table_says(ask):
    expected = {
        (role, method, address): status
        for methods in read_table().values()
        for method, (address, statuses) in methods.items()
        for role, status in zip(ROLE_COLUMNS, statuses, strict=True)
    }
    found = dict(zip(expected, ask(list(expected)), strict=True))
    assert found == expected
