"""The page Quality: measured in another process, and again only when there are other rankings."""

import asyncio
import time
from dataclasses import replace
from pathlib import Path

import pytest

from labeling_app.data_io.exporting import export
from labeling_app.db.board.overlap import set_overlap
from labeling_app.db.imports.unfinished import importing
from labeling_app.db.queue import Submission
from labeling_app.web.lead.measured import FILTERS, Measured, Measurements, measure
from rlhf.errors import InputError
from rlhf.records.jsonl import read_jsonl
from tests.labeling_app.conftest import quality_page, run_async
from tests.labeling_app.data_io.imports import add


def children() -> list[str]:
    """The command lines of this process's children."""
    numbers = [
        number
        for thread in Path("/proc/self/task").iterdir()
        for number in (thread / "children").read_text().split()
    ]
    return [Path(f"/proc/{number}/cmdline").read_text() for number in numbers]


@pytest.fixture
def rank(queue, fill):
    fill(4, 2)
    queue.add_annotator("ann")

    def submit(number: int) -> int:
        task = queue.next_task("ann")
        queue.submit("ann", Submission(id=str(number), task_id=task.id, tiers=((0,), (1,))))
        return task.id

    return submit


def exported(folder: Path) -> list[dict]:
    """The records of an export that have a ranking."""
    return [one for one in read_jsonl(folder / "train.jsonl") if one["rankings"]]


def done(measured: Measured) -> list[int]:
    """How many rankings each person has made."""
    return [person.done for person in measured.quality.people]


def test_it_is_measured_in_another_process_once_for_each_state_of_the_rankings(store, queue, rank):
    first = rank(1)
    measurements = Measurements(store)

    async def run() -> None:
        before, same = await asyncio.gather(measurements.newest(), measurements.newest())
        assert same is before
        assert any("anyio.to_process" in one for one in children())
        assert done(before) == [1]
        queue.next_task("ann")  # a lease is no ranking
        assert await measurements.newest() is before
        rank(2)
        assert done(await measurements.newest()) == [2]
        queue.skip("ann", skip_id="s", task_id=first, reason="", note="")  # withdraws the ranking
        assert done(await measurements.newest()) == [1]

    run_async(run())


def test_it_is_measured_again_when_a_ranking_changes_beside_an_import(store, queue, rank):
    task_id = rank(1)
    measurements = Measurements(store)

    async def run() -> None:
        before = await measurements.newest()
        changed = Submission(id="2", task_id=task_id, tiers=((1,), (0,)))
        with importing(store.connections, "in.jsonl") as current:
            add(store, "a", current.id)
            hidden = await measurements.newest()
            queue.submit("ann", changed)
            after = await measurements.newest()
            assert after is not hidden
            assert after.quality.top_by_position != before.quality.top_by_position
            assert after.quality.num_considered == 1

    run_async(run())


def test_whoever_would_wait_long_sees_the_numbers_before(store, rank):
    rank(1)
    measurements = Measurements(store, rest=0.0)

    async def run() -> None:
        first = await measurements.soon(0.0)  # there are no numbers before
        assert done(first) == [1]
        rank(2)
        assert await measurements.soon(0.0) is first
        assert await measurements.soon(0.0) is first  # does not measure twice at a time
        newest = await measurements.newest()
        assert done(newest) == [2]
        assert await measurements.soon(60.0) is newest
        rank(3)
        assert done(await measurements.soon(60.0)) == [3]  # as long as one took is waited for
        rank(4)
        assert done(await measurements.soon(newest.seconds / 1e6)) == [3]

    run_async(run())


def test_what_failed_while_nobody_waited_is_said_once(store, rank, tmp_path):
    rank(1)
    measurements = Measurements(store, rest=0.0)
    (tmp_path / "broken.db").write_text("no database")

    async def run() -> None:
        first = await measurements.soon()
        rank(2)
        path, store.connections.path = store.connections.path, tmp_path / "broken.db"
        assert await measurements.soon(0.0) is first

        async def ask_until_it_is_said() -> None:
            while await measurements.soon(0.0) is first:
                await asyncio.sleep(0.01)

        with pytest.raises(InputError, match=r"broken\.db cannot be used"):
            await ask_until_it_is_said()
        store.connections.path = path
        assert done(await measurements.newest()) == [2]

    run_async(run())


