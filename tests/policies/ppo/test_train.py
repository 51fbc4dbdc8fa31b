"""`rlhf ppo` on the tiny model, through the command line."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from safetensors.torch import load_file

from policies.ppo.models.critic import new_critic
from policies.reference.store import MANIFEST, open_store
from policies.rewards import load_reward
from rlhf.cli import main
from rlhf.modeling.models import load_causal_lm
from rlhf.modeling.tokens import load_tokenizer
from rlhf.parallel.distributed import start
from rlhf.records.jsonl import write_json, write_jsonl
from rlhf.run.rundir import RunDir
from tests.pipeline.loop import SHORT
from tests.pipeline.signals import count_vowels
from tests.policies.training import TrainingInputs, metrics_of, read_report
from tests.servers.interrupted import kill_when
from tests.settings import ppo_settings


def test_the_fit_of_the_critic_is_reported(
    training: TrainingInputs, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert training.ppo(tmp_path / "ppo") == 0
    fit = read_report(tmp_path / "ppo")["critic_fit"]
    assert fit["rows"] == 16
    assert fit["explained_variance"]["after"] > fit["explained_variance"]["before"]
    assert "Critic fitted: explained variance" in capsys.readouterr().err
    assert training.ppo(tmp_path / "raw", "--no-critic-warmup") == 0
    assert read_report(tmp_path / "raw")["critic_fit"] is None


def test_only_the_critics_head_trains_where_that_is_asked(
    training: TrainingInputs, tmp_path: Path
) -> None:
    assert training.ppo(tmp_path / "ppo", "--critic-trains", "head", steps=2) == 0
    assert all(row["grad_norm/critic"] > 0 for row in metrics_of(tmp_path / "ppo"))
    settings = ppo_settings(
        model=str(training.model),
        reward=(str(training.reward),),
        reference=training.reference,
        out=tmp_path / "ppo",
        critic_trains="head",
    )
    critic, _ = new_critic(settings, load_tokenizer(str(training.model)))
    assert critic is not None
    trained = [name for name, weight in critic.named_parameters() if weight.requires_grad]
    assert trained == ["score.weight"]


@pytest.mark.slow
def test_a_run_killed_while_the_critic_is_fitted_fits_it_again(
    training: TrainingInputs, tmp_path: Path
) -> None:
    straight, killed = tmp_path / "straight", tmp_path / "killed"
    options = ("--save-every", "2")
    assert training.ppo(straight, *options, steps=5) == 0
    kill_when(training.arguments(killed, *options, steps=5), killed / "stage.json", lines=0)
    kill_when(
        training.arguments(killed, *options, "--resume", steps=5), killed / "metrics.jsonl", lines=3
    )
    assert training.ppo(killed, *options, "--resume", steps=5) == 0
    fits = [read_report(out)["critic_fit"] for out in (straight, killed)]
    assert fits[0] == fits[1]
    weights = [load_file(out / "policy" / "model.safetensors") for out in (straight, killed)]
    assert all(weights[0][name].equal(weights[1][name]) for name in weights[0])


SIGNAL = "signal:tests.pipeline.signals:count_vowels"


def test_a_function_scores_the_reference_outputs(training: TrainingInputs, tmp_path: Path) -> None:
    command = [
        *("reference", "--prompts", str(training.reference.parent / "prompts.jsonl"), *SHORT),
        *("--model", str(training.model), "--reward", SIGNAL, "--out", str(tmp_path / "reference")),
    ]
    assert main(command) == 0
    store = open_store(tmp_path / "reference" / "outputs")
    assert [row.reward for row in store.rows] == [count_vowels("", row.text) for row in store.rows]
    scored = {"path": SIGNAL, "hash": SIGNAL, "precision": "fp32"}
    assert store.manifest["reward"] == scored


def test_a_function_can_be_the_reward(training: TrainingInputs, tmp_path: Path) -> None:
    assert training.ppo(tmp_path / "one", "--reward", SIGNAL, "--reward-shaping", "none") == 0
    alone = metrics_of(tmp_path / "one")[0]
    assert alone["reward/shaped"] <= alone["reward/mean"]
    inputs = RunDir(tmp_path / "one").read_stage()["inputs"]
    assert inputs["reward"] == {"path": SIGNAL, "hash": SIGNAL}


def test_several_rewards_are_weighed_and_combined(training: TrainingInputs) -> None:
    accelerator, tokenizer = start("fp32", 0), load_tokenizer(str(training.model))
    rows = open_store(training.reference / "outputs").rows[:6]

    def of(names: list[str], **options: Any) -> list[float]:
        return load_reward(names, accelerator, **options).score_rows(
            rows, tokenizer, accelerator.device
        )

    signal, model = of([SIGNAL]), of([str(training.reward)])
    assert signal == [count_vowels("", row.text) for row in rows]
    assert model == pytest.approx([row.reward for row in rows], abs=1e-5)
    names = [SIGNAL, str(training.reward)]
    mean = of(names, weights=(2.0, -1.0), combination="mean")
    assert mean == pytest.approx([(2 * s - m) / 2 for s, m in zip(signal, model, strict=True)])
    worst = of(names, combination="worst")
    assert worst == pytest.approx([min(both) for both in zip(signal, model, strict=True)], abs=1e-5)


def test_weights_must_match_the_rewards(
    training: TrainingInputs, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert training.ppo(tmp_path / "x", "--reward-weights", "1", "--reward-weights", "2") == 2
    assert "2 --rewards.weights for 1 --reward" in capsys.readouterr().err
    assert not (tmp_path / "x").exists()


def test_a_settings_file_names_one_reward_or_several(
    training: TrainingInputs, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "ppo.yaml"
    for written, read in ((SIGNAL, [SIGNAL]), (f"[{SIGNAL}, {SIGNAL}]", [SIGNAL, SIGNAL])):
        file.write_text(f"reward: {written}\nmodel: {training.model}\nreference: r\nout: o\n")
        assert main(["ppo", "--config", str(file), "--dry-run"]) == 0
        assert yaml.safe_load(capsys.readouterr().out.split("#")[0])["reward"] == read


@pytest.mark.parametrize("kind", ["rloo", "group"])
def test_advantages_without_a_critic(training: TrainingInputs, tmp_path: Path, kind: str) -> None:
    options = ("--advantages", kind, "--samples-per-prompt", "2")
    assert training.ppo(tmp_path / kind, *options) == 0
    row = metrics_of(tmp_path / kind)[0]
    assert not {"loss/value", "grad_norm/critic", "value/explained_variance"} & set(row)
    assert row["grad_norm/policy"] > 0
    assert read_report(tmp_path / kind)["critic_fit"] is None


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--advantages", "rloo"), "--batch.samples-per-prompt is 1"),
        (("--samples-per-prompt", "3"), "does not divide into --batch.samples-per-prompt 3"),
        (("--kl.source", "adapter"), "Add --lora.rank 16"),
        (
            ("--kl.target", "0.01", "--kl.source", "none"),
            "--kl.target 0.01 adjusts the coefficient of the KL term, and with --kl.source none "
            "--kl.coefficient 0.1 there is no such term",
        ),
        (("--kl.target", "0.01", "--kl.coefficient", "0"), "with --kl.source reference --kl.coeff"),
        (("--seed", "-1"), "--seed is -1 Give a value of at least 0"),
        (
            ("--kl.source", "none", "--guards.max-kl", "0.5"),
            "--guards.max-kl 0.5 with --kl.source none: no step measures a KL Add --kl.audit-every",
        ),
    ],
)
def test_settings_that_do_not_fit_are_refused(
    training: TrainingInputs,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    options: tuple[str, ...],
    words: str,
) -> None:
    assert training.ppo(tmp_path / "x", *options) == 2
    assert words in " ".join(capsys.readouterr().err.split())


def test_what_fails_after_the_last_step_trains_nothing_again(
    training: TrainingInputs, tmp_path: Path
) -> None:
    out = tmp_path / "ppo"
    assert training.ppo(out, "--save-every", "2", steps=3) == 0
    whole, trained = read_report(out), (out / "metrics.jsonl").read_bytes()
    (out / "report.json").unlink()
    stage = RunDir(out).read_stage()
    write_json(out / "stage.json", {**stage, "status": "failed"})
    assert training.ppo(out, "--save-every", "2", "--resume", steps=3) == 0
    assert (out / "metrics.jsonl").read_bytes() == trained
    again = read_report(out)
    assert again.pop("cost")["device_hours"] >= whole.pop("cost")["device_hours"]
    assert again.pop("use").keys() == whole.pop("use").keys()  # the device was measured again
    assert again == whole
    assert training.ppo(tmp_path / "short", "--save-every", "2", steps=2) == 0
    assert not (tmp_path / "short" / "checkpoints").exists()


def test_the_model_may_be_elsewhere_than_where_the_store_was_made(
    training: TrainingInputs, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    moved = replace(training, reference=tmp_path / "reference", model=tmp_path / "model")
    moved.model.symlink_to(training.model)
    shutil.copytree(training.reference, moved.reference)
    manifest = json.loads((moved.reference / "outputs" / MANIFEST).read_text())
    manifest["model"]["path"] = "gone/model"
    write_json(moved.reference / "outputs" / MANIFEST, manifest)
    assert moved.ppo(tmp_path / "ppo", "--kl.audit-every", "1") == 0
    assert training.ppo(tmp_path / "straight", "--kl.audit-every", "1") == 0
    kls = [read_report(tmp_path / name)["kl"] for name in ("ppo", "straight")]
    assert kls[0] == kls[1]
    evaluation = ["evaluate", "--reward", str(training.reward), "--precision", "fp32"]
    policy = ["--policy", str(tmp_path / "ppo")]
    for store, name in ((moved.reference, "evaluate"), (training.reference, "evaluate-straight")):
        out = ["--out", str(tmp_path / name), "--reference", str(store)]
        assert main([*evaluation, *policy, *out]) == 0
    kls = [read_report(tmp_path / name)["kl"] for name in ("evaluate", "evaluate-straight")]
    assert kls[0] == kls[1]
    evaluation += ["--reference", str(moved.reference)]
    capsys.readouterr()
    strange = ["--policy", str(training.model), "--out", str(tmp_path / "strange")]
    assert main([*evaluation, *strange]) == 2
    words = " ".join(capsys.readouterr().err.split())
    assert f"The model that made the reference outputs in {moved.reference / 'outputs'}" in words
    assert "was not found: Cannot read the model gone/model" in words
    assert "Restore it at gone/model, or put a link there" in words
    assert not (tmp_path / "strange").exists()


@pytest.mark.parametrize("source", ["adapter", "resident"])
def test_reverse_kl_is_measured_where_the_reference_is_at_hand(
    training: TrainingInputs, tmp_path: Path, source: str
) -> None:
    options = ("--kl.source", source, "--lora-rank", "4", "--kl.target", "0.001")
    assert training.ppo(tmp_path / source, *options, "--learning-rate", "3e-2", steps=3) == 0
    rows = metrics_of(tmp_path / source)
    assert rows[0]["kl/reverse_k1_per_token"] == pytest.approx(0.0, abs=1e-6)
    assert rows[2]["kl/reverse_k3_per_token"] > 1e-4
    assert not any("forward" in name for name in rows[0])
    # KL 0 is below the target: the coefficient of .1 falls by a fifth of 4 in 10,000 responses
    assert rows[1]["kl/coefficient"] == pytest.approx(0.1 * (1 - 0.2 * 4 / 10_000))
    saved = load_causal_lm(str(tmp_path / source / "policy"))
    original = load_causal_lm(str(training.model))
    assert set(saved.state_dict()) == set(original.state_dict())
    audited = read_report(tmp_path / source)["kl"]["reverse"]
    assert audited["nats"] != 0.0
    assert audited["audit"] == "measured after training with the policy's adapters switched off"


@pytest.mark.parametrize("adapters", [(), ("--lora-rank", "4")])
def test_the_true_reverse_kl_is_audited_on_the_way(
    training: TrainingInputs, tmp_path: Path, adapters: tuple[str, ...], already_loaded: list[int]
) -> None:
    """An audit of the samples of a step says what a resident reference would have said of them."""
    fast = (*adapters, "--learning-rate", "3e-2", "--kl.coefficient", "0")
    audits = ("--kl.audit-every", "2")
    assert training.ppo(tmp_path / "audited", *fast, *audits, steps=4) == 0
    # policy, critic and reward model; loaded for audits is what no adapters lie over
    assert len(already_loaded) == 3 + (0 if adapters else 2 + 1)
    assert training.ppo(tmp_path / "resident", *fast, "--kl.source", "resident", steps=4) == 0
    rows, known = metrics_of(tmp_path / "audited"), metrics_of(tmp_path / "resident")
    for estimator in ("k1", "k3"):
        found = [row.get(f"kl_audit/reverse_{estimator}_per_token") for row in rows]
        expected = [row[f"kl/reverse_{estimator}_per_token"] for row in known]
        assert (found[0], found[2]) == (None, None)
        assert found[1::2] == pytest.approx(expected[1::2], rel=1e-3, abs=1e-5)
        assert min(map(abs, expected[1:])) > 1e-3


def test_the_exact_kl_wants_a_store_that_has_it(
    training: TrainingInputs, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    exact = ("--kl.estimator", "top_k")
    assert training.ppo(tmp_path / "ppo", *exact) == 2
    error = capsys.readouterr().err
    assert f"and {training.reference / 'outputs'} has none" in error
    assert "rlhf reference --store-top-k 32, or use --kl.estimator k3" in error
    assert not (tmp_path / "ppo").exists()
    prompts = training.reference.parent / "prompts.jsonl"
    made = replace(training, reference=tmp_path / "reference")
    command = [
        *("reference", "--prompts", str(prompts), "--model", str(training.model), *SHORT),
        *("--store-top-k", "8", "--out", str(made.reference)),
    ]
    assert main(command) == 0
    assert made.ppo(tmp_path / "ppo", *exact, steps=2) == 0
    assert "Log-probs of 8 reference outputs computed again: max |Δ| " in capsys.readouterr().err
    first, second = (row["kl/forward_top_k_per_token"] for row in metrics_of(tmp_path / "ppo"))
    assert first == pytest.approx(0.0, abs=1e-6)
    assert second > first


def test_a_store_of_test_prompts_only_is_refused_before_anything_is_written(
    training: TrainingInputs, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = tmp_path / "prompts.jsonl"
    write_jsonl(prompts, [{"prompt": "How was the trip?", "split": "test"}])
    made = replace(training, reference=tmp_path / "reference")
    command = ["reference", "--prompts", str(prompts), "--model", str(training.model), *SHORT]
    assert main([*command, "--out", str(made.reference)]) == 0
    capsys.readouterr()
    assert made.ppo(tmp_path / "ppo") == 2
    words = " ".join(capsys.readouterr().err.split())
    assert f"{made.reference / 'outputs'} has no prompts of the split 'train', only 1 of" in words
    assert "Make a store of training prompts: rlhf reference --prompts DIR" in words
    assert not (tmp_path / "ppo").exists()


def test_the_controller_follows_the_held_out_forward_kl(
    training: TrainingInputs, tmp_path: Path
) -> None:
    steered = ("--kl.target", "0.01", "--kl.horizon", "10", "--learning-rate", "1e-2")
    assert training.ppo(tmp_path / "ppo", *steered, steps=4) == 0
    rows = metrics_of(tmp_path / "ppo")
    measured = [row["kl/held_out_forward_k3_per_token"] for row in rows]
    assert measured[0] == pytest.approx(0.0, abs=1e-6)
    assert max(measured) > 0.01
    coefficient = 0.1
    for row, value in zip(rows, measured, strict=True):
        assert row["kl/coefficient"] == pytest.approx(coefficient)
        coefficient *= 1 + min(max(value / 0.01 - 1, -0.2), 0.2) * 4 / 10


def test_learning_rates_fall_to_0_over_the_run(training: TrainingInputs, tmp_path: Path) -> None:
    rates = ("--learning-rate", "4e-3", "--critic-learning-rate", "8e-3")
    assert training.ppo(tmp_path / "ppo", *rates, steps=4) == 0
    rows = metrics_of(tmp_path / "ppo")
    assert [row["learning_rate/policy"] for row in rows] == pytest.approx([4e-3, 3e-3, 2e-3, 1e-3])
    assert [row["learning_rate/critic"] for row in rows] == pytest.approx([8e-3, 6e-3, 4e-3, 2e-3])


def test_flags_and_files_from_before_the_groups_mean_the_same(
    training: TrainingInputs, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "old.yaml"
    file.write_text(
        "critic: none\ncritic_trains: head\nadvantages: group\nsamples_per_prompt: 2\n"
        "max_approx_kl: 0.5\nkl:\n  rows_per_episode: 0.25\n"
    )
    flags = (
        *("--critic-trains", "head", "--advantages", "group", "--samples-per-prompt=2"),
        *("--max-approx-kl", "0.5", "--kl.rows-per-episode", "0.25"),
    )
    for given in (flags, ("--config", str(file))):
        assert training.ppo(tmp_path / "ppo", *given, "--dry-run") == 0
        shown = yaml.safe_load(capsys.readouterr().out.split("#")[0])
        assert shown["advantages"] == "grpo"
        assert (shown["critic"]["trains"], shown["critic"]["model"]) == ("head", "own")
        assert (shown["batch"]["samples_per_prompt"], shown["optim"]["target_kl"]) == (2, 0.5)
        assert shown["kl"]["rows_per_prompt"] == 0.25
