"""A backup is whole and of one moment, even while people label."""

import sqlite3
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

from labeling_app.db.queue import Submission, TaskQueue


def test_a_backup_while_people_submit_is_consistent(store, fill, tmp_path, run_json):
    fill(300, 2)
    queue = TaskQueue(store)
    names = ["ann", "bob", "cat", "dan"]
    for name in names:
        queue.add_annotator(name)
    stop = threading.Event()

    def label(name: str) -> None:
        while not stop.is_set() and (task := queue.next_task(name)):
            submission = Submission(id=f"{name}-{task.id}", task_id=task.id, tiers=((0,), (1,)))
            queue.submit(name, submission)

    out = tmp_path / "backups" / "copy.db"
    with ThreadPoolExecutor(len(names)) as pool:
        labeling = pool.map(label, names)
        try:
            before = store.counts()["rankings"]
            held = run_json("backup", "--db", store.connections.path, "--out", out)["holds"]
            after = store.counts()["rankings"]
        finally:
            stop.set()
        list(labeling)
    assert before <= held["rankings"] <= after
    with closing(sqlite3.connect(out)) as copy:
        assert copy.execute("PRAGMA integrity_check").fetchone()[0] == "ok"
        assert copy.execute("PRAGMA foreign_key_check").fetchall() == []
        live, counted, done = copy.execute(
            "SELECT (SELECT COUNT(*) FROM rankings WHERE live), "
            "(SELECT value FROM totals WHERE name = 'rankings'), "
            "(SELECT COUNT(*) FROM assignments WHERE state = 'done')"
        ).fetchone()
    assert live == counted == done == held["rankings"]


def test_refusals(store, tmp_path, refused):
    db, out = str(store.connections.path), tmp_path / "copy.db"
    out.write_text("mine")
    assert "already exists" in refused("backup", "--db", db, "--out", out)
    assert out.read_text() == "mine"
    fresh = str(tmp_path / "fresh.db")
    assert "No label database" in refused("backup", "--db", tmp_path / "none.db", "--out", fresh)
    assert sorted(p.name for p in tmp_path.glob("*fresh*")) == []
