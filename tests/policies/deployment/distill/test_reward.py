"""`rlhf distill` of a reward model: what its student learns, against the same in NumPy."""

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from policies.deployment.distill.reward import compare_scores, stored_responses
from policies.deployment.distill.student import half_of
from policies.reference.store import open_store
from reward.scoring.rankings import training_gain
from rlhf.cli import main
from rlhf.modeling.models import new_reward_model
from rlhf.modeling.tokens import load_tokenizer
from rlhf.records.jsonl import read_jsonl, write_json, write_jsonl
from rlhf.run.metrics import read_metrics
from rlhf.run.rundir import RunDir
from tests.policies.training import TrainingInputs
from tests.reward.encoders import build_encoder

USUAL = ("--batch-size", "4", "--precision", "fp32", "--learning-rate", "0.003")


@pytest.fixture(scope="module")
def done(training: TrainingInputs, tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    """A student of half the layers of the tiny model; tests only read it."""
    out = tmp_path_factory.mktemp("distill") / "student"
    assert main(command(training, out, "--half", "--epochs", "12")) == 0
    return RunDir(out)


def command(training: TrainingInputs, out: Path, *more: str) -> list[str]:
    return [
        *("distill", "--teacher", str(training.reward), "--student", str(training.model)),
        *("--outputs", str(training.reference), "--out", str(out), *USUAL, *more),
    ]


def scores_of(run_json, tmp_path: Path, model: Path, training: TrainingInputs) -> list[list[float]]:
    """The rewards that `rlhf score` gives the test prompts' stored outputs."""
    answers = stored_responses(open_store(training.reference / "outputs"), "test")
    lines = [
        {"prompt": prompt.text, "responses": [one.to_json() for one in responses]}
        for prompt, responses in answers
    ]
    file, out = tmp_path / f"{model.name}.jsonl", tmp_path / f"{model.name}-scored.jsonl"
    write_jsonl(file, lines)
    run_json("score", file, "--reward", model, "--out", out, "--precision", "fp32")
    return [line["rewards"] for line in read_jsonl(out)]


def test_the_saved_student_scores_as_the_report_says(
    training: TrainingInputs, done: RunDir, tmp_path: Path, run_json
) -> None:
    """Loaded again by its run, as any reward."""
    ours, theirs = (
        np.array(scores_of(run_json, tmp_path, model, training))
        for model in (done.path, training.reward)
    )
    report = done.read_report()["held_out"]
    assert report["error"] == pytest.approx(np.sqrt(np.mean((ours - theirs) ** 2)), rel=1e-4)
    assert report["spread"] == pytest.approx(theirs.std(), rel=1e-4)
    same = np.sign(ours[:, 0] - ours[:, 1]) == np.sign(theirs[:, 0] - theirs[:, 1])
    assert report["pairs"] == {"agreement": pytest.approx(same.mean()), "pairs": len(same)}


def test_the_loss_is_the_squared_error(training: TrainingInputs, tmp_path: Path) -> None:
    """Of the first step: all 16 training responses at once, before any update."""
    out = tmp_path / "out"
    whole = command(training, out, "--half")
    whole[whole.index("--batch-size") + 1] = "16"
    assert main(whole) == 0
    tokenizer = load_tokenizer(str(training.model))
    rows = [
        row
        for group in open_store(training.reference / "outputs").by_prompt("train")
        for row in group
    ]
    end = [tokenizer.eos_token_id]
    texts = [[*row.prompt_ids, *row.response_ids, *([] if row.finished else end)] for row in rows]
    whole = new_reward_model(str(training.model), int(tokenizer.pad_token_id), seed=0)
    student = half_of(whole, texts)
    errors = []
    for row, ids in zip(rows, texts, strict=True):
        with torch.no_grad():
            found = student(torch.tensor([ids])).logits.item()
        errors.append((found - row.reward) ** 2)
    [first] = read_metrics(out / "metrics.jsonl")
    assert len(errors) == 16
    assert first["loss"] == pytest.approx(np.mean(errors), rel=1e-3)


def test_the_student_is_on_the_scale_of_its_teacher(
    training: TrainingInputs, tmp_path: Path
) -> None:
    """As `rlhf score --rankings` reads it, for the calibration."""
    teacher = shutil.copytree(training.reward, tmp_path / "reward" / "model")
    write_json(tmp_path / "reward" / "report.json", {"normalisation": {"gain": 0.25}})
    words = command(training, tmp_path / "out", "--half")
    words[words.index("--teacher") + 1] = str(teacher)
    assert main(words) == 0
    assert training_gain(str(tmp_path / "out")) == 0.25


def test_it_learns(done: RunDir) -> None:
    losses = [row["loss"] for row in read_metrics(done.metrics_file)]
    assert np.mean(losses[-4:]) < 0.5 * np.mean(losses[:4])


def test_comparison_by_hand() -> None:
    found = compare_scores([[1.0, 3.0], [2.0]], [[2.0, 3.0], [2.0]])
    assert found["error"] == pytest.approx((1 / 3) ** 0.5)
    assert found["spread"] == pytest.approx((2 / 3) ** 0.5)
    assert found["pairs"] == {"agreement": 1.0, "pairs": 1}


def test_refusals(training: TrainingInputs, tmp_path: Path, refused) -> None:
    out = tmp_path / "out"
    said = refused(*command(training, out, "--on-policy", "1"))
    assert f"--on-policy has no effect with the reward model {training.reward}" in said
    said = refused(*command(training, out, "--temperature", "1", "--max-new-tokens", "128"))
    assert "--temperature and --max-new-tokens have no effect with the reward model" in said
    encoder = build_encoder(tmp_path / "bert")
    arguments = command(training, out)
    arguments[arguments.index("--student") + 1] = str(encoder)
    assert f"{encoder} is an encoder, and only decoders can be students" in refused(*arguments)
    assert not out.exists()
