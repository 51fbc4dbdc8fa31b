"""What was ranked is what is exported, in every format, and trl takes it as it is."""

import json
from pathlib import Path

import pytest
from datasets import load_dataset

from labeling_app.data_io.exporting import export
from labeling_app.data_io.formats import Defaults, read_entry
from labeling_app.db.people.pseudonyms import pseudonym
from labeling_app.db.queue import Submission
from rlhf.cli import main
from rlhf.errors import InputError
from rlhf.records.ranked import read_manifest, read_ranked
from rlhf.records.schema import Message, Prompt, Ranking


def rows(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


@pytest.fixture
def judged(store, make_prompt, make_responses):
    """One prompt with b > a = d > c, strengths 1 and 3, and one nobody ranked in the test split."""
    prompt, other = make_prompt("Hi?"), make_prompt("Bye?", "test")
    store.add_prompts([prompt, other])
    responses = make_responses(prompt, ["a", "b", "c", "d"])
    store.add_responses([*responses, *make_responses(other, ["x", "y"])])
    a, b, c, d = (response.id for response in responses)
    ranking = Ranking(
        id="r1", prompt_id=prompt.id, annotator="ann", kind="human",
        tiers=((b,), (a, d), (c,)), strengths=(1, 3), flags=(f"unsafe@{c}",), note="<b>${x}</b>",
    )  # fmt: skip
    store.add_rankings([ranking])
    return ranking


def test_ranked_export_reads_back_as_it_was(store, judged, make_prompt, tmp_path):
    store.add_prompts([make_prompt("Why?"), make_prompt("Where?")])  # without responses
    manifest = export(store, tmp_path / "out", "ranked", names=True)
    records = read_ranked(tmp_path / "out")
    assert records == list(store.ranked_prompts())
    assert records[0].rankings == (judged,)
    assert records[1].rankings == ()  # kept: the reference stage reads its prompt
    assert manifest["prompts"] == {"train": 1, "test": 1}
    assert manifest["prompts_without_responses"] == 2
    assert manifest["rankings"] == 1


def test_the_manifest_has_the_hours_of_people(store, queue, fill, tmp_path):
    fill(3, 2)
    for name, duration_ms in (("ann", 90_000), ("bob", 30_000)):
        queue.add_annotator(name)
        task = queue.next_task(name)
        sent = Submission(
            id=f"s-{name}", task_id=task.id, tiers=((0,), (1,)), duration_ms=duration_ms
        )
        queue.submit(name, sent)
    # 120 s of an hour; an imported ranking has no time
    assert export(store, tmp_path / "all", "ranked")["annotator_hours"] == 0.0333
    only = export(store, tmp_path / "bob", "ranked", annotators=["bob"])
    assert only["annotator_hours"] == 0.0083
    assert read_manifest(tmp_path / "all")["annotator_hours"] == 0.0333


def test_people_have_pseudonyms_and_signals_their_names(store, judged, tmp_path):
    signal = Ranking(
        id="r2", prompt_id=judged.prompt_id, annotator="signal:a:b", kind="signal",
        tiers=judged.tiers, scores=(0.9, 0.5, 0.5, -2),
    )  # fmt: skip
    store.add_rankings([signal])
    manifest = export(store, tmp_path / "out", "ranked")
    assert manifest["rankings_by_kind"] == {"human": 1, "signal": 1}
    export(store, tmp_path / "filtered", "ranked", annotators=["ann"])
    first, second = read_ranked(tmp_path / "out")[0].rankings
    assert first.annotator.startswith("person-")
    assert (second.annotator, second.scores) == ("signal:a:b", signal.scores)
    for file in tmp_path.rglob("*.json*"):
        assert '"ann"' not in file.read_text()
    [again, *_] = read_ranked(tmp_path / "filtered")
    assert again.rankings == (first,)


def test_trl_pairs_and_margins(store, judged, tmp_path):
    export(store, tmp_path / "out", "trl")
    found = rows(tmp_path / "out" / "train.jsonl")
    assert {row["prompt"] for row in found} == {"Hi?"}
    assert [(row["chosen"], row["rejected"], row["margin"]) for row in found] == [
        ("b", "a", 1.0), ("b", "d", 1.0), ("b", "c", 4.0), ("a", "c", 3.0), ("d", "c", 3.0)
    ]  # fmt: skip
    assert rows(tmp_path / "out" / "test.jsonl") == []
    assert read_manifest(tmp_path / "out")["rows"] == {"train": 5, "test": 0}


def test_conversational_pairs(store, judged, tmp_path):
    export(store, tmp_path / "out", "trl-conversational")
    assert rows(tmp_path / "out" / "train.jsonl")[2] == {
        "prompt": [{"role": "user", "content": "Hi?"}],
        "chosen": [{"role": "assistant", "content": "b"}],
        "rejected": [{"role": "assistant", "content": "c"}],
        "margin": 4.0,
    }


def test_hh_strings_read_back(store, judged, tmp_path):
    export(store, tmp_path / "out", "hh")
    row = rows(tmp_path / "out" / "train.jsonl")[2]
    assert row == {
        "chosen": "\n\nHuman: Hi?\n\nAssistant: b",
        "rejected": "\n\nHuman: Hi?\n\nAssistant: c",
    }
    entry = read_entry(row, Defaults())
    assert [response.text for response in entry.responses] == ["b", "c"]


def test_strings_begin_with_what_the_system_turn_says(store, make_responses, tmp_path):
    messages = (Message(role="system", content="Be brief."), Message(role="user", content="Hi?"))
    prompt = Prompt.create(messages, "train", "")
    store.add_prompts([prompt])
    first, second = make_responses(prompt, ["a", "b"])
    store.add_responses([first, second])
    tiers = ((first.id,), (second.id,))
    ranking = Ranking(id="r", prompt_id=prompt.id, annotator="ann", kind="human", tiers=tiers)
    store.add_rankings([ranking])
    for name in ("hh", "trl"):
        export(store, tmp_path / name, name)
    [row] = rows(tmp_path / "hh" / "train.jsonl")
    assert row["chosen"] == "\n\nHuman: Be brief.\n\nHi?\n\nAssistant: a"
    [row] = rows(tmp_path / "trl" / "train.jsonl")
    assert (row["prompt"], row["chosen"]) == ("Be brief.\n\nHi?", "a")


def test_kto_labels_best_and_worst(store, judged, tmp_path):
    export(store, tmp_path / "out", "kto")
    found = rows(tmp_path / "out" / "train.jsonl")
    labels = {row["completion"][0]["content"]: row["label"] for row in found}
    assert labels == {"b": True, "c": False}


def test_kto_all_bad(store, judged, tmp_path):
    all_bad = Ranking(
        id="r2", prompt_id=judged.prompt_id, annotator="bob", kind="human",
        tiers=judged.tiers, flags=("all-bad",),
    )  # fmt: skip
    store.add_rankings([all_bad])
    export(store, tmp_path / "out", "kto", annotators=["bob"])
    assert [row["label"] for row in rows(tmp_path / "out" / "train.jsonl")] == [False] * 4


def test_datasets_loads_every_format(store, judged, tmp_path):
    for format in ("trl", "trl-conversational", "hh", "kto"):
        export(store, tmp_path / format, format)
        files = str(tmp_path / format / "train.jsonl")
        loaded = load_dataset(
            "json", data_files=files, split="train", cache_dir=str(tmp_path / "cache")
        )
        assert len(loaded) > 0


def test_refusals_name_the_command_that_comes_first(store, make_prompt, make_responses, tmp_path):
    def refusal(**chosen) -> str:
        with pytest.raises(InputError) as caught:
            export(store, tmp_path / "out", "trl", **chosen)
        assert not (tmp_path / "out").exists()
        return str(caught.value)

    assert "rlhf import" in refusal()
    prompt = make_prompt("Hi?")
    store.add_prompts([prompt])
    assert "holds 1 prompt and no responses" in refusal()
    assert "rlhf generate" in refusal()
    responses = make_responses(prompt, ["a", "b"])
    store.add_responses(responses)
    assert "rlhf label" in refusal()
    tie = (tuple(response.id for response in responses),)
    ranking = Ranking(id="r", prompt_id=prompt.id, annotator="ann", kind="human", tiers=tie)
    store.add_rankings([ranking])
    assert "All rankings are ties" in refusal()
    assert "is by signal, bob" in refusal(kinds=["signal"], annotators=["bob"])
    assert "There are: ann (human)" in refusal(kinds=["signal"])


def test_an_existing_folder_is_left_alone(store, judged, tmp_path, refused):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine.txt").write_text("mine")
    arguments = ["export", "--db", str(store.connections.path), "--out", str(tmp_path / "out")]
    assert "already exists" in refused(*arguments)
    assert [p.name for p in (tmp_path / "out").iterdir()] == ["mine.txt"]


def test_the_command_filters(store, judged, tmp_path, run_json):
    arguments = ["export", "--db", str(store.connections.path), "--out", str(tmp_path / "out")]
    report = run_json(*arguments, "--kind", "human", "--format", "trl")
    assert report["rows"]["train"] == 5


def test_import_of_an_export_gives_the_same_export(store, judged, tmp_path, capsys):
    export(store, tmp_path / "out", "ranked", names=True)
    files = [str(tmp_path / "out" / f"{split}.jsonl") for split in ("train", "test")]
    db = str(tmp_path / "again.db")
    assert main(["import", *files, "--db", db]) == 0
    assert main(["export", "--db", db, "--out", str(tmp_path / "again"), "--names"]) == 0
    capsys.readouterr()
    assert read_ranked(tmp_path / "again") == read_ranked(tmp_path / "out")


def test_pseudonyms_stay_and_differ():
    first = pseudonym("secret", "ann")
    assert first == pseudonym("secret", "ann")
    assert first != pseudonym("secret", "bob")
    assert first != pseudonym("another database", "ann")
    assert first.startswith("person-")
    assert "ann" not in first
