"""What the loop leaves on disk is what the next stage, and a user, may rely on."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from policies.reference.store import open_store
from rlhf.records.ranked import read_ranked
from rlhf.run.metrics import read_metrics
from rlhf.run.rundir import RunDir
from tests.pipeline.loop import SIGNAL, Loop, read_json

Run = Callable[..., tuple[int, str, str]]


def test_every_stage_is_done_and_names_its_inputs(loop: Loop) -> None:
    for stage in ("reward", "reference", "ppo", "evaluate"):
        content = RunDir(loop.folder / stage).read_stage()
        assert content["status"] == "done"
        assert content["stage"] == stage
        assert all(value["hash"] for value in content["inputs"].values())
        assert content["versions"]["torch"] == torch.__version__
    assert set(RunDir(loop.folder / "ppo").read_stage()["inputs"]) == {
        "model",
        "reward",
        "reference",
    }


def test_the_signal_annotator_is_never_called_human(loop: Loop) -> None:
    records = read_ranked(loop.folder / "rankings")
    kinds = {ranking.kind for record in records for ranking in record.rankings}
    assert kinds == {"signal"}
    assert len(records) == 12


def test_reference_outputs_are_the_responses_already_ranked(loop: Loop) -> None:
    store = open_store(loop.folder / "reference" / "outputs")
    ranked = {
        record.prompt.id: [tuple(r.token_ids or ()) for r in record.responses]
        for record in read_ranked(loop.folder / "rankings")
    }
    assert len(store.rows) == 24
    for row in store.rows:
        assert row.reused
        assert tuple(row.response_ids) == ranked[row.prompt.id][row.sample_index]
        assert row.reward is not None


def test_stored_log_probs_are_those_of_the_plain_model(loop: Loop) -> None:
    model = AutoModelForCausalLM.from_pretrained(loop.model).eval()
    for row in open_store(loop.folder / "reference" / "outputs").rows[:6]:
        with torch.no_grad():
            logits = model(torch.tensor([row.prompt_ids + row.response_ids])).logits[0]
        log_probs = logits.double().log_softmax(-1)[len(row.prompt_ids) - 1 : -1]
        expected = log_probs[torch.arange(len(row.response_ids)), torch.tensor(row.response_ids)]
        assert row.log_probs == pytest.approx(expected.tolist(), abs=2e-5)


def test_stored_rewards_are_those_of_the_plain_classifier_plus_its_bias(loop: Loop) -> None:
    folder = loop.folder / "reward" / "model"
    model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    rows = open_store(loop.folder / "reference" / "outputs").rows
    for row in rows[:6]:
        with torch.no_grad():
            closed = row.response_ids if row.finished else [*row.response_ids, 2]  # <|im_end|>
            score = model(torch.tensor([row.prompt_ids + closed])).logits.item()
        assert row.reward == pytest.approx(score + model.config.reward_bias, abs=1e-4)
    rewards = torch.tensor([row.reward for row in rows])
    assert abs(rewards.mean()) < 0.5  # normalised on the reference outputs


def test_step_one_satisfies_the_invariants(loop: Loop) -> None:
    first = read_metrics(loop.folder / "ppo" / "metrics.jsonl")[0]
    assert first["kl/forward_k3_per_token"] == pytest.approx(0.0, abs=1e-6)
    assert first["approx_kl"] == pytest.approx(0.0, abs=1e-8)
    assert first["clip_fraction"] == 0.0
    assert first["entropy"] > 0


def test_the_policy_is_a_plain_folder_that_has_moved(loop: Loop) -> None:
    before = AutoModelForCausalLM.from_pretrained(loop.model)
    after = AutoModelForCausalLM.from_pretrained(loop.folder / "ppo" / "policy")
    name = "model.embed_tokens.weight"
    assert not torch.equal(before.state_dict()[name], after.state_dict()[name])


def test_the_report_holds_what_is_promised(loop: Loop) -> None:
    report = read_json(loop.folder / "evaluate" / "report.json")
    for judge in ("reward", "gold"):
        assert report["win_rate"][judge]["n"] == 4
        assert 0 <= report["win_rate"][judge]["value"] <= 1
        assert report["win_rate"][judge]["low"] is None  # of four prompts there is no interval
    for direction, estimator in (("forward", "k3"), ("reverse", "k1")):
        assert report["kl"][direction]["estimator"] == estimator
        assert set(report["kl"][direction]) >= {"nats", "per_token", "standard_error"}
    assert report["kl"]["forward"]["nats"] >= 0
    assert report["seed"] == 0
    assert set(report["inputs"]) == {"policy", "reward", "reference"}
    assert report["judges"]["reward"]["is_objective"] is True
    page = (loop.folder / "evaluate" / "report.html").read_text()
    assert "signal" in page


def test_a_finished_stage_resumes_to_its_result(loop: Loop, run_rlhf: Run) -> None:
    arguments = loop.ppo_arguments(loop.folder / "ppo", "--save-every", "2", "--resume", "--json")
    code, out, _ = run_rlhf(*arguments)
    assert code == 0
    assert json.loads(out.splitlines()[-1]) == read_json(loop.folder / "ppo" / "report.json")


def test_evaluating_the_original_model_wins_half(loop: Loop, run_rlhf: Run, tmp_path: Path) -> None:
    code, out, _ = run_rlhf(
        *("evaluate", "--policy", str(loop.model), "--reward", loop.path("reward")),
        *("--reference", loop.path("reference"), "--gold", SIGNAL, "--samples", "8"),
        *("--precision", "fp32", "--out", str(tmp_path / "same"), "--json"),
    )
    assert code == 0
    result = json.loads(out.splitlines()[-1])
    assert result["kl"]["forward"]["nats"] == pytest.approx(0.0, abs=1e-4)
    assert result["kl"]["reverse"]["nats"] == pytest.approx(0.0, abs=1e-3)
    assert 0.25 < result["win_rate"]["gold"]["value"] < 0.75
