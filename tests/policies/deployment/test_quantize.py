"""`rlhf quantize` on the tiny model: what it measures and refuses, and who reads the result."""

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from policies.deployment.quantization_error import count_agreement, describe_changes
from reward.scoring.rankings import training_gain
from rlhf.cli import main
from rlhf.modeling.models import load_causal_lm, policy_folder
from rlhf.modeling.tokens import load_tokenizer
from rlhf.records.jsonl import read_jsonl, write_json, write_jsonl
from rlhf.records.ranked import read_ranked_file
from rlhf.run.rundir import RunDir
from tests.pipeline.loop import SIGNAL, write_prompts
from tests.policies.conftest import Inputs
from tests.policies.training import TrainingInputs, build_ensemble
from tests.reward.conftest import build_record, export

PROMPTS, SAMPLES = 12, 2  # of write_prompts


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = write_prompts(tmp_path_factory.mktemp("prompts") / "prompts.jsonl")
    write_jsonl(file, [{**line, "split": "test"} for line in read_jsonl(file)])
    return file


@pytest.fixture(scope="module")
def done(tiny_model: Path, prompts: Path, tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    """An int4 policy judged by a signal; tests only read it."""
    out = tmp_path_factory.mktemp("quantized") / "int4"
    judge = ("--reward", SIGNAL, "--max-loss", "50")
    assert main(command(tiny_model, prompts, out, "--to", "int4", *judge)) == 0
    return RunDir(out)


@pytest.fixture(scope="module")
def held_out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An export with two training prompts and six test prompts of four responses."""
    splits = ["train"] * 2 + ["test"] * 6
    records = [build_record(number, split) for number, split in enumerate(splits)]
    return export(tmp_path_factory.mktemp("held-out") / "rankings", records)


def command(run: Path | str, prompts: Path, out: Path, *more: str) -> list[str]:
    """Of a policy, with two short answers of each prompt."""
    return scored(run, prompts, out, "--max-new-tokens", "12", "--samples", "2", *more)


def scored(run: Path | str, prompts: Path, out: Path, *more: str) -> list[str]:
    """Of a reward model, which answers nothing."""
    to = () if "--to" in more else ("--to", "int8")
    whole = ("quantize", str(run), "--prompts", str(prompts), "--out", str(out), *to)
    return [*whole, "--precision", "fp32", *more]


def test_the_report_has_what_the_log_probs_changed(
    tiny_model: Path, prompts: Path, done: RunDir
) -> None:
    """Recomputed one unpadded answer at a time."""
    tokenizer = load_tokenizer(str(tiny_model))
    before, after = load_causal_lm(str(tiny_model)), load_causal_lm(str(done.policy))
    changes = []
    for record in read_ranked_file(done.answers):
        text = f"<|im_start|>user\n{record.prompt.text}<|im_end|>\n<|im_start|>assistant\n"
        prompt_ids = tokenizer(text, add_special_tokens=False).input_ids
        assert record.responses[SAMPLES].model == str(done.policy)
        for response in record.responses[:SAMPLES]:  # of the original
            answer = list(response.token_ids)
            ids = torch.tensor([prompt_ids + answer])
            with torch.no_grad():
                old, new = (m(ids).logits[0, len(prompt_ids) - 1 : -1] for m in (before, after))
            change = new.log_softmax(1) - old.log_softmax(1)
            changes += change.gather(1, torch.tensor(answer)[:, None]).abs().flatten().tolist()
    found = done.read_report()["log_prob"]
    assert found["tokens"] == len(changes) > PROMPTS
    assert found["mean"] == pytest.approx(np.mean(changes), rel=1e-3)
    assert found["max"] == pytest.approx(max(changes), rel=1e-3)


def test_sizes_are_those_on_disk(tiny_model: Path, done: RunDir) -> None:
    size = done.read_report()["bytes"]
    assert size["before"] == (tiny_model / "model.safetensors").stat().st_size
    assert size["after"] == (done.policy / "model.safetensors").stat().st_size < size["before"] / 2


def test_changes_by_hand() -> None:
    before = [torch.tensor([-1.0, -2.0]), torch.tensor([-0.5])]
    after = [torch.tensor([-1.25, -2.0]), torch.tensor([-0.0])]
    assert describe_changes(before, after) == {"max": 0.5, "mean": 0.25, "tokens": 3}


def test_agreement_by_hand() -> None:
    before = [[1.0, 2.0, 3.0], [0.0, 0.0, 1.0]]
    after = [[1.0, 3.0, 2.0], [5.0, 4.0, 4.0]]
    # (1,2) and (1,3) agree, (2,3) does not; the tie is left out, the others are turned or tied
    assert count_agreement(before, after) == {"agreement": 2 / 5, "pairs": 5}
    assert count_agreement([[1.0]], [[2.0]]) == {"agreement": None, "pairs": 0}


def test_a_policy_that_loses_too_much_leaves_nothing(
    tiny_model: Path, prompts: Path, tmp_path: Path, refused
) -> None:
    out = tmp_path / "out"
    more = ("--max-log-prob-change", "1e-7")
    said = refused(*command(tiny_model, prompts, out, *more), exit_code=3)
    assert "int8 changes the log-prob of a token by 0.00" in said
    assert "nats on average, more than --max-log-prob-change 1e-07" in said
    assert "Nothing was written. Use a form with more bits, or allow more." in said
    assert list(tmp_path.iterdir()) == []


def test_the_win_rate_is_that_of_the_answers(done: RunDir) -> None:
    """Every answer of one model meets every answer of the other; the judge counts vowels."""
    shares = []
    for record in read_ranked_file(done.answers):
        texts = [response.text for response in record.responses]
        vowels = [sum(text.count(letter) for letter in "aeiou") for text in texts]
        theirs, ours = vowels[:SAMPLES], vowels[SAMPLES:]
        shares.append(np.mean([(a > b) + (a == b) / 2 for a in ours for b in theirs]))
    rate = done.read_report()["win_rate"]
    assert rate["value"] == pytest.approx(np.mean(shares))
    assert rate["n"] == PROMPTS


def test_a_reward_model_is_compared_by_the_order_of_its_pairs(
    training: TrainingInputs, held_out: Path, tmp_path: Path, run_json
) -> None:
    out = tmp_path / "int8"
    more = ("--max-loss", "100", "--price-per-hour", "7200")
    reward = shutil.copytree(training.reward, tmp_path / "reward" / "model")
    write_json(tmp_path / "reward" / "report.json", {"normalisation": {"gain": 0.25}})
    report = run_json(*scored(reward, held_out, out, *more))
    assert training_gain(str(out)) == 0.25  # so that calibration is on the same scale
    assert report["cost"]["price"] == pytest.approx(7200 * report["cost"]["device_hours"], rel=0.01)
    seconds = 3600 * report["cost"]["device_hours"]
    assert 0 < seconds <= RunDir(out).read_stage()["device_seconds"] + 1e-3
    assert report["pairs"]["pairs"] == 6 * 6  # six prompts, six pairs of four responses
    assert report["prompts"] == 6
    head = [
        load_file(folder / "model.safetensors")["score.weight"]
        for folder in (training.reward, out / "model")
    ]
    assert torch.equal(*head)
    again = run_json(
        "score", held_out / "test.jsonl", "--reward", out, "--out", tmp_path / "scored.jsonl",
        "--precision", "fp32",
    )  # fmt: skip
    assert again["responses"] == 24


@pytest.mark.parametrize("judged", [True, False], ids=["policy", "reward model"])
def test_more_than_the_maximum_loss_is_refused(
    training: TrainingInputs, prompts: Path, tmp_path: Path, refused, run_json, judged: bool
) -> None:
    """First a run that may lose everything says what is lost; half of it is then too much."""
    alike = tuple(f"The trip took {number} hours." for number in range(16))
    record = build_record(0, "test", alike, (tuple(range(16)),))
    near = export(tmp_path / "rankings", [record])  # of rewards that are nearly the same

    def words(folder: Path, most: str) -> list[str]:
        more = ("--to", "int4", "--max-loss", most)
        if not judged:
            return scored(training.reward, near, folder, *more)
        judge = ("--reward", SIGNAL, "--max-log-prob-change", "9", "--seed", "1")
        return command(training.model, prompts, folder, *more, *judge)

    report = run_json(*words(tmp_path / "all", "100"))
    if judged:
        lost, what = 50 - 100 * report["win_rate"]["value"], "win rate on 12 prompts"
    else:
        lost, what = 100 - 100 * report["pairs"]["agreement"], "agreement on 120 pairs of responses"
    assert lost > 0
    said = refused(*words(tmp_path / "half", str(lost / 2)), exit_code=3)
    assert f"int4 loses {lost:.1f} points of {what}, more than --max-loss {lost / 2:g}" in said
    assert sorted(path.name for path in tmp_path.iterdir()) == ["all", "rankings"]
    run_json(*words(tmp_path / "same", str(lost + 1e-6)))


def test_of_a_file_the_test_prompts_are_compared(
    tiny_model: Path, tmp_path: Path, run_json
) -> None:
    splits = ["train", "test", "train", "test", "test"]
    lines = [{"prompt": f"What is {n}?", "split": split} for n, split in enumerate(splits)]
    write_jsonl(tmp_path / "prompts.jsonl", lines)
    out = tmp_path / "out"
    run_json(*command(tiny_model, tmp_path / "prompts.jsonl", out))
    asked = [record.prompt.text for record in read_ranked_file(RunDir(out).answers)]
    assert asked == ["What is 1?", "What is 3?", "What is 4?"]


def test_a_reward_model_without_an_order_is_refused(
    training: TrainingInputs, held_out: Path, tmp_path: Path, refused
) -> None:
    flat = shutil.copytree(training.reward, tmp_path / "flat")
    weights = load_file(flat / "model.safetensors")
    weights["score.weight"].zero_()
    save_file(weights, flat / "model.safetensors", {"format": "pt"})
    said = refused(*scored(flat, held_out, tmp_path / "out"), exit_code=3)
    assert "gives all responses to a prompt the same reward" in said
    assert not (tmp_path / "out").exists()


def test_settings_that_do_nothing_are_refused(
    training: TrainingInputs, prompts: Path, held_out: Path, tmp_path: Path, refused
) -> None:
    out = tmp_path / "out"
    said = refused(*command(training.model, prompts, out, "--max-loss", "5"))
    assert f"--max-loss has no effect on the policy {training.model} without --reward" in said
    for flag in ("--samples", "--temperature", "--max-new-tokens", "--max-log-prob-change"):
        said = refused(*scored(training.reward, held_out, out, flag, "3"))
        assert f"{flag} has no effect with the reward model {training.reward}" in said
    assert not out.exists()


def test_a_quantized_run_is_read_as_a_policy(
    inputs: Inputs, done: RunDir, tmp_path: Path, run_json
) -> None:
    assert policy_folder(str(done.path)) == str(done.policy)
    arguments = inputs.arguments(tmp_path / "evaluate")
    arguments[arguments.index("--policy") + 1] = str(done.path)
    assert run_json(*arguments)["win_rate"]["gold"]["n"] == 4


@pytest.mark.parametrize("stage", ["sft", "dpo", "ppo", "train-reward"])
def test_training_from_it_is_refused(
    stage: str, training: TrainingInputs, held_out: Path, done: RunDir, tmp_path: Path, refused
) -> None:
    model = str(done.policy)
    rest = {
        "sft": ("--best-of", training.reference),
        "dpo": ("--rankings", held_out),
        "ppo": ("--reward", SIGNAL, "--reference", training.reference),
        "train-reward": ("--rankings", held_out),
    }[stage]
    said = refused(stage, "--model", model, *rest, "--out", tmp_path / "out")
    assert f"{model} is quantized, and only its unquantized original can be trained" in said
    assert not (tmp_path / "out").exists()


def test_gguf_is_written_by_the_script_of_llama_cpp(tmp_path: Path, refused) -> None:
    usual = ("--prompts", "p", "--out", tmp_path / "out")
    said = refused("quantize", "m", "--to", "gguf", *usual)
    assert 'Invalid value "gguf" for --to. Choose from: "int8", "int4".' in said
    script = "python convert_hf_to_gguf.py DIR --outtype q8_0. See: rlhf quantize --help"
    assert f"llama.cpp's own script writes GGUF from the folder of a policy: {script}" in said
    file = tmp_path / "quantize.yaml"
    file.write_text("to: gguf\n")
    assert script in refused("quantize", "m", "--config", file, *usual)
    assert "llama.cpp" not in refused("quantize", "m", "--to", "int3", *usual)


def test_what_cannot_be_quantized_is_refused(
    training: TrainingInputs, done: RunDir, prompts: Path, held_out: Path, tmp_path: Path, refused
) -> None:
    out = tmp_path / "out"
    said = refused(*command(done.path, prompts, out))
    assert f"{done.path} is quantized already" in said
    said = refused(*scored(training.reward, held_out, out, "--reward", SIGNAL))
    assert f"--reward judges a policy's answers, and {training.reward} is a reward model" in said
    said = refused(*scored(training.reward, prompts, out))
    assert f"{prompts} has no prompts with two responses to compare on" in said
    said = refused(*command(training.model, prompts, prompts.parent))
    assert f"{prompts.parent} already exists" in said
    only_train = export(tmp_path / "train", [build_record(0)])
    said = refused(*command(training.model, only_train, out))
    assert f"{only_train} has no test prompts to compare on" in said
    assert not out.exists()


def test_an_ensemble_is_refused(
    training: TrainingInputs, held_out: Path, tmp_path: Path, refused
) -> None:
    folder = build_ensemble(training, tmp_path / "ensemble")
    said = refused(*scored(folder, held_out, tmp_path / "out"))
    assert f"{folder} is an ensemble of 2 reward models" in said
