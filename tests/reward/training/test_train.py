import json
import math
import shutil
import signal
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml
from accelerate import Accelerator
from safetensors.torch import load_file
from transformers import AutoModelForSequenceClassification, LlamaConfig

from reward.scoring.scorer import load_scorer
from reward.training.save import require_same_weights
from reward.training.train import DETAILS, anneal, train_reward
from rlhf.cli import main
from rlhf.errors import ConfigError, GuardError, InputError
from rlhf.modeling.models import model_fingerprint
from rlhf.modeling.tokens import load_tokenizer, pad_right
from rlhf.records.fingerprints import file_hash
from rlhf.records.schema import Sampling
from rlhf.run.metrics import read_metrics
from rlhf.run.rundir import RunDir
from tests.reward.conftest import build_record, export, sequences_of, settings_for
from tests.servers.commands import RLHF, finish_group, run_group, start_group
from tests.settings import changed

SPEEDS = ("tokens_per_second", "tokens_per_pass", "tflops", "utilization")
SIX_BILLION = Path(__file__).parents[3] / "examples" / "six_billion" / "llama_6b"


@pytest.fixture(scope="module")
def trained(rankings, tiny_model, tmp_path_factory):
    out = tmp_path_factory.mktemp("runs") / "reward"
    settings = settings_for(rankings, tiny_model, out, epochs=4, save_every=5)
    return settings, train_reward(settings)


def test_training_learns_the_rankings(trained):
    settings, report = trained
    rows = read_metrics(RunDir(settings.out).metrics_file)
    assert [row["step"] for row in rows] == list(range(1, 25))
    assert rows[0]["loss"] == pytest.approx(math.log(2), abs=0.15)
    assert rows[-1]["loss"] < 0.55
    assert set(rows[0]) == {
        *("step", "epoch", "loss", "accuracy", "grad_norm", "learning_rate", "seconds"),
        *(f"speed/{name}" for name in SPEEDS),
        *("seconds/waiting_for_data", "seconds/waiting_for_ranks"),
    }
    assert 0 < report["use"]["utilization"] < 1
    assert all(0 < row["seconds/waiting_for_data"] < row["seconds"] for row in rows)
    # the 24 prompts of 4 responses in 6 steps: every step reads a quarter of the tokens
    assert rows[0]["speed/tokens_per_pass"] > 100
    assert report["accuracy"]["value"] > 0.8
    assert report["accuracy"]["low"] <= report["accuracy"]["value"] <= report["accuracy"]["high"]
    assert report["accuracy"]["pairs"] == 8 * 5  # ties between responses are left out
    assert report["held_out"] == {"prompts": 8, "from": "test prompts"}
    full = RunDir(settings.out).read_report()
    assert {name: full[name] for name in full if name not in DETAILS} == report


def test_a_fitted_head_is_measured_before_the_layers_below_it_train(rankings, tiny_model, tmp_path):
    runs = [
        train_reward(settings_for(rankings, tiny_model, tmp_path / str(n), head="fitted", epochs=n))
        for n in (0, 1)
    ]
    assert runs[0]["accuracy_before_training"] is None  # nothing is trained after it
    assert runs[1]["accuracy_before_training"] == runs[0]["accuracy"]


def test_held_out_rewards_have_mean_0_and_std_1_after_reload(trained):
    settings, report = trained
    assert report["normalisation"]["fitted_on"] == "held-out ranked responses"
    scorer = load_scorer(str(settings.out), Accelerator(mixed_precision="no"))
    records = [build_record(n, "test") for n in range(0, 32, 4)]
    sequences = sequences_of(records, load_tokenizer(settings.model))
    rewards = scorer(pad_right(sequences, 0))
    assert rewards.mean().item() == pytest.approx(0, abs=1e-4)
    assert rewards.std(correction=0).item() == pytest.approx(1, abs=1e-4)
    plain = AutoModelForSequenceClassification.from_pretrained(settings.out / "model").eval()
    with torch.no_grad():
        logits = plain(**dict(input_ids=pad_right(sequences, 0).ids)).logits[:, 0]
    assert plain.config.reward_bias == report["normalisation"]["bias"]
    torch.testing.assert_close(logits + plain.config.reward_bias, rewards, atol=1e-5, rtol=0)


