"""`rlhf score --rankings`: the report of any reward on any file of preferences."""

import json
import time
from pathlib import Path

import pytest

from reward.scoring.rankings import training_gain
from rlhf.cli import main
from rlhf.records.jsonl import write_jsonl
from tests.reward.conftest import build_record, export
from tests.servers.reward import RewardServer

LENGTH = "tests.pipeline.signals:count_vowels"
TRL = [
    {"prompt": "How was it?", "chosen": "Oh, a very good one.", "rejected": "Bad."},
    {"prompt": "How was it?", "chosen": "A good idea, too.", "rejected": "Bad."},
    {"prompt": "And the dog?", "chosen": "Shy.", "rejected": "It is an ugly animal, I see."},
    {
        "chosen": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Aha aha!"}],
        "rejected": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Tsk."}],
    },
]


def score(capsys: pytest.CaptureFixture[str], out: Path, *words: str) -> tuple[dict, dict]:
    """What the command prints, and report.json."""
    command = ["score", *words, "--precision", "fp32", "--out", str(out), "--json"]
    assert main(command) == 0, capsys.readouterr().err
    printed = json.loads(capsys.readouterr().out.splitlines()[-1])
    return printed, json.loads((out / "report.json").read_text())


def test_a_function_on_public_preferences(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_jsonl(tmp_path / "pairs.jsonl", TRL)
    words = ["--rankings", str(tmp_path / "pairs.jsonl"), "--reward", LENGTH]
    printed, report = score(capsys, tmp_path / "out", *words)
    # vowels: 8, 7 and 1 of the first prompt; 0 against 10; 4 against 0
    assert report["accuracy"]["value"] == 0.75
    assert (report["accuracy"]["pairs"], report["accuracy"]["prompts"]) == (4, 3)
    assert report["judged"] == {"prompts": 3, "from": str(tmp_path / "pairs.jsonl")}
    assert report["health"]["longer_wins"]["value"] == 0.75  # words: 5, 4, 1; 1 and 7; 2 and 1
    assert list(report["health"]["accuracy_by"]["prompt"]) == ["up to 3 words"]
    [worst] = report["worst"]
    assert worst["prompt"] == "And the dog?"
    assert (worst["preferred"], worst["other"]) == ("Shy.", "It is an ugly animal, I see.")
    assert worst["annotator"] == "imported"
    assert printed["accuracy"] == report["accuracy"]
    assert printed["left_out"] == 0
    assert "worst" not in printed
    page = (tmp_path / "out" / "report.html").read_text()
    assert f"How far to trust {LENGTH}" in page
    assert "It is an ugly animal, I see." in page
    assert "held-out" not in page
    again = ["score", *words, "--out", str(tmp_path / "out")]
    assert main(again) == 2
    assert "already exists" in capsys.readouterr().err


def test_every_vote_counts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rest = {"prompt": "How was it?", "responses": ["A good idea.", "Bad."]}
    votes = [[[0], [1]]] * 4 + [[[1], [0]]]
    write_jsonl(tmp_path / "votes.jsonl", [{**rest, "tiers": tiers} for tiers in votes])
    words = ["--rankings", str(tmp_path / "votes.jsonl"), "--reward", LENGTH]
    _, report = score(capsys, tmp_path / "out", *words)
    assert (report["accuracy"]["value"], report["accuracy"]["pairs"]) == (0.8, 5)


def test_the_report_says_what_the_measurement_cost(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_jsonl(tmp_path / "pairs.jsonl", TRL)
    words = ["--rankings", str(tmp_path / "pairs.jsonl"), "--reward", LENGTH]
    began = time.monotonic()
    _, report = score(capsys, tmp_path / "out", *words, "--price-per-hour", "7200")
    cost = report["cost"]
    assert 0 < 3600 * cost["device_hours"] <= time.monotonic() - began + 0.01
    assert cost["price"] == pytest.approx(7200 * cost["device_hours"], rel=0.1, abs=0.01)
    assert "device-hours at 7,200 each" in (tmp_path / "out" / "report.html").read_text()
    words = ["score", str(tmp_path / "pairs.jsonl"), "--reward", LENGTH, "--price-per-hour", "1"]
    assert main([*words, "--out", str(tmp_path / "scores.jsonl")]) == 2
    assert "--price-per-hour has no effect with FILE" in capsys.readouterr().err


def test_an_address_gives_the_same_report_with_and_without_prompts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_jsonl(tmp_path / "pairs.jsonl", TRL)
    with RewardServer() as server:
        words = ["--rankings", str(tmp_path / "pairs.jsonl"), "--reward", server.url]
        _, report = score(capsys, tmp_path / "out", *words)
    assert report["accuracy"]["value"] == 0.75  # the server likes long responses
    assert report["health"]["longer_wins"]["value"] == 0.75


def test_the_report_of_a_reward_model_is_that_of_its_training(
    tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    records = [build_record(n, "train") for n in range(6)]
    records += [build_record(n, "test") for n in range(6, 12)]
    export(tmp_path / "rankings", records)
    model, rankings = tmp_path / "reward", str(tmp_path / "rankings")
    words = ["--rankings", rankings, "--model", str(tiny_model), "--precision", "fp32"]
    train = ["train-reward", *words, "--head", "fitted", "--epochs", "0", "--out", str(model)]
    assert main(train) == 0, capsys.readouterr().err
    trained = json.loads((model / "report.json").read_text())
    _, report = score(capsys, tmp_path / "out", "--rankings", rankings, "--reward", str(model))
    assert report["accuracy"] == trained["accuracy"]
    assert report["held_out_counts"] == trained["held_out_counts"]
    for part in ("accuracy_by", "longer_wins", "judges_agree"):
        assert report["health"][part] == trained["health"][part]
    ece = trained["health"]["calibration"]["ece"]  # on the scale of the training loss
    assert report["health"]["calibration"]["ece"] == pytest.approx(ece, abs=1e-5)
    # the training report has the texts as the model reads them, with the chat template's words
    found, before = (
        [(one["preferred"], one["other"]) for one in of["worst"]] for of in (report, trained)
    )
    assert found == before


def test_a_sentence_says_how_often_it_agrees(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_jsonl(tmp_path / "pairs.jsonl", [*TRL, {"prompt": "x", "chosen": "", "rejected": "y"}])
    out = tmp_path / "out"
    words = ["score", "--rankings", str(tmp_path / "pairs.jsonl"), "--reward", LENGTH]
    assert main([*words, "--precision", "fp32", "--out", str(out)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == [
        f"Accuracy of {LENGTH}: 75 % (too few prompts for an interval), on 4 pairs of 3 prompts.",
        "Accuracy of choosing the longer response: 75 % (too few prompts for an interval). The "
        "model is not better.",
    ]
    assert lines[2].startswith("Expected calibration error 0.2")  # sure of each, right in three
    assert lines[3] == "Lines left out because they hold nothing to judge: 1."
    assert lines[4] == f"Report: {out / 'report.html'}"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--reward", LENGTH], "Give FILE or --rankings, and neither was given"),
        (["a", "--rankings", "b", "--reward", LENGTH], "Give FILE or --rankings, not both"),
        (["--rankings", "no.jsonl", "--reward", LENGTH], "No such file: no.jsonl"),
        (["--rankings", "alone.jsonl", "--reward", LENGTH], "holds no judgment of two responses"),
        (["--rankings", "bad.jsonl", "--reward", LENGTH], "bad.jsonl:1: "),
        (["--rankings", "train_only", "--reward", LENGTH], "train_only/test.jsonl holds no"),
        (["--rankings", "two.jsonl", "--reward", LENGTH], "two.jsonl:2: 2 questions name the"),
    ],
)
def test_what_cannot_be_scored_is_refused(
    words: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    write_jsonl(tmp_path / "alone.jsonl", [{"prompt": "Hello", "responses": ["one"]}])
    write_jsonl(tmp_path / "bad.jsonl", [{"chosen": "alone"}])
    (tmp_path / "train_only").mkdir()
    write_jsonl(tmp_path / "train_only" / "test.jsonl", [])
    said = [{"value": "answer_1", "user_id": "u", "status": "submitted"}]
    fields = {"prompt": "Hello", "answer_1": "one", "answer_2": "two"}
    questions = [{"fields": fields, "responses": {name: said}} for name in ("best", "worst")]
    write_jsonl(tmp_path / "two.jsonl", questions)
    assert main(["score", *words, "--out", "out"]) == 2
    assert message in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "out").exists()


def test_the_gain_of_an_ensemble_is_its_members_mean(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "report.json", [{"accuracy": None}])
    for number, gain in enumerate((2.0, 4.0)):
        folder = tmp_path / f"member-{number}"
        folder.mkdir()
        write_jsonl(folder / "report.json", [{"normalisation": {"gain": gain}}])
    (tmp_path / "model" / "member-1").mkdir(parents=True)
    write_jsonl(tmp_path / "stage.json", [{"stage": "reward", "status": "done"}])
    assert training_gain(str(tmp_path)) == 3.0
    assert training_gain(str(tmp_path), first_member=True) == 2.0
