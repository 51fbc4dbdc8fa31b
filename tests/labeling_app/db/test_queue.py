"""Who gets which task, and that a label is never lost or counted twice."""

from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest

from labeling_app.db.board.checks import CheckRates
from labeling_app.db.board.overlap import set_overlap
from labeling_app.db.people.sources import give_source
from labeling_app.db.queue import Submission, TaskQueue
from labeling_app.db.rankings import num_done
from labeling_app.db.tasks import insert_task
from rlhf.errors import InputError
from tests.labeling_app.conftest import work_of


def submission(task, tiers, id="s1", **fields) -> Submission:
    return Submission(id=id, task_id=task.id, tiers=tuple(map(tuple, tiers)), **fields)


def stored(queue: TaskQueue) -> list[dict]:
    return list(queue.connections.db.query("SELECT * FROM rankings ORDER BY seq"))


@pytest.fixture
def people(queue):
    for name in ("ann", "bob", "cat"):
        queue.add_annotator(name)
    return queue


def test_positions_become_response_ids_in_the_order_shown(people, store, fill):
    [prompt] = fill(1, 4)
    task = people.next_task("ann")
    people.submit("ann", submission(task, [[2], [0, 3], [1]], strengths=(3, 0), flags=("all-bad",)))
    [record] = store.ranked_prompts()
    [ranking] = record.rankings
    shown = task.shown_order
    assert ranking.tiers == ((shown[2],), (shown[0], shown[3]), (shown[1],))
    assert ranking.strengths == ()  # one of the two was left open
    assert ranking.flags == ("all-bad",)
    assert (ranking.annotator, ranking.kind, ranking.prompt_id) == ("ann", "human", prompt.id)
    assert sorted(shown) == sorted(response.id for response in record.responses)


def test_orders_differ_between_annotators(people, fill):
    fill(1, 9)
    set_overlap(people.connections, 3)
    shown = {people.next_task(name).shown_order for name in ("ann", "bob", "cat")}
    assert len(shown) == 3  # three equal shuffles of nine: once in 10^10 runs
    assert people.next_task("ann").shown_order in shown  # and each keeps its own


def test_sending_twice_stores_once(people, fill):
    fill(2, 2)
    task = people.next_task("ann")
    for _ in range(2):
        people.submit("ann", submission(task, [[0], [1]]))
    people.submit("ann", submission(task, [[0], [1]], id="a double Ctrl+Enter"))
    assert len(stored(people)) == 1
    assert num_done(people.connections, "ann") == 1


def test_a_changed_mind_supersedes_and_keeps_the_first(people, store, fill):
    fill(1, 2)
    task = people.next_task("ann")
    people.submit("ann", submission(task, [[0], [1]]))
    people.submit("ann", submission(task, [[1], [0]], id="s2"))
    old, new = stored(people)
    assert (old["live"], new["live"], new["supersedes"]) == (0, 1, "s1")
    [record] = store.ranked_prompts()
    assert record.rankings[0].tiers == ((task.shown_order[1],), (task.shown_order[0],))


def test_undo_opens_the_last_one_with_its_answer_and_loses_nothing(people, fill):
    fill(2, 3)
    first = people.next_task("ann")
    people.submit(
        "ann", submission(first, [[1], [0, 2]], response_flags=((2, "unsafe"),), note="hm")
    )
    people.next_task("ann")
    assert people.undo("ann")
    again = people.next_task("ann")
    assert again.id == first.id
    assert again.shown_order == first.shown_order
    assert again.draft == {
        "tiers": [[1], [0, 2]],
        "strengths": [],
        "flags": [],
        "response_flags": [[2, "unsafe"]],
        "note": "hm",
    }
    assert stored(people)[0]["live"] == 1
    people.submit("ann", submission(again, [[0], [1], [2]], id="s2"))
    assert [row["live"] for row in stored(people)] == [0, 1]


def test_undo_of_a_skip_and_of_nothing(people, fill):
    fill(2, 2)
    assert not people.undo("ann")
    task = people.next_task("ann")
    people.skip("ann", skip_id="k1", task_id=task.id, reason="too long", note="")
    assert people.next_task("ann").id != task.id
    assert people.undo("ann")
    assert people.next_task("ann").id == task.id


def test_a_skipped_task_goes_to_others(people, fill):
    fill(1, 2)
    task = people.next_task("ann")
    for _ in range(2):
        people.skip("ann", skip_id="k1", task_id=task.id, reason="too long", note="")
    assert people.next_task("ann") is None
    assert people.next_task("bob").id == task.id


def test_overlap_counts_rankings_and_live_leases(people, fill):
    fill(1, 2)
    set_overlap(people.connections, 2)
    task = people.next_task("ann")
    people.submit("ann", submission(task, [[0], [1]]))
    assert people.next_task("bob").id == task.id
    assert people.next_task("cat") is None
    assert people.busy_elsewhere("cat")[0] == 1
    assert people.next_task("ann") is None