def test_rewards_are_normalized_on_reference_outputs_where_there_are_enough(tiny_model, tmp_path):
    fingerprint = model_fingerprint(str(tiny_model))
    records = []
    for number in range(32):
        record = build_record(number, "test" if number < 4 else "train")
        sampled = replace(record.responses[0], model_fingerprint=fingerprint, sampling=Sampling())
        records.append(replace(record, responses=(sampled, *record.responses[1:])))
    export(tmp_path / "data", records)
    report = train_reward(settings_for(tmp_path / "data", tiny_model, tmp_path / "out"))
    assert report["normalisation"]["fitted_on"] == "the original model's responses in the dataset"
    assert report["normalisation"]["responses"] == 32
    scorer = load_scorer(str(tmp_path / "out"), Accelerator(mixed_precision="no"))
    only = [replace(record, responses=record.responses[:1]) for record in records]
    rewards = scorer(pad_right(sequences_of(only, load_tokenizer(str(tiny_model))), 0))
    assert rewards.mean().item() == pytest.approx(0, abs=1e-4)
    assert rewards.std(correction=0).item() == pytest.approx(1, abs=1e-4)


def test_the_health_report_is_written_for_programs_and_people(trained):
    settings, report = trained
    full = RunDir(settings.out).read_report()
    by_annotator = full["health"]["accuracy_by"]["annotator"]
    assert by_annotator == {"ann": report["accuracy"]}
    page = RunDir(settings.out).report_html.read_text()
    assert f"{report['accuracy']['value']:.0%}".replace("%", " %") in page
    assert "No two annotators compared the same responses to a held-out prompt" in page
    assert "likelier under the base model" in page
    assert report["likelier_wins"]["pairs"] == report["accuracy"]["pairs"]


def test_a_head_lost_on_save_is_found_out(trained):
    settings, _ = trained
    folder = RunDir(settings.out).model
    state = load_file(folder / "model.safetensors")
    require_same_weights(folder, state)
    lost = {**state, "score.weight": torch.zeros_like(state["score.weight"])}
    with pytest.raises(GuardError, match=r"1 weights differ, such as score\.weight"):
        require_same_weights(folder, lost)


def test_tokens_per_batch_changes_nothing(rankings, tiny_model, tmp_path):
    losses = []
    for budget in (1, 100_000):
        out = tmp_path / str(budget)
        train_reward(settings_for(rankings, tiny_model, out, tokens_per_batch=budget))
        losses.append([row["loss"] for row in read_metrics(out / "metrics.jsonl")])
    assert losses[0] == pytest.approx(losses[1], abs=1e-5)


def test_gradient_checkpointing_changes_nothing(rankings, tiny_model, tmp_path):
    losses = []
    for checkpointing in (False, True):
        out = tmp_path / str(checkpointing)
        changes = {"gradient_checkpointing": checkpointing, "adapter": "lora"}
        train_reward(settings_for(rankings, tiny_model, out, **changes))
        losses.append([row["loss"] for row in read_metrics(out / "metrics.jsonl")])
    assert losses[0] == pytest.approx(losses[1], abs=1e-6)


def test_what_cannot_fit_is_refused_before_weights_and_rankings_are_read(rankings, tmp_path):
    LlamaConfig(hidden_size=2**14, num_hidden_layers=96).save_pretrained(tmp_path / "large")
    shutil.copytree(rankings, tmp_path / "data")
    (tmp_path / "data" / "train.jsonl").unlink()
    with pytest.raises(ConfigError, match=r"This training needs .* GiB in each process"):
        train_reward(settings_for(tmp_path / "data", tmp_path / "large", tmp_path / "out"))
    with pytest.raises(InputError, match=r"No such folder: .*none"):
        train_reward(settings_for(tmp_path / "none", tmp_path / "large", tmp_path / "out"))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("loss", ["plackett_luce", "regression"])
