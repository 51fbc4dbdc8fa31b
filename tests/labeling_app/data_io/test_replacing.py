"""`rlhf import --replace`: a later export of a project takes the place of the earlier ones."""

import json
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from labeling_app.data_io.formats import Defaults
from labeling_app.data_io.importing import import_file, source_for
from labeling_app.data_io.reading import Part
from labeling_app.db.board.overlap import num_open
from labeling_app.db.imports import unfinished
from labeling_app.db.imports.unfinished import recover
from labeling_app.db.people.sources import give_source
from labeling_app.db.queue import Submission
from labeling_app.db.store import Store
from rlhf.cli import main
from tests.labeling_app.conftest import work_of
from tests.labeling_app.data_io.lines import ARGILLA, BY_U1, pairwise

FIRST = [pairwise(1, ("ann", "left"), ("bob", "left")), pairwise(2, ("ann", "left"))]
# Ann has changed the first, bob has withdrawn his, and there is a third.
LATER = [
    pairwise(1, ("ann", "right")),
    pairwise(2, ("ann", "left")),
    pairwise(3, ("bob", "left")),
]


@pytest.fixture
def add(store, tmp_path, run_json) -> Callable[..., dict]:
    def run(tasks: list[dict], *options: str, name: str = "project.json") -> dict:
        path = tmp_path / name
        path.write_text(json.dumps(tasks))
        return run_json("import", path, "--db", store.connections.path, *options)

    return run


def judged(store: Store) -> set[tuple[str, str, str]]:
    """(prompt, annotator, best response) of every ranking that is exported."""
    return {
        (
            record.prompt.text,
            ranking.annotator,
            next(r.text for r in record.responses if r.id == ranking.tiers[0][0]),
        )
        for record in store.ranked_prompts()
        for ranking in record.rankings
    }


AFTER_FIRST = {
    ("question 1", "ann", "yes"),
    ("question 1", "bob", "yes"),
    ("question 2", "ann", "yes"),
}
AFTER_LATER = {
    ("question 1", "ann", "certainly"),
    ("question 2", "ann", "yes"),
    ("question 3", "bob", "yes"),
}


def counts(report: dict) -> tuple[int, int, int]:
    return report["new_rankings"], report["replaced"], report["unchanged"]


def test_a_later_export_takes_the_place_of_the_earlier(store, queue, add):
    add(FIRST)
    assert counts(add(LATER, "--replace")) == (2, 2, 1)
    assert judged(store) == AFTER_LATER
    assert store.counts()["rankings"] == 3
    [kept] = store.connections.db.execute("SELECT COUNT(*) FROM rankings").fetchone()
    assert kept == 5  # those that were replaced stay in the database
    assert counts(add(LATER, "--replace")) == (0, 0, 3)
    assert judged(store) == AFTER_LATER
    assert work_of(queue, "ann") == work_of(queue, "cleo") == []


def test_without_it_changed_judgments_stand_beside_the_earlier(store, add):
    add(FIRST)
    assert counts(add(LATER)) == (2, 0, 0)
    assert judged(store) == AFTER_FIRST | AFTER_LATER


def test_what_a_later_file_has_again_is_back(store, add):
    add(FIRST)
    add(LATER, "--replace")
    assert counts(add(FIRST, "--replace")) == (0, 2, 1)
    assert judged(store) == AFTER_FIRST
    assert counts(add(LATER, "--replace")) == (0, 2, 1)
    assert judged(store) == AFTER_LATER


def test_what_any_file_has_again_counts_again(store, queue, add):
    add(FIRST)
    add(LATER, "--replace")
    report = add(FIRST, "--source", "elsewhere")
    assert (report["new_rankings"], report["returned"]) == (0, 1)  # ann has changed hers since
    assert judged(store) == AFTER_LATER | {("question 1", "bob", "yes")}
    assert work_of(queue, "ann") == []
    assert add(FIRST)["returned"] == 0


