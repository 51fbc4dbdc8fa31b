"""Files of spreadsheet programs: every separator is read, and advice speaks of columns."""

from pathlib import Path

import pytest

from labeling_app.data_io.reading import Part, read_rows
from labeling_app.web.lead.uploads import Uploads
from rlhf.errors import InputError


@pytest.mark.parametrize("separator", [",", ";", "\t"])
def test_the_head_of_a_table_says_what_separates_its_cells(separator: str, tmp_path: Path) -> None:
    path = tmp_path / "in.csv"
    names = ["prompt", '"notes, long; or\tnot"', " answer_a"]
    path.write_text(f"{separator.join(names)}\n{separator.join(['Q', 'n', 'a'])}\n")
    assert list(read_rows(path, Part())) == [
        (f"{path}:2", {"prompt": "Q", "notes, long; or\tnot": "n", "answer_a": "a"}, None)
    ]


def test_tab_separated_values_are_a_table(tmp_path: Path, run_json) -> None:
    path = tmp_path / "in.tsv"
    path.write_text("prompt\tanswer_a\tanswer_b\tpreferred\nHi, you?\tyes\tno\tb\n")
    report = run_json("import", path, "--db", tmp_path / "new.db")
    assert (report["new_prompts"], report["new_rankings"]) == (1, 1)
    assert Uploads(100).begin("lea", "Answers.TSV", 10).path.suffix == ".tsv"


def test_a_tsv_of_one_column_keeps_its_commas(tmp_path: Path) -> None:
    path = tmp_path / "in.tsv"
    path.write_text("prompt\nWrite a poem, please; now\n")
    assert [row for _, row, _ in read_rows(path, Part())] == [
        {"prompt": "Write a poem, please; now"}
    ]


@pytest.mark.parametrize("before", ["\n", "sep=;\n", "\r\nSEP=;\r\n"])
def test_what_stands_before_the_head_is_skipped_and_lines_are_counted(before, tmp_path: Path):
    path = tmp_path / "in.csv"
    path.write_text(f"{before}prompt;answer_a\nQ, or?;yes\n", newline="")
    [(place, row, _)] = read_rows(path, Part())
    assert place == f"{path}:{before.count(chr(10)) + 2}"
    assert row == {"prompt": "Q, or?", "answer_a": "yes"}


def test_a_table_of_one_column_keeps_its_texts(tmp_path: Path) -> None:
    path = tmp_path / "in.csv"
    path.write_text("prompt\nWhy; and how?\n")
    assert [row for _, row, _ in read_rows(path, Part())] == [{"prompt": "Why; and how?"}]


def test_a_table_with_semicolons_is_imported(tmp_path, run_json):
    path = tmp_path / "in.csv"
    path.write_text("prompt;answer_a;answer_b;preferred\nHi, you?;yes;no;b\n")
    report = run_json("import", path, "--db", tmp_path / "new.db")
    assert (report["new_prompts"], report["new_responses"], report["new_rankings"]) == (1, 2, 1)


def test_a_spreadsheet_is_refused_with_what_to_do(tmp_path, refused):
    named, renamed = tmp_path / "in.xlsx", tmp_path / "in.csv"
    named.write_text("prompt,chosen,rejected\nQ,a,b\n")
    renamed.write_bytes(b"PK\x03\x04\x14\x00")
    for path, said in ((named, "in.xlsx is a spreadsheet"), (renamed, "holds a spreadsheet or")):
        message = refused("import", path, "--db", tmp_path / "new.db")
        assert said in message
        assert "Save the sheet as CSV (Excel: File, Save As, CSV UTF-8)" in message
    with pytest.raises(InputError, match="Save the sheet as CSV"):
        Uploads(100).begin("lea", "Answers.XLSX", 10)


def test_advice_on_a_table_speaks_of_columns(tmp_path, refused):
    path = tmp_path / "in.csv"
    path.write_text("topic,text\nx,y\n")
    said = refused("import", path, "--db", tmp_path / "new.db")
    assert "No known format has the fields ['text', 'topic']" in said
    assert "Name the columns prompt, answer_a, answer_b and preferred (a, b or tie)" in said
    path.write_text("prompt,chosen,rejected\nQ,yes,\n")
    said = refused("import", path, "--db", tmp_path / "new.db", "--on-error", "stop")
    assert f"{path}:2: rejected is empty Fill it in, or leave the line out." in said
