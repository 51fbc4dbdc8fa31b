"""Tables and folders that somebody else wrote: no judgement is lost, no broken one is half read."""

import json
import shutil
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import Dataset, DatasetDict

from labeling_app.db.store import Store
from rlhf.cli import main


@pytest.mark.parametrize("text", ["None", "NA", "null", "NaN", "n/a", "007", "1e3", "True", "-"])
def test_a_csv_cell_is_text_whatever_it_looks_like(text, tmp_path, run_json):
    path = tmp_path / "in.csv"
    path.write_text(f"prompt,chosen,rejected\nIs there a bug?,{text},Yes there is\n")
    report = run_json("import", path, "--db", tmp_path / "new.db")
    assert (report["new_responses"], report["new_rankings"]) == (2, 1)
    with Store(tmp_path / "new.db") as store:
        [record] = store.ranked_prompts()
    [[best], [worst]] = record.rankings[0].tiers
    texts = {response.id: response.text for response in record.responses}
    assert (texts[best], texts[worst]) == (text, "Yes there is")


def test_labels_of_a_csv_file_are_true_or_false(tmp_path, refused, run_json):
    path = tmp_path / "in.csv"
    path.write_text("prompt,completion,label\na,None,True\na,no,false\n")
    run_json("import", path, "--db", tmp_path / "new.db")
    with Store(tmp_path / "new.db") as store:
        [record] = store.ranked_prompts()
    texts = {response.id: response.text for response in record.responses}
    said = [(texts[ranking.tiers[0][0]], ranking.flags) for ranking in record.rankings]
    assert said == [("None", ("thumbs-up",)), ("no", ("thumbs-down",))]
    path.write_text("prompt,completion,label\na,yes,\n")
    assert f"{path}:2: label is ''" in refused("import", path, "--db", tmp_path / "new.db")


CSV = {
    "an empty cell": ("a,,b\n", "2: chosen is empty"),
    "a cell too few": ("a,b\n", "2: 2 cells under 3 columns"),
    "a cell too many": ("a,b,c,d\n", "2: 4 cells under 3 columns"),
    "a quote that never ends": ('a,b,"c\nx,y,z\n', "2: not valid CSV (unexpected end of data)"),
    "an empty prompt": (",b,c\n", "2: The user turn of a prompt is empty"),
}


@pytest.mark.parametrize("name", CSV)
def test_a_broken_csv_line_is_named(name, tmp_path, refused):
    lines, problem = CSV[name]
    path = tmp_path / "in.csv"
    path.write_text(f"prompt,chosen,rejected\n{lines}")
    assert f"{path}:{problem}" in refused("import", path, "--db", tmp_path / "new.db")


def test_csv_places_are_lines_and_texts_keep_their_line_ends(tmp_path, refused, run_json):
    path = tmp_path / "in.csv"
    path.write_bytes(b'prompt,chosen,rejected\r\n"a\r\nb",c,d\r\n\r\ne,f,g\r\n,h,i\r\n')
    assert f"{path}:6: The user turn" in refused("import", path, "--db", tmp_path / "new.db")
    run_json("import", path, "--db", tmp_path / "new.db", "--on-error", "skip")
    with Store(tmp_path / "new.db") as store:
        assert [prompt.text for prompt in store.prompts()] == ["a\r\nb", "e"]


def test_csv_columns_of_one_name_are_refused(tmp_path, refused):
    path = tmp_path / "in.csv"
    path.write_text("prompt,chosen,rejected,chosen\na,b,c,d\n")
    assert f"{path} has two columns 'chosen'" in refused(
        "import", path, "--db", tmp_path / "new.db"
    )


NULLS = {
    "chosen": ({"prompt": "a", "chosen": None, "rejected": "b"}, "chosen must be text, found None"),
    "rejected": ({"prompt": "a", "chosen": "b", "rejected": None}, "rejected must be text"),
    "prompt": ({"prompt": None, "responses": ["b"]}, "prompt must be text, found None"),
    "a response": ({"prompt": "a", "responses": ["b", None]}, "response 1 must be text"),
    "completions": ({"instruction": "a", "completions": None}, "completions must be a list"),
}


@pytest.mark.parametrize("container", ["jsonl", "parquet", "folder"])
@pytest.mark.parametrize("name", NULLS)
def test_a_null_is_refused_wherever_it_stands(name, container, tmp_path, refused):
    line, problem = NULLS[name]
    fine = {
        key: "x" if isinstance(value, str) or not value else ["x", "y"]
        for key, value in line.items()
    }
    if "completions" in fine:
        fine["completions"] = [{"response": "x"}]
    path = tmp_path / f"in.{container}"
    if container == "jsonl":
        path.write_text("\n".join(map(json.dumps, [fine, line])))
    elif container == "parquet":
        pq.write_table(pa.Table.from_pylist([fine, line]), path)
    else:
        Dataset.from_list([fine, line]).save_to_disk(path)
    said = refused("import", path, "--db", tmp_path / "new.db")
    assert f"{path}:{'row:' if container == 'folder' else ''}2: {problem}" in said


def test_columns_that_a_row_does_not_use_are_null_and_no_fault(tmp_path, run_json):
    rows = [
        {"prompt": "a", "messages": None, "responses": ["x", "y"], "tiers": [[1], [0]]},
        {"prompt": None, "messages": [{"role": "user", "content": "b"}], "responses": None,
         "tiers": None},
    ]  # fmt: skip
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "in.parquet")
    report = run_json("import", tmp_path / "in.parquet", "--db", tmp_path / "new.db")
    assert (report["new_prompts"], report["new_rankings"], report["bad_lines"]) == (2, 1, 0)


