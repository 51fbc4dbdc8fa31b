"""Pretraining gradients: what is read, what it adds to the loss, and that a killed run goes on."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from policies.ppo.batches import read_chunks, stack_chunks
from policies.ppo.setting_groups import KLSettings
from policies.ppo.train import update
from policies.ppo.update import Learner, StepData, reference_batch
from rlhf.errors import InputError
from rlhf.modeling.models import load_causal_lm
from rlhf.modeling.tokens import load_tokenizer
from rlhf.parallel.distributed import start
from tests.policies.ppo.updates import SETTINGS, build_experience, build_model
from tests.policies.training import TrainingInputs, metrics_of
from tests.servers.interrupted import kill_when
from tests.settings import changed

PIECES = [[50, 51, 52, 53], [60, 61], [70, 71, 72, 73, 74, 75], [80, 81, 82]]
TEXTS = [
    "The weather was lovely.",
    "How was the trip? Tell me about the dog.",
    "It rained all day.",
]


def write_texts(path: Path) -> Path:
    path.write_text("\n".join(TEXTS * 3), encoding="utf-8")
    return path


@pytest.mark.parametrize("form", ["jsonl", "txt"])
def test_texts_are_cut_and_not_joined(tiny_model: Path, tmp_path: Path, form: str) -> None:
    tokenizer = load_tokenizer(str(tiny_model))
    lines = ['{"text": "the dog the dog"}', "", '{"text": "a"}', '{"text": "the house"}']
    if form == "txt":
        lines = ["the dog the dog", "", "a", "the house"]
    path = tmp_path / f"texts.{form}"
    path.write_text("\n".join(lines), encoding="utf-8")
    first, _, last = (
        tokenizer(text)["input_ids"] for text in ("the dog the dog", "a", "the house")
    )
    cut = [first[i : i + 3] for i in range(0, len(first), 3)] + [
        last[i : i + 3] for i in range(0, len(last), 3)
    ]
    assert read_chunks(path, tokenizer, 3, 100) == [part for part in cut if len(part) > 1]
    assert read_chunks(path, tokenizer, 100, 100) == [first, last]  # one token predicts nothing
    assert read_chunks(path, tokenizer, 100, 1) == [first]


def test_what_holds_no_text_is_refused(tiny_model: Path, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(str(tiny_model))
    path = tmp_path / "texts.jsonl"
    path.write_text('{"text": "fine"}\n{"words": 1}\n', encoding="utf-8")
    with pytest.raises(InputError, match=r"texts.jsonl:2: no text") as caught:
        read_chunks(path, tokenizer, 8, 9)
    assert '{"text": "…"}' in caught.value.remedy
    path.write_text("", encoding="utf-8")
    with pytest.raises(InputError, match="holds no text"):
        read_chunks(path, tokenizer, 8, 9)


def weights_after(folder: Path, chunks: list[list[int]], **changes: object):
    """One step of plain gradient descent on texts alone: the advantages are 0."""
    kl = KLSettings(source="none")
    settings = changed(SETTINGS, kl=kl, ptx_coefficient=2.5, max_grad_norm=1e9, **changes)
    accelerator = start("fp32", 0)
    plain = build_model(folder)
    model, optimizer = accelerator.prepare(plain, torch.optim.SGD(plain.parameters(), lr=0.1))
    experience = build_experience()
    still = replace(
        experience,
        advantages=torch.zeros_like(experience.advantages),
        returns=experience.old_values,
    )
    data = StepData(
        still,
        reference_batch([], 0, accelerator.device),
        stack_chunks(chunks, 0, accelerator.device),
    )
    learner = Learner(accelerator, model, optimizer, settings, 0.7, settings.kl.coefficient)
    found = update(learner, data, torch.Generator().manual_seed(0))
    return plain.policy.state_dict(), found


def test_the_gradient_is_that_of_the_mean_negative_log_likelihood(tiny_model: Path) -> None:
    # loss = 2.5 · (Σ over texts and their tokens but the first of −log p) / 11, at temperature 1
    model = load_causal_lm(str(tiny_model))
    total = torch.zeros(())
    for ids in PIECES:
        log_probs = model(torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
        total = total - log_probs[torch.arange(len(ids) - 1), torch.tensor(ids[1:])].sum()
    mean = total / 11
    (2.5 * mean).backward()
    weights, found = weights_after(tiny_model, PIECES)
    assert found["loss/ptx"] == pytest.approx(mean.item(), rel=1e-5)
    for name, value in model.named_parameters():
        torch.testing.assert_close(
            weights[name], value.detach() - 0.1 * value.grad, rtol=1e-4, atol=1e-6
        )


@pytest.mark.parametrize("changes", [{"micro_batch_size": 1}, {"micro_tokens": 8}])
def test_how_texts_are_batched_changes_nothing(tiny_model: Path, changes: dict[str, int]) -> None:
    expected, first = weights_after(tiny_model, PIECES)
    weights, second = weights_after(tiny_model, PIECES[::-1], **changes)
    assert second == pytest.approx(first, rel=1e-4, abs=1e-7)
    for name, value in expected.items():
        torch.testing.assert_close(weights[name], value, rtol=1e-5, atol=1e-6)


def test_a_run_with_texts_killed_and_resumed_is_the_undisturbed_one(
    training: TrainingInputs, tmp_path: Path
) -> None:
    texts = write_texts(tmp_path / "texts.txt")
    options = ("--ptx-data", str(texts), "--save-every", "2", "--minibatches", "2")
    straight, killed = tmp_path / "straight", tmp_path / "killed"
    assert training.ppo(straight, *options, steps=5) == 0
    kill_when(training.arguments(killed, *options, steps=5), killed / "metrics.jsonl", lines=3)
    assert training.ppo(killed, *options, "--resume", steps=5) == 0
    assert metrics_of(killed) == metrics_of(straight)
    assert all(row["loss/ptx"] > 0 for row in metrics_of(straight))
    weights = [load_file(out / "policy" / "model.safetensors") for out in (straight, killed)]
    assert all(weights[0][name].equal(weights[1][name]) for name in weights[0])


def test_the_likelihood_of_the_texts_rises(training: TrainingInputs, tmp_path: Path) -> None:
    texts = write_texts(tmp_path / "texts.txt")
    assert training.ppo(tmp_path / "ppo", "--ptx-data", str(texts), steps=6) == 0
    rows = metrics_of(tmp_path / "ppo")
    assert rows[-1]["loss/ptx"] < rows[0]["loss/ptx"] - 0.1


def test_a_missing_file_of_texts_is_refused_before_anything_is_written(
    training: TrainingInputs, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert training.ppo(tmp_path / "ppo", "--ptx-data", str(tmp_path / "none.jsonl")) == 2
    assert "No such file:" in capsys.readouterr().err
    assert not (tmp_path / "ppo").exists()
