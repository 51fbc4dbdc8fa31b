"""What is believed of stored rewards, and what happens to rewards that are no numbers."""

import re
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from policies.reference.rewards import rewards_by_prompt
from policies.reference.store import open_store
from policies.rewards import Combination, load_reward
from reward.scoring.texts import load_text_reward
from rlhf.cli import main
from rlhf.modeling.models import describe_model
from rlhf.modeling.tokens import load_tokenizer
from rlhf.parallel.distributed import start
from rlhf.records.schema import Response
from rlhf.run.rundir import RunDir
from tests.policies.training import TrainingInputs, build_ensemble, metrics_of
from tests.reward.encoders import build_encoder
from tests.servers.commands import REPOSITORY
from tests.servers.reward import RewardServer

GUIDE = REPOSITORY / "examples" / "guides" / "reward.md"


def test_stored_rewards_of_an_ensemble_are_those_of_its_mean_only(
    training: TrainingInputs, tmp_path: Path
) -> None:
    ensemble = build_ensemble(training, tmp_path / "ensemble")
    reference = shutil.copytree(training.reference, tmp_path / "reference")
    command = ["reference", "--reward", str(ensemble), "--out", str(reference)]
    assert main([*command, "--replace-reward", "--precision", "fp32"]) == 0
    store = open_store(reference / "outputs")
    accelerator, tokenizer = start("fp32", 0), load_tokenizer(str(training.model))

    def of_store(name: Path, combination: Combination) -> list[float]:
        reward = load_reward([str(name)], accelerator, combination=combination)
        found = rewards_by_prompt(store, reward, tokenizer, accelerator)
        return [value for values in found.values() for value in values]

    members = [of_store(one, "sum") for one in (training.reward, ensemble / "member-1")]
    mean = [sum(both) / 2 for both in zip(*members, strict=True)]
    worst = [min(both) for both in zip(*members, strict=True)]
    assert of_store(ensemble, "sum") == pytest.approx(mean, abs=1e-5)
    assert of_store(ensemble, "worst") == pytest.approx(worst, abs=1e-5)
    assert max(m - w for m, w in zip(mean, worst, strict=True)) > 0.01


def test_a_function_that_has_changed_since_is_asked_again(
    training: TrainingInputs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scaled = "signal:tests.pipeline.signals:count_scaled"
    reference = shutil.copytree(training.reference, tmp_path / "reference")
    command = ["reference", "--reward", scaled, "--out", str(reference), "--precision", "fp32"]
    assert main([*command, "--replace-reward"]) == 0
    store, accelerator = open_store(reference / "outputs"), start("fp32", 0)
    monkeypatch.setenv("SCALE", "100")
    tokenizer = load_tokenizer(str(training.model))
    found = rewards_by_prompt(store, load_reward([scaled], accelerator), tokenizer, accelerator)
    assert [value for values in found.values() for value in values] == pytest.approx(
        [100 * row.reward for row in store.rows]
    )


def test_the_worst_of_an_ensemble_of_encoders_is_another_reward_than_its_mean(
    tmp_path: Path,
) -> None:
    ensemble = build_encoder(tmp_path / "ensemble")
    shutil.copytree(ensemble, tmp_path / "other")
    shutil.copytree(tmp_path / "other", ensemble / "member-1")
    accelerator = start("fp32", 0)
    mean, worst = (
        load_reward([str(ensemble)], accelerator, combination=combination).description["hash"]
        for combination in ("sum", "worst")
    )
    assert mean != worst


def test_a_reward_that_is_not_a_number_ends_the_run_with_2(
    training: TrainingInputs, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = shutil.copytree(training.reward, tmp_path / "broken")
    state = load_file(broken / "model.safetensors")
    save_file(
        state | {"score.weight": state["score.weight"] * float("nan")},
        broken / "model.safetensors",
        metadata={"format": "pt"},
    )
    signal = "tests.pipeline.signals:not_a_number"
    with RewardServer() as server:
        server.answer = {"rewards": [float("nan")] * 24}
        several = "gave 24 of 24 responses a reward that is not a number, the first of them to"
        for name, words in (
            (server.url, f"{server.url} {several} 'Tell me about the house.'"),
            (str(broken), f"{broken} {several} 'Tell me about the house.'"),
            (f"signal:{signal}", f"{signal} returned nan for the response"),
        ):
            assert training.ppo(tmp_path / "ppo", "--reward", name) == 2
            assert words in " ".join(capsys.readouterr().err.split())
            shutil.rmtree(tmp_path / "ppo")


def test_an_encoder_rewards_a_policy_as_it_does_as_a_function(
    training: TrainingInputs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It reads text, so the critic starts from the policy and tokenizers may differ."""
    encoder = build_encoder(tmp_path / "encoder")
    ((code,),) = [re.findall(r"```python\n(.*?)```", GUIDE.read_text(encoding="utf-8"), re.DOTALL)]
    code = re.sub(r'MODEL = ".*"', f"MODEL = {str(encoder)!r}", code)
    (tmp_path / "classifier.py").write_text(code, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    stored = shutil.copytree(training.reference, tmp_path / "stored")
    scoring = ["reference", "--reward", str(encoder), "--out", str(stored), "--precision", "fp32"]
    assert main([*scoring, "--replace-reward"]) == 0
    common = ("--reward-shaping", "none")
    for name, reward in (("a", str(encoder)), ("b", "signal:classifier:score")):
        assert training.ppo(tmp_path / name, "--reward", reward, *common, steps=2) == 0
    rows, others = metrics_of(tmp_path / "a"), metrics_of(tmp_path / "b")
    assert [row["reward/mean"] for row in rows] == pytest.approx(
        [row["reward/mean"] for row in others], abs=1e-5
    )
    assert rows[1]["loss/policy"] == pytest.approx(others[1]["loss/policy"], abs=1e-4)
    inputs = RunDir(tmp_path / "a").read_stage()["inputs"]
    assert inputs["reward"] == describe_model(str(encoder))
    rewards = [row.reward for row in open_store(stored / "outputs").rows]
    answers = open_store(training.reference / "outputs").rows
    score = load_text_reward(str(encoder), start("fp32", 0), 400)
    asked = [
        (row.prompt, (Response(id="", prompt_id="", text=row.text, model=""),)) for row in answers
    ]
    assert rewards == pytest.approx([value for (value,) in score(asked)], abs=1e-5)
