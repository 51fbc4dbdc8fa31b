"""The Runs page in a real browser: a lead starts, pauses, reads, promotes, without a shell."""

import os
import re
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from playwright.sync_api import Page, expect

from labeling_app.db.board.overlap import num_open
from labeling_app.db.store import Store
from rlhf.records.jsonl import write_jsonl
from rlhf.run.loops.promotion import promoted_round, read_promotions
from rlhf.run.watchdog import process_has_ended, read_heartbeats
from tests.browser.accessibility import require_accessible
from tests.browser.conftest import App, ProcessApp, submit_as_shown
from tests.browser.lead.loops import (
    OpenAs,
    add_people,
    fill,
    serve,
    wait_for_status,
    write_loop,
)
from tests.browser.lead.pages import (
    SECONDS,
    agreement,
    invite,
    upload,
)

pytestmark = pytest.mark.browser


def test_a_lead_reads_promotes_and_rolls_back(made: App, open_as: OpenAs) -> None:
    out = made.db.parent
    page = open_as(made, "lea", "lead")
    page.get_by_role("link", name="Runs").click()
    wait_for_status(page, "Failed: InputError: <script>")
    for scheme, width in (("light", 1000), ("dark", 390)):
        page.emulate_media(color_scheme=scheme)
        page.set_viewport_size({"width": width, "height": 900})
        require_accessible(page, f"runs, {scheme}")
        assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert (
        page.locator("svg")
        .get_attribute("aria-label")
        .startswith("round 0 wins 62 % against the original, interval 55–69 %; round 1 wins 62 %")
    )
    newest = page.locator(".round").first
    expect(newest).to_contain_text("1,200 (60 new)")
    expect(newest).to_contain_text("62 % (95 % interval 55–69 %)")
    expect(page.locator("pre")).to_contain_text("<script>")

    promote = page.get_by_role("button", name="Promote anyway the policy of round 0")
    expect(promote).to_be_hidden()
    page.locator("#ask-promote-0").press("Enter")
    expect(page.locator("#confirm-0 p")).to_contain_text(
        "Round 0 did not gain: its policy wins 62 %"
    )
    require_accessible(page, "a question before a promotion")
    promote.press("Enter")
    expect(page.locator("#promoted + p")).to_contain_text("the policy of round 0")
    page.get_by_role("button", name="Promote the policy of round 1").click()
    expect(newest.locator(".mark")).to_have_text("promoted")
    page.get_by_role("button", name="Roll back to round 0").click()
    page.get_by_role("button", name="Roll back to the original model").click()
    expect(page.locator("#promoted + p")).to_contain_text("the original model")
    history = read_promotions(out)
    assert [one.round for one in history] == [0, 1, 0, None]
    assert {one.by for one in history} == {"lea"}
    assert page.evaluate("window.hacked") is None

    newest.get_by_role("link", name="Report of the evaluation").click()
    page.wait_for_url("**/lead/runs/1/evaluate")
    expect(page.locator("h1")).to_have_text("Round 1")
    page.get_by_role("link", name="Back to Runs").click()
    wait_for_status(page, "Failed: InputError: <script>")


def test_a_lead_changes_only_what_the_file_opens(made: App, open_as: OpenAs) -> None:
    page = open_as(made, "lea", "lead/runs")
    fields = page.locator("#values [name]")
    assert [fields.nth(n).get_attribute("name") for n in range(fields.count())] == [
        "rounds",
        "stages.ppo.steps",
    ]
    page.fill("[name='stages.ppo.steps']", "0")
    page.get_by_role("button", name="Save settings").click()
    expect(page.locator("main > .problem")).to_have_text(
        "stages.ppo.steps is 0. Give a value of at least 1.", timeout=60_000
    )
    page.fill("[name='stages.ppo.steps']", "5")
    page.press("[name='stages.ppo.steps']", "Enter")
    expect(page.locator("#kept")).to_have_text("Saved.", timeout=60_000)
    assert page.locator("main > .problem").is_hidden()
    page.reload()
    expect(page.locator("[name='stages.ppo.steps']")).to_have_value("5")
    expect(page.locator("#values")).to_contain_text("The file says 2.")
    require_accessible(page, "a setting that a lead has changed")
    # What she has not changed stays that of the file, and what she is typing is not lost.
    lead_file = made.db.parent / "lead.yaml"
    assert yaml.safe_load(lead_file.read_text("utf-8")) == {"stages": {"ppo": {"steps": 5}}}
    page.fill("[name=rounds]", "4")
    page.locator("[data-op=unset]").click()
    expect(page.locator("[name='stages.ppo.steps']")).to_have_value("2", timeout=60_000)
    expect(page.locator("[name='stages.ppo.steps']")).to_be_focused()
    expect(page.get_by_role("button", name="Back to the file")).to_have_count(0)
    assert page.input_value("[name=rounds]") == "4"
    assert yaml.safe_load(lead_file.read_text("utf-8")) in (None, {})


