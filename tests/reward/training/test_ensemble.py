import json

import pytest
import torch
from accelerate import Accelerator
from transformers import AutoModelForSequenceClassification

from reward.scoring.files import score_file
from reward.scoring.scorer import combine_members, load_scorer
from reward.settings import ScoreSettings
from reward.training.ensemble import train_ensemble
from rlhf.cli import main
from rlhf.config import read_setting
from rlhf.errors import ConfigError, GuardError
from rlhf.modeling.models import model_fingerprint
from rlhf.modeling.tokens import load_tokenizer, pad_right
from rlhf.records.jsonl import read_jsonl, write_jsonl
from rlhf.run.rundir import watching_stage
from rlhf.run.watchdog import read_heartbeats
from tests.reward.conftest import build_record, sequences_of
from tests.servers.listener import Listener
from tests.settings import changed, reward_settings

RECORDS = [build_record(n, "test") for n in range(0, 32, 4)]


@pytest.fixture(scope="module")
def listener():
    with Listener() as listening:
        yield listening


@pytest.fixture(scope="module")
def ensemble(rankings, tiny_model, tmp_path_factory, listener):
    out = tmp_path_factory.mktemp("runs") / "reward"
    settings = reward_settings(
        rankings=rankings,
        model=str(tiny_model),
        out=out,
        seeds=(3, 4, 5),
        precision="fp32",
        prompts_per_batch=4,
        learning_rate=1e-3,
        epochs=2,
        notify=listener.url,
    )
    return settings, train_ensemble(settings)


def rewards_of(folder, tiny_model, combine="mean"):
    scorer = load_scorer(str(folder), Accelerator(mixed_precision="no"), combine)
    return scorer(pad_right(sequences_of(RECORDS, load_tokenizer(str(tiny_model))), 0))


def test_mean_and_worst_case_by_hand():
    rewards = torch.tensor([[1.0, -2.0], [3.0, -1.0], [2.0, 9.0]])
    assert combine_members(rewards, "mean").tolist() == [2.0, 2.0]
    assert combine_members(rewards, "worst").tolist() == [1.0, -2.0]


def test_an_ensemble_scores_as_its_members_together(ensemble, tiny_model):
    settings, report = ensemble
    members = [rewards_of(settings.out / f"member-{n}", tiny_model) for n in range(3)]
    for first, second in ((0, 1), (0, 2), (1, 2)):
        assert (members[first] - members[second]).abs().max() > 0.01
    every = torch.stack(members)
    for folder in (settings.out, settings.out / "model"):  # later stages pass on the folder
        torch.testing.assert_close(rewards_of(folder, tiny_model), every.mean(dim=0))
        torch.testing.assert_close(rewards_of(folder, tiny_model, "worst"), every.min(dim=0).values)
    assert report["disagreement"] == pytest.approx(every.std(dim=0).mean().item(), abs=1e-5)


def test_the_report_names_every_member(ensemble):
    settings, report = ensemble
    assert {name: one["seed"] for name, one in report["members"].items()} == {
        "member-0": 3,
        "member-1": 4,
        "member-2": 5,
    }
    assert report["accuracy"]["value"] > 0.7
    assert report["accuracy_of_the_worst_case"]["pairs"] == report["accuracy"]["pairs"] == 40
    for name, one in report["members"].items():
        own = json.loads((settings.out / name / "report.json").read_text())
        assert own["accuracy"] == one["accuracy"]
        assert (settings.out / name / "report.html").is_file()


def test_the_use_of_the_devices_is_that_of_all_members(ensemble):
    settings, report = ensemble
    members = [
        json.loads((settings.out / n / "report.json").read_text()) for n in report["members"]
    ]
    uses = [member["use"] for member in members]
    seconds = sum(use["seconds"] for use in uses)
    assert report["use"]["seconds"] == pytest.approx(seconds, rel=1e-3)
    for name in ("tokens_per_second", "tflops", "waiting_for_data"):
        mean = sum(use[name] * use["seconds"] for use in uses) / seconds
        assert report["use"][name] == pytest.approx(mean, rel=2e-3)


