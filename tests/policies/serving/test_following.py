"""`rlhf serve --policy LOOP` follows promotions, and no running stream breaks."""

import asyncio
import json
import sqlite3
import sys
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import OpenAI

from labeling_app.db.answers.served import comparisons, find_served
from labeling_app.db.store import Store
from labeling_app.web.programs.served import ServedRecords
from policies.serving import following
from policies.serving.following import PromotionFollower
from policies.serving.proxy import Policies, Proxy, ServedPolicy
from policies.serving.retention import Retention
from policies.serving.servers.engine import EngineProcess
from policies.serving.servers.upstream import Upstream
from policies.serving.split import Split
from rlhf.errors import InputError
from rlhf.modeling.tokens import load_tokenizer
from rlhf.run.loops.promotion import promote, roll_back
from tests.conftest import build_tiny_model
from tests.rlhf.run.loops.folders import make_loop, make_round
from tests.servers.chat import ChatServer
from tests.servers.coroutines import run_alone
from tests.servers.processes import HEALTHY, children_of
from tests.servers.served_policy import served_policy
from tests.servers.waiting import wait_until

HI = [{"role": "user", "content": "Hi?"}]


@pytest.fixture
def out(tmp_path: Path) -> Path:
    folder = make_loop(tmp_path / "loop", "original")
    make_round(folder, 0)
    return folder


@pytest.fixture
def old() -> Iterator[ChatServer]:
    with ChatServer() as server:
        server.answers = ["the original says so"]
        yield server


@pytest.fixture
def new() -> Iterator[ChatServer]:
    with ChatServer() as server:
        server.answers = ["the promoted one does not"]
        yield server


class Serving:
    """A proxy whose policy follows a loop: engines are processes, their answers come from here."""

    def __init__(self, out: Path, store: Store, servers: Mapping[str, ChatServer]) -> None:
        self.servers, self.records = servers, ServedRecords(store)
        self.broken: set[str] = set()
        self.loading: set[str] = set()  # folders whose server is never ready
        self.begun: list[EngineProcess] = []
        self.is_locked = False
        policy, engine = self.prepare("original")()
        against = ServedPolicy(description={"path": "other"}, upstream=policy.upstream)
        policies = {"policy": policy, "against": against}
        retention = Retention(records=self.records, comparison=self.start_comparison(policies))
        policies = Policies(by_variant=policies, split=Split(0.0), retention=retention)
        self.proxy = Proxy(policies, None, 30.0)
        self.follower = PromotionFollower(
            out=out,
            variant="policy",
            name="original",
            engine=engine,
            engines=[engine],
            prepare=self.prepare,
            start_comparison=self.start_comparison,
        )

    def prepare(self, folder: str) -> following.Start:
        if folder in self.broken:
            raise InputError(f"{folder} is not a model", "Train it.")

        def start() -> tuple[ServedPolicy, EngineProcess]:
            program = "import time; time.sleep(600)" if folder in self.loading else HEALTHY
            engine = EngineProcess(lambda port: [sys.executable, "-c", program, str(port)])
            self.begun.append(engine)
            url = self.servers[folder].url
            upstream = Upstream(url=url, model=folder, headers={})
            return ServedPolicy(description={"path": folder}, upstream=upstream), engine

        return start

    def start_comparison(self, policies: Mapping[Any, ServedPolicy]) -> int:
        if self.is_locked:
            raise sqlite3.OperationalError("database is locked")
        names = {name: policy.description["path"] for name, policy in policies.items()}
        return self.records.start_comparison(names, 0.5)

    async def ask(self) -> list[str]:
        """The events of a streamed answer."""
        answer = await self.proxy.complete({"model": "policy", "messages": HI, "stream": True})
        sent: list[bytes] = []

        async def receive() -> dict[str, Any]:
            await asyncio.sleep(60)
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            sent.append(message.get("body", b""))

        await answer({"type": "http", "asgi": {"spec_version": "2.4"}}, receive, send)
        return [line[6:] for line in b"".join(sent).decode().splitlines() if line]

    async def changed_to(self, name: str) -> None:
        while self.proxy.policies.by_variant["policy"].description["path"] != name:
            await asyncio.sleep(0.02)

    async def run(self, work: Any) -> None:
        async with httpx.AsyncClient() as self.proxy.client:
            following_it = asyncio.create_task(self.follower.follow(self.proxy))
            try:
                await asyncio.wait_for(work, 60)
            finally:
                following_it.cancel()
                for engine in self.follower.engines:
                    engine.stop()


def text_of(events: list[str]) -> str:
    deltas = (json.loads(event)["choices"][0]["delta"] for event in events if event != "[DONE]")
    return "".join(delta.get("content") or "" for delta in deltas)


