"""Files that nobody would write by hand, by the thousand: whole imports or one message.

Two targets for every reader, together 100,000 cases in the slow run. `rows`: tables of texts and
nulls, of which it is known by hand what must be stored. `noise`: good files with bytes changed, and
lines of our fields with any JSON in them; nobody knows whether those still are good files, but
either nothing is stored or what is stored can be exported and read again.
"""

import csv
import json
import shutil
import tempfile
from collections.abc import Callable, Iterable
from datetime import timedelta
from io import StringIO
from pathlib import Path
from zlib import crc32

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import Dataset
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from labeling_app.data_io.exporting import ROWS
from labeling_app.data_io.fields import KEYS
from labeling_app.data_io.formats import Defaults, Entry
from labeling_app.data_io.importing import OnError, Report, import_file, read_entries
from labeling_app.data_io.reading import Part
from labeling_app.db.store import Store
from rlhf.errors import InputError
from rlhf.records.schema import RankedPrompt
from tests.labeling_app.data_io.lines import exported

SECONDS = 60.0  # a case that takes longer hangs
ARROW = "data-00000-of-00001.arrow"
TABLES = ("prompts", "responses", "rankings", "annotators", "tasks", "imports", "import_tasks")
Rows = list[dict[str, str | None]]


@pytest.fixture
def place(in_memory: Path) -> Path:
    """A folder with an empty database to copy."""
    Store(in_memory / "empty.db").close()
    return in_memory


def require_named(path: Path, error: InputError) -> None:
    assert str(path) in error.problem


def read(path: Path, on_error: OnError) -> tuple[list[Entry], int] | None:
    """What a file holds and how many lines were left out; None where it is refused."""
    report = Report()
    try:
        placed = read_entries(path, Defaults(), on_error, report, Part())
        entries = [entry for _, entry in placed]
    except InputError as error:
        require_named(path, error)
        return None
    assert report.lines == len(entries) + report.bad_lines
    return entries, report.bad_lines


def store(place: Path, path: Path, on_error: OnError) -> Report | None:
    """Import a file into an empty database: all of it, or nothing and None."""
    for old in place.glob("labels.db*"):
        old.unlink()
    shutil.copy(place / "empty.db", place / "labels.db")
    report = None
    try:
        report = import_file(path, place / "labels.db", Defaults(), on_error, Part())
    except InputError as error:
        require_named(path, error)
    with Store(place / "labels.db") as opened:
        count = "SELECT COUNT(*) FROM "
        db = opened.connections.db
        counts = {one: db.execute(count + one).fetchone()[0] for one in TABLES}
        if report is None:
            assert counts == dict.fromkeys(TABLES, 0)
        else:
            assert counts["prompts"] == report.new_prompts > 0
            assert counts["responses"] == report.new_responses
            assert counts["rankings"] == report.new_rankings
            assert counts["import_tasks"] == 0
            require_usable(opened)
    return report


def is_drawn(case: object) -> bool:
    """Whether a case goes through a database too, which takes ten times as long as reading it."""
    return crc32(repr(case).encode()) % 16 == 0


def require_usable(store: Store) -> None:
    """That what is stored can be exported in every format, and read again."""
    for record in store.ranked_prompts():
        text = json.dumps(record.to_json(), ensure_ascii=False).encode().decode()
        assert RankedPrompt.from_json(json.loads(text)) == record
        for rows_of in ROWS.values():
            json.dumps(list(rows_of(record)), ensure_ascii=False).encode()


# ------------------------------------------------------------------------------------------- rows


ODD = (
    *("None", "NA", "null", "nan", "", " ", "\t", "0", "1e5", "True", "a,b", 'a"b', '"', "'"),
    *("\r\n", "a\rb", "a\nb", "\x00", "a\x00b", "\ufeff", "\u2028x", "\ufeffx", "\\", "{}", "[]"),
)
TEXTS = st.one_of(
    st.sampled_from(ODD), st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
)
NULLABLE = st.one_of(TEXTS, st.none())


def tables(cells: st.SearchStrategy[str | None]) -> st.SearchStrategy[Rows]:
    row = st.tuples(TEXTS, cells, cells).map(
        lambda texts: dict(zip(("prompt", "chosen", "rejected"), texts, strict=True))
    )
    return st.lists(row, min_size=1, max_size=4)


