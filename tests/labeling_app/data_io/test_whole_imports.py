"""An import is stored bit by bit, seen when it is whole, and leaves nothing when it is not."""

import json
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from labeling_app.data_io.exporting import export
from labeling_app.db.board.overlap import set_overlap
from labeling_app.db.imports import unfinished
from labeling_app.db.imports.unfinished import importing, recover, roll_back
from labeling_app.db.queue import TaskQueue
from labeling_app.db.store import Store
from labeling_app.web.board.session import Board
from rlhf.errors import InputError, InterruptedRunError
from rlhf.records.schema import Ranking
from tests.labeling_app.asking import ask
from tests.labeling_app.data_io.imports import TABLES, add, lines, require_whole, stored
from tests.labeling_app.data_io.lines import exported, write
from tests.servers.commands import Command, start_process


def test_nobody_sees_an_import_before_it_is_whole(store, queue, tmp_path):
    queue.add_annotator("ann")
    set_overlap(store.connections, 2)  # what eve has judged is for one more person
    with importing(store.connections, "in.jsonl") as current:
        prompt_id = add(store, "a", current.id)
        with Store(store.connections.path) as other:
            assert other.counts() == dict.fromkeys(store.counts(), 0)
            assert other.prompts() == []
            assert other.responses(prompt_id) == []
            assert list(other.ranked_prompts()) == []
            assert other.prompts_lacking_responses(4, "m") == []
            assert other.annotators() == {"ann": "human"}
            with pytest.raises(InputError, match=r"labels\.db is empty"):
                export(other, tmp_path / "out", "ranked")
        assert queue.next_task("ann") is None
    assert (store.counts()["prompts"], store.counts()["rankings"]) == (1, 1)
    assert [record.rankings[0].id for record in store.ranked_prompts()] == ["r a"]
    assert store.annotators() == {"ann": "human", "eve": "human"}
    assert queue.next_task("ann").messages[0]["content"] == "a"


def test_what_fails_is_taken_back_to_the_last_row(tmp_path, refused, run_json):
    db = tmp_path / "labels.db"
    path = write(tmp_path / "in.jsonl", [*lines(700), {"prompt": 5}])
    assert f"{path}:701: prompt must be text, found 5" in refused("import", path, "--db", db)
    with Store(db) as store:
        assert stored(store) == dict.fromkeys(TABLES, 0)
        assert store.counts() == dict.fromkeys(store.counts(), 0)
    run_json("import", write(path, lines(700)), "--db", db)
    with Store(db) as store:
        require_whole(store, 700)


def test_what_somebody_else_adds_meanwhile_stays_theirs(store):
    def add_and_fail() -> None:
        with importing(store.connections, "in.jsonl") as current:
            for text in ("a", "b"):
                add(store, text, current.id)
            add(store, "a", 0)
            raise InputError("a bad line", "Fix it.")

    with pytest.raises(InputError, match="a bad line"):
        add_and_fail()
    require_whole(store, 1, num_open=1)
    assert [prompt.text for prompt in store.prompts()] == ["a"]
    assert store.annotators() == {"eve": "human"}


def test_what_is_not_taken_back_cannot_be_deleted(store):
    with importing(store.connections, "in.jsonl") as current:
        add(store, "a", current.id)
    with pytest.raises(Exception, match="rankings are append-only"):
        store.connections.db.execute("DELETE FROM rankings")


def test_a_second_import_says_that_another_is_under_way(store, tmp_path, refused, monkeypatch):
    monkeypatch.setattr(unfinished, "WAIT_SECONDS", 0.1)
    path = write(tmp_path / "in.jsonl", lines(1))
    with importing(store.connections, "first.jsonl") as current:
        add(store, "a", current.id)
        said = refused("import", path, "--db", store.connections.path, exit_code=75)
        assert "Another import into" in said
        recover(store.connections)  # the board starts meanwhile
    require_whole(store, 1)
    assert not list(tmp_path.glob("*-import"))


# ------------------------------------------------------------------------------------- known ids


CHANGED = {
    "the prompt's text": (
        lambda line: line["prompt"]["messages"][0].update(content="other"),
        "is in the database with another text",
    ),
    "a response's text": (
        lambda line: line["responses"][0].update(text="other"),
        "is in the database with another text",
    ),
    "the annotator": (
        lambda line: line["rankings"][0].update(annotator="other"),
        "is in the database with another annotator",
    ),
    "a flag": (
        lambda line: line["rankings"][0].update(flags=["unsure"]),
        "is in the database with another flag",
    ),
    "the order": (
        lambda line: line["rankings"][0]["tiers"].reverse(),
        "is in the database with another order",
    ),
}