def test_other_losses_learn_the_rankings_too(rankings, tiny_model, tmp_path, loss):
    settings = settings_for(rankings, tiny_model, tmp_path / "out", epochs=4, loss=loss)
    report = train_reward(changed(settings, centring=0.01, annotator_weights={"ann": 0.5}))
    assert report["accuracy"]["value"] > 0.8
    assert report["loss"]["last"] < report["loss"]["first"]


def test_a_regression_learns_given_scores(tiny_model, tmp_path):
    splits = ["test" if n % 4 == 0 else "train" for n in range(32)]
    records = [build_record(n, s, scores=(10, 10, 2, 2)) for n, s in enumerate(splits)]
    export(tmp_path / "data", records)
    settings = settings_for(tmp_path / "data", tiny_model, tmp_path / "out", epochs=6)
    report = train_reward(changed(settings, loss="regression"))
    assert report["accuracy"]["value"] > 0.8
    # standard scores are 1 and −1: rewards that say nothing have a loss of 1
    assert report["loss"]["last"] < 0.5


def test_a_weight_for_nobody_is_refused(rankings, tiny_model, tmp_path):
    settings = settings_for(rankings, tiny_model, tmp_path / "out", annotator_weights={"zoe": 2})
    with pytest.raises(ConfigError, match="names zoe, who ranked nothing here") as caught:
        train_reward(settings)
    assert "The annotators are: ann." in caught.value.remedy


def test_a_finished_stage_only_returns_its_report(trained):
    settings, report = trained
    again = train_reward(changed(settings, resume=True))
    assert again == {**report, "already_done": True}
    with pytest.raises(InputError, match="already exists"):
        train_reward(settings)


def test_test_prompts_that_are_also_train_prompts_are_left_out_and_counted(tiny_model, tmp_path):
    records = [build_record(n) for n in range(8)] + [build_record(n, "test") for n in range(5, 10)]
    records = [
        replace(record, prompt=replace(record.prompt, id=f"{record.prompt.split}{number}"))
        for number, record in enumerate(records)
    ]
    export(tmp_path / "data", records)
    report = train_reward(settings_for(tmp_path / "data", tiny_model, tmp_path / "out"))
    assert report["counts"]["test"]["prompts_also_in_train"] == 3
    assert report["held_out"]["prompts"] == 2


def test_held_out_rankings_that_are_all_tied_have_no_accuracy(tiny_model, tmp_path):
    tied = [build_record(n, "test", tiers=((0, 1, 2, 3),)) for n in range(3)]
    export(tmp_path / "data", [build_record(n) for n in range(3, 8)] + tied)
    report = train_reward(settings_for(tmp_path / "data", tiny_model, tmp_path / "out"))
    assert report["accuracy"] is None
    assert "Every held-out judgment is a tie" in (tmp_path / "out/report.html").read_text()


def test_too_few_rankings_leave_nothing_behind(tiny_model, tmp_path):
    export(tmp_path / "data", [build_record(1), build_record(2, tiers=((0,),))])
    with pytest.raises(InputError, match="1 to train on, 0 to measure with"):
        train_reward(settings_for(tmp_path / "data", tiny_model, tmp_path / "out"))
    assert not (tmp_path / "out").exists()


def test_broken_weights_stop_the_run_with_the_step(rankings, broken_model, tmp_path):
    with pytest.raises(GuardError, match="not a number at step 1") as caught:
        train_reward(settings_for(rankings, broken_model, tmp_path / "out"))
    assert "No checkpoint was saved" in caught.value.remedy
    assert RunDir(tmp_path / "out").read_stage()["status"] == "failed"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"learning_rate": 0}, "--optim.learning-rate is 0"),
        ({"epochs": 0}, "--optim.epochs is 0"),
        ({"adapter": "ia3"}, "--adapter is 'ia3'"),
        ({"lora_rank": 0}, "--lora.rank is 0"),
        ({"ddp_comm_hook": "zip"}, "--ddp-comm-hook is 'zip'"),
        ({"precision": "fp8"}, "--precision is 'fp8'"),
        ({"too_long": "ignore"}, "--data.too-long is 'ignore'"),
        ({"loss": "dpo"}, "--loss is 'dpo'"),
        ({"loss": "plackett_luce", "margin": 1}, "--objective.margin 1 has no effect with --loss"),
        ({"seed": -1}, "--seed is -1"),
        ({"seeds": (0, 2**32)}, "--seeds is 4294967296"),
        ({"annotator_weights": {"ann": -1}}, "--annotator-weights.ann is -1"),
        ({"held_out_fraction": 0.9}, "--evaluation.held-out-fraction is 0.9"),
    ],
)
def test_settings_out_of_range_are_refused(changes, words):
    with pytest.raises(ConfigError, match=words):
        settings_for(Path("r"), "m", Path("o"), **changes)


