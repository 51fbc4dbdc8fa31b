"""`rlhf distill` on tiny models: its loss, its student, its resuming, and the share of gain."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    SmolLM3Config,
    SmolLM3ForCausalLM,
)

from policies.deployment.distill.settings import DistillSettings
from policies.deployment.distill.student import block_influence, half_of, strongest_half
from policies.deployment.distill.train import _arguments, sampling_like
from policies.evaluate.measures.statistics import share_of_gain
from policies.evaluate.report import render
from policies.evaluate.settings import EvaluateSettings
from policies.reference.store import open_store
from rlhf.cli import main
from rlhf.commands.models.evaluate import describe_report
from rlhf.config import read_settings_file
from rlhf.errors import InputError
from rlhf.modeling.models import load_causal_lm, save_model
from rlhf.modeling.tokens import load_tokenizer
from rlhf.records.jsonl import write_jsonl
from rlhf.run.metrics import read_metrics
from rlhf.run.rundir import RunDir
from tests.conftest import build_tiny_model
from tests.families import FAMILIES, build_family_model
from tests.pipeline.loop import SHORT, SIGNAL, write_prompts
from tests.policies.training import metrics_of
from tests.servers.interrupted import stop_after

SHARPER = 30.0  # times the weights of a random model, whose distributions are nearly uniform
SIZES = ("--batch-size", "4", "--micro-batch-size", "4")
USUAL = (*SIZES, "--precision", "fp32", "--learning-rate", "0.01")
SHORTER = ("--max-new-tokens", "6")


@pytest.fixture(scope="module")
def teacher(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that is surer of the next token than the tiny one."""
    folder = tmp_path_factory.mktemp("teacher") / "teacher"
    model = load_causal_lm(str(tiny_model))
    with torch.no_grad():
        model.model.norm.weight.mul_(SHARPER)
    save_model(model, load_tokenizer(str(tiny_model)), folder)
    return folder


