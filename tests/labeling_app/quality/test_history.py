"""One's own last work, newest first, and changing it."""

from labeling_app.db.queue import Submission
from labeling_app.db.store import Store
from labeling_app.quality.history import recent_work
from labeling_app.web.board.session import Board
from tests.labeling_app.asking import ask


def test_the_latest_comes_first_in_the_letters_on_the_screen(store, queue, fill):
    fill(3, 3)
    queue.add_annotator("ann")
    first = queue.next_task("ann")
    tiers = ((1,), (0, 2))
    queue.submit("ann", Submission(id="s1", task_id=first.id, tiers=tiers))
    second = queue.next_task("ann")
    queue.skip("ann", skip_id="k1", task_id=second.id, reason="Too long", note="")
    past = recent_work(store.connections, "ann")
    assert [(p.task_id, p.prompt, p.answer) for p in past] == [
        (second.id, "prompt 1", "skipped: Too long"),
        (first.id, "prompt 0", "B > A = C"),
    ]
    assert recent_work(store.connections, "bob") == []
    assert len(recent_work(store.connections, "ann", limit=1)) == 1


def test_all_bad_is_no_tie(store, queue, fill):
    fill(3, 2)
    queue.add_annotator("ann")
    answers = {((0, 1),): "all bad", ((1,), (0,)): "B > A, all bad"}
    for number, tiers in enumerate(answers):
        task = queue.next_task("ann")
        sent = Submission(id=f"s{number}", task_id=task.id, tiers=tiers, flags=("all-bad",))
        queue.submit("ann", sent)
    tie = queue.next_task("ann")
    queue.submit("ann", Submission(id="tie", task_id=tie.id, tiers=((0, 1),)))
    past = recent_work(store.connections, "ann")
    assert [one.answer for one in past] == ["A = B", *reversed(answers.values())]


def test_changing_an_old_one_through_the_board(store, queue, fill):
    fill(2, 2)
    queue.add_annotator("ann")
    board = Board(store, queue)
    task = ask(board, "ann", {"op": "next"})["task"]
    submit = {"op": "submit", "id": "u1", "ticket": task["ticket"], "tiers": [[0], [1]]}
    ask(board, "ann", submit)
    [past] = ask(board, "ann", {"op": "history"})["past"]
    opened = ask(board, "ann", {"op": "open", "ticket": past["ticket"]})["task"]
    assert (opened["ticket"], opened["draft"]["tiers"]) == (task["ticket"], [[0], [1]])
    ask(board, "ann", {**submit, "id": "u2", "tiers": [[1], [0]]})
    assert [p["answer"] for p in ask(board, "ann", {"op": "history"})["past"]] == ["B > A"]
    rows = list(store.connections.db.query("SELECT id, live, supersedes FROM rankings"))
    assert [(r["id"], r["live"], r["supersedes"]) for r in rows] == [
        ("u1", 0, None),
        ("u2", 1, "u1"),
    ]


def test_nobody_opens_the_work_of_others(store, queue, fill):
    fill(1, 2)
    for name in ("ann", "bob"):
        queue.add_annotator(name)
    board = Board(store, queue)
    task = ask(board, "ann", {"op": "next"})["task"]
    answer = ask(board, "bob", {"op": "open", "ticket": task["ticket"]})
    assert "was never given to bob" in answer["error"]


def test_the_rubric_is_rendered_and_its_version_stored(store: Store, queue, fill):
    fill(1, 2)
    queue.add_annotator("ann")
    board = Board(
        store, queue, rubric="Prefer **true** answers. <script>x</script>", flags=("odd",)
    )
    screen = ask(board, "ann", {"op": "next"})
    version = screen["rubric"]["version"]
    assert "<strong>true</strong>" in screen["rubric"]["html"]
    assert "<script" not in screen["rubric"]["html"]
    assert screen["flags"] == ("odd",)
    submit = {"op": "submit", "id": "u", "ticket": screen["task"]["ticket"], "rubric": version}
    ask(board, "ann", {**submit, "tiers": [[0], [1]]})
    db = store.connections.db
    assert db.execute("SELECT rubric FROM rankings").fetchone() == (version,)
    assert db.execute("SELECT version FROM rubrics").fetchall() == [(version,)]
    assert Board(store, queue, rubric="Another one").rubric["version"] != version