def write_jsonl(rows: Rows, path: Path) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_csv(rows: Rows, path: Path) -> None:
    stream = StringIO(newline="")
    writer = csv.writer(stream)
    writer.writerow(rows[0])
    writer.writerows(row.values() for row in rows)
    path.write_bytes(stream.getvalue().encode())


def write_parquet(rows: Rows, path: Path) -> None:
    schema = pa.schema([(name, pa.string()) for name in rows[0]])
    pq.write_table(pa.Table.from_pylist(rows, schema), path, row_group_size=2)


SAVED: dict[pa.Schema, tuple[pa.Schema, dict[str, bytes]]] = {}


def write_folder(rows: Rows, path: Path) -> None:
    """As `save_to_disk` writes it, which takes ten times as long as what is tested.

    Of a table, it is used for the first one with such columns only; the others get its files.
    """
    table = pa.Table.from_pylist(rows)
    if table.schema not in SAVED:
        with tempfile.TemporaryDirectory() as folder:
            Dataset.from_list(rows).save_to_disk(folder)
            files = {one.name: one.read_bytes() for one in Path(folder).iterdir()}
        with pa.ipc.open_stream(files[ARROW]) as stream:
            SAVED[table.schema] = stream.schema, files
    schema, files = SAVED[table.schema]
    replace_folder(path, files)
    with pa.ipc.new_stream(path / ARROW, schema) as stream:
        stream.write_table(table.cast(schema))


def replace_folder(path: Path, files: dict[str, bytes]) -> None:
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir()
    for name, content in files.items():
        (path / name).write_bytes(content)


WRITERS: dict[str, tuple[str, Callable[[Rows, Path], None], st.SearchStrategy[Rows]]] = {
    "JSONL": ("in.jsonl", write_jsonl, tables(NULLABLE)),
    "CSV": ("in.csv", write_csv, tables(TEXTS)),
    "Parquet": ("in.parquet", write_parquet, tables(NULLABLE)),
    "folder": ("folder", write_folder, tables(NULLABLE)),
}


def is_good(row: dict[str, str | None]) -> bool:
    """Whether a row holds a judgment: of an equal response nobody can prefer one."""
    is_full = all(text is not None and text.strip() for text in row.values())
    return is_full and row["chosen"] != row["rejected"]


def judgments(records: Iterable[Entry | RankedPrompt]) -> set[tuple[str, str, str]]:
    """(prompt, chosen, rejected) of every ranking."""
    found = set()
    for record in records:
        texts = {response.id: response.text for response in record.responses}
        for ranking in record.rankings:
            [[best], [worst]] = ranking.tiers
            found.add((record.prompt.text, texts[best], texts[worst]))
    return found


def check_rows(container: str, rows: Rows, place: Path) -> None:
    name, write, _ = WRITERS[container]
    path = place / name
    write(rows, path)
    good = [row for row in rows if is_good(row)]
    expected = {tuple(row.values()) for row in good}
    stopped, skipped = read(path, "stop"), read(path, "skip")
    assert skipped is not None
    assert (judgments(skipped[0]), skipped[1]) == (expected, len(rows) - len(good))
    assert (stopped is None) == (len(good) < len(rows))
    if is_drawn(rows):
        assert (store(place, path, "stop") is None) == (stopped is None)
        assert (store(place, path, "skip") is None) == (not good)
        with Store(place / "labels.db") as opened:
            assert judgments(opened.ranked_prompts()) == expected


# ------------------------------------------------------------------------------------------ noise


GOOD_ROWS: Rows = [
    {"prompt": f"Wie geht's {n}? ☃", "chosen": "good, " * 9, "rejected": 'a "no"\nand more'}
    for n in range(12)
]
CHANGES = st.lists(
    st.tuples(
        st.sampled_from(["set", "insert", "delete", "cut", "repeat"]),
        st.floats(0, 1, exclude_max=True),
        st.one_of(
            st.binary(min_size=1, max_size=8), st.sampled_from([b"\xff" * 4, b'"', b"{", b"9" * 30])
        ),
    ),
    min_size=1,
    max_size=5,
)


