"""Runs that are stopped because something about them is really broken."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest
from safetensors.torch import load_file, save_file

from policies.ppo.checks import check_step
from policies.reference.shards import describe_shard, read_table, reward_of, write_table
from rlhf.cli import main
from rlhf.errors import GuardError
from rlhf.records.jsonl import write_json
from tests.pipeline.loop import SHORT
from tests.policies.training import TrainingInputs


def change_log_probs(outputs: Path, sample: int) -> None:
    """Make one sample of every training prompt likelier than it was, and sign the change."""
    manifest = json.loads((outputs / "manifest.json").read_text())
    for name in (one for one in manifest["shards"] if one.startswith("train")):
        table = read_table(outputs / name)
        places = zip(table["log_probs"].to_pylist(), table["sample_index"].to_pylist(), strict=True)
        changed = [[x + 0.3 * (index == sample) for x in each] for each, index in places]
        place = table.schema.get_field_index("log_probs")
        kind = table.schema.field(place).type
        table = table.set_column(place, "log_probs", pa.array(changed, kind))
        write_table(outputs / name, table, reward_of(outputs / name))
        manifest["shards"][name] = describe_shard(table)
    write_json(outputs / "manifest.json", manifest)


@pytest.mark.parametrize(
    ("sample", "words"),
    [
        (0, "reference outputs are off by 0.3000 nats per token before any training"),
        (1, "Step 1: kl/forward_k3_per_token is 0.04082 before the first update, it must be 0"),
    ],
)
def test_a_store_with_other_log_probs(
    training: TrainingInputs,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    sample: int,
    words: str,
) -> None:
    broken = replace(
        training, reference=shutil.copytree(training.reference, tmp_path / "reference")
    )
    change_log_probs(broken.reference / "outputs", sample)
    assert broken.ppo(tmp_path / "ppo") == 3  # e^(−.3) − 1 + .3 = .04082, on samples 1 at step 1
    assert words in " ".join(capsys.readouterr().err.split())


def test_a_model_that_does_not_sample(
    training: TrainingInputs, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sure = shutil.copytree(training.model, tmp_path / "sure")
    state = load_file(sure / "model.safetensors")
    state["model.norm.weight"] *= 1e5  # its logits, so that one token has all the probability
    save_file(state, sure / "model.safetensors", metadata={"format": "pt"})
    made = replace(training, model=sure, reference=tmp_path / "reference")
    prompts = str(training.reference.parent / "prompts.jsonl")
    command = ["reference", "--prompts", prompts, "--model", str(sure), *SHORT]
    assert main([*command, "--out", str(made.reference)]) == 0
    for updates in ("1", "2"):
        assert made.ppo(tmp_path / updates, "--epochs", updates) == 3
        words = " ".join(capsys.readouterr().err.split())
        assert "Step 1: the policy's entropy is" in words
        assert "it does not sample Use a model whose" in words


def test_weights_that_are_blown_up(
    training: TrainingInputs, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ("--learning-rate", "1e30", "--advantages", "rloo", "--samples-per-prompt", "2")
    assert training.ppo(tmp_path / "ppo", *options, steps=2) == 3
    words = " ".join(capsys.readouterr().err.split())
    assert "Step 2: " in words
    assert "is not a finite number No checkpoint was saved. Start a new --out with a" in words


def test_a_metric_that_is_not_finite_names_the_checkpoint_to_go_back_to() -> None:
    row = {"step": 7.0, "loss/policy": float("inf"), "entropy": 1.0}
    with pytest.raises(GuardError) as caught:
        check_step(row, "no", Path("ppo/checkpoints/step-000005"), single_update=True)
    assert str(caught.value) == (
        "Step 7.0: loss/policy is not a finite number\n  ppo/checkpoints/step-000005 is the last "
        "good checkpoint. Start a new --out with a lower --optim.learning-rate."
    )


def test_what_is_measured_before_the_updates_must_be_0_however_many_there_are() -> None:
    row = {"step": 1, "sampler_gap": 0.0, "entropy": 1.0, "approx_kl": 0.5}
    check_step(row | {"kl/forward_k3_per_token": 0.5}, "no", None, single_update=False)
    with pytest.raises(GuardError, match=r"Step 1: approx_kl is 0\.50000 before"):
        check_step(row, "no", None, single_update=True)
    clipped = row | {"approx_kl": 0.0, "clip_fraction": 0.03}
    check_step(clipped, "no", None, single_update=False)
    for precision in ("no", "bf16"):
        with pytest.raises(GuardError, match=r"Step 1: clip_fraction is 0\.03000 before"):
            check_step(clipped, precision, None, single_update=True)
    check_step(clipped | {"clip_fraction": 0.01}, "bf16", None, single_update=True)  # rounding
    with pytest.raises(GuardError, match=r"reverse_k1_per_token is -0\.50000 before"):
        check_step(row | {"kl/reverse_k1_per_token": -0.5}, "no", None, single_update=False)
