"""The page Quality: measured in another process, and again only when there are other rankings."""

import asyncio
from pathlib import Path

import pytest

from labeling_app.db.imports.unfinished import importing
from labeling_app.db.queue import Submission
from labeling_app.web.lead.quality import Measurements
from tests.labeling_app.conftest import run_async
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
    fill(3, 2)
    queue.add_annotator("ann")

    def submit(number: int) -> int:
        task = queue.next_task("ann")
        queue.submit("ann", Submission(id=str(number), task_id=task.id, tiers=((0,), (1,))))
        return task.id

    return submit


def test_it_is_measured_in_another_process_once_for_each_state_of_the_rankings(store, queue, rank):
    first = rank(1)
    measurements = Measurements(store)

    async def run() -> None:
        before, same = await asyncio.gather(measurements.newest(), measurements.newest())
        assert same is before
        assert any("anyio.to_process" in one for one in children())
        assert [person.done for person in before.people] == [1]
        queue.next_task("ann")  # a lease is no ranking
        assert await measurements.newest() is before
        rank(2)
        after = await measurements.newest()
        assert [person.done for person in after.people] == [2]
        queue.skip("ann", skip_id="s", task_id=first, reason="", note="")  # withdraws the ranking
        assert [person.done for person in (await measurements.newest()).people] == [1]

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
            assert after.top_by_position != before.top_by_position
            assert after.num_considered == 1

    run_async(run())


def test_whoever_would_wait_long_sees_the_numbers_before(store, rank):
    rank(1)
    measurements = Measurements(store, rest=0.0)

    async def run() -> None:
        first, is_old = await measurements.soon(0.0)  # there are no numbers before
        assert ([person.done for person in first.people], is_old) == ([1], False)
        rank(2)
        assert await measurements.soon(0.0) == (first, True)
        assert await measurements.soon(0.0) == (first, True)  # does not measure twice at a time
        newest = await measurements.newest()
        assert [person.done for person in newest.people] == [2]
        assert await measurements.soon(60.0) == (newest, False)

    run_async(run())


def test_it_rests_after_a_measurement(store, rank):
    rank(1)
    measurements = Measurements(store, rest=1000.0)

    async def run() -> None:
        first, _ = await measurements.soon()
        assert await measurements.soon(60.0) == (first, False)
        rank(2)
        assert await measurements.soon(60.0) == (first, True)

    run_async(run())


def test_the_page_says_how_much_is_open_now(ask, rank):
    def open_tasks() -> str:
        [answer] = ask([("GET", "/lead/quality", None)])
        assert answer.status_code == 200
        return answer.text.partition("<dt>tasks still open</dt><dd>")[2].partition("</dd>")[0]

    assert open_tasks() == "3 of 3"
    rank(1)
    assert open_tasks() == "2 of 3"
