"""A lead's browser, a loop that was made by hand, and the end of loops that a test has started."""

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Page

from rlhf.records.jsonl import write_json
from rlhf.run.rundir import RunDir
from rlhf.run.watchdog import process_has_ended, read_heartbeats
from tests.browser.boards import RUNS
from tests.browser.conftest import App
from tests.browser.lead.loops import OpenAs, fill, serve, write_loop
from tests.browser.lead.pages import sign_in, wait_longer
from tests.rlhf.run.loops.folders import make_loop, make_round

RATE = {"value": 0.62, "low": 0.55, "high": 0.69, "level": 0.95, "n": 60, "p_value": 0.004}


@pytest.fixture
def open_as(open_page: Callable[..., Page]) -> OpenAs:
    """Open a page of an app as somebody, in a browser of their own."""

    def opening(app: App, name: str, path: str = "") -> Page:
        def prepare(page: Page) -> None:
            wait_longer(page)
            sign_in(page, app, name)

        return open_page(app.url, prepare, path)

    return opening


@pytest.fixture
def end_loop() -> Iterator[list[Path]]:
    """Folders whose processes are killed at the end."""
    folders: list[Path] = []
    yield folders
    for out in folders:
        for folder in (out, *out.glob("round-*/*")):
            for beat in read_heartbeats(folder / "heartbeat"):
                if not process_has_ended(beat):
                    os.kill(beat.pid, signal.SIGKILL)


@pytest.fixture
def made(tmp_path: Path) -> Iterator[App]:
    """A loop with two evaluated rounds whose texts try to run, and its server."""
    file = write_loop(tmp_path, "m", "lead_may: [rounds, stages.ppo.steps]")
    fill(tmp_path)
    out = make_loop(tmp_path / "out", "m", status="failed", error=f"InputError: {RUNS}")
    entries, results = [], []
    for number in range(2):
        folder = make_round(out, number)
        page = RunDir(folder / "evaluate").report_html
        page.write_text(f"{page.read_text('utf-8')}<p>{number}</p>", encoding="utf-8")
        started = {"started_at": "2026-01-01T00:00:00+00:00", "seconds": 61.0, "exit_code": 0}
        stages = ("export", "ppo", "evaluate")
        entries += [{"round": number, "stage": name, **started} for name in stages]
        rates = {"original": RATE, "before": RATE}
        outcome = "better" if number else "unproven"
        judge = "people" if number else RUNS
        found = {"round": number, "judge": judge, "win_rate": rates, "outcome": outcome}
        results.append({**found, "rankings": 1200, "new_rankings": 60, "accuracy": RATE})
    write_json(out / "commands.json", {"commands": entries})
    write_json(out / "report.json", {"rounds": results, "stopped": None})
    (out / "loop.log").write_text(f"Round 1: {RUNS}\n", encoding="utf-8")
    app = serve(file)
    yield app
    app.stop()