def test_a_database_that_cannot_be_measured_has_a_page_that_says_so(
    store, rank, ask, tmp_path, monkeypatch: pytest.MonkeyPatch
):
    rank(1)
    (tmp_path / "broken.db").write_text("no database")
    monkeypatch.setattr(store.connections, "path", tmp_path / "broken.db")
    [answer] = ask([("GET", "/lead/quality", None)])
    assert answer.status_code == 503
    assert "broken.db cannot be used" in answer.text
    assert '<nav aria-label="Pages for leads">' in answer.text


def test_it_rests_after_a_measurement(store, rank):
    rank(1)
    measurements = Measurements(store, rest=1000.0)

    async def run() -> None:
        first = await measurements.soon()
        assert await measurements.soon(60.0) is first
        rank(2)
        assert await measurements.soon(60.0) is first

    run_async(run())


@pytest.mark.parametrize(
    ("seconds", "age"),
    [
        (0, "0 seconds"),
        (1, "1 second"),
        (119, "119 seconds"),
        (120, "2 minutes"),
        (9000, "2 hours"),
    ],
)
def test_the_age_of_numbers_is_said_in_words(store, seconds, age):
    measured = measure(store.connections.path)
    assert replace(measured, at=time.time() - seconds).age == age


def test_a_lead_sees_what_exports_and_reports_call_a_person(store, rank, tmp_path):
    rank(1)
    export(store, tmp_path / "out", "ranked")
    [called] = {one["rankings"][0]["annotator"] for one in exported(tmp_path / "out")}
    assert called.startswith("person-")
    assert f'<th scope="row">ann <small>{called}</small></th>' in quality_page(store)


def test_the_page_says_what_its_words_mean(store, rank):
    rank(1)
    text = " ".join(quality_page(store).split())
    for meaning in (
        "<b>Krippendorff's alpha</b> allows for chance: 1 means that people agree on everything, 0 "
        "no more than by chance.",
        "<b>Kendall's tau-b</b> compares whole orders, 1 for the same",
        "<b>Too fast</b>: the share of rankings that were submitted sooner than anybody can read "
        "the responses (120 characters a second).",
        "<b>Gold</b>: agreement with the known answers of gold tasks.",
        "<b>Self-agreement</b>: agreement with oneself on tasks that came again.",
    ):
        assert meaning in text


def test_the_page_says_how_old_its_numbers_are(store, rank):
    rank(1)
    assert "as they were" not in quality_page(store)
    assert "latest 1 ranking <span" in quality_page(store, is_old=True)
    assert "as they were 0 seconds ago" in quality_page(store, is_old=True)


def test_the_page_says_how_much_is_open_now(ask, rank):
    def open_tasks() -> str:
        [answer] = ask([("GET", "/lead/quality", None)])
        assert answer.status_code == 200
        return answer.text.partition("<dt>tasks still open</dt><dd>")[2].partition("</dd>")[0]

    assert open_tasks() == "4 of 4"
    rank(1)
    assert open_tasks() == "3 of 4"


@pytest.mark.parametrize(
    ("name", "value", "shown"),
    [
        ("interval", None, "–"),
        ("interval", (0.82, 0.01, 0.99), "too few to say"),
        ("interval", (0.82, None, None), "too few to say"),
        ("interval", (0.75, 0.30, 0.95), "75\u00a0% (30–95)"),  # three of four
        ("coefficient", (0.56, -0.11, 1.0), "0.56 (-0.11\u00a0to\u00a01.00)"),
        ("coefficient", (0.1, -0.8, 0.8), "too few to say"),
    ],
)
def test_a_number_is_shown_only_with_an_interval_that_says_something(name, value, shown):
    assert FILTERS[name](value) == shown


def test_the_first_rankings_are_being_measured_and_not_called_none(store, fill):
    fill(1, 2)
    page = quality_page(store, is_old=True)
    assert "New rankings are being measured." in page
    assert "<dd>being measured</dd>" in page
    assert "Being measured." in page
    assert "has ranked anything" not in page
    page = quality_page(store)
    assert "<dd>0</dd>" in page
    assert "being measured" not in page.lower()
    assert "No person has ranked anything yet." in page
    assert "and rankings by functions and judge models are not among them." in page


def test_the_page_says_how_many_people_rank_each_task(store, fill):
    fill(1, 2)
    assert "<code>rlhf label --overlap 2</code>" in quality_page(store)
    set_overlap(store.connections, 2)
    page = quality_page(store)
    assert "No disagreements yet. Each task is ranked by 2 people." in page
    assert "rlhf label --overlap" not in page
