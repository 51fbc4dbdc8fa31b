"""A disk that fills up: a clear message, the draft kept, nothing half-written, and it goes on."""

from labeling_app.db.queue import TaskQueue
from labeling_app.db.store import Store
from labeling_app.web.board.session import Board
from tests.labeling_app.asking import ask
from tests.labeling_app.conftest import fill_up
from tests.labeling_app.data_io.imports import lines, require_whole
from tests.labeling_app.data_io.lines import write

NOTE = "n" * 9_000


def test_a_full_disk_loses_nothing(small_disk, make_prompt, make_responses):
    with Store(small_disk / "labels.db") as store:
        for number in range(3):
            prompt = make_prompt(f"question {number}")
            store.add_prompts([prompt])
            store.add_responses(make_responses(prompt, ["a", "b"]))
        queue = TaskQueue(store)
        queue.add_annotator("ann")
        board = Board(store, queue)
        task = ask(board, "ann", {"op": "next"})["task"]
        state = {"tiers": [[1], [0]], "note": "kept"}
        assert ask(board, "ann", {"op": "draft", "ticket": task["ticket"], "state": state})["ok"]

        fill_up(small_disk)
        submission = {"op": "submit", "ticket": task["ticket"], "tiers": [[1], [0]], "note": NOTE}
        for number in range(1_000):  # the write-ahead log has some room left
            answer = ask(board, "ann", {**submission, "id": f"u{number}"})
            if not answer["ok"]:
                break
            submission |= {"ticket": answer["task"]["ticket"]} if answer["task"] else {}
            submission["note"] = f"{number}{NOTE}"
        assert answer["retry"]
        assert "The database could not write (database or disk is full)" in answer["error"]
        assert "Your draft is kept." in answer["error"]

        (small_disk / "filler").unlink()
        again = ask(board, "ann", {**submission, "id": f"u{number}"})
        assert again["ok"]
        db = store.connections.db
        assert db.execute("PRAGMA integrity_check").fetchone()[0] == "ok"
        stored = {row[0] for row in db.execute("SELECT id FROM rankings")}
        assert stored == {f"u{n}" for n in range(number + 1)}


def test_a_full_disk_leaves_nothing_and_the_next_import_is_whole(
    small_disk, tmp_path, refused, run_json
):
    path = write(tmp_path / "in.jsonl", lines(300))
    db = small_disk / "labels.db"
    Store(db).close()
    spare = small_disk / "spare"
    spare.write_bytes(b"\0" * 300_000)
    fill_up(small_disk)
    spare.unlink()
    said = refused("import", path, "--db", db, exit_code=75)
    assert f"The database has no room for {path} (database or disk is full)" in said
    assert "Free some space, then run the same command again." in said
    (small_disk / "filler").unlink()
    with Store(db) as store:
        assert store.counts() == dict.fromkeys(store.counts(), 0)
    run_json("import", path, "--db", db)
    with Store(db) as store:
        require_whole(store, 300)
