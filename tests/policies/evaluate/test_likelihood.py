"""Log-likelihoods under the original model and of neutral text, recomputed one text at a time."""

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from policies.evaluate.measures.likelihood import (
    NEUTRAL_TEXT,
    compare_texts,
    encode_texts,
    read_texts,
)
from rlhf.cli import main
from rlhf.errors import InputError
from rlhf.records.jsonl import BadLineError
from rlhf.records.ranked import read_ranked_file
from rlhf.run.rundir import RunDir
from tests.conftest import build_tokenizer
from tests.policies.conftest import Inputs


def nats(folder: str, prompt: list[int], text: list[int], temperature: float = 1.0) -> float:
    """Log-likelihood of a text after a prompt, straight from the logits."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        logits = model(torch.tensor([prompt + text])).logits[0] / temperature
    places = range(len(prompt) - 1, len(prompt) + len(text) - 1)
    return sum(
        float(logits[place].log_softmax(0)[token])
        for place, token in zip(places, text, strict=True)
    )


def test_answers_are_scored_by_the_original_model(inputs: Inputs, done: RunDir) -> None:
    found = done.read_report()["log_likelihood"]
    tokenizer = AutoTokenizer.from_pretrained(inputs.path("original"))
    places = {"reference": slice(0, 3), "policy": slice(3, 5), "rival": slice(5, 7)}
    for name, place in places.items():
        total, tokens = 0.0, 0
        for record in read_ranked_file(done.answers):
            prompt = tokenizer.apply_chat_template(record.prompt.chat, add_generation_prompt=True)
            for answer in record.responses[place]:
                ids = list(answer.token_ids or ())
                total += nats(
                    inputs.path("original"), prompt["input_ids"], ids, answer.sampling.temperature
                )
                tokens += len(ids)
        assert found[name]["value"] == pytest.approx(total / tokens, abs=1e-4)
        assert found[name]["n"] == 4  # prompts: too few for an interval
        assert found[name]["low"] is None


def test_what_is_forgotten_is_measured_on_a_text_of_ones_own(
    inputs: Inputs, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    texts = ["The weather was lovely.", "It rained all day.", "I hated the room.", "So", "ok then"]
    file = tmp_path / "own.txt"
    file.write_text("\n\n".join(texts) + "\n")
    assert main(inputs.arguments(tmp_path / "out", "--retain", str(file))) == 0
    assert "Negative log-likelihood of neutral text: " in capsys.readouterr().out
    report = RunDir(tmp_path / "out").read_report()
    tokenizer = build_tokenizer()
    ids = [tokenizer(text)["input_ids"] for text in texts]
    tokens = sum(len(one) - 1 for one in ids)
    expected = {
        name: -sum(nats(inputs.path(folder), one[:1], one[1:]) for one in ids) / tokens
        for name, folder in (("before", "original"), ("after", "policy"))
    }
    found = report["retained"]
    assert {name: found[name] for name in expected} == pytest.approx(expected, abs=1e-4)
    change = found["difference"]
    assert change["value"] == pytest.approx(expected["after"] - expected["before"], abs=1e-4)
    assert change["low"] < change["value"] < change["high"]
    assert found["tokens"] == tokens
    assert report["inputs"]["retain"]["path"] == str(file)


def test_the_difference_is_that_of_the_sums() -> None:
    before, after = np.array([6.0, 2.0, 8.0, 4.0, 4.0]), np.array([7.0, 2.0, 10.0, 4.0, 7.0])
    found = compare_texts(before, after, np.array([2.0, 2.0, 4.0, 2.0, 2.0]), seed=0)
    assert (found["before"], found["after"]) == (2.0, 2.5)  # 24 and 30 nats, 12 tokens
    assert found["difference"]["value"] == 0.5
    assert found["tokens"] == 12


def test_the_text_of_the_package_is_read_when_none_is_given(inputs: Inputs, done: RunDir) -> None:
    texts = read_texts(None)
    assert len(texts) == 20
    assert all(30 <= len(text.split()) <= 60 for text in texts)
    report = done.read_report()
    assert report["retained"]["tokens"] == sum(
        len(ids) - 1 for ids in encode_texts(build_tokenizer(), texts)
    )
    assert "retain" not in report["inputs"]
    assert NEUTRAL_TEXT.is_file()


def test_texts_are_paragraphs_or_lines_of_json(tmp_path: Path) -> None:
    plain, lines = tmp_path / "a.txt", tmp_path / "a.jsonl"
    plain.write_text("one\ntwo\n\n \nthree\n")
    assert read_texts(plain) == ["one\ntwo", "three"]
    lines.write_text('{"text": "one\\n\\ntwo"}\n{"text": "three"}\n')
    assert read_texts(lines) == ["one\n\ntwo", "three"]
    lines.write_text('{"text": "one"}\n{"words": "two"}\n')
    with pytest.raises(BadLineError, match=r"a\.jsonl:2: no text \(expected a string under `text`"):
        read_texts(lines)
    with pytest.raises(InputError, match="No such file"):
        read_texts(tmp_path / "none.txt")
    with pytest.raises(InputError, match="no text of two tokens or more"):
        encode_texts(build_tokenizer(), ["", "a"])


def test_a_text_is_cut_where_the_model_s_context_ends() -> None:
    text = "one two three four five six seven eight"
    whole = encode_texts(build_tokenizer(), [text])[0]
    assert encode_texts(build_tokenizer(), [text], context=3) == [whole[:3]]
