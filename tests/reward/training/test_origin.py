"""A reward model goes on from a reward model: ours, or any classifier with one label."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from transformers import AutoModelForSequenceClassification

from reward.scoring.scorer import load_scorer
from reward.training.ensemble import train_ensemble
from reward.training.origin import resolve_model
from reward.training.train import train_reward
from rlhf.cli import main
from rlhf.commands.models.train_reward import describe_report
from rlhf.errors import ConfigError, InputError
from rlhf.modeling.models import describe_model, load_config
from rlhf.modeling.tokens import load_tokenizer, pad_right
from rlhf.records.schema import Sampling
from rlhf.run.metrics import read_metrics
from rlhf.run.rundir import RunDir
from tests.reward.conftest import BAD, GOOD, build_record, export, sequences_of, settings_for
from tests.settings import changed

HELD_OUT = [build_record(n, "test") for n in range(0, 32, 4)]
STILL = 1e-12  # a learning rate that changes no weight


def rewards_of(name: Path, tokenizer: Path) -> torch.Tensor:
    AcceleratorState._reset_state(True)
    scorer = load_scorer(str(name), Accelerator(cpu=True, mixed_precision="no"))
    return scorer(pad_right(sequences_of(HELD_OUT, load_tokenizer(str(tokenizer))), 0))


@pytest.fixture(scope="module")
def first(rankings, tiny_model, tmp_path_factory) -> Path:
    """A finished run that started from a language model."""
    out = tmp_path_factory.mktemp("first") / "reward"
    train_reward(settings_for(rankings, tiny_model, out, epochs=2))
    return out


@pytest.mark.parametrize(
    ("name", "changes"),
    [("model", {}), (".", {"adapter": "lora"}), (".", {"adapter": "lora", "precision": "bf16"})],
)
def test_what_does_not_train_keeps_its_rewards(
    first, rankings, tiny_model, tmp_path, name, changes
):
    out = tmp_path / "next"
    settings = settings_for(rankings, first / name, out, learning_rate=STILL, seed=1, **changes)
    report = train_reward(settings)
    before = RunDir(first).read_report()
    error = 2e-2 if settings.precision == "bf16" else 1e-5  # adapters lie beside bf16 weights
    torch.testing.assert_close(
        rewards_of(out, tiny_model), rewards_of(first, tiny_model), atol=error, rtol=0
    )
    if settings.precision == "fp32":
        assert report["accuracy_before_training"] == report["accuracy"] == before["accuracy"]
    AcceleratorState._reset_state(True)


def test_the_report_says_what_it_started_from_and_how_good_that_was(
    first, rankings, tiny_model, tmp_path
):
    settings = settings_for(rankings, first, tmp_path / "next")
    report = train_reward(settings)
    model, base = describe_model(str(first / "model")), describe_model(str(tiny_model))
    assert report["started_from"] == {
        "kind": "reward model",
        "path": model["path"],
        "hash": model["hash"],
        "language_model": {"path": base["path"], "hash": base["hash"]},
    }
    earlier = RunDir(first).read_report()
    assert earlier["started_from"] == {
        "kind": "language model",
        "path": base["path"],
        "hash": base["hash"],
        "language_model": {"path": base["path"], "hash": base["hash"]},
    }
    assert report["accuracy_before_training"] == earlier["accuracy"]
    assert report["likelier_wins"] is None
    page = RunDir(settings.out).report_html.read_text()
    assert f"started from the reward model {first}/model" in page
    words = describe_report(settings, report).splitlines()
    share = f"{earlier['accuracy']['value']:.0%}".replace("%", " %")
    assert words[1].startswith(
        f"It started from the reward model {first}/model, whose accuracy was {share} ("
    )
    assert f"--model {tiny_model} " in words[-1]
    again = train_reward(settings_for(rankings, settings.out, tmp_path / "third", limit="4"))
    assert again["started_from"]["path"] == f"{settings.out}/model"
    assert again["started_from"]["language_model"] == report["started_from"]["language_model"]


@pytest.fixture(scope="module")
def thoughtful(tmp_path_factory) -> Path:
    """Responses that only their thinking tells apart."""
    thoughts = [f"<think>{text}</think>Yes." for text in (*GOOD, *BAD)]
    records = [build_record(n, "test" if n % 4 == 0 else "train", thoughts) for n in range(32)]
    return export(tmp_path_factory.mktemp("thoughtful"), records)


@pytest.fixture(scope="module")
def thinker(thoughtful, tiny_model, tmp_path_factory) -> Path:
    """A run that read them whole."""
    out = tmp_path_factory.mktemp("thinker") / "reward"
    train_reward(settings_for(thoughtful, tiny_model, out, epochs=2, reads_thinking=True))
    return out


@pytest.mark.parametrize(
    ("given", "recorded", "reads"),
    [(None, True, True), (False, True, False), (None, None, True), (None, False, False)],
)
def test_a_training_reads_thinking_as_the_model_it_starts_from(
    thoughtful, thinker, tmp_path, given, recorded, reads
):
    shutil.copytree(thinker / "model", tmp_path / "from")
    config = json.loads((tmp_path / "from/config.json").read_text())
    assert config.pop("reads_thinking") is True
    if recorded is not None:  # early models of ours read all and do not say so
        config["reads_thinking"] = recorded
    (tmp_path / "from/config.json").write_text(json.dumps(config))
    out = tmp_path / "next"
    changes = {"learning_rate": STILL, "limit": "4", "reads_thinking": given}
    report = train_reward(settings_for(thoughtful, tmp_path / "from", out, **changes))
    assert load_config(str(out / "model")).reads_thinking is reads
    assert f"reads_thinking: {str(reads).lower()}\n" in RunDir(out).config_file.read_text()
    earlier = RunDir(thinker).read_report()["accuracy"]
    assert earlier["value"] > 0.7
    same = {True: earlier["value"], False: 0.5}  # without thinking all responses are the same
    assert report["accuracy"]["value"] == pytest.approx(same[reads])
    before = same[recorded is not False]
    assert report["accuracy_before_training"]["value"] == pytest.approx(before)


def test_a_language_model_does_not_read_thinking_unless_asked(tiny_model, rankings, tmp_path):
    settings = settings_for(rankings, tiny_model, tmp_path / "out")
    assert resolve_model(settings).data.reads_thinking is False
    assert resolve_model(changed(settings, reads_thinking=True)).data.reads_thinking is True


def test_a_model_of_another_maker_keeps_its_head_too(rankings, tiny_model, tmp_path):
    theirs = tmp_path / "theirs"
    torch.manual_seed(3)
    AutoModelForSequenceClassification.from_pretrained(tiny_model, num_labels=1).save_pretrained(
        theirs
    )
    load_tokenizer(str(tiny_model)).save_pretrained(theirs)
    before = rewards_of(theirs, tiny_model)
    out = tmp_path / "next"
    settings = settings_for(rankings, theirs, out, learning_rate=STILL)
    report = train_reward(settings)
    assert report["started_from"]["language_model"] is None
    after = rewards_of(out, tiny_model)  # shifted and scaled, as every new reward model is
    expected = (before - before.mean()) / before.std(correction=0)
    torch.testing.assert_close(after, expected, atol=1e-4, rtol=0)
    assert "--model LANGUAGE_MODEL " in describe_report(settings, report).splitlines()[-1]


def test_a_regression_starts_from_the_rewards_bias_included(tiny_model, tmp_path):
    train = [build_record(n, scores=(10, 10, 2, 2)) for n in range(1, 4)]
    export(tmp_path / "data", [*train, *HELD_OUT])
    train_reward(settings_for(tmp_path / "data", tiny_model, tmp_path / "rm"))
    file = tmp_path / "rm/model/config.json"
    config = json.loads(file.read_text())
    file.write_text(json.dumps({**config, "reward_bias": config["reward_bias"] + 3.0}))
    AcceleratorState._reset_state(True)
    scorer = load_scorer(str(tmp_path / "rm"), Accelerator(cpu=True, mixed_precision="no"))
    sequences = sequences_of(train, load_tokenizer(str(tiny_model)))
    rewards = scorer(pad_right(sequences, 0)).numpy().reshape(3, 4)
    assert rewards.mean() > 1
    expected = ((rewards - np.array([1, 1, -1, -1])) ** 2).mean()  # standard scores

    out = tmp_path / "next"
    changes = {"loss": "regression", "learning_rate": STILL}
    train_reward(settings_for(tmp_path / "data", tmp_path / "rm", out, **changes))
    [row] = read_metrics(out / "metrics.jsonl")
    assert row["loss"] == pytest.approx(expected, rel=1e-4)
    # what is saved is fitted anew: mean 0 on the held-out responses, whatever the bias was
    assert rewards_of(out, tiny_model).mean().item() == pytest.approx(0, abs=1e-4)


def test_the_scale_is_fixed_on_outputs_of_the_language_model_behind_it(tiny_model, tmp_path):
    base = describe_model(str(tiny_model))["hash"]
    records = []
    for number in range(40):
        record = build_record(number, "test" if number < 4 else "train")
        sampled = replace(record.responses[0], model_fingerprint=base, sampling=Sampling())
        records.append(replace(record, responses=(sampled, *record.responses[1:])))
    export(tmp_path / "data", records)
    changes = {"limit": "4"}
    train_reward(settings_for(tmp_path / "data", tiny_model, tmp_path / "rm", **changes))
    report = train_reward(
        settings_for(tmp_path / "data", tmp_path / "rm", tmp_path / "next", **changes)
    )
    assert report["normalisation"]["fitted_on"] == "the original model's responses in the dataset"


def test_an_ensemble_goes_on_from_one_model_and_is_none_to_go_on_from(
    first, rankings, tiny_model, tmp_path
):
    out = tmp_path / "all"
    weights = {"annotator_weights": {"ann": 0.5}}
    settings = settings_for(rankings, first, out, seeds=(0, 1), limit="4", **weights)
    report = train_ensemble(settings)
    assert report["started_from"]["path"] == f"{first}/model"
    assert report["annotators"] == {"ann": {"weight": 0.5, "judgements": 24, "share": 1.0}}
    before = [one["accuracy_before_training"] for one in report["members"].values()]
    assert before == [RunDir(first).read_report()["accuracy"]] * 2
    text = describe_report(changed(settings, out=out), report)
    assert f"It started from the reward model {first}/model, whose accuracy was" in text
    for name, member in ((out, out / "member-0"), (out / "model", out / "model/member-1")):
        with pytest.raises(InputError) as caught:
            resolve_model(settings_for(rankings, name, tmp_path / "next"))
        assert caught.value.problem == (
            f"{name} is an ensemble of 2 reward models, and a training starts from one"
        )
        assert caught.value.remedy == f"Give one of them, such as {member}."
    report = train_reward(settings_for(rankings, out / "member-0", tmp_path / "next", limit="4"))
    assert report["started_from"]["path"] == f"{out}/member-0/model"


def test_a_fitted_head_would_replace_the_trained_one(first, rankings, tmp_path):
    settings = settings_for(rankings, first, tmp_path / "next", head="fitted")
    with pytest.raises(ConfigError, match="--head fitted would replace the trained head of") as e:
        train_reward(settings)
    assert e.value.remedy == "Leave --head out: a reward model keeps its head."
    assert not (tmp_path / "next").exists()


def test_a_run_that_did_not_finish_is_refused(first, rankings, tmp_path):
    (tmp_path / "rm").mkdir()
    stage = RunDir(first).stage_file.read_text().replace('"done"', '"running"')
    (tmp_path / "rm/stage.json").write_text(stage)
    with pytest.raises(InputError, match=r"The reward stage in .* is running, not done"):
        train_reward(settings_for(rankings, tmp_path / "rm", tmp_path / "next"))


def test_other_numbers_of_labels_are_refused_in_one_sentence(
    rankings, tiny_model, tmp_path, capsys
):
    two = tmp_path / "two"
    AutoModelForSequenceClassification.from_pretrained(tiny_model, num_labels=2).save_pretrained(
        two
    )
    load_tokenizer(str(tiny_model)).save_pretrained(two)
    words = ["train-reward", "--rankings", str(rankings), "--model", str(two)]
    for more in ([], ["--dry-run"]):
        assert main([*words, "--out", str(tmp_path / "next"), *more]) == 2
        text = capsys.readouterr().err
        assert f"{two} is not a reward model (LlamaForSequenceClassification, 2 labels)" in text
    assert not (tmp_path / "next").exists()


def test_a_dry_run_plans_for_the_model_of_a_run(first, rankings, tmp_path, capsys):
    words = ["train-reward", "--rankings", str(rankings), "--model", str(first), "--dry-run"]
    assert main([*words, "--out", str(tmp_path / "next")]) == 0
    assert "GiB" in capsys.readouterr().out


def test_a_dry_run_refuses_a_file_that_is_no_export(first, tmp_path, capsys):
    table = tmp_path / "labels.csv"
    table.write_text("prompt,chosen,rejected\n")
    words = ["train-reward", "--rankings", str(table), "--model", str(first), "--dry-run"]
    assert main([*words, "--out", str(tmp_path / "next")]) == 2
    assert f"{table} is not an exported dataset" in capsys.readouterr().err