def test_an_export_is_known_to_its_own_database(tmp_path, run_json):
    """Under pseudonyms, also where strengths and flags were given."""
    db, out = tmp_path / "labels.db", tmp_path / "rankings"
    line = exported("a", id="r1")
    line["rankings"][0] |= {"strengths": [2], "flags": ["unsure"]}
    run_json("import", write(tmp_path / "in.jsonl", [line]), "--db", db)
    run_json("export", "--db", db, "--out", out)
    assert "person-" in (out / "train.jsonl").read_text()
    report = run_json("import", out / "train.jsonl", "--db", db)
    assert (report["new_rankings"], report["bad_lines"]) == (0, 0)


@pytest.mark.parametrize("where", ["in the file before", "in the line before"])
@pytest.mark.parametrize("name", CHANGED)
def test_a_known_id_with_other_content_is_refused(name, where, tmp_path, refused, run_json):
    change, problem = CHANGED[name]
    line = exported("a", id="r1")
    changed = json.loads(json.dumps(line))
    change(changed)
    db, path = tmp_path / "labels.db", tmp_path / "in.jsonl"
    if where == "in the file before":
        run_json("import", write(path, [line]), "--db", db)
    write(path, [line, changed])
    said = refused("import", path, "--db", db)
    assert f"{path}:2: " in said
    assert problem in said
    with Store(db) as store:
        assert store.counts()["rankings"] == (where == "in the file before")
        texts = [r.text for record in store.ranked_prompts() for r in record.responses]
        assert "other" not in texts


def test_a_response_of_another_prompt_is_refused(tmp_path, refused):
    first, second = exported("a"), exported("b")
    second["responses"][0]["id"] = first["responses"][0]["id"]
    second["rankings"] = []
    path = write(tmp_path / "in.jsonl", [first, second])
    said = refused("import", path, "--db", tmp_path / "labels.db")
    assert f"{path}:2: Response" in said
    assert "is in the database as one to prompt" in said


# ---------------------------------------------------------------------------------- few bad lines


def test_one_empty_response_in_101_lines_is_left_out_and_named(tmp_path, run_json):
    good = lines(100)
    bad = {"prompt": "x", "chosen": "y", "rejected": " "}
    path = write(tmp_path / "in.jsonl", [*good[:40], bad, *good[40:]])
    report = run_json("import", path, "--db", tmp_path / "labels.db")
    assert (report["lines"], report["new_prompts"], report["bad_lines"]) == (101, 100, 1)
    assert report["first_bad"] == [
        f"{path}:41: rejected is empty. Fill it in, or leave the line out."
    ]


def test_one_in_100_is_no_longer_few(tmp_path, refused):
    path = write(tmp_path / "in.jsonl", [*lines(99), {"prompt": "x", "responses": [""]}])
    db = tmp_path / "labels.db"
    said = refused("import", path, "--db", db)
    assert f"nothing to judge in 1 of 100 lines, the first: {path}:100: Response 0 is" in said
    with Store(db) as store:
        assert stored(store) == dict.fromkeys(TABLES, 0)


@pytest.mark.parametrize(
    "bad", [{"promt": "x"}, '{"prompt": ', {"prompt": "x", "responses": ["y"], "tiers": [[1]]}]
)
def test_a_line_that_is_misread_stops_by_default(bad, tmp_path, refused):
    path = write(tmp_path / "in.jsonl", [*lines(300), bad])
    assert f"{path}:301: " in refused("import", path, "--db", tmp_path / "labels.db")


def test_stop_stops_at_an_empty_response(tmp_path, refused):
    path = write(tmp_path / "in.jsonl", [*lines(300), {"prompt": "x", "responses": [""]}])
    arguments = ["import", str(path), "--db", str(tmp_path / "labels.db"), "--on-error", "stop"]
    assert f"{path}:301: Response 0 is empty" in refused(*arguments)


# ---------------------------------------------------------------------------------------- killed


def start_import(path: Path, db: Path) -> Command:
    return start_process("import", path, "--db", db)


def wait_until(process: Command, is_time: Callable[[], bool]) -> None:
    give_up = time.monotonic() + 120
    while not is_time():
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < give_up
        time.sleep(0.001)


def kill_when(process: Command, is_time: Callable[[], bool]) -> None:
    wait_until(process, is_time)
    process.kill()
    process.communicate()


def test_a_killed_import_is_never_seen_and_then_done_again(store, tmp_path, run_json):
    path = write(tmp_path / "in.jsonl", lines(1_000))
    kill_when(start_import(path, store.connections.path), lambda: stored(store)["prompts"] > 100)
    assert stored(store)["prompts"] < 1_000
    assert store.counts() == dict.fromkeys(store.counts(), 0)
    assert list(store.ranked_prompts()) == []
    other = write(tmp_path / "other.jsonl", lines(5, start=998))
    run_json("import", other, "--db", store.connections.path)
    require_whole(store, 5)
    run_json("import", path, "--db", store.connections.path)
    require_whole(store, 1_003)


