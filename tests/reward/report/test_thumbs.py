"""Thumbs and "all bad" in the loss, in a training and in its report."""

import json
import math
import shutil
from dataclasses import replace

import pytest
import torch
from accelerate import Accelerator

from reward.data.annotators import AnnotatorWeights, weigh_annotators
from reward.data.batches import to_judgments, to_pointwise_tensors, total_weight
from reward.data.groups import Group, Pair, Pointwise, TieredRanking
from reward.losses import Objective, sum_of_losses
from reward.report.thumbs import OTHER_SOURCES
from reward.scoring.scorer import load_scorer
from reward.training.ensemble import train_ensemble
from reward.training.train import train_reward
from rlhf.commands.models.train_reward import describe_report
from rlhf.modeling.tokens import load_tokenizer, pad_right
from rlhf.records.fingerprints import file_hash
from rlhf.run.checkpoint import newest_checkpoint
from rlhf.run.metrics import read_metrics
from rlhf.run.rundir import RunDir
from tests.reward.conftest import build_record, export, sequences_of, thumbed
from tests.reward.conftest import settings_for as small_settings
from tests.servers.commands import RLHF, run_group
from tests.settings import changed

PAIR = Group(
    "a", (1,), ((2,), (3,)), (Pair(1, 0, 1.0, 0, "x"),), (TieredRanking(((1,), (0,)), "x"),)
)
THUMBS = Group(
    "b",
    (1,),
    ((2,), (3,)),
    pointwise=(
        Pointwise(0, True, "x", "thumbs", 0.5),
        Pointwise(0, False, "y", "all_bad", 2.0),
        Pointwise(1, True, "y", "thumbs"),
    ),
)
BOTH = replace(PAIR, prompt_id="c", pointwise=(Pointwise(0, False, "y", "thumbs"),))
GROUPS = [PAIR, THUMBS, BOTH]
REWARDS = torch.tensor([0.0, 1.0, 2.0, -1.0, 0.5, 1.5])
B = torch.tensor([1.0, 0.5, 0.5, -1.0])


def log_sigmoid(x):
    return -math.log(1 + math.exp(-x))


def loss_of(loss, groups, rewards, b):
    judgments = to_judgments(groups, loss, rewards.device)
    return sum_of_losses(Objective(loss), judgments, rewards, b)


def test_pointwise_judgments_number_responses_over_all_groups():
    said = to_pointwise_tensors(GROUPS, torch.device("cpu"))
    assert said.response.tolist() == [2, 2, 3, 4]
    assert said.sign.tolist() == [1, -1, 1, -1]
    assert said.weight.tolist() == [0.5, 2, 1, 1]
    assert said.prompt.tolist() == [1, 1, 1, 2]


@pytest.mark.parametrize("loss", ["bradley_terry", "plackett_luce"])
def test_the_loss_by_hand(loss):
    # b: good at 2 − 1, bad at −(2 − ½), good at −1 − ½, weights ½, 2, 1; c: bad at −(½ + 1)
    thumbs = -0.5 * log_sigmoid(1) - 2 * log_sigmoid(-1.5) - log_sigmoid(-1.5)
    pairs = -2 * log_sigmoid(1)  # a and c, each won by 1
    expected = pairs + thumbs / 3 - log_sigmoid(-1.5)
    got = loss_of(loss, GROUPS, REWARDS, B)
    assert got.item() == pytest.approx(expected)
    assert total_weight(GROUPS, loss) == 1 + 3.5 / 3 + (1 + 1)


def test_a_pass_without_any_pair_by_hand():
    got = loss_of("regression", [THUMBS], REWARDS[2:4], B[:3])
    expected = (-0.5 * log_sigmoid(1) - 3 * log_sigmoid(-1.5)) / 3
    assert got.item() == pytest.approx(expected)


def test_the_shares_of_annotators_count_thumbs():
    # x: 1 pair, ½ of the three of b, 1 pair; y: 3 of the three of b, 1 thumb; of 2 + 3½/3 + 1
    found = weigh_annotators(GROUPS, "bradley_terry", AnnotatorWeights({"x": 1.0}))
    assert [found[name]["judgements"] for name in "xy"] == [3, 3]
    assert found["x"]["share"] == pytest.approx((2 + 0.5 / 3) / (3 + 3.5 / 3), abs=1e-4)


