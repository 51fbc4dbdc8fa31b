"""A headless Chromium without network, and the app in a thread or in a process."""

import asyncio
import json
import socket
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest.mock import patch
from urllib.error import URLError

import pytest
from playwright.sync_api import Browser, ConsoleMessage, Page, Request, expect, sync_playwright
from starlette.types import ASGIApp

from labeling_app.annotators import passwords
from labeling_app.web.http_server import LimitedServer, configure
from tests.servers.commands import start_process

CHROMIUM = Path("/usr/bin/chromium")
ARGUMENTS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
    "--disable-quic",
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
]
PATIENCE = 120_000  # milliseconds, for a machine whose cores are all busy with other tests


class App:
    """`rlhf label` in a thread: most tests need no process, and importing Gradio takes seconds."""

    command = "label"

    def __init__(self, db: Path, *arguments: str) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.db, self.arguments = db, arguments
        self.url = f"http://127.0.0.1:{self.port}/"
        self.start()

    def start(self) -> None:
        self.run()
        deadline = time.monotonic() + 600  # on a busy machine
        while time.monotonic() < deadline:
            try:
                with urllib.request.urlopen(self.url + "healthz", timeout=1):
                    return
            except (URLError, ConnectionError, TimeoutError):
                if not self.is_running():
                    break
                time.sleep(0.02)
        pytest.fail(f"rlhf label did not start: {self.output()}")

    def line(self) -> list[str]:
        return [self.command, "--db", str(self.db), "--port", str(self.port), *self.arguments]

    def run(self) -> None:
        from rlhf.cli import main

        self.server: LimitedServer | None = None

        def serve_app(app: ASGIApp, listening: list[socket.socket]) -> None:
            self.server = LimitedServer(configure(app))
            with ThreadPoolExecutor(1) as pool:
                pool.submit(self.server.run, sockets=listening).result()

        async def run() -> None:
            with patch("labeling_app.web.serving.serve_app", serve_app):
                main(self.line())

        # Without a running event loop Gradio opens new ones, and closes none.
        self.thread = threading.Thread(target=lambda: asyncio.run(run()), daemon=True)
        self.thread.start()

    def is_running(self) -> bool:
        return self.thread.is_alive()

    def output(self) -> str:
        return "see the captured output"

    def stop(self) -> None:
        if self.server is not None:
            self.server.should_exit = True
        self.thread.join(60)


class ProcessApp(App):
    """`rlhf label` as a process of its own, which can be killed."""

    def run(self) -> None:
        self.process = start_process(*self.line())

    def is_running(self) -> bool:
        return self.process.poll() is None

    def output(self) -> str:
        self.process.kill()
        return "".join(self.process.communicate())

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    if not CHROMIUM.exists():
        pytest.skip("no /usr/bin/chromium: run `make browser`")
    with sync_playwright() as playwright:
        expect.set_options(timeout=PATIENCE)
        opened = playwright.chromium.launch(executable_path=str(CHROMIUM), args=ARGUMENTS)
        yield opened
        opened.close()


@pytest.fixture(scope="session", autouse=True)
def _quick_hashes() -> Iterator[None]:
    """Hashing a password costs half a second; what it costs is not the subject here."""
    with patch.object(passwords, "COST", passwords.Cost(2**4, 8, 1)):
        yield


def submit_as_shown(page: Page) -> None:
    """Submit a board that nobody has touched: it asks first."""
    page.keyboard.press("Control+Enter")
    page.wait_for_selector(".rb-confirm:visible")
    page.keyboard.press("Control+Enter")


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[..., App]]:
    """Import lines into a new database and serve it."""
    started: list[App] = []

    def start(lines: list[dict], *arguments: str, kind: type[App] = App) -> App:
        from rlhf.cli import main

        source, db = tmp_path / "in.jsonl", tmp_path / "labels.db"
        source.write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
        assert main(["import", str(source), "--db", str(db)]) == 0
        started.append(kind(db, *arguments))
        return started[-1]

    yield start
    for app in started:
        app.stop()


@pytest.fixture
def open_page(browser: Browser) -> Iterator[Callable[..., Page]]:
    """Open a page that fails the test on a JavaScript error, a request to anywhere else, or what
    its content policy blocks."""
    contexts = []
    problems: list[str] = []

    def watch(request: Request, url: str) -> None:
        if not request.url.startswith((url, "data:", "blob:")):
            problems.append(f"outside request: {request.url}")

    def check_console(message: ConsoleMessage) -> None:
        if "Content Security Policy" in message.text:
            problems.append(f"blocked: {message.text}")

    def opening(
        url: str,
        before: Callable[[Page], object] = lambda page: None,
        path: str = "",
        **context: object,
    ) -> Page:
        contexts.append(browser.new_context(**context))
        contexts[-1].set_default_timeout(PATIENCE)
        page = contexts[-1].new_page()
        page.on("request", lambda request: watch(request, url))
        page.on("pageerror", lambda error: problems.append(f"page error: {error}"))
        page.on("console", check_console)
        before(page)
        page.goto(url + path)
        return page

    yield opening
    for context in contexts:
        context.close()
    assert problems == []
