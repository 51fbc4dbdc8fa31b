"""A backup is whole and of one moment, even while people label."""

import json
import sqlite3
import threading
from contextlib import closing

from labeling_app.db.queue import Submission, TaskQueue
from rlhf.cli import main


def test_a_backup_while_people_submit_is_consistent(store, fill, tmp_path, capsys):
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

    threads = [threading.Thread(target=label, args=(name,)) for name in names]
    for thread in threads:
        thread.start()
    try:
        before = store.counts()["rankings"]
        out = tmp_path / "backups" / "copy.db"
        arguments = ["backup", "--db", str(store.connections.path), "--out", str(out), "--json"]
        assert main(arguments) == 0
        after = store.counts()["rankings"]
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    held = json.loads(capsys.readouterr().out)["holds"]["rankings"]
    assert before <= held <= after
    with closing(sqlite3.connect(out)) as copy:
        assert copy.execute("PRAGMA integrity_check").fetchone()[0] == "ok"
        assert copy.execute("PRAGMA foreign_key_check").fetchall() == []
        live, counted, done = copy.execute(
            "SELECT (SELECT COUNT(*) FROM rankings WHERE live), "
            "(SELECT value FROM totals WHERE name = 'rankings'), "
            "(SELECT COUNT(*) FROM assignments WHERE state = 'done')"
        ).fetchone()
    assert live == counted == done == held


def test_refusals(store, tmp_path, capsys):
    db, out = str(store.connections.path), tmp_path / "copy.db"
    out.write_text("mine")
    assert main(["backup", "--db", db, "--out", str(out)]) == 2
    assert "already exists" in capsys.readouterr().err
    assert out.read_text() == "mine"
    fresh = str(tmp_path / "fresh.db")
    assert main(["backup", "--db", str(tmp_path / "none.db"), "--out", fresh]) == 2
    assert "No label database" in capsys.readouterr().err
    assert sorted(p.name for p in tmp_path.glob("*fresh*")) == []
