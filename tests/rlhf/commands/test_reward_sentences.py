"""What `rlhf train-reward` says at its end: every sentence of a literal report."""

import subprocess
import sys
from pathlib import Path

import pytest

from rlhf.commands.models.train_reward import describe_report
from rlhf.records.jsonl import write_jsonl
from rlhf.records.schema import Message, Prompt, RankedPrompt, Response, Sampling
from tests.settings import reward_settings

ACCURACY = {"value": 0.8201, "low": 0.751, "high": 0.88, "pairs": 189, "prompts": 64}
COUNTS = {
    "train": {"rankings": 512, "prompts": 500, "pairs": 2400, "ties": 9, "prompts_too_long": 2},
    "test": {"rankings": 64, "prompts": 62, "pairs": 200, "prompts_without_pairs": 1},
}
REPORT = {
    "accuracy": ACCURACY,
    "held_out": {"prompts": 64, "from": "test prompts"},
    "counts": COUNTS,
    "health": {"longer_wins": {**ACCURACY, "value": 0.55, "low": None, "high": None}},
}


def sentences_of(tmp_path: Path, **changes: object) -> list[str]:
    settings = reward_settings(
        rankings=Path("my rankings"), model="models/m", out=tmp_path / "reward"
    )
    (tmp_path / "reward").mkdir(parents=True)
    (tmp_path / "reward" / "report.html").touch()
    return describe_report(settings, REPORT | changes).splitlines()


def test_a_short_verdict_in_sentences(tmp_path: Path) -> None:
    out = tmp_path / "reward"
    assert sentences_of(tmp_path) == [
        "Accuracy: 82 % (95 % interval 75–88 %), on 189 held-out pairs of 64 prompts (test "
        "prompts).",
        "Accuracy of choosing the longer response: 55 % (too few prompts for an interval).",
        "It read 576 rankings: 2,600 pairs of 562 prompts. Skipped: 2 prompts too long, 1 prompts "
        "without pairs.",
        f"Report: {out}/report.html",
        "Next: rlhf reference --prompts 'my rankings' --model models/m "
        f"--reward {out} --out {tmp_path}/reference",
    ]


def test_what_more_labels_would_give(tmp_path: Path) -> None:
    curve = {
        "points": [{"labels": 400, "value": 0.68}, {"labels": 800, "value": 0.712}],
        "forecast": {"labels": 1600, "value": 0.741, "low": 0.72, "high": 0.768},
        "gain": {"value": 0.03, "low": 0.01, "high": 0.05},
    }
    sentence = "800 labels give 71 %; 1,600 would give 74 % (95 % interval 72–77 %)."
    assert sentence in sentences_of(tmp_path / "a", learning_curve=curve)
    both = {**curve, "forecast_4x": {"labels": 3200, "value": 0.76, "low": 0.73, "high": 0.79}}
    longer = sentence.replace("%).", "%) and 3,200 would give 76 % (95 % interval 73–79 %).")
    assert longer in sentences_of(tmp_path / "c", learning_curve=both)
    curve["gain"]["low"] = 0.004
    doubt = f"{sentence} The gain of twice the labels cannot be told from none."
    assert doubt in sentences_of(tmp_path / "b", learning_curve=curve)


@pytest.mark.parametrize(
    ("changes", "place", "sentence"),
    [
        (
            {"accuracy": None, "health": {"longer_wins": {}}},
            0,
            "Every held-out judgment is a tie: there is no accuracy to report.",
        ),
        (
            {"counts": {"train": {"rankings": 2, "prompts": 2, "pairs": 3}}},
            2,
            "It read 2 rankings: 3 pairs of 2 prompts. Skipped: nothing.",
        ),
    ],
)
def test_what_there_is_not(tmp_path: Path, changes: dict, place: int, sentence: str) -> None:
    assert sentences_of(tmp_path, **changes)[place] == sentence


def test_an_ensemble_has_no_counts_of_its_own(tmp_path: Path) -> None:
    report = {"accuracy": ACCURACY, "held_out": {"from": "test prompts"}, "members": {"a": 1}}
    settings = reward_settings(rankings=Path("r"), model="m", out=tmp_path / "reward")
    lines = describe_report(settings, report).splitlines()
    assert lines[1] == f"An ensemble of 1, whose reports are in {tmp_path}/reward."
    assert lines[2].startswith("Next: rlhf reference")


def test_the_next_command_samples_as_the_ranked_responses_were(tmp_path: Path) -> None:
    prompt = Prompt.create((Message(role="user", content="How?"),), "train", "test")
    sampling = Sampling(temperature=0.8, max_new_tokens=16)
    response = Response(id="r", prompt_id=prompt.id, text="So.", model="m", sampling=sampling)
    record = RankedPrompt(prompt=prompt, responses=(response,), rankings=())
    write_jsonl(tmp_path / "rankings" / "train.jsonl", [record.to_json()])
    settings = reward_settings(rankings=tmp_path / "rankings", model="m", out=tmp_path / "reward")
    last = describe_report(settings, REPORT).splitlines()[-1]
    assert last.endswith(
        f"--out {tmp_path}/reference --sampling.temperature 0.8 --sampling.max-new-tokens 16"
    )


def test_an_accuracy_that_may_be_chance_is_said_to_be(tmp_path: Path) -> None:
    doubtful = {**ACCURACY, "value": 0.52, "low": 0.45, "high": 0.6}
    warning = " That is not proven better than chance: read the report before you go on."
    assert sentences_of(tmp_path, accuracy=doubtful)[0].endswith(f"(test prompts).{warning}")


THUMBS = {
    "thumbs": {
        "accuracy": {
            **{"value": 0.75, "low": 0.66, "high": 0.83},
            **{"judgements": 120, "prompts": 110, "commoner": 0.64},
        }
    },
    "all_bad": {"accuracy": None},
}


def test_thumbs_have_sentences_of_their_own(tmp_path: Path) -> None:
    counts = {"rankings": 402, "prompts": 400, "pairs": 2, "thumbs_up": 300, "thumbs_down": 95}
    train = counts | {"responses_of_all_bad": 5}
    lines = sentences_of(tmp_path, judgements=THUMBS, counts={"train": train}, accuracy=None)
    assert (
        lines[0]
        == "No preference between two responses is held out: there is no accuracy on pairs."
    )
    assert lines[2:4] == [
        "Of 120 held-out thumbs it puts 75 % (95 % interval 66–83 %) on the right side of the "
        "annotator's threshold; always giving the majority verdict would be right for 64 %.",
        "It read 402 rankings: 2 pairs, 300 thumbs up and 95 down, 5 responses that were all bad, "
        "of 400 prompts. Skipped: nothing.",
    ]


def test_missing_rankings_are_refused_before_torch_is_loaded(tmp_path: Path) -> None:
    words = ["train-reward", "--rankings", "rkk", "--model", "m", "--out", "out"]
    code = (
        "import sys; from rlhf import cli; "
        f"print(cli.main({words}), 'torch' in sys.modules, 'transformers' in sys.modules)"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout == "2 False False\n"
    assert done.stderr.startswith("error No such folder: rkk\n")