def test_a_url_hears_of_the_run_and_not_of_its_members(ensemble, listener):
    settings, _ = ensemble
    heard = [one for one in listener.heard if one["run"].startswith(str(settings.out))]
    assert [(one["run"], one["status"]) for one in heard] == [(str(settings.out), "done")]


def test_a_url_hears_once_that_a_member_failed_and_from_the_member_that_it_stalls(
    ensemble, broken_model, listener, tmp_path, monkeypatch
):
    watched = []

    def watching(run, timeout_seconds, url):
        watched.append((run.path, timeout_seconds, url))
        return watching_stage(run, timeout_seconds, url)

    monkeypatch.setattr("rlhf.run.stage.watching_stage", watching)
    out = tmp_path / "reward"
    before = len(listener.heard)
    failing = changed(ensemble[0], model=str(broken_model), out=out, stall_timeout=70)
    with pytest.raises(GuardError):
        train_ensemble(failing)
    [message] = listener.heard[before:]
    assert message["text"].startswith(
        f"{out}: failed\nGuardError: Loss or gradient is not a number"
    )
    assert watched == [(out / "member-0", 70, listener.url)]


def test_joining_and_measuring_are_watched(ensemble):
    settings, _ = ensemble
    assert [heartbeat.phase for heartbeat in read_heartbeats(settings.out / "heartbeat")] == [
        "starting"
    ]


def test_plain_transformers_reads_the_first_member(ensemble, tiny_model):
    settings, _ = ensemble
    plain = AutoModelForSequenceClassification.from_pretrained(settings.out / "model").eval()
    ids = pad_right(sequences_of(RECORDS, load_tokenizer(str(tiny_model))), 0).ids
    with torch.no_grad():
        logits = plain(input_ids=ids).logits[:, 0]
    first = rewards_of(settings.out / "member-0", tiny_model)
    torch.testing.assert_close(logits + plain.config.reward_bias, first, atol=1e-5, rtol=0)


def test_the_fingerprint_covers_all_members(ensemble):
    whole, first = (str(ensemble[0].out / name / "model") for name in (".", "member-0"))
    assert model_fingerprint(whole) != model_fingerprint(first)


def test_a_file_is_scored_by_the_mean_or_the_worst_case(ensemble, tiny_model, tmp_path):
    settings, _ = ensemble
    write_jsonl(tmp_path / "in.jsonl", [record.to_json() for record in RECORDS])
    for combine in ("mean", "worst"):
        out = tmp_path / f"{combine}.jsonl"
        score_file(
            ScoreSettings(
                tmp_path / "in.jsonl",
                reward=str(settings.out),
                out=out,
                combine=combine,
                precision="fp32",
            )
        )
        found = torch.tensor([line["rewards"] for line in read_jsonl(out)]).flatten()
        expected = rewards_of(settings.out, tiny_model, combine)
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)


def test_finished_members_are_kept_when_the_ensemble_is_resumed(ensemble):
    settings, report = ensemble
    words = ["train-reward", "--resume", "--json"]
    for name in ("rankings", "model", "out", "precision", "batch.prompts"):
        words += [f"--{name.replace('_', '-')}", str(read_setting(settings, name))]
    words += ["--learning-rate", "1e-3", "--epochs", "2", "--seeds", "3,4,5"]
    before = (settings.out / "model/member-1/model.safetensors").stat().st_mtime_ns
    stage = settings.out / "stage.json"
    stage.write_text(stage.read_text().replace('"done"', '"interrupted"'))
    assert main(words) == 0
    assert (settings.out / "model/member-1/model.safetensors").stat().st_mtime_ns == before
    again = json.loads((settings.out / "report.json").read_text())
    assert again["accuracy"] == report["accuracy"]


@pytest.mark.parametrize("seeds", [(3,), (0, 1, 0)])
def test_seeds_must_differ(tmp_path, seeds):
    with pytest.raises(ConfigError, match="does not name different models"):
        reward_settings(rankings=tmp_path, model="m", out=tmp_path, seeds=seeds)