# --------------------------------------------------------------------------------- larger inside


def test_a_parquet_file_of_a_few_kilobytes_that_holds_ten_gigabytes(tmp_path, refused):
    path = tmp_path / "in.parquet"
    texts = pa.DictionaryArray.from_arrays(pa.array([0] * 10_000), ["a" * 1_000_000])
    schema = pa.schema({"prompt": texts.type})
    with pq.ParquetWriter(path, schema, compression="zstd", write_statistics=False) as writer:
        writer.write_table(pa.table([texts], schema))
    assert path.stat().st_size < 2**14
    said = refused("import", path, "--db", tmp_path / "new.db")
    # 64 MiB are free; a row counts a million characters and 8 for its object
    assert f"{path}:{2**26 // 1_000_008 + 1}: unpacks to more than 200 times its size" in said


def test_a_parquet_file_that_says_itself_how_large_it_is(tmp_path, refused):
    path = tmp_path / "in.parquet"
    table = pa.table({"prompt": ["a" * (2**26 + 2**20)]})
    pq.write_table(table, path, compression="zstd", use_dictionary=False, write_statistics=False)
    assert path.stat().st_size < 2**16
    said = refused("import", path, "--db", tmp_path / "new.db")
    assert (
        f"{path}:1: unpacks to more than 200 times its size" in said or f"{path}: unpacks" in said
    )


# -------------------------------------------------------------------------------- broken folders


def save(folder: Path) -> Path:
    rows = [{"prompt": f"p{n}", "chosen": "yes", "rejected": "no"} for n in range(200)]
    Dataset.from_list(rows).save_to_disk(folder)
    return folder


def arrow(folder: Path) -> Path:
    return next(folder.glob("*.arrow"))


def cut(path: Path, share: float) -> None:
    path.write_bytes(path.read_bytes()[: int(path.stat().st_size * share)])


def replace_json(path: Path, **values: object) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def wrong_offsets(path: Path) -> None:
    """Let the texts of the first column begin far outside of their buffer."""
    table = pa.ipc.open_stream(path.read_bytes()).read_all()
    [chunk] = table.column(0).chunks
    valid, offsets, texts = chunk.buffers()
    inner = (offsets.size - 8) // 4
    wrong = pa.py_buffer(
        offsets[:4].to_pybytes() + b"\xff\xff\xff\x7f" * inner + offsets[-4:].to_pybytes()
    )
    column = pa.StringArray.from_buffers(len(chunk), wrong, texts, valid)
    with pa.ipc.new_stream(path, table.schema) as writer:
        writer.write_table(table.set_column(0, table.schema.field(0), column))


def refuse(path: Path, db: Path, capfd: pytest.CaptureFixture[str]) -> str:
    """Import a folder that must be refused; what is said, also by libraries not in Python."""
    assert main(["import", str(path), "--db", str(db)]) == 2
    said = capfd.readouterr().err
    assert "Traceback" not in said
    return said


BROKEN = {
    "no state.json": lambda folder: (folder / "state.json").unlink(),
    "no dataset_info.json": lambda folder: (folder / "dataset_info.json").unlink(),
    "no arrow file": lambda folder: arrow(folder).unlink(),
    "an empty arrow file": lambda folder: arrow(folder).write_bytes(b""),
    "half an arrow file": lambda folder: cut(arrow(folder), 0.5),
    "noise for an arrow file": lambda folder: arrow(folder).write_bytes(b"noise" * 1_000),
    "texts outside of the file": lambda folder: wrong_offsets(arrow(folder)),
    "state.json that is no JSON": lambda folder: cut(folder / "state.json", 0.5),
    "state.json that is a list": lambda folder: (folder / "state.json").write_text("[]"),
    "state.json that is empty": lambda folder: (folder / "state.json").write_text("{}"),
    "files that are a number": lambda folder: replace_json(folder / "state.json", _data_files=5),
    "files without a name": lambda folder: replace_json(folder / "state.json", _data_files=[{}]),
    "an unknown format": lambda folder: replace_json(folder / "state.json", _format_type="x"),
    "a column that is not there": lambda folder: replace_json(
        folder / "state.json", _format_columns=["x"]
    ),
    "features of another table": lambda folder: replace_json(
        folder / "dataset_info.json", features={"x": {"dtype": "int64", "_type": "Value"}}
    ),
    "features that are text": lambda folder: replace_json(
        folder / "dataset_info.json", features="x"
    ),
    "an unknown feature": lambda folder: replace_json(
        folder / "dataset_info.json", features={"prompt": {"_type": "Nothing"}}
    ),
    "info in Latin-1": lambda folder: (folder / "dataset_info.json").write_bytes(b'{"\xe9": 1}'),
    "a folder for a file": lambda folder: (
        arrow(folder).unlink(),
        (folder / "data-00000-of-00001.arrow").mkdir(),
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_folder_is_refused(name, tmp_path, capfd):
    folder = save(tmp_path / "saved")
    BROKEN[name](folder)
    said = refuse(folder, tmp_path / "new.db", capfd)
    assert f"{folder}" in said
    assert not (tmp_path / "new.db").exists()


def test_a_folder_of_splits_with_one_missing(tmp_path, capfd):
    rows = Dataset.from_list([{"prompt": "a", "chosen": "b", "rejected": "c"}])
    DatasetDict(train=rows, test=rows).save_to_disk(tmp_path / "saved")
    shutil.rmtree(tmp_path / "saved" / "test")
    said = refuse(tmp_path / "saved", tmp_path / "new.db", capfd)
    assert "cannot be read as a dataset" in said