def test_argilla_says_no_times_and_may_return_to_an_earlier_order(store, add):
    def order(*names: str) -> list[dict]:
        said = {"preference": [{"value": [f"response_{n}" for n in names], **BY_U1}]}
        return [{**ARGILLA, "responses": said}]

    for names in ("123", "321", "123"):
        add(order(*names), "--replace")
        [record] = store.ranked_prompts()
        texts = {r.id: r.text for r in record.responses}
        [ranking] = record.rankings
        assert texts[ranking.tiers[0][0]] == {"1": "no", "3": "maybe"}[names[0]]


def test_a_task_whose_judgment_was_withdrawn_is_open_again(store, queue, add):
    add(FIRST)
    assert num_open(store.connections) == 0
    withdrawn = [pairwise(1), pairwise(2, ("ann", "left"))]
    assert counts(add(withdrawn, "--replace")) == (0, 2, 1)
    assert work_of(queue, "cleo") == ["question 1"]
    add(FIRST, "--replace")
    assert work_of(queue, "dan") == []


def test_other_sources_and_the_board_are_left_alone(store, queue, add):
    add(FIRST, name="other.json")
    add([pairwise(4, ("ann", "left")), pairwise(5)])
    queue.add_annotator("ann")
    task = queue.next_task("ann")
    queue.submit("ann", Submission(id="s", task_id=task.id, tiers=((0,), (1,))))
    before = judged(store)
    add([pairwise(4, ("ann", "right")), pairwise(5)], "--replace")
    changed = {("question 4", "ann", "yes"), ("question 4", "ann", "certainly")}
    assert judged(store) ^ before == changed
    report = add(LATER, "--replace", name="third.json")
    assert counts(report) == (2, 0, 0)
    assert report["other_sources"] == ["other", "project"]
    add(LATER, "--source", "other", "--replace", name="fourth.json")
    assert ("question 1", "bob", "yes") not in judged(store)


class KilledError(BaseException):
    pass


@pytest.mark.parametrize("place", ["replace_earlier", "defer_link", "make_deferred_tasks"])
def test_an_import_that_is_killed_replaces_all_or_nothing(store, add, tmp_path, monkeypatch, place):
    add(FIRST)
    path = tmp_path / "project.json"
    path.write_text(json.dumps(LATER))
    real = getattr(unfinished, place)
    calls = []

    def die(*arguments: object) -> None:
        calls.append(arguments)
        if place == "make_deferred_tasks" and len(calls) == 1:
            return real(*arguments)  # of `clean_up` before the import
        real(*arguments)
        raise KilledError

    with monkeypatch.context() as patched:
        patched.setattr(unfinished, place, die)
        patched.setattr(unfinished, "roll_back", lambda *_: None)  # nobody is left to do that
        with pytest.raises(KilledError):
            import_file(
                path, store.connections.path, Defaults(), "few", Part(), replace_earlier=True
            )
    is_whole = place == "make_deferred_tasks"
    assert judged(store) == (AFTER_LATER if is_whole else AFTER_FIRST)
    recover(store.connections)
    assert judged(store) == (AFTER_LATER if is_whole else AFTER_FIRST)
    assert counts(add(LATER, "--replace")) == ((0, 0, 3) if is_whole else (2, 2, 1))
    assert judged(store) == AFTER_LATER


def test_it_takes_one_file(refused, tmp_path):
    said = refused("import", "a.json", "b.json", "--replace", "--db", tmp_path / "labels.db")
    assert "--replace takes one file, and 2 are named" in said


def test_it_says_so_in_a_sentence(add, store, tmp_path, capsys):
    add(FIRST)
    (tmp_path / "project.json").write_text(json.dumps(LATER))
    words = ["import", str(tmp_path / "project.json"), "--db", str(store.connections.path)]
    assert main([*words, "--replace"]) == 0
    assert "2 earlier rankings of this source were replaced" in capsys.readouterr().out