# ---- whole trainings ----


def settings_for(rankings, tiny_model, out, **changes):
    return small_settings(
        rankings, tiny_model, out, **{"prompts_per_batch": 8, "epochs": 4, **changes}
    )


def one_thumb(number, annotator="ann", split="train"):
    """Up on a sunny response, down on a rainy one."""
    place = number % 4
    return thumbed(number, {place: "thumbs-up" if place < 2 else "thumbs-down"}, split, annotator)


@pytest.fixture(scope="module")
def thumbs(tmp_path_factory):
    """80 train prompts with one thumb each and 8 test prompts with a ranking."""
    records = [one_thumb(n) for n in range(8, 88)] + [build_record(n, "test") for n in range(8)]
    return export(tmp_path_factory.mktemp("thumbs"), records)


@pytest.fixture(scope="module")
def mixed(tmp_path_factory):
    """Rankings, thumbs of two people, and "all bad", in both splits."""
    records = []
    for number in range(96):
        split = "test" if number % 10 < 2 else "train"
        if number % 3 == 0:
            record = build_record(number, split)
        else:
            record = one_thumb(number, ("ann", "bob")[number // 4 % 2], split)
        records.append(record)
    for number in range(96, 104):
        record = build_record(number, "test" if number > 101 else "train", tiers=((2, 3),))
        bad = replace(record.rankings[0], annotator="cid", flags=("all-bad",))
        records.append(replace(record, rankings=(bad,)))
    return export(tmp_path_factory.mktemp("mixed"), records)


def test_thumbs_alone_teach_to_order_pairs(thumbs, tiny_model, tmp_path):
    settings = settings_for(thumbs, tiny_model, tmp_path / "out")
    report = train_reward(settings)
    assert report["accuracy"]["pairs"] == 8 * 5
    assert report["accuracy"]["value"] > 0.75
    rows = read_metrics(tmp_path / "out" / "metrics.jsonl")
    assert "accuracy" not in rows[0]
    assert rows[0]["loss"] == pytest.approx(math.log(2), abs=0.1)  # b is fitted before
    assert rows[-1]["thumbs_accuracy"] > 0.8
    assert report["judgements"]["thumbs"]["train"] == {"all": 80, "good": 40}
    assert report["judgements"]["thumbs"]["accuracy"] is None
    assert report["judgements"]["pairs"]["train"] == {"all": 0}


@pytest.fixture(scope="module")
def trained(mixed, tiny_model, tmp_path_factory):
    out = tmp_path_factory.mktemp("runs") / "reward"
    weights = {"thumbs_weight": 0.5, "all_bad_weight": 0.25}
    settings = settings_for(mixed, tiny_model, out, eval_every=5, **weights)
    return settings, train_reward(settings)


def test_the_report_has_each_kind_with_weight_counts_and_accuracy(trained):
    _, report = trained
    kinds = report["judgements"]
    assert {name: row["weight"] for name, row in kinds.items()} == {
        "pairs": 1.0, "thumbs": 0.5, "all_bad": 0.25
    }  # fmt: skip
    assert kinds["pairs"]["accuracy"] == report["accuracy"]
    assert kinds["all_bad"]["held_out"] == {"all": 4, "good": 0}
    assert kinds["thumbs"]["accuracy"]["judgements"] == kinds["thumbs"]["held_out"]["all"]
    assert kinds["thumbs"]["accuracy"]["value"] > 0.7
    sources = report["thresholds"]
    assert {name: row["fitted"] for name, row in sources.items()} == {
        "ann": True, "bob": True, OTHER_SOURCES: False
    }  # fmt: skip
    for name in ("train", "held_out"):
        in_kinds = sum(kinds[kind][name]["all"] for kind in ("thumbs", "all_bad"))
        assert sum(row[name]["all"] for row in sources.values()) == in_kinds
    assert set(report["annotators"]) == {"ann", "bob", "cid"}


@pytest.fixture(scope="module")
def shifted(trained, tmp_path_factory):
    """The same data, from a reward model whose rewards are all higher by 3."""
    settings, _ = trained
    folder = tmp_path_factory.mktemp("runs")
    shutil.copytree(RunDir(settings.out).model, folder / "from")
    file = folder / "from" / "config.json"
    config = json.loads(file.read_text())
    file.write_text(json.dumps({**config, "reward_bias": config["reward_bias"] + 3.0}))
    again = changed(settings, model=str(folder / "from"), out=folder / "next", epochs=1)
    return again, train_reward(again)


@pytest.mark.parametrize("name", ["trained", "shifted"])
def test_thresholds_are_on_the_scale_of_the_saved_model(name, mixed, request):
    settings, report = request.getfixturevalue(name)
    scorer = load_scorer(str(settings.out), Accelerator(mixed_precision="no"))
    tests = [one_thumb(n, ("ann", "bob")[n // 4 % 2]) for n in range(96) if n % 10 < 2 and n % 3]
    right = 0.0
    for record in tests:
        [ranking] = record.rankings
        [response] = [one for one in record.responses if one.id == ranking.tiers[0][0]]
        only = replace(record, responses=(response,))
        sequences = sequences_of([only], load_tokenizer(settings.model))
        reward = scorer(pad_right(sequences, 0)).item()
        above = reward > report["thresholds"][ranking.annotator]["threshold"]
        right += above == (ranking.flags == ("thumbs-up",))
    found = report["judgements"]["thumbs"]["accuracy"]
    assert found["value"] == pytest.approx(right / len(tests))
    good = sum(record.rankings[0].flags == ("thumbs-up",) for record in tests)
    assert found["commoner"] == max(good, len(tests) - good) / len(tests)


def test_evaluations_while_training_see_thumbs(trained):
    settings, report = trained
    rows = read_metrics(RunDir(settings.out).metrics_file)
    measured = [row for row in rows if "validation_loss" in row]
    assert measured
    assert {"validation_accuracy", "validation_thumbs_accuracy"} <= set(measured[0])
    assert report["best"]["loss"] == min(row["validation_loss"] for row in measured)


def test_the_page_and_the_last_sentence_tell_of_thumbs(trained):
    settings, report = trained
    full = RunDir(settings.out).read_report()
    page = RunDir(settings.out).report_html.read_text()
    assert "Kinds of judgments" in page
    assert "all others" in page
    words = describe_report(settings, full)
    thumbs = report["judgements"]["thumbs"]["accuracy"]
    assert f"Of {thumbs['judgements']} held-out thumbs" in words
    assert "always giving the majority verdict would be right for" in words
    assert "Of 4 held-out responses that were all bad" in words
    up = sum(report["counts"][split]["thumbs_up"] for split in ("train", "test"))
    assert f" {up} thumbs up and {64 - up} down, 16 responses that were all bad, of" in words


@pytest.fixture(scope="module")
def short(mixed, tiny_model, tmp_path_factory):
    """One epoch, with all its checkpoints: settings, report, losses and the hash of the weights."""
    out = tmp_path_factory.mktemp("runs") / "short"
    settings = settings_for(mixed, tiny_model, out, epochs=1, save_every=3, keep_checkpoints=9)
    return settings, train_reward(settings), losses(settings), weights(settings)


def losses(settings):
    return [row["loss"] for row in read_metrics(RunDir(settings.out).metrics_file)]


def weights(settings):
    return file_hash(RunDir(settings.out).model / "model.safetensors")


def of_sources(report):
    return [source["threshold"] for source in report["thresholds"].values()]


def test_the_layout_of_batches_changes_nothing(short, tmp_path):
    settings, report, curve, _ = short
    apart = changed(settings, out=tmp_path / "o", tokens_per_batch=1, share_prompt=False)
    again = train_reward(apart)
    assert losses(apart) == pytest.approx(curve, abs=1e-4)
    assert of_sources(again) == pytest.approx(of_sources(report), abs=1e-3)


def test_stopped_and_resumed_gives_the_same_weights_and_thresholds(short):
    settings, report, curve, digest = short
    run = RunDir(settings.out)
    # as a run that was killed after step 3 leaves it
    (run.checkpoints / "latest").write_text("step-000003")
    (run.path / "stage.json").write_text(json.dumps(run.read_stage() | {"status": "running"}))
    saved = json.loads((newest_checkpoint(run.checkpoints) / "progress.json").read_text())
    assert set(saved["thresholds"]) == {"ann", "bob", ""}
    again = train_reward(changed(settings, resume=True))
    assert "already_done" not in again
    assert (again["thresholds"], losses(settings)) == (report["thresholds"], curve)
    assert weights(settings) == digest


def test_an_ensemble_of_fitted_heads_learns_thumbs_and_is_measured_on_them(
    mixed, tiny_model, tmp_path
):
    head = {"head": "fitted", "epochs": 0, "seeds": (0, 1), "share_prompt": False}
    settings = settings_for(mixed, tiny_model, tmp_path / "out", **head)
    report = train_ensemble(settings)
    members = [RunDir(settings.out / f"member-{n}").read_report() for n in (0, 1)]
    for member in members:
        assert member["judgements"]["thumbs"]["accuracy"]["value"] > 0.7
    # both heads are the one that fits best: so are their mean, and its thresholds
    kinds = members[0]["judgements"]
    right = sum(
        kinds[kind]["accuracy"]["value"] * kinds[kind]["held_out"]["all"]
        for kind in ("thumbs", "all_bad")
    )
    found = report["accuracy_on_thumbs"]
    assert found["judgements"] == sum(kinds[k]["held_out"]["all"] for k in ("thumbs", "all_bad"))
    assert found["value"] == pytest.approx(right / found["judgements"])
    assert f"Of {found['judgements']} held-out thumbs" in describe_report(settings, report)


def test_adapters_learn_thumbs(thumbs, tiny_model, tmp_path):
    settings = settings_for(thumbs, tiny_model, tmp_path / "lora", adapter="lora")
    assert train_reward(changed(settings, learning_rate=1e-2))["accuracy"]["value"] > 0.7


def test_weights_of_0_leave_the_training_as_it_is_without_thumbs(mixed, tiny_model, tmp_path):
    records = [build_record(n, "test" if n % 10 < 2 else "train") for n in range(0, 96, 3)]
    rows = [
        build_record(n, "test" if n > 101 else "train", tiers=((2, 3),)) for n in range(96, 104)
    ]
    rows = [replace(r, rankings=(replace(r.rankings[0], annotator="cid"),)) for r in rows]
    export(tmp_path / "plain", records + rows)
    none = {"thumbs_weight": 0.0, "all_bad_weight": 0.0, "epochs": 1}
    train_reward(settings_for(mixed, tiny_model, tmp_path / "a", **none))
    report = train_reward(settings_for(tmp_path / "plain", tiny_model, tmp_path / "b", epochs=1))
    assert "judgements" not in report
    files = [tmp_path / name / "model" / "model.safetensors" for name in "ab"]
    assert file_hash(files[0]) == file_hash(files[1])


# tests/pipeline spreads the same over processes, in every way of sharding


def command(rankings, tiny_model, out):
    words = ["--rankings", rankings, "--model", tiny_model, "--out", out, "--precision", "fp32"]
    words += ["--prompts-per-batch", "4", "--learning-rate", "1e-3", "--json"]
    return [*RLHF, "train-reward", *map(str, words)]


def finish(words, processes):
    done = run_group(processes, *words)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.strip().splitlines()[-1])


@pytest.mark.slow
def test_two_processes_of_which_one_has_no_thumbs_give_the_curve_of_one(tiny_model, tmp_path):
    # in batches of 4 most have one or two thumbs: often a process has none, or nothing else
    records = [build_record(n, "test" if n < 4 else "train") for n in range(28)]
    records += [one_thumb(n, "ann") for n in range(28, 48)]
    export(tmp_path / "data", records)
    found = {}
    for name, processes in (("one", 1), ("two", 2)):
        report = finish(command(tmp_path / "data", tiny_model, tmp_path / name), processes)
        rows = read_metrics(tmp_path / name / "metrics.jsonl")
        curve = [(row["loss"], row["grad_norm"]) for row in rows]
        found[name] = torch.tensor(curve), report["thresholds"]["ann"]["threshold"]
    torch.testing.assert_close(found["one"][0], found["two"][0], atol=1e-5, rtol=1e-4)
    assert found["one"][1] == pytest.approx(found["two"][1], abs=1e-3)
