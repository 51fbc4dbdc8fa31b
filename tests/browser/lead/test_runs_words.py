"""What the Runs page explains while a round waits and people vote, and where the focus goes."""

import json
import os
import socket
import time

import pytest
from playwright.sync_api import expect

from labeling_app.annotators.comparisons import queue_pairs, tasks_of_pairs
from labeling_app.db.store import Store
from rlhf.records.jsonl import write_json
from rlhf.run.locks import locked
from rlhf.run.loops.asking import write_asked
from rlhf.run.loops.train_now import Waiting, write_waiting
from rlhf.run.rundir import RunDir
from tests.browser.accessibility import require_accessible
from tests.browser.conftest import App
from tests.browser.lead.loops import OpenAs, wait_for_status
from tests.labeling_app.asking import rank_next
from tests.labeling_app.conftest import build_prompt, build_responses

pytestmark = pytest.mark.browser


def test_the_focus_stays_at_what_was_pressed_or_what_took_its_place(
    made: App, open_as: OpenAs
) -> None:
    page = open_as(made, "lea", "lead/runs")
    page.focus("#promote-1")
    page.keyboard.press("Enter")
    expect(page.locator("#promoted + p")).to_contain_text("the policy of round 1")
    expect(page.locator("#round-1")).to_be_focused()  # the button is gone
    page.focus("#ask-promote-0")
    page.keyboard.press("Enter")
    page.focus("#promote-0")
    page.keyboard.press("Enter")
    expect(page.locator("#round-0")).to_be_focused()
    page.focus("#rollback")
    page.keyboard.press("Enter")
    expect(page.locator("#rollback")).to_contain_text("Roll back to the original model")
    expect(page.locator("#rollback")).to_be_focused()
    page.keyboard.press("Enter")
    expect(page.locator("#promoted")).to_be_focused()
    page.focus("#ask-1")
    page.keyboard.press("Enter")  # this evaluation was made by hand and has no answers
    expect(page.locator("main > .problem")).not_to_be_empty(timeout=60_000)
    expect(page.locator("#ask-1")).to_be_focused()
    write_asked(RunDir(made.db.parent / "round-1" / "evaluate"), made.db, [])
    expect(page.locator("#votes-1")).to_be_focused()
    page.focus("#last-lines")
    log = made.db.parent / "loop.log"
    log.write_text("Another line\n", encoding="utf-8")
    expect(page.locator("#last-lines")).to_have_text("Another line")
    expect(page.locator("#last-lines")).to_be_focused()


def test_a_waiting_round_says_whose_rankings_there_are(made: App, open_as: OpenAs) -> None:
    out = made.db.parent
    me = {"rank": 0, "host": socket.gethostname(), "pid": os.getpid(), "step": 1}
    beat = {**me, "phase": "waiting for rankings: 16 of 20", "time": time.time()}
    commands = {"round": 2, "stage": "round", "seconds": 3.0, "exit_code": 0}
    started = {"started_at": "2026-01-01T00:00:00+00:00", **commands}
    write_json(out / "commands.json", {"commands": [started]})
    with locked(out, ""):
        write_json(out / "heartbeat" / "rank-00000.json", beat)
        write_waiting(out, Waiting(round=2, new=16, wanted=20, possible=48, samples=24))
        page = open_as(made, "lea", "lead/runs")
        wait_for_status(page, "Waiting for rankings: 16 of 20.")
        expect(page.locator(".samples")).to_have_text(
            "None of this round's 24 new samples is ranked on the board yet; all 16 new rankings "
            "are of other tasks or from elsewhere."
        )
        buttons = page.locator('[aria-labelledby="status"] button')
        expect(buttons).to_have_text(["Train now", "Pause"])
        stages = page.locator(".round").first.locator(".stages b")
        expect(stages.first).to_have_text("round the newest policy writes responses to rank")
        expect(stages.last).to_have_text("evaluate compares the policy with the models before it")
        require_accessible(page, "a round that waits")
        page.emulate_media(color_scheme="dark")
        page.set_viewport_size({"width": 390, "height": 900})
        require_accessible(page, "a round that waits, dark")
        assert page.evaluate("document.documentElement.scrollWidth") <= 390


def test_the_page_says_how_many_have_voted(made: App, open_as: OpenAs) -> None:
    prompts = [build_prompt(f"Which is better, {n}?") for n in range(2)]
    pairs = [(p, *build_responses(p, ["old", "new"])) for p in prompts]
    with Store(made.db) as store:
        queue_pairs(store, pairs, overlap=2, mix=False, seed=0)
        tasks = tasks_of_pairs(store, pairs)
    write_asked(RunDir(made.db.parent / "round-1" / "evaluate"), made.db, tasks)
    page = open_as(made, "lea", "lead/runs")
    newest = page.locator(".round").first
    expect(newest).to_contain_text("0 of 4 votes are in, from 0 people.")
    rank_next(made.db, "ann", 2)
    rank_next(made.db, "ben", 1)
    expect(newest).to_contain_text("3 of 4 votes are in, from 2 people.")
    require_accessible(page, "votes that come in")


def test_a_promotion_asks_first_where_no_people_have_voted(made: App, open_as: OpenAs) -> None:
    file = made.db.parent / "report.json"
    report = json.loads(file.read_text("utf-8"))
    report["rounds"][1]["judge"] = "signal examples.quickstart.sentiment:score"
    write_json(file, report)
    page = open_as(made, "lea", "lead/runs")
    promote = page.get_by_role("button", name="Promote anyway the policy of round 1")
    expect(promote).to_be_hidden()
    page.locator("#ask-promote-1").click()
    expect(page.locator("#confirm-1 p")).to_have_text(
        "The function sentiment:score prefers this policy to the policy of round 0: it wins 62 % "
        "(95 % interval 55–69 %). No people have voted."
    )
    require_accessible(page, "a question before a promotion that no people have judged")
    promote.click()
    expect(page.locator("#promoted + p")).to_contain_text("the policy of round 1")
