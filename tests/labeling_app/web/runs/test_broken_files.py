"""The Runs page and its reports say which file of a loop is broken."""

from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
from fastapi import FastAPI

from labeling_app.annotators.users import User
from labeling_app.db.store import Store
from labeling_app.web.access.middleware import USER
from labeling_app.web.lead.frame import LeadFrame
from labeling_app.web.runs.loop_file import LoopFile
from labeling_app.web.runs.loop_process import LoopProcess
from labeling_app.web.runs.routes import WAY_BACK, add_runs_page
from rlhf.records.jsonl import write_json
from tests.labeling_app.conftest import run_async
from tests.rlhf.run.loops.folders import REPORT, make_loop, make_round

Open = Callable[[str], httpx.Response]
NOT_THE_LOOPS = "is not what rlhf loop writes"


@pytest.fixture
def out(tmp_path: Path) -> Path:
    """A loop with an evaluated round, which has a report."""
    folder = make_loop(tmp_path / "loop", model="m", status="done")
    make_round(folder, 0)
    return folder


@pytest.fixture
def visit(out: Path, store: Store) -> Open:
    """Open an address as a lead."""
    names = {"first": ("ppo", "evaluate"), "later": ("ppo", "evaluate")}
    limits = {"rounds": 3, "stop_without_gain": True}
    file = LoopFile(path=out.parent / "l.yaml", out=out, open=(), **names, **limits)
    app = FastAPI()
    add_runs_page(app, LeadFrame(), LoopProcess(file), store.connections)
    lea = User(name="lea", role="lead", disabled=False, epoch=0)

    async def as_lead(scope, receive, send) -> None:
        await app({**scope, USER: lea}, receive, send)

    async def get(path: str) -> httpx.Response:
        transport = httpx.ASGITransport(as_lead)
        async with httpx.AsyncClient(transport=transport, base_url="http://label") as client:
            return await client.get(path)

    return lambda path: run_async(get(path))


def test_whole_files_make_a_page_and_a_report(visit):
    assert visit("/lead/runs").status_code == 200
    assert visit("/lead/runs/state").status_code == 200
    report = visit("/lead/runs/0/evaluate").text
    assert '<a href="/lead/runs">Back to Runs</a>' in report
    assert report == REPORT.format(0).replace("<body>", f"<body>\n{WAY_BACK}")


def test_votes_that_an_earlier_version_has_counted_make_a_page(visit, out):
    """It did not count the people."""
    rate = {"value": 0.75, "low": 0.2, "high": 0.95, "n": 4, "level": 0.95}
    result = {"round": 0, "rankings": 4, "new_rankings": 4, "accuracy": rate, "outcome": "unproven"}
    judged = {"judge": "people", "win_rate": {"original": rate, "before": rate}}
    votes = {"given": 4, "prompts": 4, "still_needed": 10}
    report = {"rounds": [{**result, **judged, "votes": votes}], "stopped": "1 round is done"}
    write_json(out / "report.json", report)
    done = {"round": 0, "stage": "evaluate", "command": ["rlhf", "evaluate"], "exit_code": 0}
    times = {"started_at": "2026-11-28T10:00:00+00:00", "seconds": 9.0}
    write_json(out / "commands.json", {"commands": [{**done, **times}]})
    shown = visit("/lead/runs/state")
    assert shown.status_code == 200
    assert "Judged by people, 4 votes on 4 prompts: no gain." in " ".join(shown.text.split())


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("commands.json", "{", "commands.json"),
        ("commands.json", '{"commands": [7]}', NOT_THE_LOOPS),
        ("commands.json", '{"commands": [{"round": 0, "stage": "ppo"}]}', "no &#39;exit_code&#39;"),
        ("commands.json", '{"commands": [{"round": "0", "stage": "ppo"}]}', NOT_THE_LOOPS),
        ("report.json", '{"rounds": 3}', NOT_THE_LOOPS),
        ("report.json", "[]", "report.json"),
        ("stage.json", '{"status": 1}', "stage.json"),
        ("promoted.json", "x", "promoted.json"),
    ],
)
def test_the_page_names_the_broken_file_and_what_to_do(visit, out, name, content, problem):
    (out / name).write_text(content, "utf-8")
    answer = visit("/lead/runs")
    assert answer.status_code == 500
    assert problem in answer.text
    assert str(out) in answer.text
    assert "Restore the file from a copy" in answer.text
    assert '<nav aria-label="Pages for leads">' in answer.text
    state = visit("/lead/runs/state")  # what the open page asks for, and shows
    assert state.status_code == 500
    assert "Restore the file from a copy" in state.json()["detail"]


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [("report.html", b"\xff", "report.html cannot be read"), ("stage.json", b"{", "stage.json")],
)
def test_a_broken_report_is_named(visit, out, name, content, problem):
    (out / "round-0" / "evaluate" / name).write_bytes(content)
    answer = visit("/lead/runs/0/evaluate")
    assert answer.status_code == 500
    assert problem in answer.text
    assert "Restore the file from a copy" in answer.text


def test_a_report_that_is_not_there(visit):
    for address in ("1/evaluate", "0/reward", "0/ppo", "-1/evaluate"):
        answer = visit(f"/lead/runs/{address}")
        assert (answer.status_code, answer.json()["detail"]) == (404, "There is no such report.")