def test_the_page_says_that_its_numbers_are_old(made: App, open_as: OpenAs) -> None:
    page = open_as(made, "lea", "lead/runs")
    old = page.locator("#old")
    expect(old).to_be_empty()
    file = made.db.parent / "commands.json"
    content = file.read_text("utf-8")
    file.write_text("{", encoding="utf-8")
    expect(old).to_contain_text("This page shows what was true at ")
    expect(old).to_contain_text(str(file))
    require_accessible(page, "old numbers")
    expect(page.locator(".round")).to_have_count(2)
    file.write_text(content, encoding="utf-8")
    expect(old).to_be_empty()


def test_an_annotator_has_no_runs(made: App, open_as: OpenAs) -> None:
    page = open_as(made, "ann", "lead/runs")
    answer = page.request.post(made.url + "lead/runs", data={"op": "start"})
    assert answer.status == 403
    assert page.reload().status == 403


def loop_process(out: Path) -> int:
    [beat] = read_heartbeats(out / "heartbeat")
    return beat.pid


def test_a_loop_is_started_paused_killed_and_resumed_in_the_browser(
    tmp_path: Path, tiny_model: Path, open_as: OpenAs, end_loop: list[Path]
) -> None:
    file = write_loop(tmp_path, tiny_model, "new_rankings: 3", "lead_may: [new_rankings]")
    fill(tmp_path)
    out = tmp_path / "out"
    end_loop.append(out)
    app = serve(file)
    page = open_as(app, "lea", "lead/runs")
    wait_for_status(page, "Not started yet.")
    page.get_by_role("button", name="Start").click()
    expect(page.locator(".stages")).to_contain_text("generate", timeout=1000 * SECONDS)
    wait_for_status(page, "Waiting for rankings: 0 of 3.")
    expect(page.locator(".stage-done")).to_contain_text("generate")
    require_accessible(page, "a running loop")

    expect(page.get_by_role("button", name="Pause after this stage")).to_have_count(0)
    expect(page.locator('[aria-labelledby="status"]')).to_contain_text(
        "Train now, which starts the round with fewer rankings, appears here"
    )
    page.get_by_role("button", name="Pause", exact=True).click()
    wait_for_status(page, "Paused by lea since ")
    page.fill("[name=new_rankings]", "2")
    page.get_by_role("button", name="Save settings").click()
    expect(page.locator("#kept")).to_have_text("Saved.", timeout=1000 * SECONDS)
    page.get_by_role("button", name="Resume").click()  # reads the settings again
    wait_for_status(page, "Waiting for rankings: 0 of 2.")

    first = loop_process(out)
    os.kill(first, signal.SIGKILL)
    wait_for_status(page, "The loop's process has ended without saying why")
    page.get_by_role("button", name="Resume").click()
    wait_for_status(page, "Waiting for rankings: 0 of 2.")
    app.stop()  # the loop goes on
    second = loop_process(out)
    assert second != first
    assert not process_has_ended(read_heartbeats(out / "heartbeat")[0])
    log = (out / "loop.log").read_text(encoding="utf-8")
    assert log.count("rlhf generate --config") == 1


def rank(page: Page, first: int, last: int) -> None:
    """Rank tasks by keyboard, as they are shown: the first, …, the last one of a person."""
    for number in range(first, last + 1):
        page.wait_for_selector(".rb-list .rb-card")
        submit_as_shown(page)
        page.wait_for_selector(f".rb-progress:has-text('{number} done')")


@pytest.mark.slow
def test_whole_rounds_without_a_shell(
    tmp_path: Path,
    tiny_model: Path,
    open_as: OpenAs,
    open_page: Callable[..., Page],
    end_loop: list[Path],
) -> None:
    lines = ("new_rankings: 150", "rounds: 1", "stop_without_gain: false")
    file = write_loop(tmp_path, tiny_model, *lines, "lead_may: [rounds, new_rankings]")
    prompts = [{"prompt": f"What is {n} + {n}?", "split": "test"} for n in range(12)]
    prompts += [{"prompt": f"Tell me about house {n}."} for n in range(48)]
    write_jsonl(tmp_path / "prompts.jsonl", prompts)
    out = tmp_path / "out"
    out.mkdir()
    add_people(out / "labels.db", "lea")
    end_loop.append(out)
    live = ("--model", str(out), "--max-new-tokens", "8", "--overlap", "2")
    app = serve(file, *live, kind=ProcessApp)
    try:
        lead = open_as(app, "lea", "lead/data")
        upload(lead, tmp_path / "prompts.jsonl")
        people = [invite(lead, app, open_page, name) for name in ("ann", "bob")]
        first_round(lead, app, people)
        next_round(lead, app, people)
        chat_promote_and_roll_back(lead, app, tiny_model)
        ask_people(lead, app)
    finally:
        app.stop()