@pytest.mark.parametrize("by", ["flag", "file"])
def test_annotators_whose_names_have_dots_can_be_weighed(tmp_path, capsys, by):
    weights = {"signal:tests.pipeline.signals:count_vowels": 0.5, "judge:gpt-4.1": 0.25, "ann": 2.0}
    flags = [word for n, w in weights.items() for word in (f"--annotator-weights.{n}", str(w))]
    file = tmp_path / "weights.yaml"
    file.write_text(yaml.safe_dump({"annotator_weights": weights}))
    given = flags if by == "flag" else ["--config", str(file)]
    start = ["train-reward", "--rankings", "r", "--model", str(SIX_BILLION), "--out", "o"]
    start.append("--dry-run")
    assert main([*start, *given]) == 0
    assert yaml.safe_load(capsys.readouterr().out)["annotator_weights"] == weights
    assert main([*start, "--annotator-weights.ann", "much"]) == 2
    assert "--annotator-weights.ann is 'much'" in capsys.readouterr().err
    assert main([*start, "--annotator-weights", json.dumps(weights)]) == 0
    assert yaml.safe_load(capsys.readouterr().out)["annotator_weights"] == weights
    assert main([*start, "--annotator-weights", "0.5"]) == 2
    assert "--annotator-weights is '0.5'" in capsys.readouterr().err
    file.write_text("annotator_weights: auto\n")
    for given in (["--annotator-weights", "auto"], ["--config", str(file)]):
        assert main([*start, *given]) == 0
        assert yaml.safe_load(capsys.readouterr().out)["annotator_weights"] == "auto"


def test_learning_rate_rises_then_falls_to_0():
    factors = [anneal(step, 10, 2) for step in range(11)]
    assert factors[:3] == [0.5, 1.0, 1.0]
    assert factors[2:] == pytest.approx([1 - n / 8 for n in range(9)])


# ---- whole processes ----


def command(rankings, tiny_model, out, *more, precision="fp32"):
    words = ["--rankings", rankings, "--model", tiny_model, "--out", out, "--precision", precision]
    words += ["--prompts-per-batch", "4", "--learning-rate", "1e-3", "--json", *more]
    return [*RLHF, "train-reward", *map(str, words)]


def finish(words, processes=1):
    done = run_group(processes, *words)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.strip().splitlines()[-1])


def test_two_processes_give_the_loss_curve_of_one(rankings, tiny_model, tmp_path):
    one = finish(command(rankings, tiny_model, tmp_path / "one"))
    two = finish(command(rankings, tiny_model, tmp_path / "two", "--processes", "2"))
    assert (one["processes"], two["processes"]) == (1, 2)
    curves = [
        [(row["loss"], row["grad_norm"]) for row in read_metrics(tmp_path / name / "metrics.jsonl")]
        for name in ("one", "two")
    ]
    torch.testing.assert_close(*map(torch.tensor, curves), atol=1e-5, rtol=1e-4)
    assert one["accuracy"] == two["accuracy"]
    states = [load_file(tmp_path / name / "model/model.safetensors") for name in ("one", "two")]
    torch.testing.assert_close(*states, atol=1e-4, rtol=1e-3)


