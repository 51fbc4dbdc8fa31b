"""Starting and steering a loop from the server: once, by a fixed command, with open settings."""

import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from fastapi import FastAPI

from labeling_app.annotators.users import User
from labeling_app.db.board.rubrics import save_rubric
from labeling_app.db.queue import TaskQueue
from labeling_app.db.store import Store
from labeling_app.web.access.middleware import USER
from labeling_app.web.app import add_lead_pages
from labeling_app.web.board.session import Board
from labeling_app.web.lead.frame import LeadFrame
from labeling_app.web.runs.loop_process import LoopProcess
from labeling_app.web.runs.page import FILTERS, content, status_of
from labeling_app.web.runs.routes import add_runs_page, answer
from rlhf.commands.loop.opened import read_loop_file
from rlhf.errors import ConfigError
from rlhf.records.jsonl import write_json
from rlhf.run.locks import locked
from rlhf.run.loops.pausing import request_pause
from rlhf.run.loops.train_now import (
    Waiting,
    end_waiting,
    training_requested_by,
    write_waiting,
)
from rlhf.run.watchdog import process_has_ended, read_heartbeats
from tests.labeling_app.conftest import run_async
from tests.pipeline.loop import write_prompts
from tests.rlhf.run.loops.folders import make_loop, make_round
from tests.servers.waiting import wait_until

OPEN = (
    "new_rankings",
    "rounds",
    "stop_without_gain",
    "stages.ppo.steps",
    "stages.ppo.kl.coefficient",
    "stages.ppo.advantages",
)
RATE = {"value": 0.62, "low": 0.55, "high": 0.69, "level": 0.95, "n": 60, "p_value": 0.004}
FILE = """\
out: {out}
model: m
prompts: {prompts}
lead_may: [{open}]
stages:
  ppo: {{steps: 7}}
"""


def loop_file(folder: Path, open: tuple[str, ...] = OPEN) -> Path:
    path, prompts = folder / "loop.yaml", write_prompts(folder / "prompts.jsonl")
    text = FILE.format(out=folder / "out", prompts=prompts, open=", ".join(open))
    path.write_text(text, encoding="utf-8")
    return path


@pytest.fixture
def process(tmp_path: Path) -> Iterator[LoopProcess]:
    process = LoopProcess(read_loop_file(loop_file(tmp_path))[1])
    yield process
    for beat in read_heartbeats(process.file.run.heartbeat):
        if not process_has_ended(beat):
            os.kill(beat.pid, signal.SIGKILL)


def send(process: LoopProcess, op: str, **payload: Any) -> str:
    """What the page shows: nothing where all is well."""
    return answer(process, "lea", {"op": op, **payload}).get("error", "")


def change(process: LoopProcess, **values: Any) -> str:
    return send(process, "change", values={k.replace("__", "."): v for k, v in values.items()})


def test_what_a_lead_may_change(process: LoopProcess) -> None:
    found = {one.name: (one.kind, one.value) for one in process.file.open}
    assert found == {
        "new_rankings": ("whole number", 100),
        "rounds": ("whole number", 3),
        "stop_without_gain": ("yes or no", True),
        "stages.ppo.steps": ("whole number", 7),
        "stages.ppo.kl.coefficient": ("number", 0.1),
        "stages.ppo.advantages": ("choice", "gae"),
    }
    assert process.file.open[1].help == "Maximum number of rounds."
    assert change(process, stages__ppo__steps=9, rounds=2, new_rankings=5) == ""
    written = yaml.safe_load(process.file.run.lead_file.read_text("utf-8"))
    assert written == {"rounds": 2, "new_rankings": 5, "stages": {"ppo": {"steps": 9}}}
    assert change(process, stages__ppo__kl__coefficient=0.2) == ""  # beside the earlier ones
    assert process.values() == {
        "new_rankings": 5,
        "rounds": 2,
        "stages.ppo.steps": 9,
        "stages.ppo.kl.coefficient": 0.2,
    }
    assert change(process, stages__ppo__advantages="rloo") == (
        "stages.ppo.advantages rloo compares the responses to one prompt, and "
        "stages.ppo.batch.samples_per_prompt is 1. Set stages.ppo.batch.samples_per_prompt to 2 "
        "or more."
    )
    assert process.file.open[0].help.startswith(
        "People: start the training of a round after this many new rankings. none: only start_at "
    )
    assert "with stages.ppo.kl.source reference" in process.file.open[4].help