@pytest.fixture(scope="module")
def outputs(teacher: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two answers of the teacher to each of eight training and four test prompts."""
    folder = tmp_path_factory.mktemp("outputs")
    prompts = write_prompts(folder / "prompts.jsonl")
    stored = ("--out", str(folder / "reference"), "--samples", "2", *SHORT)
    assert main(["reference", "--prompts", str(prompts), "--model", str(teacher), *stored]) == 0
    return folder / "reference"


@pytest.fixture(scope="module")
def done(
    tiny_model: Path, teacher: Path, outputs: Path, tmp_path_factory: pytest.TempPathFactory
) -> RunDir:
    """A student of the tiny model's first layer; tests only read it."""
    out = tmp_path_factory.mktemp("distill") / "student"
    more = ("--half", "--epochs", "3", "--save-every", "4", *SHORTER)
    assert main(command(teacher, tiny_model, outputs, out, *more)) == 0
    return RunDir(out)


def command(teacher: Path, student: Path, outputs: Path, out: Path, *more: str) -> list[str]:
    return [
        *("distill", "--teacher", str(teacher), "--student", str(student)),
        *("--outputs", str(outputs), "--out", str(out), *USUAL, *more),
    ]


def jensen_shannon(p: np.ndarray, q: np.ndarray) -> np.ndarray:
    """½·KL(p ‖ m) + ½·KL(q ‖ m) with m = ½(p + q), of each row."""
    m = (p + q) / 2
    return ((p * np.log(p / m)).sum(axis=1) + (q * np.log(q / m)).sum(axis=1)) / 2


def test_the_held_out_divergence_is_that_of_the_stored_tokens(
    tiny_model: Path, teacher: Path, outputs: Path, done: RunDir
) -> None:
    """In NumPy, one unpadded output at a time; trl averages over batches of four."""
    rows = [row for group in open_store(outputs / "outputs").by_prompt("test") for row in group]
    half = half_of(load_causal_lm(str(tiny_model)), training_ids(outputs))
    models = {"before": half, "after": load_causal_lm(str(done.policy))}
    sums = {name: [] for name in models}
    for row in rows:
        ids = torch.tensor([[*row.prompt_ids, *row.response_ids]])
        of = slice(len(row.prompt_ids) - 1, -1)
        with torch.no_grad():
            expected = load_causal_lm(str(teacher))(ids).logits[0, of].double().softmax(1)
            for name, model in models.items():
                found = model(ids).logits[0, of].double().softmax(1)
                sums[name].append(jensen_shannon(expected.numpy(), found.numpy()))
    report = done.read_report()["divergence"]
    for name, of_rows in sums.items():
        batches = [np.concatenate(of_rows[first : first + 4]) for first in (0, 4)]
        assert report[name] == pytest.approx(np.mean([one.mean() for one in batches]), rel=1e-3)
    assert report["after"] < 0.9 * report["before"]  # it learned


def training_ids(outputs: Path) -> list[list[int]]:
    groups = open_store(outputs / "outputs").by_prompt("train")
    return [[*row.prompt_ids, *row.response_ids] for group in groups for row in group]


TEXTS = [list(range(2, 20)), [7, 3, 11]]
SIZES: Any = {
    **{"vocab_size": 50, "hidden_size": 16, "intermediate_size": 32, "pad_token_id": 0},
    **{"num_attention_heads": 2, "num_key_value_heads": 2, "initializer_range": 0.3},
}


def silence(model: PreTrainedModel, *layers: int) -> None:
    """Let some layers pass hidden states on as they are."""
    with torch.no_grad():
        for number in layers:
            model.model.layers[number].self_attn.o_proj.weight.zero_()
            model.model.layers[number].mlp.down_proj.weight.zero_()


def test_the_student_has_the_layers_that_change_hidden_states_most() -> None:
    """It computes what the whole model computes without the others, two of which do nothing."""
    whole = LlamaForCausalLM(LlamaConfig(**SIZES, num_hidden_layers=5)).eval()
    silence(whole, 0, 2)
    half = half_of(whole, TEXTS).eval()
    assert half.config.num_hidden_layers == 3
    ids = torch.arange(2, 20)[None]
    with torch.no_grad():
        torch.testing.assert_close(half(ids).logits, whole(ids).logits)
    ours, theirs = (dict(model.named_parameters()) for model in (half, whole))
    assert torch.equal(
        ours["model.layers.1.mlp.up_proj.weight"], theirs["model.layers.3.mlp.up_proj.weight"]
    )
    assert ours["model.norm.weight"].data_ptr() != theirs["model.norm.weight"].data_ptr()


def test_influence_is_one_less_the_cosine_similarity() -> None:
    """In NumPy, from the hidden states that transformers returns: those before each layer."""
    model = LlamaForCausalLM(LlamaConfig(**SIZES, num_hidden_layers=4))
    dissimilarities: list[list[float]] = [[], [], []]
    for ids in TEXTS:
        with torch.no_grad():
            states = model.eval()(torch.tensor([ids]), output_hidden_states=True).hidden_states
        rows = [state[0].double().numpy() for state in states[:4]]
        for number in range(3):  # what follows the last layer is normalized
            before, after = rows[number], rows[number + 1]
            norms = np.linalg.norm(before, axis=1) * np.linalg.norm(after, axis=1)
            dissimilarities[number] += list(1 - (before * after).sum(axis=1) / norms)
    found = block_influence(model.train(), TEXTS)
    assert found[:3] == pytest.approx([np.mean(of_layer) for of_layer in dissimilarities], rel=1e-4)
    assert model.training


def test_texts_are_read_from_everywhere(capsys: pytest.CaptureFixture[str]) -> None:
    model = GPT2LMHeadModel(GPT2Config(vocab_size=50, n_embd=16, n_layer=4, n_head=2))
    read: list[int] = []
    model.transformer.wte.register_forward_pre_hook(lambda _, ids: read.append(int(ids[0][0, 0])))
    half_of(model, [[number] for number in range(40)])
    assert read == [number * 40 // 32 for number in range(32)]
    assert "Reading 32 of the outputs to choose 2 layers." in capsys.readouterr().err


def test_half_of_the_layers_is_rounded_up() -> None:
    assert strongest_half([0.1, 0.5, 0.2, 0.4, 0.3]) == [1, 3, 4]
    assert strongest_half([0.1, 0.1, 0.1, 0.1]) == [0, 1]


def test_kept_layers_keep_their_position_encoding() -> None:
    """Every fourth layer of SmolLM3 has none, by a list in the config."""
    config = SmolLM3Config(**SIZES, num_hidden_layers=4)
    assert config.no_rope_layers == [1, 1, 1, 0]  # 1: with rotary positions
    whole = SmolLM3ForCausalLM(config)
    silence(whole, 0, 1)
    half = half_of(whole, TEXTS)
    assert half.config.no_rope_layers == [1, 0]
    assert [layer.self_attn.use_rope for layer in half.model.layers] == [1, 0]


def test_other_families_are_halved_too() -> None:
    model = GPT2LMHeadModel(GPT2Config(vocab_size=50, n_embd=16, n_layer=4, n_head=2))
    assert len(half_of(model, TEXTS).transformer.h) == 2
    one = GPT2LMHeadModel(GPT2Config(vocab_size=50, n_embd=16, n_layer=1, n_head=2))
    with pytest.raises(InputError, match=r"The layers of GPT2LMHeadModel cannot be halved \(1 of"):
        half_of(one, TEXTS)


def test_the_report_has_both_sizes(tiny_model: Path, done: RunDir) -> None:
    weights = load_file(tiny_model / "model.safetensors")
    layer = sum(value.numel() for name, value in weights.items() if ".layers.1." in name)
    total = sum(value.numel() for value in weights.values())
    report = done.read_report()
    assert report["parameters"] == {"teacher": total, "student": total - layer}
    assert report["outputs"] == {"train": 16, "test": 8}
    assert report["steps"] == len(read_metrics(done.metrics_file)) == 12


def test_a_stopped_run_goes_on_to_the_same_weights(
    tiny_model: Path, teacher: Path, outputs: Path, done: RunDir, tmp_path: Path
) -> None:
    stopped = RunDir(tmp_path / "stopped")
    shutil.copytree(done.path, stopped.path)
    assert len(list(stopped.checkpoints.glob("checkpoint-*"))) == 1
    shutil.rmtree(stopped.path)
    more = ("--half", "--epochs", "3", "--save-every", "4", "--keep-checkpoints", "3", *SHORTER)
    arguments = command(teacher, tiny_model, outputs, stopped.path, *more)
    assert main(arguments) == 0
    stop_after(stopped, 4)
    shutil.rmtree(stopped.policy)
    assert main([*arguments, "--resume"]) == 0
    whole, resumed = (load_file(run.policy / "model.safetensors") for run in (done, stopped))
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)


def test_the_student_samples_as_the_outputs_were_sampled(
    tiny_model: Path, teacher: Path, tmp_path: Path
) -> None:
    prompts, stored = write_prompts(tmp_path / "prompts.jsonl"), tmp_path / "reference"
    given = ("--model", str(teacher), "--out", str(stored), "--precision", "fp32")
    sampled = ("--temperature", "0.8", "--max-new-tokens", "5")
    assert main(["reference", "--prompts", str(prompts), *given, *sampled]) == 0
    settings = DistillSettings(
        teacher=str(teacher), student=str(tiny_model), outputs=stored, out=tmp_path / "unused"
    )
    found = sampling_like(settings, open_store(stored / "outputs"))
    assert (_arguments(found).temperature, _arguments(found).max_new_tokens) == (0.8, 5)
    for more, expected in (((), (0.8, 5)), (("--temperature", "2", *SHORTER), (2.0, 6))):
        run = RunDir(tmp_path / f"out-{len(more)}")
        assert main(command(teacher, tiny_model, stored, run.path, "--on-policy", "1", *more)) == 0
        recorded = read_settings_file(run.config_file)
        assert (recorded["temperature"], recorded["max_new_tokens"]) == expected
        assert main(["distill", "--config", str(run.config_file), "--resume"]) == 0


def test_the_temperature_is_that_of_sampling_alone(
    tiny_model: Path, teacher: Path, outputs: Path, tmp_path: Path
) -> None:
    """As the help says: on stored outputs it changes no loss."""
    losses = []
    for temperature in ("0.25", "4"):
        run = RunDir(tmp_path / temperature)
        more = ("--on-policy", "0", "--half", "--temperature", temperature)
        assert main(command(teacher, tiny_model, outputs, run.path, *more)) == 0
        losses.append([row["loss"] for row in metrics_of(run.path)])
    assert losses[0] == losses[1]


def test_the_share_of_gain_by_hand() -> None:
    original = np.array([[0.0, 2.0], [1.0, 1.0]])  # means 1 and 1
    teacher = np.array([[3.0], [5.0]])  # gains 2 and 4
    student = np.array([[2.0, 3.0], [4.0, 4.0]])  # gains 1.5 and 3: 4.5 of 6
    found = share_of_gain(student, teacher, original, seed=0)
    assert found.value == pytest.approx(0.75)
    assert found.n == 2


def test_the_evaluation_says_how_much_of_the_gain_is_kept(
    tiny_model: Path, teacher: Path, done: RunDir, tmp_path: Path, run_json
) -> None:
    reference, out = tmp_path / "reference", tmp_path / "evaluate"
    prompts = write_prompts(tmp_path / "prompts.jsonl")
    stored = ("--prompts", prompts, "--model", tiny_model, "--out", reference)
    run_json("reference", *stored, *SHORT)
    given = ("--policy", done.path, "--reference", reference, "--reward", f"signal:{SIGNAL}")
    shown = run_json(
        "evaluate", *given, "--against", teacher, "--samples", "2", "--precision", "fp32",
        "--out", out,
    )  # fmt: skip
    report = RunDir(out).read_report()
    gain = shown["student"]["gain"]["reward"]
    means = {name: report["reward"][name]["mean"] for name in ("policy", "rival", "reference")}
    expected = means["rival"] - means["reference"]
    assert gain["teacher"]["value"] == pytest.approx(expected)
    kept = (means["policy"] - means["reference"]) / expected
    assert gain["kept"]["value"] == pytest.approx(kept)
    assert shown["student"]["parameters"] == done.read_report()["parameters"]
    settings = EvaluateSettings(policy="p", reference=reference, reward=SIGNAL, out=out)
    said = describe_report(settings, report)
    assert "parameters, 70 % of its teacher's." in said
    page = RunDir(out).report_html.read_text()
    assert "The policy was distilled from it" in page
    # four prompts prove no gain of the teacher
    assert "the teacher's own gain (" in page.replace("&#39;", "'")
    assert "it keeps" not in page
    found = {"kept": {"value": 0.634, "low": 0.5, "high": 0.71}}
    content = json.loads(RunDir(out).report_json.read_text())
    content["student"]["gain"] = {"reward": {**found, "teacher": {"value": 0.42, "low": 0.3}}}
    words = "By the mean score of the reward function, it keeps 63 % of the teacher's gain of 0.42"
    content["eos_rate"] |= {"policy": 0.93, "rival": 0.97}
    page = render(content)
    assert f"{words} (95 % interval of the share 50–71 %)." in page
    assert "responses end," not in page
    content["eos_rate"]["policy"] = 0.11
    page = re.sub(r"<[^>]*>", "", render(content)).replace("\N{NO-BREAK SPACE}", " ")
    assert " 11 % of its responses end, 97 % of the teacher's do" in page
    said = describe_report(settings, content)
    assert "11 % of its responses end, 97 % of its teacher's do" in said


def test_refusals(tiny_model: Path, teacher: Path, outputs: Path, tmp_path: Path, refused) -> None:
    out = tmp_path / "out"
    other = build_family_model(tmp_path / "qwen", FAMILIES["qwen"])
    said = refused(*command(teacher, other, outputs, out))
    assert f"{other} and the teacher {teacher} have different tokenizers" in said
    said = refused(*command(teacher, tiny_model, outputs, out, "--max-length", "9"))
    assert "24 of 24 stored outputs have more than 9 tokens" in said
    assert "--on-policy is 1.5" in refused(
        *command(teacher, tiny_model, outputs, out, "--on-policy", "1.5")
    )
    only_test = tmp_path / "prompts.jsonl"
    write_jsonl(only_test, [{"prompt": "Hello?", "split": "test"}])
    stored = ("--prompts", str(only_test), "--model", str(teacher), *SHORT)
    assert main(["reference", *stored, "--out", str(tmp_path / "reference")]) == 0
    said = refused(*command(teacher, tiny_model, tmp_path / "reference", out))
    assert "has no prompts of the split 'train', only" in said
    deep = build_tiny_model(tmp_path / "deep", seed=1)
    said = refused(*command(teacher, deep, tmp_path, out))
    assert "does not hold a finished reference stage" in said
    assert not out.exists()
