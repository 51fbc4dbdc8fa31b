import gzip
import os
import time
from pathlib import Path

import pytest

from rlhf.errors import InputError
from rlhf.records.jsonl import (
    BadLineError,
    new_file,
    new_folder,
    read_jsonl,
    read_lines,
    write_json,
    write_jsonl,
    write_text_atomically,
)


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    objects = [{"text": "Grüße 🌊"}, {"n": 1, "list": [1.5, None, True]}]
    file = tmp_path / "new" / "folder" / "a.jsonl"
    assert write_jsonl(file, objects) == 2
    assert list(read_jsonl(file)) == objects
    assert "Grüße 🌊" in file.read_text(encoding="utf-8")
    assert [path.name for path in file.parent.iterdir()] == ["a.jsonl"]


def test_blank_lines_are_passed_over_and_lines_keep_their_numbers(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text('\n{"a": 1}\n   \n{"a": 2}\n', encoding="utf-8")
    assert [place for place, _ in read_lines(file)] == [f"{file}:2", f"{file}:4"]


def test_a_character_escaped_in_two_halves_is_one(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text(r'{"a": "\ud83c\udf0a"}', encoding="utf-8")
    assert list(read_jsonl(file)) == [{"a": "🌊"}]


def test_a_gz_file_and_a_byte_order_mark_are_read(tmp_path: Path) -> None:
    packed = tmp_path / "a.jsonl.gz"
    with gzip.open(packed, "wt", encoding="utf-8") as stream:
        stream.write('{"a": 1}\n')
    marked = tmp_path / "b.jsonl"
    marked.write_bytes(b'\xef\xbb\xbf{"a": 2}\r\n')
    assert [*read_jsonl(packed), *read_jsonl(marked)] == [{"a": 1}, {"a": 2}]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('{"a": 1', "2: not valid JSON (Expecting ',' delimiter at column 8): '{\"a\": 1'"),
        ("[1, 2]", "2: expected a JSON object, found list: '[1, 2]'"),
        ("3", "2: expected a JSON object, found int: '3'"),
        (
            r'{"a": {"b": ["\ud83d\ude00 and \uD83d"]}}',
            r"2: \ud83d is half a character (a surrogate without its other half)",
        ),
    ],
)
def test_a_bad_line_is_named_by_file_and_number(tmp_path: Path, line: str, words: str) -> None:
    file = tmp_path / "bad.jsonl"
    file.write_text('{"a": 1}\n' + line + "\n", encoding="utf-8")
    with pytest.raises(BadLineError) as caught:
        list(read_jsonl(file))
    assert caught.value.problem == f"{file}:{words}"
    assert "line" in caught.value.remedy


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("none.jsonl", None, r"No such file: .*/none\.jsonl"),
        (
            "latin.jsonl",
            '{"a": "Größe"}\n'.encode("latin-1"),
            r"is not UTF-8 text \(.+ at byte 9\)\n  .*iconv -f LATIN1 .* > converted\.jsonl$",
        ),
        ("l1.csv", "Größe\n".encode("latin-1"), r"iconv -f LATIN1 .*l1\.csv > converted\.csv$"),
        ("u16.csv", "Größe\n".encode("utf-16"), r"iconv -f UTF-16 .*u16\.csv > converted\.csv$"),
        ("be.txt", b"\xfe\xff\x00a", r"iconv -f UTF-16 -t UTF-8 .*be\.txt > converted\.txt$"),
        (
            "l1.jsonl.gz",
            gzip.compress(b"\xe9\n", mtime=0),
            r"gunzip -c .*l1\.jsonl\.gz \| iconv -f LATIN1 -t UTF-8 > converted\.jsonl$",
        ),
        (
            "labels.db",
            b"SQLite format 3\0\x10",
            r"labels\.db is a database, .*\n  Give it as --db\.$",
        ),
        ("a.jsonl.gz", b"no gzip at all", r"a\.jsonl\.gz cannot be unpacked"),
        # without a time, which would differ between the workers of a parallel run
        (
            "a.jsonl.gz",
            gzip.compress(b"{}\n" * 99, mtime=0)[:-12],
            r"a\.jsonl\.gz cannot be unpacked",
        ),
    ],
)
def test_a_file_that_cannot_be_read_is_refused(
    tmp_path: Path, name: str, content: bytes | None, words: str
) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(InputError, match=words):
        list(read_jsonl(tmp_path / name))


def test_a_failed_write_leaves_the_old_file(tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    write_json(file, {"old": True})

    def fail(stream: object) -> None:
        stream.write("half")
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        write_text_atomically(file, fail)
    assert file.read_text(encoding="utf-8") == '{\n  "old": true\n}\n'


def test_a_folder_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    target = tmp_path / "model"
    with new_folder(target) as partial:
        (partial / "deep").mkdir()
        (partial / "deep" / "weights").write_text("1", encoding="utf-8")
        assert not target.exists()
    assert (target / "deep" / "weights").read_text(encoding="utf-8") == "1"

    def fail() -> None:
        with new_folder(target) as partial:
            (partial / "weights").write_text("2", encoding="utf-8")
            raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        fail()
    assert [file.name for file in target.iterdir()] == ["deep"]
    assert [file.name for file in tmp_path.iterdir()] == ["model"]

    with new_folder(target) as partial:
        (partial / "weights").write_text("3", encoding="utf-8")
    assert [file.name for file in target.iterdir()] == ["weights"]
    assert [file.name for file in tmp_path.iterdir()] == ["model"]


def test_two_programs_may_write_one_file_at_once(tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    with new_file(file) as first, new_file(file) as second:
        first.write_text("first", encoding="utf-8")
        second.write_text("second", encoding="utf-8")
    assert file.read_text(encoding="utf-8") == "first"  # its block ended last
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]


def test_what_a_killed_program_left_of_a_file_is_removed(tmp_path: Path) -> None:
    abandoned, in_work, of_another = (
        tmp_path / f".{name}.partial" for name in ("a.json.0123abcd", "a.json.89ef0123", "b.json.0")
    )
    for partial in (abandoned, in_work, of_another):
        partial.touch()
    for partial in (abandoned, of_another):
        os.utime(partial, (time.time() - 4000,) * 2)
    write_json(tmp_path / "a.json", {})
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {"a.json", in_work.name, of_another.name}
