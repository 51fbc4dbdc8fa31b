"""How many people rank a task, and the one more where they differ."""

import pytest

from labeling_app.db.board.overlap import set_another_below, set_overlap
from labeling_app.db.queue import Submission
from rlhf.errors import InputError

ORDER = ("0", "1", "2", "3")


@pytest.fixture
def people(queue, store, fill):
    """Four people, one task of four answers that two rank."""
    fill(1, 4)
    set_overlap(store.connections, 2)
    for name in ("ann", "bob", "cat", "dan"):
        queue.add_annotator(name)
    return queue


def rank(queue, name: str, order: tuple[str, ...]) -> int:
    task = queue.next_task(name)
    places = {text[-1]: place for place, text in enumerate(task.texts)}
    tiers = tuple((places[text],) for text in order)
    queue.submit(name, Submission(id=f"{name}-{order}", task_id=task.id, tiers=tiers))
    return task.id


def test_a_third_person_only_where_two_differ(people, store):
    set_another_below(store.connections, 0.8)
    rank(people, "ann", ORDER)
    rank(people, "bob", ("0", "1", "3", "2"))  # 5 of 6 pairs agree: 0.83
    assert people.next_task("cat") is None
    # Bob thinks again: 4 of 6 agree, and a third is asked, once.
    people.reopen("bob", 1)
    rank(people, "bob", ("1", "0", "3", "2"))
    rank(people, "cat", ("3", "2", "1", "0"))
    assert people.next_task("dan") is None
    assert store.counts()["open"] == 0


def test_tasks_that_were_finished_before_are_looked_at_too(people, store):
    rank(people, "ann", ORDER)
    rank(people, "bob", ("3", "2", "1", "0"))
    assert people.next_task("cat") is None
    set_another_below(store.connections, 0.5)
    assert people.next_task("cat").id == 1
    assert people.next_task("dan") is None


def test_a_changed_overlap_keeps_the_extra_person(people, store):
    set_another_below(store.connections, 0.5)
    rank(people, "ann", ORDER)
    rank(people, "bob", ("3", "2", "1", "0"))
    set_overlap(store.connections, 3)
    assert rank(people, "cat", ORDER) == 1
    assert people.next_task("dan").id == 1


def test_nobody_differs_from_oneself(queue, store, fill):
    fill(1, 2)
    with pytest.raises(
        InputError, match=r"--another-below is 0.5, but one person.*\n.*--overlap 2"
    ):
        set_another_below(store.connections, 0.5)
