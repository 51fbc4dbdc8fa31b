"""The dashboard's numbers from a database made by hand, and a page on which nothing runs."""

import time
from collections.abc import Iterator
from datetime import UTC, datetime

import pytest

from labeling_app.db.board.overlap import num_open, set_overlap
from labeling_app.db.queue import Submission
from labeling_app.quality.report import measure_quality
from tests.labeling_app.conftest import quality_page

EVIL = "<script>alert(1)</script>${x}"


@pytest.fixture
def labelled(store, queue, make_prompt, make_responses):
    """Two tasks, two responses, two people: they agree on the first and differ on the second."""
    set_overlap(queue.connections, 2)
    for text in (EVIL, "second"):
        prompt = make_prompt(text)
        store.add_prompts([prompt])
        store.add_responses(make_responses(prompt, ["long " * 100, "short"]))
    for name, wishes in {"ann": ["long", "long"], EVIL: ["long", "short"]}.items():
        queue.add_annotator(name)
        for number, wish in enumerate(wishes):
            task = queue.next_task(name)
            best = next(i for i, text in enumerate(task.texts) if text.startswith(wish))
            queue.submit(
                name,
                Submission(
                    id=f"{name}{number}",
                    task_id=task.id,
                    tiers=((best,), (1 - best,)),
                    duration_ms=2_000 if name == "ann" else 60_000,
                ),
            )
    return store


def test_numbers(labelled):
    quality = measure_quality(labelled)
    assert quality.agreement[0] == 0.5  # 1 and 0
    assert quality.tau[0] == 0.0  # 1 and -1
    # Places 1,1 | 2,2 | 1,2 | 2,1 with n1 = n2 = 4: D_o = 4/8, D_e = 4/7, α = 1 - 7/8.
    assert quality.alpha == (pytest.approx(0.125), None, None)  # too few tasks for an interval
    assert quality.longer_wins[0] == 0.75
    assert sum(share for share, _, _ in quality.top_by_position) == pytest.approx(1.0)
    evil, ann = sorted(quality.people, key=lambda person: person.name)
    assert (ann.name, ann.done, ann.median_seconds) == ("ann", 2, 2.0)
    assert ann.too_fast == 1.0  # 505 characters in 2 s
    assert evil.too_fast == 0.0
    assert quality.matrix == {(EVIL, "ann"): (0.5, 2)}
    [worst] = quality.disagreements
    assert (worst.prompt, worst.agreement) == ("second", 0.0)
    assert worst.answers == ["A > B", "B > A"]


def test_what_too_few_tasks_say_is_not_shown_as_a_number(labelled):
    quality, page = measure_quality(labelled), quality_page(labelled)
    for person in quality.people:
        low, high = person.reliability[1:]
        assert high - low > 0.75
    # of both people: agreement with others and reliability
    assert page.count("<td>too few to say</td>") == 4
    assert page.count("<dd>too few to say</dd>") == 2  # agreement on pairs, alpha
    assert page.count('too few to say<i class="tall-0">') == 2  # the bars of both places


def test_the_page_escapes_everything(labelled):
    page = quality_page(labelled)
    assert page.count("<script") == 2  # the frame's, and the page's own, which renews the numbers
    assert "&lt;script&gt;alert(1)&lt;/script&gt;${x}" in page
    assert "on 73 %" in page
    assert "secret-model" not in page


def test_an_empty_database_has_a_page_too(store):
    page = quality_page(store)
    assert "No person has ranked anything yet." in page
    assert "No disagreements yet." in page


def test_reliability_is_estimated_from_shared_tasks(store, queue, fill):
    set_overlap(queue.connections, 3)
    fill(6, 2)
    for name, best in {"ann": "answer 0", "bob": "answer 0", "eve": "answer 1"}.items():
        queue.add_annotator(name)
        for number in range(6):
            task = queue.next_task(name)
            place = next(n for n, text in enumerate(task.texts) if text.endswith(best))
            tiers = ((place,), (1 - place,))
            queue.submit(name, Submission(id=f"{name}{number}", task_id=task.id, tiers=tiers))
    share = 2 / 3  # the share of votes, then the probability, that answer 0 is the better one
    for _ in range(100):
        right, wrong = (1 + 6 * share) / 8, (1 + 6 * (1 - share)) / 8
        odds = (right / (1 - right)) ** 2 * (1 - wrong) / wrong
        share = odds / (1 + odds)
    quality = measure_quality(store)
    found = {person.name: person.reliability for person in quality.people}
    assert found["ann"][0] == found["bob"][0] == pytest.approx(right, abs=1e-6)
    assert found["eve"][0] == pytest.approx(wrong, abs=1e-6)
    assert found["ann"][1] < right < found["ann"][2]
    assert "<td>87\u00a0% (" in quality_page(store)


@pytest.fixture
def tokyo(monkeypatch) -> Iterator[None]:
    """A server whose clock is nine hours ahead of UTC."""
    with monkeypatch.context() as patch:
        patch.setenv("TZ", "Asia/Tokyo")
        time.tzset()
        yield
    time.tzset()


def test_today_began_at_the_server_s_midnight(store, queue, fill, monkeypatch, tokyo):
    fill(2, 2)
    queue.add_annotator("ann")
    # 23:30 and 0:30 in Tokyo, both on the first of March in UTC.
    for minutes in (30, 90):
        at = datetime(2026, 3, 1, 14, 0, tzinfo=UTC).timestamp() + 60 * minutes
        monkeypatch.setattr(time, "time", lambda at=at: at)
        task = queue.next_task("ann")
        queue.submit("ann", Submission(id=str(at), task_id=task.id, tiers=((0,), (1,))))
    [ann] = measure_quality(store).people
    assert (ann.done, ann.today) == (2, 1)


def test_a_task_on_somebodys_screen_is_open_here_as_on_the_board(store, queue, fill):
    fill(2, 2)
    queue.add_annotator("ann")
    task = queue.next_task("ann")
    queue.submit("ann", Submission(id="1", task_id=task.id, tiers=((0,), (1,))))
    queue.next_task("ann")
    assert "<dd>1 of 2</dd>" in quality_page(store)
    assert num_open(store.connections) == 1  # as `rlhf label` says at its end