def test_sixty_requests_at_once_give_exactly_two_leases_a_task(people, store, fill):
    fill(10, 2)
    set_overlap(people.connections, 2)
    names = [f"annotator {index}" for index in range(60)]
    for name in names:
        people.add_annotator(name)
    with ThreadPoolExecutor(len(names)) as pool:
        got = [task and task.id for task in pool.map(people.next_task, names)]
    counts = Counter(got)
    assert counts.pop(None) == 40
    assert sorted(counts.values()) == [2] * 10
    assert store.counts()["open"] == 0


def test_an_expired_lease_frees_the_task_and_a_late_answer_still_counts(store, people, fill):
    fill(1, 2)
    short_leases = TaskQueue(store, lease_seconds=-1)
    task = short_leases.next_task("ann")
    short_leases.save_draft("ann", task.id, {"note": "half done"})
    assert people.next_task("bob").id == task.id
    people.submit("ann", submission(task, [[0], [1]]))
    people.submit("bob", submission(task, [[0], [1]], id="s2"))
    assert [row["annotator"] for row in stored(people)] == ["ann", "bob"]
    assert store.counts()["open"] == 0


def test_a_draft_survives_its_lease_and_comes_first(store, people, fill):
    fill(3, 2)
    short_leases = TaskQueue(store, lease_seconds=-1)
    task = short_leases.next_task("ann")
    short_leases.save_draft("ann", task.id, {"note": "half done"})
    again = people.next_task("ann")
    assert (again.id, again.draft) == (task.id, {"note": "half done"})


def test_a_late_draft_does_not_reopen_a_submitted_task(people, fill):
    fill(2, 2)
    task = people.next_task("ann")
    people.submit("ann", submission(task, [[0], [1]]))
    people.save_draft("ann", task.id, {"note": "late"})
    assert people.next_task("ann").id != task.id


def test_the_database_is_the_same_after_a_restart(store, people, fill):
    fill(3, 2)
    task = people.next_task("ann")
    assert TaskQueue(store).next_task("ann") == task


@pytest.mark.parametrize("tiers", [[[0], [5]], [[-1], [0]], [], [[0, 1]]])
def test_positions_that_do_not_fit_are_refused(people, fill, tiers):
    fill(1, 2)
    task = people.next_task("ann")
    with pytest.raises(InputError, match="does not fit its 2 responses"):
        people.submit("ann", submission(task, tiers, strengths=(0, 1)))
    assert stored(people) == []


def test_a_task_of_somebody_else_is_refused(people, fill):
    fill(1, 2)
    task = people.next_task("ann")
    with pytest.raises(InputError, match="was never given to bob"):
        people.submit("bob", submission(task, [[0], [1]]))


def test_an_overlong_draft_is_refused(people, fill):
    fill(1, 2)
    task = people.next_task("ann")
    with pytest.raises(InputError, match="The draft has"):
        people.save_draft("ann", task.id, {"note": "x" * 300_000})


@pytest.mark.parametrize("query", ["tasks_open", "leases_of_annotator"])
def test_the_next_task_is_found_by_index_alone(people, fill, query):
    fill(3, 2)
    statements = {
        "tasks_open": "SELECT id FROM tasks t WHERE open > 0 AND only_for IS NULL"
        " AND purpose IN ('rank', 'compare') AND reserved IS NULL"
        " ORDER BY priority DESC, id LIMIT 1",
        "leases_of_annotator": "SELECT task_id FROM assignments WHERE annotator = 'ann'"
        " AND state = 'leased' ORDER BY updated_at DESC LIMIT 1",
    }
    plan = list(people.connections.db.query("EXPLAIN QUERY PLAN " + statements[query]))
    assert query in plan[0]["detail"]
    assert len(plan) == 1  # no sorting, no second scan


def test_a_skip_takes_ones_ranking_back(people, store, fill):
    fill(1, 2)
    task = people.next_task("ann")
    people.submit("ann", submission(task, [[0], [1]]))
    assert people.undo("ann")
    people.skip("ann", skip_id="k1", task_id=task.id, reason="too long", note="")
    assert num_done(people.connections, "ann") == 0
    assert store.counts()["rankings"] == 0
    assert [record.rankings for record in store.ranked_prompts()] == [()]
    assert people.undo("ann")  # a skip by mistake: what was said is there again, as a draft
    assert people.next_task("ann").draft["tiers"] == [[0], [1]]
    people.skip("ann", skip_id="k2", task_id=task.id, reason="too long", note="")
    assert people.next_task("bob").id == task.id