def changed(content: bytes, changes: list[tuple[str, float, bytes]]) -> bytes:
    for kind, share, new in changes:
        at = int(share * len(content))
        if kind == "set":
            content = content[:at] + new + content[at + len(new) :]
        elif kind == "insert":
            content = content[:at] + new + content[at:]
        elif kind == "delete":
            content = content[:at] + content[at + len(new) :]
        elif kind == "cut":
            content = content[:at]
        else:
            content = content[:at] + content[at : at + 64] * new[0] + content[at:]
    return content


def check_noise(container: str, changes: list[tuple[str, float, bytes]], place: Path) -> None:
    name, write, _ = WRITERS[container]
    path = place / name
    write(GOOD_ROWS, path)
    victim = path
    if path.is_dir():
        files = sorted(path.iterdir())
        victim = files[int(changes[0][1] * len(files))]
    victim.write_bytes(changed(victim.read_bytes(), changes))
    check_any(path, changes, place)


def check_any(path: Path, case: object, place: Path) -> None:
    for on_error in ("stop", "skip"):
        found = read(path, on_error)
        if is_drawn(case):
            stored = store(place, path, on_error)
            assert stored is None or found is not None


JSON = st.recursive(
    st.one_of(
        *(st.none(), st.booleans(), st.integers(), st.floats(), TEXTS),
        st.sampled_from([2**63, -(2**63) - 1, 10**400, 1e308, "up", "train", "gold", "tie", 0, 1]),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(
            st.sampled_from([*KEYS, "role", "content", "text", "x"]), inner, max_size=3
        ),
    ),
    max_leaves=6,
)
MESSAGES = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["system", "user", "assistant", "x"]), "content": NULLABLE}
    ),
    max_size=3,
)
FIELDS = st.dictionaries(
    st.sampled_from([*KEYS, "instruction", "completions", "completion", "label", "response"]),
    st.one_of(
        JSON,
        TEXTS,
        MESSAGES,
        st.lists(TEXTS, max_size=3),
        st.lists(st.lists(st.integers(0, 2), max_size=2), max_size=2),
    ),
    max_size=7,
)


def replaced(record: dict, path: list[int], value: object) -> dict:
    """A line of an export in which one value, somewhere inside, is another."""
    copy = json.loads(json.dumps(record))
    node: object = copy
    for step in path:
        keys = list(node) if isinstance(node, dict) else list(range(len(node)))  # type: ignore[arg-type, call-overload]
        key = keys[step % len(keys)]
        inner = node[key]  # type: ignore[index]
        if not isinstance(inner, dict | list) or not inner or step == path[-1]:
            node[key] = value  # type: ignore[index]
            return copy
        node = inner
    return copy


RECORDS = st.builds(
    replaced,
    st.just(exported("a", flags=["unsafe"], strengths=[2], scores=[2, 1])),
    st.lists(st.integers(0, 50), min_size=2, max_size=6),
    JSON,
)


def check_lines(values: list[dict], place: Path) -> None:
    path = place / "in.jsonl"
    path.write_text("".join(json.dumps(value) + "\n" for value in [{"prompt": "a"}, *values]))
    check_any(path, values, place)


# ---------------------------------------------------------------------------------------- targets


TARGETS = {
    **{f"{name} rows": (strategy, name, check_rows) for name, (_, _, strategy) in WRITERS.items()},
    **{f"{name} noise": (CHANGES, name, check_noise) for name in WRITERS},
    "JSONL fields": (st.lists(st.one_of(FIELDS, RECORDS), min_size=1, max_size=3), "", None),
}


@pytest.mark.parametrize("name", TARGETS)
@pytest.mark.parametrize("num_cases", [75, pytest.param(50_000, marks=pytest.mark.slow)])
def test_a_reader_stores_all_of_a_file_or_says_why_not(name, num_cases, place):
    strategy, container, check = TARGETS[name]

    def one(case):
        if check is None:
            check_lines(case, place)
        else:
            check(container, case, place)

    settings(
        max_examples=num_cases,
        deadline=timedelta(seconds=SECONDS),
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )(given(strategy)(one))()