def shown(process: LoopProcess) -> dict[str, Any]:
    """What the page shows as the file's values."""
    return {one.name: one.value for one in process.open_settings()}


def test_a_setting_goes_back_to_the_file(process: LoopProcess) -> None:
    assert change(process, stages__ppo__steps=9, rounds=2) == ""
    refusal = "This setting is that of the file already. Reload the page to see it."
    for name in ("new_rankings", "launch", None, ["rounds"]):
        assert send(process, "unset", setting=name) == refusal
    assert send(process, "unset", setting="stages.ppo.steps") == ""
    assert process.values() == {"rounds": 2}
    assert send(process, "unset", setting="rounds") == ""
    assert process.values() == {}
    assert yaml.safe_load(process.file.run.lead_file.read_text("utf-8")) in (None, {})


def test_later_edits_of_the_file_count_where_no_lead_has_changed_anything(
    process: LoopProcess,
) -> None:
    assert change(process, rounds=2) == ""
    file = process.file.path
    text = file.read_text("utf-8")
    file.write_text(f"rounds: 8\n{text.replace('steps: 7', 'steps: 11')}", encoding="utf-8")
    assert (shown(process)["rounds"], shown(process)["stages.ppo.steps"]) == (8, 11)
    assert process.values() == {"rounds": 2}  # steps stays 11
    file.write_text("{", encoding="utf-8")
    assert shown(process)["stages.ppo.steps"] == 7  # as when the server started


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"stages.ppo.steps": 0}, "stages.ppo.steps is 0. Give a value of at least 1."),
        ({"rounds": 2.5}, "rounds is '2.5'. Give a whole number."),
        ({"rounds": True}, "rounds is 'True'. Give a whole number."),
        ({"rounds": 10**20}, "rounds is '100000000000000000000'. Give a whole number."),
        ({"rounds": "2; rm -r /"}, "rounds is '2; rm -r /'. Give a whole number."),
        ({"rounds": None}, "rounds is 'None'. Give a whole number."),
        ({"new_rankings": "x"}, "new_rankings is 'x'. Give a whole number, or leave it empty."),
        ({"stop_without_gain": "no"}, "stop_without_gain is 'no'. Give yes or no."),
        (
            {"stages.ppo.advantages": "--out"},
            "stages.ppo.advantages is '--out'. Give one of gae, rloo, grpo.",
        ),
        (
            {"launch": "rm -r /"},
            "launch is not open to leads. Reload the page to see which settings are.",
        ),
        ({"stages.ppo.kl.coefficient": [1]}, "stages.ppo.kl.coefficient is '[1]'. Give a number."),
    ],
)
def test_other_values_are_refused_and_leave_nothing(
    process: LoopProcess, values: dict[str, Any], message: str
) -> None:
    assert send(process, "change", values=values) == message
    assert not list(process.file.out.glob("*"))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("model", "lead_may opens model, whose values are text or lists\n  Open numbers, yes or"),
        ("stages.evaluate.gold", "lead_may opens stages.evaluate.gold, whose values are text"),
        ("stages.ppo.resume", "lead_may opens stages.ppo.resume, and rlhf loop sets it itself"),
        ("stages.ppo.step", "lead_may opens stages.ppo.step, and there is no such setting\n  Did"),
        ("stages.annotate.k", "lead_may opens stages.annotate, and there is no such setting"),
        ("round", "lead_may opens round, and there is no such setting\n  Did you mean rounds?"),
    ],
)
def test_what_cannot_be_opened(tmp_path: Path, name: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_loop_file(loop_file(tmp_path, (name,)))
    assert str(caught.value).startswith(message)


def test_what_the_loop_only_suggests_may_be_opened(tmp_path: Path) -> None:
    path = loop_file(tmp_path, ("stages.round.pick", "stages.ppo.seed"))
    path.write_text(path.read_text() + "seed: 3\n")
    _, found = read_loop_file(path)
    assert {one.name: one.value for one in found.open} == {
        "stages.round.pick": 100,  # as many as are waited for
        "stages.ppo.seed": 3,
    }


def test_presses_at_once_start_one_loop_which_outlives_the_server(process: LoopProcess) -> None:
    assert status_of(process).sentence == "Not started yet."
    process.file.path.with_name("prompts.jsonl").unlink()  # the first stage will fail
    with ThreadPoolExecutor(8) as pool:
        assert set(pool.map(lambda _: send(process, "start"), range(8))) == {""}
    assert status_of(process).name in ("starting", "running")
    wait_until(lambda: process.is_running)
    # A server that was restarted knows the loop by its lock.
    other = LoopProcess(process.file)
    assert other.is_running
    assert send(other, "start") == ""
    assert other.exit_code is None
    assert status_of(other).may_pause
    assert os.getpgid(process._process.pid) == process._process.pid  # a session of its own
    wait_until(lambda: process.exit_code is not None)
    assert process.exit_code == 2
    status = status_of(process)
    assert (status.name, status.may_start) == ("failed", "Resume")
    assert (
        status.sentence == "Failed: StageFailedError: rlhf import of round 0 ended with exit code 2"
    )
    with locked(process.file.out, ""):  # somebody has started it again, in a shell
        assert process.exit_code is None
    assert process.exit_code is None  # that loop's end is not known here
    log = process.log()
    assert sum("Round 0: rlhf import" in line for line in log) == 1
    assert any(line.startswith("error No such file") for line in log)


def test_a_killed_loop_is_said_to_be_dead(process: LoopProcess) -> None:
    make_loop(process.file.out, "m", status="running")
    status = status_of(process)
    assert (status.name, status.may_start, status.may_pause) == ("killed", "Resume", False)


def test_a_loop_that_does_not_run_is_not_paused(process: LoopProcess) -> None:
    assert send(process, "pause") == "No loop runs. There is nothing to pause."
    assert not process.file.out.exists()


def test_a_loop_that_does_not_wait_is_not_told_to_train(process: LoopProcess) -> None:
    out = process.file.out
    waits = Waiting(round=1, new=2, wanted=9, possible=4)
    refusal = (
        f"The loop in {out} does not wait for rankings. Train now starts a round that waits for "
        "people. Start or resume the loop first."
    )
    assert send(process, "train") == refusal
    write_waiting(make_loop(out, "m", status="running"), waits)
    assert send(process, "train") == refusal  # of a loop that was killed


def test_a_waiting_round_says_what_a_lead_can_do(process: LoopProcess) -> None:
    out = make_loop(process.file.out, "m", status="running")
    beat = {"rank": 0, "host": "h", "pid": 1, "phase": "waiting for rankings: 2 of 9", "step": 1}
    with locked(out, ""):
        write_json(out / "heartbeat" / "rank-00000.json", {**beat, "time": time.time()})
        write_waiting(out, Waiting(round=1, new=2, wanted=9, possible=6))
        status = status_of(process)
        assert (status.name, status.may_train) == ("waiting", True)
        assert status.waits_for == "Waits for people: 2 of 9 new rankings."
        assert status.advice == (
            "7 rankings are missing, and the open tasks can give only 6. Import more "
            "prompts on the Data page, or train now."
        )
        write_waiting(out, Waiting(round=1, new=8, wanted=9, possible=0))
        assert status_of(process).advice.startswith("1 ranking is missing, and the open tasks")
        write_waiting(out, Waiting(round=1, new=0, wanted=9, possible=6))
        status = status_of(process)
        assert (status.may_train, status.advice) == (
            False,
            "9 rankings are missing, and the open tasks can give only 6. Import more "
            "prompts on the Data page.",
        )
        assert send(process, "train") == (
            "Round 1 has no new rankings to train on. Wait until somebody has ranked a task."
        )
        write_waiting(out, Waiting(round=1, new=2, wanted=9, possible=7))
        enough = "Train now starts the round with the rankings there are."
        assert status_of(process).advice == enough
        assert send(process, "train") == ""
        assert training_requested_by(out, 1) == "lea"
        write_waiting(out, Waiting(round=1, new=1, wanted=None, possible=7))
        assert status_of(process).waits_for == "Waits for its time: 1 new ranking so far."
        sampling = {**beat, "phase": "round 1: generate", "time": time.time()}  # for new prompts
        write_json(out / "heartbeat" / "rank-00000.json", sampling)
        status = status_of(process)
        assert (status.name, status.may_train, status.advice) == ("running", False, "")
        assert status.waits_for == "Waits for its time: 1 new ranking so far."
        end_waiting(out)
        assert status_of(process).waits_for == ""
        request_pause(out, "lea")
        paused = {**beat, "phase": "paused by lea", "time": time.time()}
        write_json(out / "heartbeat" / "rank-00000.json", paused)
        assert (status_of(process).name, status_of(process).waits_for) == ("paused", "Paused.")


def test_a_lead_asks_people_about_a_round(process: LoopProcess) -> None:
    out = make_loop(process.file.out, "m")
    assert send(process, "ask", round=0) == (
        f"Round 0 of {out} is not evaluated. Evaluated are: no rounds. Let the loop finish the "
        "round first."
    )
    make_round(out, 0)
    assert send(process, "votes", round=0).startswith("People were not asked about round 0. Press")
    assert send(process, "ask", round="0; rm") == "There is no such round. Reload the page."
    assert send(process, "votes", round=-1) == "There is no such round. Reload the page."


def test_the_remedy_of_an_error_is_shown(process: LoopProcess) -> None:
    make_loop(
        process.file.out, "m", status="failed", error="InputError: No prompts\n  Upload some."
    )
    status = status_of(process)
    assert (status.sentence, status.advice) == ("Failed: InputError: No prompts", "Upload some.")


def test_promotions_name_the_lead(process: LoopProcess) -> None:
    make_round(make_loop(process.file.out, "m"), 0)
    assert send(process, "promote", round=0) == ""
    assert send(process, "promote", round=0).startswith("The policy of round 0 is promoted alre")
    assert send(process, "promote", round="0/../..") == "There is no such round. Reload the page."
    assert send(process, "promote", round=True) == "There is no such round. Reload the page."
    assert send(process, "rollback") == ""
    assert send(process, "rollback").startswith("No policy of ")
    assert '"by": "lea"' in process.file.run.promoted_file.read_text("utf-8")
    assert send(process, "steal") == "Unknown operation. Reload the page."


def test_every_page_of_a_lead_opens_beside_runs(process: LoopProcess, store: Store) -> None:
    save_rubric(store.connections, "Be kind.", "lea")
    app = FastAPI()
    frame = add_lead_pages(app, Board(store, TaskQueue(store)), 1_000)
    add_runs_page(app, frame, process, store.connections)
    lea = User(name="lea", role="lead", disabled=False, epoch=0)

    async def as_lead(scope: Any, receive: Any, send: Any) -> None:
        await app({**scope, USER: lea}, receive, send)

    async def open_all() -> list[int]:
        transport = httpx.ASGITransport(as_lead)
        async with httpx.AsyncClient(transport=transport, base_url="http://label") as client:
            return [(await client.get(link.path)).status_code for link in frame.links]

    assert run_async(open_all()) == [200] * 5


def test_the_page_says_what_the_rounds_have_cost(process: LoopProcess, store: Store) -> None:
    out = make_loop(process.file.out, "m")
    cost = {"device_hours": 1.5, "price_per_hour": 2.0, "price": 3.0, "annotator_hours": 4.25}
    write_json(out / "report.json", {"rounds": [], "cost": cost})  # the loop was started
    assert content(process, store.connections)["cost"] == ""
    rates = {"before": RATE, "original": RATE}
    one = {"round": 0, "outcome": "better", "judge": "people", "win_rate": rates}
    stopped = {"stopped": "1 of 1 round is done.", "stopped_by": "rounds"}
    write_json(out / "report.json", {"rounds": [one], "cost": cost, **stopped})
    frame = LeadFrame()
    frame.add_filters(**FILTERS)
    lea = User(name="lea", role="lead", disabled=False, epoch=0)
    page = frame.render("runs/state.html", lea, "/lead/runs", **content(process, store.connections))
    said = "Cost: 1.5 device-hours at 2 each: 3, and 4.25 annotator-hours. Counted when a round"
    assert said in page


def test_two_pages_cannot_share_the_name_of_a_filter() -> None:
    frame = LeadFrame()
    frame.add_filters(clock=str)
    with pytest.raises(ValueError, match="Two pages have a filter of the name clock"):
        frame.add_filters(clock=repr)