def first_round(lead: Page, app: App, people: list[Page]) -> None:
    """Both rank the same tasks, agreement moves from nothing to a share with an interval, and the
    lead, who has waited for more than the sixty tasks can give, presses Train now."""
    lead.goto(app.url + "lead/runs")
    lead.get_by_role("button", name="Start").click()
    wait_for_status(lead, "Waiting for rankings: 0 of 150.")
    expect(lead.locator(".advice")).to_have_text(
        "150 rankings are missing, and the open tasks can give only 120. Import more "
        "prompts on the Data page."
    )
    expect(lead.get_by_role("button", name="Train now")).to_have_count(0)
    for person in people:
        person.reload()
    rank(people[0], 1, 15)
    assert agreement(lead, app, 15) == "–"
    rank(people[1], 1, 4)
    assert agreement(lead, app, 19) == "too few to say"  # on four tasks
    rank(people[1], 5, 15)
    lead.goto(app.url + "lead/runs")
    wait_for_status(lead, "Waiting for rankings: 30 of 150.")
    lead.get_by_role("button", name="Train now").click()
    wait_for_status(lead, "The policy of round 0 is ")
    now = lead.locator('[aria-labelledby="status"]')
    expect(now).to_contain_text("The loop has stopped because 1 of 1 round is done.")
    expect(lead.locator(".options li").last).to_have_text(
        "Another round cannot start while rounds is 1. Set rounds to 2 or more under Settings; "
        "then Start appears here."
    )
    assert re.fullmatch(r"\d+\s% \(\d+–\d+\)", agreement(lead, app, 30))
    lead.goto(app.url + "lead/runs")
    require_accessible(lead, "runs")
    lead.get_by_role("link", name="Report of the evaluation").click()
    lead.wait_for_url("**/lead/runs/0/evaluate")
    expect(lead.locator("h1")).to_be_visible()
    require_accessible(lead, "report")
    lead.go_back()


def next_round(lead: Page, app: App, people: list[Page]) -> None:
    """The lead asks for a second round and for fewer rankings, and both rank again."""
    lead.fill("[name=rounds]", "2")
    lead.fill("[name=new_rankings]", "4")
    lead.get_by_role("button", name="Save settings").click()
    expect(lead.locator("#kept")).to_have_text("Saved.", timeout=1000 * SECONDS)
    lead.get_by_role("button", name="Start").click()
    wait_for_status(lead, "Waiting for rankings: 0 of 4.")
    for person in people:
        person.reload()
        rank(person, 16, 17)
    expect(lead.locator('[aria-labelledby="status"]')).to_contain_text(
        "The loop has stopped because 2 of 2 rounds are done.", timeout=1000 * SECONDS
    )
    expect(lead.locator(".round")).to_have_count(2)
    require_accessible(lead, "two rounds")


def chat_promote_and_roll_back(lead: Page, app: App, original: Path) -> None:
    """Whatever is promoted answers in live mode."""
    out = app.db.parent
    assert ask(lead, app) == original
    for number in (0, 1):
        lead.goto(app.url + "lead/runs")
        if lead.locator(f"#ask-promote-{number}").count():  # tiny models hardly ever gain
            lead.click(f"#ask-promote-{number}")
        lead.click(f"#promote-{number}")
        expect(lead.locator(".mark")).to_be_visible()
        assert ask(lead, app) == out / f"round-{number}" / "ppo" / "policy"
    require_accessible(lead, "live mode")
    lead.goto(app.url + "lead/runs")
    lead.get_by_role("button", name="Roll back to round 0").click()
    expect(lead.locator("#promoted + p")).to_contain_text("the policy of round 0")
    assert promoted_round(read_promotions(out)) == 0
    assert ask(lead, app) == out / "round-0" / "ppo" / "policy"


def ask_people(lead: Page, app: App) -> None:
    """Pairs of the newest round come among the open tasks."""
    before = open_tasks(app)
    lead.goto(app.url + "lead/runs")
    lead.click("#ask-1")
    expect(lead.locator("main > .said")).to_contain_text("are on the board now, each for 2 people.")
    expect(lead.locator(".round").first).to_contain_text("votes are in, from 0 people")
    require_accessible(lead, "people were asked")
    lead.click("#votes-1")
    expect(lead.locator("main > .problem")).to_contain_text("Nobody has voted on round 1 yet.")
    assert open_tasks(app) > before


def open_tasks(app: App) -> int:
    with Store(app.db, read_only=True) as store:
        return num_open(store.connections)


def ask(page: Page, app: App) -> Path:
    """Ask live mode a question; the model that has answered it."""
    with Store(app.db, read_only=True) as store:
        before = {
            response.id for prompt in store.prompts() for response in store.responses(prompt.id)
        }
    page.goto(app.url + "live")
    page.wait_for_selector(".who:has-text('lea')", state="attached")
    page.click("[data-act=new]")
    page.wait_for_selector(".empty:visible")
    page.fill("#prompt", f"How was the trip? {len(before)}")
    page.press("#prompt", "Enter")
    page.wait_for_selector(".saved:has-text('The answers are complete')", timeout=1000 * SECONDS)
    with Store(app.db, read_only=True) as store:
        new = [
            response
            for prompt in store.prompts()
            for response in store.responses(prompt.id)
            if response.id not in before
        ]
    [model] = {response.model for response in new}
    return Path(model)