def test_a_skip_keeps_the_work_for_an_undo(people, fill):
    fill(1, 3)
    task = people.next_task("ann")
    people.save_draft("ann", task.id, {"tiers": [[0], [1], [2]], "note": "saved"})
    people.skip("ann", skip_id="k1", task_id=task.id, reason="too long", note="")
    assert people.next_task("ann") is None  # the kept draft brings nothing back by itself
    assert people.undo("ann")
    assert people.next_task("ann").draft["note"] == "saved"
    newer = {"tiers": [[2], [1, 0]], "note": "not saved before the skip"}
    people.skip("ann", skip_id="k2", task_id=task.id, reason="too long", note="", state=newer)
    people.undo("ann")
    assert people.next_task("ann").draft == newer
    people.submit("ann", submission(task, [[1], [0], [2]]))
    people.undo("ann")
    assert people.next_task("ann").draft["tiers"] == [[1], [0], [2]]
    newest = {"tiers": [[0], [1], [2]], "note": "second thoughts"}
    people.skip("ann", skip_id="k3", task_id=task.id, reason="too long", note="", state=newest)
    people.undo("ann")
    assert people.next_task("ann").draft == newest


def test_a_correction_that_was_left_gives_way_to_the_ranking_that_stands(people, fill):
    fill(1, 2)
    task = people.next_task("ann")
    people.submit("ann", submission(task, [[0], [1]]))
    people.undo("ann")
    people.save_draft("ann", task.id, {"tiers": [[1], [0]], "note": "half"})
    people.connections.db.execute("UPDATE assignments SET expires_at = 1")
    assert people.next_task("ann") is None
    people.reopen("ann", task.id)
    draft = people.next_task("ann").draft
    assert (draft["tiers"], draft["note"]) == ([[0], [1]], "")


def test_a_corrected_ranking_counts_the_time_of_both_passes(people, fill):
    fill(1, 2)
    task = people.next_task("ann")
    people.submit("ann", submission(task, [[0], [1]], duration_ms=90_000))
    people.undo("ann")
    people.submit("ann", submission(task, [[1], [0]], id="s2", duration_ms=4_000))
    assert [row["duration_ms"] for row in stored(people)] == [90_000, 94_000]


def test_a_skip_from_another_tab_counts_once(people, store, fill):
    fill(1, 2)
    task = people.next_task("ann")
    people.submit("ann", submission(task, [[0], [1]]))
    for _ in range(2):
        people.skip("ann", skip_id="k1", task_id=task.id, reason="too long", note="")
    assert (num_done(people.connections, "ann"), store.counts()["open"]) == (0, 1)
    people.reopen("ann", task.id)
    people.submit("ann", submission(task, [[1], [0]], id="s2"))
    people.skip("ann", skip_id="k1", task_id=task.id, reason="too long", note="")
    assert [row["live"] for row in stored(people)] == [0, 1]
    assert (num_done(people.connections, "ann"), store.counts()["open"]) == (1, 0)


def add_vote(store, prompt) -> None:
    """A vote on the responses to a prompt, before all other tasks."""
    ids = [response.id for response in store.responses(prompt.id)]
    with store.connections.write() as db:
        insert_task(db, prompt.id, ids, purpose="compare", priority=1)


@pytest.mark.parametrize("is_given", [False, True])
@pytest.mark.parametrize(("num_prompts", "asked"), [(3, [0, 1, 0, 2]), (1, [0, 0])])
def test_a_prompt_comes_twice_in_a_row_only_if_nothing_else_is_open(
    num_prompts, asked, is_given, people, store, fill
):
    prompts = fill(num_prompts, 2)
    add_vote(store, prompts[0])
    if is_given:
        give_source(store.connections, "test", ["ann"], [])
    assert work_of(people, "ann") == [f"prompt {number}" for number in asked]


def test_what_was_skipped_does_not_come_again_at_once(people, store, fill):
    prompts = fill(2, 2)
    add_vote(store, prompts[0])
    vote = people.next_task("ann")
    people.skip("ann", skip_id="s", task_id=vote.id, reason="", note="")
    assert work_of(people, "ann") == ["prompt 1", "prompt 0"]


def test_what_was_just_voted_on_is_not_repeated(people, store, fill):
    prompts = fill(12, 2)
    for number in range(11):
        people.submit("ann", submission(people.next_task("ann"), [[0], [1]], id=f"{number}"))
    add_vote(store, prompts[0])
    people.submit("ann", submission(people.next_task("ann"), [[0], [1]], id="vote"))
    queue = TaskQueue(store, checks=CheckRates(repeat_every=1))  # prompt 0 is the next to repeat
    task = queue.next_task("ann")
    assert (task.purpose, task.messages[-1]["content"]) == ("rank", "prompt 11")
    queue.submit("ann", submission(task, [[0], [1]], id="last"))
    assert queue.next_task("ann").purpose == "repeat"