def test_a_running_stream_ends_with_the_policy_it_began_with(
    out: Path, old: ChatServer, new: ChatServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(following, "LOOK_SECONDS", 0.05)
    promoted = f"{out}/round-0/ppo/policy"
    with Store(tmp_path / "labels.db") as store:
        serving = Serving(out, store, {"original": old, promoted: new})
        first = serving.follower.engine

        async def work() -> None:
            old.gate.clear()
            running = asyncio.create_task(serving.ask())
            while not old.calls:
                await asyncio.sleep(0.02)
            promote(out, 0, "lea")
            await serving.changed_to(promoted)
            later = await serving.ask()
            assert text_of(later) == "the promoted one does not"
            await asyncio.sleep(0.5)
            assert first.is_ready()  # it is still answering
            old.gate.set()
            events = await running
            assert text_of(events) == "the original says so"
            assert events[-1] == later[-1] == "[DONE]"
            while first in serving.follower.engines or first._process.poll() is None:
                await asyncio.sleep(0.02)
            found = [
                find_served(store.connections.db, json.loads(one[0])["id"])
                for one in (events, later)
            ]
            # each answer counts in the comparison of the policy that has given it
            assert [(one.response.model, one.comparison) for one in found if one] == [
                ("original", 1),
                (promoted, 2),
            ]
            roll_back(out, "lea")
            await serving.changed_to("original")
            assert serving.proxy.policies.retention.comparison == 1  # goes on

        run_alone(serving.run(work()))
        pairs = [(one["policy"], one["against"]) for one in comparisons(store.connections)]
        assert pairs == [("original", "other"), (promoted, "other")]


def test_a_policy_that_cannot_be_served_is_tried_again_and_the_earlier_one_answers(
    out: Path, old: ChatServer, new: ChatServer, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setattr(following, "LOOK_SECONDS", 0.02)
    monkeypatch.setattr(following, "RETRY_SECONDS", 0.1)
    promoted = f"{out}/round-0/ppo/policy"
    with Store(tmp_path / "labels.db") as store:
        serving = Serving(out, store, {"original": old, promoted: new})
        serving.broken.add(promoted)

        async def work() -> None:
            promote(out, 0, "lea")
            await asyncio.sleep(0.5)
            assert text_of(await serving.ask()) == "the original says so"
            assert len(serving.follower.engines) == 1
            serving.broken.clear()
            await serving.changed_to(promoted)
            assert text_of(await serving.ask()) == "the promoted one does not"

        run_alone(serving.run(work()))
    said = capsys.readouterr().err
    assert f"The promoted policy of {out} cannot be served: {promoted} is not a model" in said
    assert "original answers until it can; it is tried again in a minute." in said


@pytest.mark.parametrize("case", ["rolled back while it loads", "database locked"])
def test_a_server_that_is_not_needed_ends_and_the_earlier_one_answers(
    case: str,
    out: Path, old: ChatServer, new: ChatServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    monkeypatch.setattr(following, "LOOK_SECONDS", 0.02)
    promoted = f"{out}/round-0/ppo/policy"
    with Store(tmp_path / "labels.db") as store:
        serving = Serving(out, store, {"original": old, promoted: new})
        first = serving.follower.engine
        serving.is_locked = case == "database locked"
        serving.loading |= set() if serving.is_locked else {promoted}

        async def work() -> None:
            promote(out, 0, "lea")
            while len(serving.begun) < 2:
                await asyncio.sleep(0.02)
            if not serving.is_locked:
                await asyncio.sleep(0.2)
                roll_back(out, "lea")
            while serving.begun[1]._process.poll() is None:
                await asyncio.sleep(0.02)
            assert text_of(await serving.ask()) == "the original says so"
            assert serving.follower.engines == [first]
            assert serving.follower.name == "original"

        run_alone(serving.run(work()))


@pytest.mark.slow
def test_apps_notice_nothing_of_a_promotion(tiny_model: Path, tmp_path: Path) -> None:
    """Streams are asked one after the other, before, during and after it, of transformers serve."""
    out = make_loop(tmp_path / "loop", str(tiny_model))
    policy = build_tiny_model(make_round(out, 0) / "ppo" / "policy", seed=7)
    db = tmp_path / "labels.db"
    ids: list[str] = []
    unfinished: list[str] = []
    is_over = threading.Event()
    letter = load_tokenizer(str(tiny_model)).encode("a")[0]
    only_letters = {str(letter): 100.0}  # or these models say nothing but newlines

    def ask_again_and_again(client: OpenAI) -> None:
        while not is_over.is_set():
            asked = {"model": "policy", "messages": HI, "max_tokens": 30}
            asked["logit_bias"] = only_letters
            events = list(client.chat.completions.create(**asked, stream=True))
            ids.append(events[-1].id)
            if events[-1].choices[0].finish_reason is None:
                unfinished.append(events[-1].id)

    with served_policy("--policy", out, "--db", db) as proxy, Store(db) as store:
        apps = [threading.Thread(target=ask_again_and_again, args=[proxy.openai]) for _ in range(2)]
        for app in apps:
            app.start()

        def models() -> list[str]:
            found = (find_served(store.connections.db, one) for one in list(ids))
            return [one.response.model.partition(" (")[0] for one in found if one]

        try:
            wait_until(lambda: bool(models()), 120)
            [first] = children_of(proxy.process.pid)
            promote(out, 0, "lea")
            wait_until(lambda: str(policy) in models(), 240)
            wait_until(lambda: first not in children_of(proxy.process.pid), 60)
        finally:
            is_over.set()
            for app in apps:
                app.join()
        assert not unfinished
        assert set(models()) == {str(tiny_model), str(policy)}
        assert proxy.get("/health").status_code == 200
        assert proxy.metrics()["failures_total"] == 0
