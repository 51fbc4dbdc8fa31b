"""Lines that no honest program writes: refused by file and line, and nothing of them is stored."""

import gzip
import json

import pytest

from labeling_app.db.store import Store
from rlhf.cli import main
from tests.labeling_app.data_io.lines import exported, write

DEEP = "[" * 2_000 + "]" * 2_000
LONG = "9" * 4_301

LINES = {
    "2,000 deep": ('{"prompt": "a", "x": ' + DEEP + "}", "nested more than 64 deep"),
    "990 deep": (
        '{"prompt": "a", "responses": ' + "[" * 990 + "]" * 990 + "}",
        "nested more than 64 deep",
    ),
    "65 objects deep": ('{"x":' * 65 + "1" + "}" * 65, "nested more than 64 deep"),
    "4,301 digits": ('{"prompt": "a", "x": ' + LONG + "}", "an integer of more than 4300 digits"),
    "sample_index of 2^63": (
        exported("a", response={"sample_index": 2**63}),
        f"needs 'sample_index' from 0 to 2^63 - 1, found {2**63}",
    ),
    "sample_index below 0": (
        exported("a", response={"sample_index": -1}),
        "needs 'sample_index' from 0 to 2^63 - 1, found -1",
    ),
    "a flag that is a list": (
        exported("a", flags=[["l"]]),
        "needs 'flags' as a list of str, found [['l']]",
    ),
    "a flag that is an object": (
        exported("a", flags=[{"thumbs-up": 1}]),
        "needs 'flags' as a list of str",
    ),
    "a strength that is a list": (
        exported("a", strengths=[[1]]),
        "has strengths [[1]]",
    ),
    "a token that is text": (
        exported("a", response={"token_ids": ["x"]}),
        "needs 'token_ids' as a list of int, found ['x']",
    ),
    "a token of 100 digits": (
        exported("a", response={"token_ids": [10**100]}),
        "token_ids must lie from 0 to 2^31 - 1",
    ),
    "a temperature of NaN": (
        exported("a", response={"sampling": {"temperature": float("nan")}}),
        "Sampling setting temperature is nan",
    ),
    "a length limit that is a list": (
        exported("a", response={"sampling": {"max_new_tokens": [1]}}),
        "Sampling setting max_new_tokens is [1]",
    ),
    "a kind that is a list": (
        exported("a", kind=["human"]),
        "has annotator kind ['human']",
    ),
    "a split that is a list": (
        {"prompt": "a", "split": ["train"]},
        "Unknown split ['train']",
    ),
    "a verdict that is a list": (
        {"prompt": "a", "responses": ["b", "c"], "pairs": [[0, 1, ["tie"]]]},
        "pairs must hold [i, j, first|second|tie]",
    ),
    "a position that is a list": (
        {"prompt": "a", "responses": ["b", "c"], "pairs": [[[0], 1, "tie"]]},
        "tiers name position [0]",
    ),
    "100,000 fields": (
        {"prompt": "a", **dict.fromkeys(map(str, range(100_000)))},
        "The line has 100,001 fields",
    ),
    "a million responses": (
        {"prompt": "a", "responses": ["b"] * 1_000_000},
        "responses holds 1,000,000 values",
    ),
    "a purpose that is a list": (
        {"prompt": "a", "responses": ["b", "c"], "tiers": [[0], [1]], "purpose": ["gold"]},
        "purpose is ['gold']",
    ),
}


@pytest.mark.parametrize("name", LINES)
def test_the_line_is_named(name, tmp_path, refused):
    line, problem = LINES[name]
    path = write(tmp_path / "in.jsonl", [{"prompt": "fine"}, line])
    said = refused("import", path, "--db", tmp_path / "new.db")
    assert f"{path}:2: " in said
    assert problem in said
    assert not (tmp_path / "new.db").exists()


def test_a_line_of_more_than_16_million_characters(tmp_path, refused):
    path = tmp_path / "in.jsonl"
    path.write_text('{"prompt": "fine"}\n{"prompt": "' + "a" * 2**24 + '"}\n')
    said = refused("import", path, "--db", tmp_path / "new.db")
    assert f"{path}:2: a line of more than 16,777,216 characters" in said


def test_a_small_file_that_unpacks_to_a_huge_one(tmp_path, refused):
    path = tmp_path / "in.jsonl.gz"
    lines = json.dumps({"prompt": "a" * 1_000_000}).encode() + b"\n"
    with gzip.open(path, "wb", compresslevel=1) as stream:
        for _ in range(100):
            stream.write(lines)
    packed = path.stat().st_size
    assert packed < 2**19
    said = refused("import", path, "--db", tmp_path / "new.db")
    first_beyond = 200 * packed // len(lines) + 1  # less than 64 MiB are free anyway
    assert 67 < first_beyond <= 100
    assert f"{path}:{first_beyond}: unpacks to more than 200 times its size" in said


def test_flags_that_an_older_version_took_in_leave_the_export_working(tmp_path, capsys):
    db = tmp_path / "labels.db"
    good = write(tmp_path / "in.jsonl", [exported("a", flags=["unsafe"])])
    assert main(["import", str(good), "--db", str(db)]) == 0
    with Store(db) as store, store.connections.write() as open_db:
        open_db.execute("DROP TRIGGER rankings_do_not_change")
        open_db.execute("""UPDATE rankings SET flags = '[["l"], "thumbs-up"]'""")
    for form in ("kto", "ranked"):
        assert (
            main(["export", "--db", str(db), "--out", str(tmp_path / form), "--format", form]) == 0
        )
    said = (tmp_path / "ranked" / "train.jsonl").read_text()
    assert all(isinstance(flag, str) for flag in json.loads(said)["rankings"][0]["flags"])


def test_a_file_that_may_not_be_read(tmp_path, refused):
    path = tmp_path / "in.jsonl"
    path.symlink_to("/proc/self/mem")
    said = refused("import", path, "--db", tmp_path / "new.db")
    assert f"{path} cannot be read" in said