def test_imports_of_earlier_versions_are_known_by_the_source_of_their_prompts(
    tmp_path: Path, run_json
) -> None:
    path, db = tmp_path / "project.json", tmp_path / "labels.db"
    path.write_text(json.dumps(FIRST))
    run_json("import", path, "--db", db)
    with closing(sqlite3.connect(db)) as old, old:
        for name, columns in (("rankings", ["replaced_by"]), ("imports", ["name"])):
            old.execute("DROP INDEX IF EXISTS rankings_replaced")
            for column in columns:
                old.execute(f"ALTER TABLE {name} DROP COLUMN {column}")
        old.execute("DELETE FROM _sqlite_migrations WHERE name = '020_import_names'")
    path.write_text(json.dumps(LATER))
    assert counts(run_json("import", path, "--db", db, "--replace")) == (2, 2, 1)


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("project.json", "project"),
        ("x.csv", "x"),
        ("x.PARQUET", "x"),
        ("x.jsonl.gz", "x"),
        ("x.json.gz", "x"),
        ("x.gz", "x"),
        ("x.y.jsonl", "x.y"),
        ("x.txt", "x.txt"),
        (".jsonl", ".jsonl"),
    ],
)
def test_the_source_is_the_name_without_its_ending(name, source):
    assert source_for(name) == source


def sources(store: Store) -> set[str]:
    return {record.prompt.source for record in store.ranked_prompts()}


def test_a_source_of_an_earlier_version_keeps_its_name_its_people_and_its_rankings(
    store, queue, add
):
    """They stored `project.json`, ending and all."""
    add(FIRST, "--source", "project.json")
    for name in ("ann", "zoe"):
        queue.add_annotator(name)
    give_source(store.connections, "project.json", ["zoe"])
    assert counts(add([*LATER, pairwise(4)], "--replace")) == (2, 2, 1)
    assert judged(store) == AFTER_LATER
    assert sources(store) == {"project.json"}
    assert (work_of(queue, "zoe"), work_of(queue, "cleo")) == (["question 4"], [])
    add([pairwise(5, ("ann", "left"))], "--source", "project")  # as the page Data has called it
    report = add([pairwise(5, ("ann", "right"))], "--replace")
    assert counts(report) == (1, 1, 0)  # the source that was imported last


def test_a_file_whose_source_has_an_older_name_is_read_once(store, add, tmp_path):
    add(FIRST, "--source", "judged.csv")
    file = tmp_path / "judged.csv"
    file.write_text("prompt,response\n" + "".join(f"{n}?,yes\n" for n in range(3)))
    shares: list[float] = []
    db, defaults = store.connections.path, Defaults(split="train")
    report = import_file(file, db, defaults, "stop", Part(), progress=shares.append)
    assert (report.lines, report.new_prompts) == (3, 3)
    assert {one.source for one in store.prompts()} == {"judged.csv"}
    assert len(shares) == 4  # a header and three rows


def test_an_unnamed_person_who_agrees_with_another_is_told_of(tmp_path, capsys):
    header = "prompt,answer_a,answer_b,preferred\n"
    (tmp_path / "ann.csv").write_text(f"{header}Hi?,no,yes,b\nSo?,no,yes,b\n")
    (tmp_path / "bob.csv").write_text(f"{header}Hi?,no,yes,b\nSo?,no,yes,a\n")
    command = ["import", "--db", str(tmp_path / "labels.db")]
    assert main([*command, str(tmp_path / "ann.csv")]) == 0
    assert "unnamed person" not in capsys.readouterr().out
    assert main([*command, str(tmp_path / "bob.csv")]) == 0
    assert (
        "1 ranking of an unnamed person was there already. If somebody else made these, add "
        "--annotator NAME."
    ) in capsys.readouterr().out
    assert main([*command, str(tmp_path / "bob.csv"), "--annotator", "bob"]) == 0
    assert "Imported 2 rankings" in capsys.readouterr().out
