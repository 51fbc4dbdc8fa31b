"""A disk that fills up: a clear message, the draft kept, nothing half-written, and it goes on."""

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from labeling_app.db.queue import TaskQueue
from labeling_app.db.store import Store
from labeling_app.web.board.session import Board
from tests.labeling_app.data_io.lines import write
from tests.labeling_app.data_io.test_whole_imports import lines, require_whole

NOTE = "n" * 9_000


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 4 MB of its own."""
    if os.geteuid() != 0:
        pytest.skip("mounting a small disk needs root")
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(folder)]
    mounted = subprocess.run(command, capture_output=True, text=True)
    if mounted.returncode:
        pytest.skip(f"no small disk can be mounted here: {mounted.stderr.strip()}")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


def fill_up(disk: Path) -> None:
    """Leave no free byte."""
    with (disk / "filler").open("wb", buffering=0) as filler:
        try:
            while True:
                filler.write(b"\0" * 4096)
        except OSError:
            return


def test_a_full_disk_loses_nothing(small_disk, make_prompt, make_responses):
    with Store(small_disk / "labels.db") as store:
        for number in range(3):
            prompt = make_prompt(f"question {number}")
            store.add_prompts([prompt])
            store.add_responses(make_responses(prompt, ["a", "b"]))
        queue = TaskQueue(store)
        queue.add_annotator("ann")
        board = Board(store, queue)
        task = board.answer("ann", {"op": "next"})["task"]
        state = {"tiers": [[1], [0]], "note": "kept"}
        assert board.answer("ann", {"op": "draft", "task_id": task["id"], "state": state})["ok"]

        fill_up(small_disk)
        submission = {"op": "submit", "task_id": task["id"], "tiers": [[1], [0]], "note": NOTE}
        for number in range(1_000):  # the write-ahead log has some room left
            answer = board.answer("ann", {**submission, "id": f"u{number}"})
            if not answer["ok"]:
                break
            submission |= {"task_id": answer["task"]["id"]} if answer["task"] else {}
            submission["note"] = f"{number}{NOTE}"
        assert answer["retry"]
        assert "The database could not write (database or disk is full)" in answer["error"]
        assert "Your draft is kept." in answer["error"]

        (small_disk / "filler").unlink()
        again = board.answer("ann", {**submission, "id": f"u{number}"})
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
