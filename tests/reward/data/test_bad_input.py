"""What a team may bring by mistake: each case is an error that says so, or a counted skip."""

import json
from dataclasses import replace

import pytest

from reward.training.train import train_reward
from rlhf.cli import main
from rlhf.records.fingerprints import folder_hash
from tests.reward.conftest import build_record, export
from tests.settings import reward_settings

TIED = ((0, 1, 2, 3),)


def records(**changes):
    """Twelve good prompts, with `changes` to the first train prompt."""
    good = [build_record(n, "test" if n < 4 else "train") for n in range(12)]
    return [*good[:4], replace(good[4], **changes), *good[5:]]


def train(folder, tiny_model, tmp_path, *more):
    words = ["--rankings", folder, "--model", tiny_model, "--out", tmp_path / "out", *more]
    return main(["train-reward", "--precision", "fp32", *map(str, words)])


def refused(folder, tiny_model, tmp_path, capsys, *more):
    """The message; nothing may be left behind."""
    assert train(folder, tiny_model, tmp_path, *more) == 2
    assert not (tmp_path / "out").exists()
    return " ".join(capsys.readouterr().err.split())


def edit_first_train_line(folder, change):
    """Write a line by hand that `rlhf export` would never write, with a fitting manifest."""
    lines = (folder / "train.jsonl").read_text().splitlines()
    (folder / "train.jsonl").write_text("\n".join([change(lines[0]), *lines[1:]]) + "\n")
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["content_hash"] = folder_hash(folder, ("*.jsonl",))
    (folder / "manifest.json").write_text(json.dumps(manifest))


def test_a_ranking_of_an_unknown_response(tiny_model, tmp_path, capsys):
    folder = export(tmp_path / "data", records())
    first = build_record(4).responses[0].id
    edit_first_train_line(folder, lambda line: line.replace(f'[["{first}"]', '[["nobody"]'))
    message = refused(folder, tiny_model, tmp_path, capsys)
    assert "train.jsonl:1: Ranking" in message
    assert "names responses that are not there: ['nobody']" in message


def test_a_score_that_is_not_a_number(tiny_model, tmp_path, capsys):
    folder = export(tmp_path / "data", records())
    edit_first_train_line(
        folder, lambda line: line.replace('"scores": []', '"scores": [NaN, 1, 1, 1]')
    )
    message = refused(folder, tiny_model, tmp_path, capsys)
    assert "train.jsonl:1: Ranking" in message
    assert "has scores [nan, 1, 1, 1]" in message


def test_duplicate_ids(tiny_model, tmp_path, capsys):
    found = records()
    folder = export(tmp_path / "data", [*found, found[-1]])
    assert "prompt ids occur more than once" in refused(folder, tiny_model, tmp_path, capsys)


def test_only_ties(tiny_model, tmp_path, capsys):
    found = [build_record(n, "test" if n < 4 else "train", tiers=TIED) for n in range(12)]
    message = refused(export(tmp_path / "data", found), tiny_model, tmp_path, capsys)
    assert "All judgments of the 8 train prompts" in message


def test_a_prompt_beyond_the_context(tiny_model, tmp_path, capsys):
    long = build_record(4, texts=("so " * 600, "no"), tiers=((0,), (1,)))
    folder = export(tmp_path / "data", [*records()[:4], long, *records()[5:]])
    message = refused(folder, tiny_model, tmp_path, capsys)
    assert "1 of 8 prompts with their responses are longer than 512 tokens" in message
    assert "Raise --data.max-length" in message
    assert "--data.too-long truncate" in message


@pytest.mark.parametrize(
    ("changed", "counted"),
    [
        ({"responses": build_record(4).responses[:1], "rankings": ()}, "prompts_without_pairs"),
        ({"rankings": ()}, "prompts_without_pairs"),
    ],
)
def test_prompts_without_a_pair_are_counted(tiny_model, tmp_path, changed, counted):
    report = train_reward(
        reward_settings(
            rankings=export(tmp_path / "data", records(**changed)),
            model=str(tiny_model),
            out=tmp_path / "out",
            precision="fp32",
        )
    )
    assert report["counts"]["train"][counted] == 1
    assert report["counts"]["train"]["prompts"] == 7


def test_a_prompt_of_ties_trains_and_is_counted(tiny_model, tmp_path):
    found = [*records()[:4], build_record(4, tiers=TIED), *records()[5:]]
    report = train_reward(
        reward_settings(
            rankings=export(tmp_path / "data", found),
            model=str(tiny_model),
            out=tmp_path / "out",
            precision="fp32",
        )
    )
    assert report["counts"]["train"]["ties"] == 6 + 7  # all of one prompt, one of each other