def test_an_import_that_another_program_rolls_back_stores_nothing(store, tmp_path):
    path = write(tmp_path / "in.jsonl", lines(1_000))
    process = start_import(path, store.connections.path)
    wait_until(process, lambda: stored(store)["prompts"] > 100)
    roll_back(store.connections, 1)  # where locks of files do not work
    said = process.communicate()[1]
    assert process.returncode == 75, said
    assert "Another program has rolled this import back" in said
    assert stored(store) == dict.fromkeys(TABLES, 0)


def test_an_import_that_was_rolled_back_at_its_end_says_so(store):
    def add_and_roll_back() -> None:
        with importing(store.connections, "in.jsonl") as current:
            add(store, "a", current.id)
            roll_back(store.connections, current.id)

    with pytest.raises(InterruptedRunError, match="rolled this import back"):
        add_and_roll_back()
    assert stored(store) == dict.fromkeys(TABLES, 0)


@pytest.fixture
def full_disk_before_tasks(store) -> int:
    """An import of 300 prompts for whose tasks there is no room, and a check that cannot be made.

    Gives how large the file was allowed to be before.
    """
    seen = add(store, "seen", 0)
    TaskQueue(store).add_annotator("ann")
    TaskQueue(store).next_task("ann")
    responses = [response.id for response in store.responses(seen)]
    answer = Ranking(
        id="g", prompt_id=seen, annotator="eve", kind="human", tiers=((responses[0],),)
    )
    check = unfinished.Check(
        location="in.jsonl:7", answer=answer, responses=responses, purpose="gold", explanation=""
    )
    db = store.connections.db
    [most] = db.execute("PRAGMA max_page_count").fetchone()
    problem = r"no room for the tasks of in\.jsonl .*; its prompts, responses and rankings are"

    def add_and_fill_up() -> None:
        with importing(store.connections, "in.jsonl") as current:
            unfinished.defer_check(db, current.id, check)
            for number in range(300):
                add(store, str(number), current.id)
            db.execute(f"PRAGMA max_page_count = {db.execute('PRAGMA page_count').fetchone()[0]}")

    with pytest.raises(InterruptedRunError, match=problem):
        add_and_fill_up()
    return most


def test_a_disk_that_is_full_when_only_tasks_are_missing(store, full_disk_before_tasks, capfd):
    assert store.counts()["prompts"] == 301
    assert store.counts()["tasks"] < 301
    store.connections.db.execute(f"PRAGMA max_page_count = {full_disk_before_tasks}")
    recover(store.connections)
    assert stored(store)["tasks"] == 301
    assert stored(store)["import_tasks"] == 0
    # The import that was interrupted has reported nothing.
    assert capfd.readouterr().err == (
        "An interrupted import was completed. Gold or training tasks that were not made: 1, the "
        "first: in.jsonl:7: no gold task was made: somebody has seen this prompt\n"
    )
    recover(store.connections)
    assert capfd.readouterr().err == ""


def test_an_import_killed_when_only_tasks_are_missing_gets_them_later(store, tmp_path):
    path = write(tmp_path / "in.jsonl", lines(800))
    kill_when(start_import(path, store.connections.path), lambda: 0 < stored(store)["tasks"] < 700)
    assert store.counts()["rankings"] == 800
    assert store.counts()["tasks"] < 800
    recover(store.connections)  # as the board does when it starts
    require_whole(store, 800)


# ------------------------------------------------------------------------- the board meanwhile


def label_during_import(store: Store, queue: TaskQueue, path: Path) -> list[float]:
    """Seconds that each request of one busy person took while a file is imported."""
    queue.add_annotator("ann")
    board = Board(store, queue)
    process = start_import(path, store.connections.path)
    while not stored(store)["imports"]:
        assert process.poll() is None, process.communicate()[1]
        time.sleep(0.01)
    waited, number = [], 0
    task = ask(board, "ann", {"op": "next"})["task"]
    while process.poll() is None:
        time.sleep(0.01)
        began = time.monotonic()
        state = {"ticket": task["ticket"], "tiers": [[0], [1]]}
        answer = ask(board, "ann", {"op": "submit", "id": f"u{number}", **state})
        waited.append(time.monotonic() - began)
        assert answer["ok"]
        task, number = answer["task"], number + 1
    assert process.returncode == 0, process.communicate()[1]
    process.communicate()
    return waited


def test_the_board_answers_during_an_import(store, queue, fill, tmp_path):
    fill(1_000, 2)
    path = write(tmp_path / "in.jsonl", lines(1_500))
    began = time.monotonic()
    waited = label_during_import(store, queue, path)
    assert len(waited) > 20
    assert max(waited) < (time.monotonic() - began) / 4  # nobody waits for its end
    assert store.counts()["prompts"] == 2_500


@pytest.mark.slow
def test_the_board_answers_during_an_import_of_130_000_lines(store, queue, fill, tmp_path):
    fill(30_000, 2)
    path = write(tmp_path / "in.jsonl", lines(130_000))
    waited = label_during_import(store, queue, path)
    assert np.percentile(waited, 99) < 0.3
    assert store.counts()["prompts"] == 160_000