def test_a_divided_model_keeps_its_fitted_head_and_its_best_weights(rankings, tiny_model, tmp_path):
    def train(name, *more, processes=1):
        more = ("--head", "fitted", "--eval-every", "2", "--epochs", "2", *more)
        found = finish(command(rankings, tiny_model, tmp_path / name, *more), processes)
        rows = read_metrics(tmp_path / name / "metrics.jsonl")
        return [(row["loss"], row.get("validation_loss", 0)) for row in rows], found["accuracy"]

    losses, accuracy = train("one")
    for sharding in ("fsdp", "zero3"):
        found, again = train(sharding, "--sharding", sharding, processes=2)
        torch.testing.assert_close(*map(torch.tensor, (found, losses)), atol=1e-4, rtol=1e-3)
        assert again == accuracy


HOOKS_SCRIPT = """
import sys
from pathlib import Path
from tests.settings import changed, reward_settings
from reward.training.train import train_reward

rankings, model, out = map(Path, sys.argv[1:])
for hook in ("no", "fp16", "powersgd"):
    train_reward(reward_settings(
        rankings=rankings, model=str(model), out=out / hook, precision="fp32", epochs=3,
        prompts_per_batch=4, learning_rate=1e-3, save_every=None, ddp_comm_hook=hook,
    ))
"""


def test_compressed_gradients_between_two_processes_train_alike(rankings, tiny_model, tmp_path):
    script = tmp_path / "train.py"
    script.write_text(HOOKS_SCRIPT)
    done = run_group(2, script, rankings, tiny_model, tmp_path)
    assert done.returncode == 0, done.stderr
    losses = {
        hook: torch.tensor([row["loss"] for row in read_metrics(tmp_path / hook / "metrics.jsonl")])
        for hook in ("no", "fp16", "powersgd")
    }
    assert len(losses["no"]) == 18
    for hook in ("fp16", "powersgd"):  # compressed, so close and not equal
        torch.testing.assert_close(losses[hook], losses["no"], atol=0.02, rtol=0)
        assert not torch.equal(losses[hook], losses["no"])
    exact = 11  # PowerSGD begins after ten exact steps
    torch.testing.assert_close(losses["powersgd"][:exact], losses["no"][:exact], atol=0, rtol=0)
    assert not torch.equal(losses["powersgd"][exact:], losses["no"][exact:])


def test_what_compresses_on_cuda_only_is_refused_here(rankings, tiny_model, tmp_path):
    with pytest.raises(ConfigError, match="--ddp-comm-hook bf16 needs NCCL"):
        train_reward(settings_for(rankings, tiny_model, tmp_path / "o", ddp_comm_hook="bf16"))


@pytest.mark.parametrize(
    ("precision", "processes"),
    [
        ("fp32", 1),
        ("fp32", 2),
        pytest.param("bf16-weights", 1, marks=pytest.mark.slow),
        pytest.param("bf16-weights", 2, marks=pytest.mark.slow),
    ],
)
def test_killed_and_resumed_gives_the_same_weights(
    rankings, tiny_model, tmp_path, processes, precision
):
    more = ["--epochs", "8", "--save-every", "3"]
    whole = command(rankings, tiny_model, tmp_path / "whole", *more, precision=precision)
    finish(whole, processes)

    out = tmp_path / "killed"
    words = command(rankings, tiny_model, out, *more, precision=precision)
    group = start_group(processes, *words)
    deadline = time.monotonic() + 200
    while len(read_metrics(out / "metrics.jsonl")) < 11:
        assert time.monotonic() < deadline
        assert group[0].poll() is None, group[0].communicate()
        time.sleep(0.02)
    for process in group:
        process.kill()
    assert finish_group(group).returncode == -signal.SIGKILL
    assert RunDir(out).read_stage()["status"] == "running"
    assert len(read_metrics(out / "metrics.jsonl")) < 48

    report = finish([*words, "--resume"], processes)
    assert "already_done" not in report
    whole, again = (tmp_path / name / "model/model.safetensors" for name in ("whole", "killed"))
    assert file_hash(whole) == file_hash(again)
    losses = [
        [row["loss"] for row in read_metrics(tmp_path / name / "metrics.jsonl")]
        for name in ("whole", "killed")
    ]
    assert losses[0] == losses[1]
