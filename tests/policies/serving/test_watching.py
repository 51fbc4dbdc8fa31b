"""What the proxy does by itself: it watches model servers, and deletes old answers."""

import asyncio
import sqlite3
import time
from types import SimpleNamespace

import pytest

from policies.serving import app
from policies.serving.app import DAY_SECONDS
from policies.serving.proxy import Policies, Proxy
from policies.serving.retention import Retention
from policies.serving.split import Split
from tests.servers.coroutines import run_alone


class Engine:
    """A server that cannot be started at first."""

    def __init__(self) -> None:
        self.asked = 0

    def restart_if_dead(self) -> None:
        self.asked += 1
        if self.asked == 1:
            raise BlockingIOError("Resource temporarily unavailable")


class Records:
    """Fails at first; `before` are the times before which everything is to be deleted."""

    def __init__(self) -> None:
        self.before: list[float] = []

    async def forget(self, before: float) -> int:
        self.before.append(before)
        if len(self.before) == 1:
            raise sqlite3.OperationalError("database is locked")
        return 0


def serve(records: Records, engines: list[Engine], days: int | None) -> None:
    retention = Retention(records=records, days=days)
    proxy = Proxy(Policies(by_variant={}, split=Split(0.0), retention=retention), None, 1.0)
    served = app.build_app(proxy, SimpleNamespace(), engines)

    async def live() -> None:
        async with served.router.lifespan_context(served):
            await asyncio.sleep(0.2)

    run_alone(live())


def test_a_server_that_could_not_be_started_is_tried_again(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(app, "WATCH_SECONDS", 0.01)
    first, second = Engine(), Engine()
    serve(Records(), [first, second], None)
    assert first.asked > 1
    assert second.asked > 1
    said = "A model server could not be started (Resource temporarily unavailable).\n"
    assert capsys.readouterr().err == 2 * said


@pytest.mark.parametrize("days", [3, None])
def test_old_answers_are_deleted_again_and_again(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], days: int | None
) -> None:
    monkeypatch.setattr(app, "FORGET_EVERY_SECONDS", 0.01)
    records = Records()
    serve(records, [], days)
    if days is None:
        assert records.before == []
        return
    assert len(records.before) > 1
    assert records.before[0] == pytest.approx(time.time() - 3 * DAY_SECONDS, abs=60)
    assert capsys.readouterr().err == ("Old responses could not be deleted (database is locked).\n")
