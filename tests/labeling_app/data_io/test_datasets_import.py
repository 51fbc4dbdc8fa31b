"""Datasets: folders of files, configurations and splits, and names of the hub."""

import json
from pathlib import Path

import datasets
import pytest
from datasets import Dataset, load_dataset_builder

from labeling_app.db.store import Store
from tests.labeling_app.data_io.lines import write


def rows(name: str, count: int = 2) -> list[dict]:
    return [{"prompt": f"{name} {n}", "chosen": "yes", "rejected": "no"} for n in range(count)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder as the hub holds them: two configurations, the second with a split of its own."""
    root = tmp_path / "dialogues"
    for name in ("helpful", "harmless"):
        (root / name).mkdir(parents=True)
    write(root / "helpful" / "train.jsonl", rows("helpful"))
    write(root / "helpful" / "test.jsonl", rows("kept", 1))
    write(root / "harmless" / "prefs.jsonl", rows("prefs", 3))
    write(root / "harmless" / "train.jsonl", rows("harmless"))
    (root / "README.md").write_text("""---
configs:
- config_name: helpful
  default: true
  data_files: [{split: train, path: helpful/train.jsonl}, {split: test, path: helpful/test.jsonl}]
- config_name: harmless
  data_files: [{split: train, path: harmless/train.jsonl},
               {split: test_prefs, path: harmless/prefs.jsonl}]
---
""")
    return root


def stored(db: Path) -> list[tuple[str, str]]:
    with Store(db) as store:
        assert store.counts()["rankings"] == store.counts()["prompts"]
        return [(prompt.text, prompt.split) for prompt in store.prompts()]


def test_a_folder_of_files_comes_with_its_splits(folder, tmp_path, run_json):
    db = tmp_path / "new.db"
    run_json("import", folder, "--db", db)
    assert stored(db) == [("helpful 0", "train"), ("helpful 1", "train"), ("kept 0", "test")]


def test_one_split_of_a_configuration(folder, tmp_path, run_json):
    db = tmp_path / "new.db"
    chosen = ["--config-name", "harmless", "--data-split", "test_prefs", "--split", "test"]
    run_json("import", folder, "--db", db, *chosen)
    assert stored(db) == [(f"prefs {n}", "test") for n in range(3)]


def test_the_name_of_a_known_split_says_what_it_is_for(folder, tmp_path, run_json):
    db = tmp_path / "new.db"
    run_json("import", folder, "--db", db, "--data-split", "test")
    assert stored(db) == [("kept 0", "test")]


REFUSED = {
    "a split of unknown purpose": (
        ["--config-name", "harmless"],
        "has a split 'test_prefs', which is neither train nor test Say what it is for: "
        "--data-split test_prefs with --split train or --split test.",
    ),
    "no such split": (["--data-split", "dev"], "has no split 'dev' Its splits are: train, test."),
    "no such configuration": (
        ["--config-name", "harmles"],
        "cannot be read as a dataset (BuilderConfig 'harmles' not found. Available: ['helpful', "
        "'harmless'])",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_part_that_is_not_there(name, folder, tmp_path, refused):
    arguments, problem = REFUSED[name]
    assert problem in refused("import", folder, "--db", tmp_path / "new.db", *arguments)
    assert not (tmp_path / "new.db").exists()


def test_a_bad_row_of_a_folder_is_named_by_split_and_number(folder, tmp_path, refused):
    write(folder / "helpful" / "test.jsonl", [*rows("kept", 1), {**rows("x")[0], "chosen": None}])
    said = refused("import", folder, "--db", tmp_path / "new.db")
    assert f"{folder}:test:2: chosen must be text, found None" in said


def test_a_cell_of_a_csv_file_in_a_folder_is_text(tmp_path, run_json):
    (tmp_path / "tables").mkdir()
    table = "prompt,chosen,rejected\nIs there a bug?,None,Yes there is\n"
    (tmp_path / "tables" / "train.csv").write_text(table)
    report = run_json("import", tmp_path / "tables", "--db", tmp_path / "new.db")
    assert (report["new_responses"], report["new_rankings"]) == (2, 1)


def test_numbers_of_a_csv_file_in_a_folder_stay_as_they_are_written(tmp_path, run_json):
    (tmp_path / "tables").mkdir()
    table = "prompt,chosen,rejected,annotator\nHi?,yes,no,007\nHi?,yes,no,7\n"
    (tmp_path / "tables" / "train.csv").write_text(table)
    # the other part has one column less
    (tmp_path / "tables" / "test.csv").write_text("prompt,chosen,rejected\nHo?,1.50,2\n")
    run_json("import", tmp_path / "tables", "--db", tmp_path / "new.db")
    with Store(tmp_path / "new.db") as store:
        assert sorted(store.annotators()) == ["007", "7", "imported"]
        texts = [r.text for record in store.ranked_prompts() for r in record.responses]
    assert sorted(texts) == ["1.50", "2", "no", "yes"]


def test_a_split_that_is_said_is_that_of_a_single_part(folder, tmp_path, run_json):
    """`datasets` calls a folder of plain files `train`."""
    (tmp_path / "plain").mkdir()
    write(tmp_path / "plain" / "in.jsonl", rows("a"))
    arguments = [tmp_path / "plain", "--split", "test"]
    report = run_json("import", *arguments, "--db", tmp_path / "plain.db")
    assert report["splits"] == {"train": 0, "test": 2}
    arguments = [folder, "--data-split", "train", "--split", "test"]
    report = run_json("import", *arguments, "--db", tmp_path / "part.db")
    assert report["splits"] == {"train": 0, "test": 2}
    report = run_json("import", folder, "--split", "test", "--db", tmp_path / "both.db")
    assert report["splits"] == {"train": 2, "test": 1}


def test_files_without_rows_are_refused(tmp_path, refused):
    (tmp_path / "sounds").mkdir()
    (tmp_path / "sounds" / "a.wav").write_bytes(b"RIFF")
    said = refused("import", tmp_path / "sounds", "--db", tmp_path / "new.db")
    assert "holds files of kind audiofolder" in said


def test_flags_for_a_part_of_a_dataset_are_refused_for_a_single_file(tmp_path, refused):
    path = write(tmp_path / "in.jsonl", rows("a"))
    arguments = ["import", str(path), "--db", str(tmp_path / "new.db"), "--data-split", "train"]
    assert f"--data-split has no effect on {path}, a single file" in refused(*arguments)


@pytest.mark.parametrize("streaming", [[], ["--streaming"]])
def test_a_name_of_the_hub_is_read_from_its_copy_without_a_network(
    streaming, folder, tmp_path, run_json, monkeypatch
):
    cache = tmp_path / "cache"
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", cache)
    load_dataset_builder(str(folder), "helpful", cache_dir=str(cache)).download_and_prepare()
    (cache / "dialogues").rename(cache / "team___dialogues")
    db = tmp_path / "new.db"
    report = run_json("import", "team/dialogues", "--db", db, *streaming)
    assert (report["lines"], report["new_rankings"]) == (3, 3)
    assert stored(db) == [("helpful 0", "train"), ("helpful 1", "train"), ("kept 0", "test")]
    with Store(db) as store:
        assert {prompt.source for prompt in store.prompts()} == {"dialogues"}


def test_a_name_that_cannot_be_reached_says_so(tmp_path, refused):
    said = refused("import", "nobody/nothing", "--db", tmp_path / "new.db")
    assert "nobody/nothing: cannot be read as a dataset (" in said
    assert "There is no such file either" in said
    assert not (tmp_path / "new.db").exists()


def test_a_path_with_a_typing_error_is_not_looked_for_on_the_hub(tmp_path, refused, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    for name in ("data/prompts", "prompts", "data/in.jsonl", "nowhere/in.jsonl"):
        assert f"No such file: {name}" in refused("import", name, "--db", tmp_path / "new.db")


def test_the_second_file_is_looked_for_before_the_first_is_stored(tmp_path, refused):
    path = write(tmp_path / "in.jsonl", rows("a"))
    missing = tmp_path / "missing.jsonl"
    said = refused("import", path, missing, "--db", tmp_path / "new.db")
    assert f"No such file: {missing}" in said
    assert not (tmp_path / "new.db").exists()


def test_a_saved_dataset_of_splits_gives_one_of_them(tmp_path, capsys, refused, run_json):
    parts = {"train": Dataset.from_list(rows("a")), "dev": Dataset.from_list(rows("b"))}
    datasets.DatasetDict(parts).save_to_disk(tmp_path / "saved")
    capsys.readouterr()
    db = tmp_path / "new.db"
    run_json("import", tmp_path / "saved", "--db", db, "--data-split", "dev")
    assert stored(db) == [("b 0", "train"), ("b 1", "train")]
    path = tmp_path / "alone"
    Dataset.from_list(rows("c")).save_to_disk(path)
    said = refused("import", path, "--db", db, "--data-split", "dev")
    assert "It has none; leave --data-split out." in said


def test_json_of_a_folder_that_looks_like_a_date_is_refused_and_not_changed(tmp_path, refused):
    (tmp_path / "dates").mkdir()
    line = {"prompt": "When?", "chosen": "2020-01-01 10:00:00", "rejected": "later"}
    (tmp_path / "dates" / "train.jsonl").write_text(json.dumps(line) + "\n")
    said = refused("import", tmp_path / "dates", "--db", tmp_path / "new.db")
    assert "dates:train:1: chosen must be text, found datetime" in said
