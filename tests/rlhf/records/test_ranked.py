import json
from pathlib import Path

import pytest

from rlhf.errors import InputError
from rlhf.records.jsonl import BadLineError
from rlhf.records.ranked import (
    find_prompts,
    read_manifest,
    read_ranked,
    read_ranked_file,
    write_ranked,
)
from rlhf.records.schema import Message, Prompt, RankedPrompt, Ranking, Response, Split


def record(text: str, split: Split) -> RankedPrompt:
    prompt = Prompt.create((Message(role="user", content=text),), split, "test")
    responses = tuple(
        Response(id=f"{text}-{n}", prompt_id=prompt.id, text=str(n), model="m") for n in range(3)
    )
    ranking = Ranking(
        id=f"{text}-r",
        prompt_id=prompt.id,
        annotator="ann",
        kind="human",
        tiers=tuple((response.id,) for response in responses),
    )
    return RankedPrompt(prompt=prompt, responses=responses, rankings=(ranking,))


@pytest.fixture
def export(tmp_path: Path) -> Path:
    records = [record("a", "test"), record("b", "train"), record("c", "train")]
    write_ranked(tmp_path, records, {"seed": 7})
    return tmp_path


def test_the_manifest_counts(export: Path) -> None:
    manifest = read_manifest(export)
    assert manifest["prompts"] == {"train": 2, "test": 1}
    assert (manifest["responses"], manifest["rankings"], manifest["seed"]) == (9, 3, 7)


def test_train_prompts_come_first(export: Path) -> None:
    assert [r.prompt.text for r in read_ranked(export)] == ["b", "c", "a"]
    assert read_ranked(export)[2] == record("a", "test")


def test_the_content_hash_follows_the_content(export: Path, tmp_path_factory) -> None:
    again, other = tmp_path_factory.mktemp("again"), tmp_path_factory.mktemp("other")
    same = [record("a", "test"), record("b", "train"), record("c", "train")]
    first = read_manifest(export)["content_hash"]
    assert write_ranked(again, same, {})["content_hash"] == first
    assert write_ranked(other, same[:2], {})["content_hash"] != first


def test_files_changed_after_the_export_are_refused(export: Path) -> None:
    with (export / "train.jsonl").open("a", encoding="utf-8") as stream:
        stream.write("\n")
    with pytest.raises(InputError, match=r"do not match its manifest\.json \(content hash differs"):
        read_ranked(export)


def test_another_format_is_refused(export: Path) -> None:
    manifest = json.loads((export / "manifest.json").read_text(encoding="utf-8"))
    (export / "manifest.json").write_text(json.dumps({**manifest, "format": "trl"}))
    with pytest.raises(
        InputError, match=r"holds an export of format 'trl', training needs 'ranked'"
    ):
        read_ranked(export)


def test_a_folder_that_is_no_export_gets_the_command(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"has no manifest\.json\n  Make one: rlhf export --db DB"):
        read_ranked(tmp_path)


def test_a_malformed_record_is_named_by_file_and_line(tmp_path: Path) -> None:
    file = tmp_path / "train.jsonl"
    good = json.dumps(record("a", "train").to_json())
    file.write_text(f"{good}\n" + '{"prompt": {}, "responses": []}\n', encoding="utf-8")
    with pytest.raises(BadLineError) as caught:
        read_ranked_file(file)
    assert caught.value.problem == f"{file}:2: A prompt needs 'messages' as list, found None"


def test_prompts_are_found_by_id_without_reading_the_others(export: Path) -> None:
    lines = (export / "train.jsonl").read_text(encoding="utf-8")
    (export / "train.jsonl").write_text("no JSON at all\n" + lines, encoding="utf-8")
    records = [RankedPrompt.from_json(json.loads(line)) for line in lines.splitlines()]
    wanted = records[-1].prompt
    assert find_prompts(export, {wanted.id}) == {wanted.id: wanted}
    # the id of a response is not that of a prompt
    assert find_prompts(export, {records[0].responses[0].id}) == {}
    assert find_prompts(export, set()) == {}
