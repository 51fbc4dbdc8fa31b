"""Judgments made elsewhere count like those of the board: for tasks, agreement and exports."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from sqlite_utils import Database

from labeling_app.db.board.overlap import num_open, set_another_below, set_overlap
from labeling_app.db.files.migrations import migrations
from labeling_app.db.queue import Submission, TaskQueue
from labeling_app.db.store import Store
from labeling_app.quality.adjudication import open_adjudication, opinions_on
from labeling_app.quality.history import recent_work
from labeling_app.quality.report import Quality, measure_quality
from tests.labeling_app.conftest import quality_page, work_of
from tests.labeling_app.data_io.lines import pairwise

# Two people agree on the first task and differ on the second; nobody has seen the third.
AGREED = pairwise(1, ("ann", "left"), ("bob", "left"))
DIFFER = pairwise(2, ("ann", "left"), ("bob", "right"))
PROJECT = [AGREED, DIFFER, pairwise(3)]


@pytest.fixture
def add(store, tmp_path, run_json) -> Callable[..., dict]:
    """Import tasks of a project: the report."""

    def run(*tasks: dict) -> dict:
        path = tmp_path / "project.json"
        path.write_text(json.dumps(tasks))
        return run_json("import", path, "--db", store.connections.path)

    return run


def num_exported(store: Store) -> int:
    return sum(len(record.rankings) for record in store.ranked_prompts())


def check_numbers(quality: Quality) -> None:
    """Those of PROJECT."""
    assert quality.num_considered == 4
    assert quality.agreement is not None
    assert quality.agreement[0] == 0.5  # 1 and 0
    # Places 1,1 | 2,2 | 1,2 | 2,1 with n1 = n2 = 4: D_o = 4/8, D_e = 4/7, α = 1 - 7/8.
    assert quality.alpha == (pytest.approx(0.125), None, None)  # too few tasks for an interval
    assert quality.matrix == {("ann", "bob"): (0.5, 2)}
    # ann prefers the shorter answer twice, bob once.
    assert quality.longer_wins is not None
    assert quality.longer_wins[0] == 0.25
    assert [item.prompt for item in quality.disagreements] == ["question 2"]


def test_imported_judgments_are_measured(store, add):
    set_overlap(store.connections, 2)
    assert add(*PROJECT)["new_rankings"] == 4
    quality = measure_quality(store)
    check_numbers(quality)
    # The year 2024 was not today, and nobody knows in which order it was shown.
    assert (quality.last_hour, quality.top_by_position) == (0, [])
    ann, _ = quality.people
    assert (ann.done, ann.today, ann.median_seconds, ann.unchanged) == (2, 0, 12.5, None)
    page = quality_page(store)
    assert "Measured on the latest 4 rankings." in page
    assert "<dd>1 of 3</dd>" in page


def test_what_a_file_without_times_holds_has_no_speed(store, import_lines):
    import_lines({"prompt": "Hi?", "responses": ["a", "b"], "tiers": [[0], [1]]})
    quality = measure_quality(store)
    [person] = quality.people
    assert (person.done, person.today, person.median_seconds) == (1, 0, None)
    assert person.too_fast is None
    assert quality.last_hour == 0
    assert "<td>1</td><td>0</td><td>–</td>" in quality_page(store)


def test_what_was_judged_is_not_asked_again(store, queue, add):
    add(*PROJECT)
    assert num_open(store.connections) == 1
    assert work_of(queue, "eve") == ["question 3"]


def test_with_more_people_per_task_others_are_asked_what_they_have_not_judged(store, queue, add):
    add(*PROJECT)
    set_overlap(store.connections, 3)
    assert work_of(queue, "ann") == ["question 3"]
    assert work_of(queue, "eve") == ["question 1", "question 2", "question 3"]
    assert work_of(queue, "dan") == ["question 3"]
    assert num_open(store.connections) == 0


def test_one_more_person_is_asked_where_imported_judgments_differ(store, queue, add):
    set_overlap(store.connections, 2)
    set_another_below(store.connections, 0.6)
    add(AGREED, DIFFER)
    assert work_of(queue, "eve") == ["question 2"]


def test_a_later_export_adds_only_what_is_new(store, queue, add):
    set_overlap(store.connections, 2)
    add(pairwise(1, ("ann", "left")))
    assert num_open(store.connections) == 1
    assert add(AGREED)["new_rankings"] == 1
    assert add(AGREED)["new_rankings"] == 0
    assert num_open(store.connections) == 0
    assert num_exported(store) == measure_quality(store).num_considered == 2
    assert store.counts()["tasks"] == 1


def test_an_imported_judgment_can_be_settled_and_leaves_the_export_then(store, queue, add):
    set_overlap(store.connections, 2)
    add(DIFFER)
    [item] = measure_quality(store).disagreements
    queue.add_annotator("lead")
    open_adjudication(queue, "lead", item.task_id)
    task = queue.next_task("lead")
    assert sorted(one.answer for one in opinions_on(store.connections, task)) == ["A > B", "B > A"]
    queue.submit("lead", Submission(id="d", task_id=task.id, tiers=((0,), (1,))))
    assert num_exported(store) == 1


def test_undo_and_history_are_of_work_on_the_board(store, queue, add):
    add(AGREED)
    assert recent_work(store.connections, "ann") == []
    assert not queue.undo("ann")


def test_pairs_out_of_more_responses_leave_their_task_open(store, queue, import_lines):
    line = {"prompt": "Hi?", "responses": ["a", "b", "c"], "annotator": "ann"}
    import_lines({**line, "pairs": [[0, 1, "first"], [1, 2, "first"]]})
    assert num_exported(store) == 2
    assert work_of(queue, "ann") == ["Hi?"]


def test_a_signal_takes_nobodys_place(store, queue, import_lines):
    line = {"prompt": "Hi?", "responses": ["a", "b"], "scores": [1, 0]}
    import_lines({**line, "kind": "signal", "annotator": "words"})
    assert work_of(queue, "eve") == ["Hi?"]


def test_lines_of_one_prompt_make_one_task(store, queue, import_lines):
    first = {"prompt": "Hi?", "responses": ["a", "b"], "tiers": [[0], [1]], "annotator": "ann"}
    import_lines(first, {"prompt": "Hi?", "responses": ["a", "b", "c"]})
    assert store.counts()["tasks"] == 1
    assert work_of(queue, "eve") == ["Hi?"]


# ------------------------------------------------------------------------------- older databases


def downgrade(store: Store, path: Path) -> None:
    """The content of a database as the version before left it: judgments without their tasks."""
    old = Database(path)
    migrations.apply(old, stop_before="019_imported_judgments")
    old.attach("new", store.connections.path)
    for table in ("prompts", "responses", "annotators", "tasks", "rankings", "imports"):
        columns = [name for name in old[table].columns_dict if name != "task_id"]
        names = ", ".join(columns)
        old.execute(f"INSERT INTO {table} ({names}) SELECT {names} FROM new.{table}")
    old.execute("UPDATE tasks SET open = overlap")
    old.conn.commit()
    old.close()


def test_judgments_of_an_older_database_get_their_tasks(store, add, tmp_path):
    set_overlap(store.connections, 2)
    add(*PROJECT)
    downgrade(store, tmp_path / "old.db")
    with Store(tmp_path / "old.db") as opened:
        check_numbers(measure_quality(opened))
        assert num_open(opened.connections) == 1
        assert num_exported(opened) == opened.counts()["rankings"] == 4
        eve = TaskQueue(opened)
        assert work_of(eve, "eve") == ["question 3"]
        assert work_of(eve, "ann") == ["question 3"]
    with Store(tmp_path / "old.db") as opened:  # the step runs once
        assert num_exported(opened) == 6


def test_what_is_in_doubt_in_an_older_database_stays_as_it_is(store, add, tmp_path):
    add(*PROJECT)
    downgrade(store, tmp_path / "old.db")
    old = Database(tmp_path / "old.db")
    # ann was asked the first task again and ranked it; the second one was asked twice.
    old.execute(
        "INSERT INTO assignments SELECT 1, 'ann', 'done', responses, 0, 0 FROM tasks WHERE id = 1"
    )
    old.execute(
        "INSERT INTO rankings (id, prompt_id, task_id, annotator, tiers, shown, duration_ms,"
        " created_at) SELECT 'again', prompt_id, 1, 'ann', tiers, '[]', 1, 0 FROM rankings"
        " WHERE seq = 1"
    )
    old.execute("UPDATE tasks SET open = 0 WHERE id = 1")
    old.execute(
        "INSERT INTO tasks (prompt_id, responses, overlap, open, created_at)"
        " SELECT prompt_id, responses, 1, 1, 0 FROM tasks WHERE id = 2"
    )
    old.conn.commit()
    old.close()
    with Store(tmp_path / "old.db") as opened:
        rows = opened.connections.db.execute("SELECT task_id FROM rankings ORDER BY seq").fetchall()
        # ann's and bob's of the first task, theirs of the second, and ann's of the board
        assert [row[0] for row in rows] == [None, 1, None, None, 1]
        open_now = opened.connections.db.execute("SELECT id, open FROM tasks ORDER BY id")
        assert open_now.fetchall() == [(1, -1), (2, 1), (3, 1), (4, 1)]
        assert num_exported(opened) == 5
