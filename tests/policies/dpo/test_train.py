"""`rlhf dpo` on the tiny model: its loss, its resuming, its adapters, and what it refuses."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from accelerate.state import AcceleratorState
from transformers import AutoModelForCausalLM

from policies.dpo.pairs import read_pairs
from policies.dpo.settings import DPOSettings
from policies.dpo.train import _arguments, _build_trainer, _on_disk
from rlhf.cli import main
from rlhf.errors import ConfigError
from rlhf.modeling.chat_template import template_kwargs
from rlhf.modeling.tokens import load_tokenizer
from rlhf.records.ranked import write_ranked
from rlhf.records.schema import Message, Prompt, RankedPrompt, Ranking, Response
from rlhf.run.metrics import read_metrics
from rlhf.run.rundir import RunDir
from rlhf.run.watchdog import read_heartbeats
from tests.families import FAMILIES, build_family_model
from tests.policies.training import metrics_of
from tests.servers.interrupted import kill_once, stop_after

TEXTS = ("The weather was lovely.", "It rained all day.", "We loved the warm food and the music.")
SETTINGS = ("--precision", "fp32", "--micro-batch-size", "2", "--learning-rate", "0.005")


@pytest.fixture(autouse=True)
def _own_precision():
    AcceleratorState._reset_state(True)
    yield
    AcceleratorState._reset_state(True)


def ranked(number: int, split: str, tiers: tuple[tuple[int, ...], ...]) -> RankedPrompt:
    """Three answers to a question, ranked by one person; the third was cut."""
    prompt = Prompt.create((Message(role="user", content=f"Trip {number}?"),), split, "test")
    responses = tuple(
        Response(id=f"{number}-{i}", prompt_id=prompt.id, text=text, model="m", finished=i < 2)
        for i, text in enumerate(TEXTS)
    )
    ranking = Ranking(
        id=f"r{number}", prompt_id=prompt.id, annotator="ann", kind="human",
        tiers=tuple(tuple(f"{number}-{i}" for i in tier) for tier in tiers),
    )  # fmt: skip
    return RankedPrompt(prompt=prompt, responses=responses, rankings=(ranking,))


@pytest.fixture(scope="module")
def rankings(tmp_path_factory) -> Path:
    """Three training prompts with 3, 2 and 1 pairs, a tie with none, and a test prompt with two."""
    folder = tmp_path_factory.mktemp("dpo") / "rankings"
    folder.mkdir()
    records = [
        ranked(0, "train", ((0,), (1,), (2,))),
        ranked(1, "train", ((0, 2), (1,))),
        ranked(2, "train", ((2,), (0,))),
        ranked(3, "train", ((0, 1, 2),)),
        ranked(4, "test", ((0, 2), (1,))),
    ]
    write_ranked(folder, records, {"annotator_hours": 1.25})
    return folder


@pytest.fixture
def dpo(tiny_model, rankings, tmp_path, capsys):
    def run(*more: str, source: Path = rankings, model: Path = tiny_model) -> dict | str:
        code = main(arguments(model, source, tmp_path / "out", *more, "--json"))
        captured = capsys.readouterr()
        return captured.err if code else json.loads(captured.out.splitlines()[-1])

    return run


def arguments(model: Path, rankings: Path, out: Path, *more: str) -> list[str]:
    command = ["dpo", "--rankings", str(rankings), "--model", str(model), "--out", str(out)]
    size = () if "--batch-size" in more else ("--batch-size", "6")
    return [*command, *SETTINGS, *size, *more]


def sums_of_log_probs(model: Path, rows: list[dict], side: str) -> np.ndarray:
    """Σ log π(token) over each answer, the end of its turn included: one forward pass each."""
    network = AutoModelForCausalLM.from_pretrained(model).double()
    tokenizer = load_tokenizer(str(model))
    sums = []
    for row in rows:
        texts = (f"<|im_start|>user\n{row['prompt'][0]['content']}<|im_end|>\n"
                 "<|im_start|>assistant\n", f"{row[side][0]['content']}<|im_end|>\n")  # fmt: skip
        prompt, answer = (tokenizer(text, add_special_tokens=False).input_ids for text in texts)
        with torch.no_grad():
            logits = network(torch.tensor([prompt + answer])).logits[0].numpy()
        log_probs = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
        before = range(len(prompt) - 1, len(prompt) + len(answer) - 1)
        sums.append([float(log_probs[i, t]) for i, t in zip(before, answer, strict=True)])
    return np.array([sum(one) for one in sums]), np.array([len(one) for one in sums])


def log_ratios(before: Path, after: Path, rows: list[dict]) -> tuple[np.ndarray, np.ndarray]:
    """log π/π_ref of chosen and rejected answers: sums, and means over the tokens."""
    found = {}
    for side in ("chosen", "rejected"):
        (old, length), (new, _) = (sums_of_log_probs(one, rows, side) for one in (before, after))
        found[side] = (new - old, (new - old) / length)
    (chosen, mean_chosen), (rejected, mean_rejected) = found["chosen"], found["rejected"]
    return chosen - rejected, mean_chosen - mean_rejected


@pytest.mark.parametrize("loss", ["sigmoid", "ipo"])
def test_the_loss_is_that_of_the_paper(dpo, rankings, tiny_model, tmp_path, loss) -> None:
    beta = 0.3
    dpo("--loss", loss, "--beta", str(beta), "--epochs", "2", "--save-every", "1",
        "--keep-checkpoints", "9", "--warmup-fraction", "0")  # fmt: skip
    rows, _, _ = read_pairs(rankings)
    steps = read_metrics(tmp_path / "out" / "metrics.jsonl")
    first = tmp_path / "out" / "checkpoints" / "checkpoint-1"
    sums, means = log_ratios(tiny_model, first, rows["train"])
    expected = {
        "sigmoid": (np.log(2), np.log1p(np.exp(-beta * sums)).mean()),
        "ipo": ((1 / (2 * beta)) ** 2, ((means - 1 / (2 * beta)) ** 2).mean()),
    }[loss]
    assert [step["loss"] for step in steps] == pytest.approx(expected, rel=1e-4)
    assert steps[1]["rewards/margin"] == pytest.approx(beta * sums.mean(), rel=1e-3)
    assert steps[1]["accuracy"] == pytest.approx((sums > 0).mean())
    assert abs(expected[1] - expected[0]) > 0.01  # the step before it has learned something


def test_pairs_are_those_of_the_rankings(rankings) -> None:
    rows, counts, _ = read_pairs(rankings)
    assert counts["train"] == {"pairs": 6, "prompts": 3, "no_pairs": 1, "unfinished": 4}
    assert counts["test"] == {"pairs": 2, "prompts": 1, "no_pairs": 0, "unfinished": 1}
    assert rows["train"][0] == {
        "prompt": [{"role": "user", "content": "Trip 0?"}],
        "chosen": [{"role": "assistant", "content": TEXTS[0]}],
        "rejected": [{"role": "assistant", "content": TEXTS[1]}],
    }


def test_a_policy_that_evaluate_and_others_read(dpo, tmp_path, tiny_model, rankings) -> None:
    report = dpo("--epochs", "12")
    run = RunDir(tmp_path / "out")
    assert report["cost"]["annotator_hours"] == 1.25
    assert report["steps"] == 12
    assert report["pairs"]["test"]["pairs"] == 2
    assert report["held_out"]["accuracy"] == 1.0
    rows, _, _ = read_pairs(rankings)
    sums, _ = log_ratios(tiny_model, run.policy, rows["test"])
    expected = np.log1p(np.exp(-0.1 * sums)).mean()
    assert report["held_out"]["loss"] == pytest.approx(expected, rel=1e-4)
    assert (run.read_stage()["stage"], run.read_stage()["status"]) == ("dpo", "done")
    assert set(run.inputs) == {"rankings", "model"}
    assert [heartbeat.step for heartbeat in read_heartbeats(run.heartbeat)] == [12]
    assert "# dpo, trained from" in (run.policy / "README.md").read_text()
    assert not (run.checkpoints / "pairs").exists()
    assert dpo("--epochs", "12", "--resume")["already_done"] is True


def test_an_adapter_is_merged_and_starts_at_the_original(dpo, tmp_path, tiny_model, rankings):
    report = dpo("--lora.rank", "2", "--epochs", "3", "--save-every", "1")
    run = RunDir(tmp_path / "out")
    steps = read_metrics(run.metrics_file)
    assert steps[0]["loss"] == pytest.approx(np.log(2), abs=1e-6)
    assert steps[2]["loss"] < steps[0]["loss"]
    rows, _, _ = read_pairs(rankings)
    sums, _ = log_ratios(tiny_model, run.policy, rows["test"])
    expected = np.log1p(np.exp(-0.1 * sums)).mean()
    assert report["held_out"]["loss"] == pytest.approx(expected, rel=1e-4)
    names = {path.name for path in (run.checkpoints / "checkpoint-3").glob("*.safetensors")}
    assert names == {"adapter_model.safetensors"}
    assert not list(run.policy.glob("adapter*"))


LONG = ("--epochs", "8", "--batch-size", "4", "--save-every", "2", "--keep-checkpoints", "9")


def require_same_end(first: RunDir, second: RunDir, steps: int) -> None:
    rows = [metrics_of(run.path) for run in (first, second)]
    assert [row["step"] for row in rows[1]] == list(range(1, steps + 1))
    assert rows[0] == rows[1]
    files = [(run.policy / "model.safetensors").read_bytes() for run in (first, second)]
    assert files[0] == files[1]


def test_a_killed_run_ends_with_the_bytes_of_one_that_nothing_disturbed(
    tiny_model, rankings, tmp_path
) -> None:
    runs = [RunDir(tmp_path / name) for name in ("whole", "killed")]
    whole, killed = (arguments(tiny_model, rankings, run.path, *LONG) for run in runs)
    assert main(whole) == 0
    metrics = runs[1].metrics_file
    kill_once(killed, lambda: metrics.is_file() and metrics.read_bytes().count(b"\n") >= 5)
    assert runs[1].read_stage()["status"] == "running"
    assert main([*killed, "--resume"]) == 0
    require_same_end(*runs, steps=16)


def test_a_stopped_run_with_an_adapter_goes_on(tiny_model, rankings, tmp_path) -> None:
    runs = [RunDir(tmp_path / name) for name in ("whole", "stopped")]
    whole, stopped = (
        arguments(tiny_model, rankings, run.path, *LONG, "--lora.rank", "2") for run in runs
    )
    assert main(whole) == 0
    shutil.copytree(runs[0].path, runs[1].path)
    stop_after(runs[1], 6)
    shutil.rmtree(runs[1].policy)
    assert main([*stopped, "--resume"]) == 0
    require_same_end(*runs, steps=16)


# a trainer that is built outside of its stage
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
def test_template_values_reach_every_row_and_are_kept(dpo, tmp_path, rankings) -> None:
    folder = build_family_model(tmp_path / "qwen", FAMILIES["qwen"])
    dpo("--chat-template-kwargs", '{"enable_thinking": false}', model=folder)
    tokenizer = load_tokenizer(str(tmp_path / "out" / "policy"))
    assert template_kwargs(tokenizer) == {"enable_thinking": False}
    settings = DPOSettings(rankings=rankings, model=str(folder), out=tmp_path / "other")
    rows, _, _ = read_pairs(rankings)
    data = _on_disk(rows, tokenizer, RunDir(settings.out))
    trainer = _build_trainer(settings, _arguments(settings), data, tokenizer)
    for row in trainer.train_dataset:
        assert tokenizer.decode(row["prompt_ids"]).endswith("<think>\n\n</think>\n\n")


def test_refusals(dpo, tmp_path) -> None:
    assert "8 of 8 pairs have more than 24 tokens (the longest 33)" in dpo("--max-length", "24")
    assert "is not an exported dataset" in dpo(source=tmp_path)
    folder = tmp_path / "ties"
    folder.mkdir()
    write_ranked(folder, [ranked(0, "train", ((0, 1, 2),)), ranked(1, "test", ((0,), (1,)))], {})
    assert "imply no pair: they hold ties or thumbs only" in dpo(source=folder)
    assert not (tmp_path / "out").exists()
    with pytest.raises(ConfigError, match="--beta is 0\n  Give a value of more than 0"):
        DPOSettings(rankings=folder, model="m", out=tmp_path, beta=0)


def test_dry_run_plans_the_memory(dpo, tmp_path) -> None:
    plan = dpo("--dry-run")["memory_plan"]
    assert "Memory of each process for DPO" in plan
    assert "4 sequences of 2048 tokens" in plan
    lora = dpo("--dry-run", "--lora.rank", "2")["memory_plan"]
    assert "model: weights" in lora
    assert "adapters: Adam" in lora
    assert not (tmp_path / "out").exists()
