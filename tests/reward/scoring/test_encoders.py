"""Classifiers of text pairs (BERT, RoBERTa, DeBERTa, …) give transformers' own rewards."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BartConfig,
    BartForSequenceClassification,
    BertConfig,
    BertForMaskedLM,
)

from reward.model.module import RewardModule
from reward.scoring.scorer import load_scorer
from reward.scoring.texts import load_text_reward
from rlhf.cli import main
from rlhf.errors import InputError
from rlhf.modeling.models import context_length, load_config
from rlhf.modeling.tokens import pad_right
from rlhf.records.schema import Message, Prompt, Response
from tests.reward.encoders import SIZES, build_encoder, build_pair_tokenizer
from tests.servers.commands import REPOSITORY

GUIDE = REPOSITORY / "examples" / "guides" / "reward.md"
PAIRS = [{"prompt": f"p{n}", "chosen": f"good {n}", "rejected": f"bad {n}"} for n in range(6)]
QUESTIONS = ("How was the trip?", "Tell me about the house, the garden and the dog.")
ANSWERS = ("The weather was lovely.", "It rained all day and the train was late.", "Sad.")
FAMILIES = (
    ("Albert", "bert", {"embedding_size": 16}),
    ("Bert", "bert", {}),
    ("DebertaV2", "bert", {"type_vocab_size": 0}),
    ("DistilBert", "bert", {"dim": 32, "hidden_dim": 64, "n_layers": 2, "n_heads": 4}),
    ("Electra", "bert", {}),
    ("ModernBert", "bert", {}),
    ("Roberta", "roberta", {"type_vocab_size": 1}),
    ("XLMRoberta", "roberta", {"type_vocab_size": 1}),
)


def said(prompt: str, *texts: str, system: str = "") -> tuple[Prompt, tuple[Response, ...]]:
    messages = [Message(role="system", content=system)] if system else []
    asked = Prompt.create((*messages, Message(role="user", content=prompt)), "test", "")
    responses = [Response(id=t, prompt_id=asked.id, text=t, model="") for t in texts]
    return asked, tuple(responses)


@pytest.mark.parametrize(("family", "style", "config"), FAMILIES)
def test_rewards_are_those_of_transformers(
    tmp_path: Path, family: str, style: str, config: dict[str, Any]
) -> None:
    folder = build_encoder(tmp_path / "model", family, style, **config)
    model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    expected = [
        [
            float(model(**tokenizer(q, a, return_tensors="pt")).logits[0, 0].detach())
            for a in ANSWERS
        ]
        for q in QUESTIONS
    ]
    score = load_text_reward(str(folder), Accelerator(cpu=True, mixed_precision="no"), 120)
    found = score([said(question, *ANSWERS) for question in QUESTIONS])
    torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), atol=2e-6, rtol=1e-5)
    assert torch.tensor(found).std() > 0.01  # or all would be equal


@pytest.mark.parametrize("style", ["bert", "roberta"])
def test_token_batches_get_the_same_rewards(tmp_path: Path, style: str) -> None:
    """As an ensemble measures its members: the first separator ends the prompt."""
    family, types = ("Bert", 2) if style == "bert" else ("Roberta", 1)
    folder = str(build_encoder(tmp_path / "model", family, style, type_vocab_size=types))
    accelerator = Accelerator(cpu=True, mixed_precision="no")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    rows = [tokenizer(question, one)["input_ids"] for question in QUESTIONS for one in ANSWERS]
    batch = pad_right(rows, tokenizer.pad_token_id)
    found = load_scorer(folder, accelerator)(batch)
    expected = load_text_reward(folder, accelerator, 120)([said(q, *ANSWERS) for q in QUESTIONS])
    torch.testing.assert_close(found, torch.tensor(expected).flatten(), atol=2e-6, rtol=1e-5)


def test_only_the_answer_and_what_people_asked_is_read(tmp_path: Path) -> None:
    folder = build_encoder(tmp_path / "model")
    score = load_text_reward(str(folder), Accelerator(cpu=True, mixed_precision="no"), 120)
    plain, thinking, instructed = score(
        [
            said("Why?", "It rained."),
            said("Why?", "<think>Was it sunny?</think>It rained."),
            said("Why?", "It rained.", system="Be brief."),
        ]
    )
    for other in (thinking, instructed):  # in another batch, which may round in another way
        assert other == pytest.approx(plain, rel=1e-5, abs=2e-6)


def test_a_position_after_the_padding_token_is_the_first(tmp_path: Path) -> None:
    folder = build_encoder(tmp_path / "roberta", "Roberta", "roberta", type_vocab_size=1)
    assert context_length(load_config(str(folder))) == 128  # of 130, the padding token is 1
    score = load_text_reward(str(folder), Accelerator(cpu=True, mixed_precision="no"), 400)
    with pytest.raises(InputError, match="longer than the 128 tokens"):
        score([said("?" * 60, "!" * 65)])
    assert score([said("?" * 60, "!" * 64)])  # 4 tokens stand around them


def test_score_gives_the_report_that_the_function_of_the_guide_gives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = build_encoder(tmp_path / "model")
    ((code,),) = [re.findall(r"```python\n(.*?)```", GUIDE.read_text(encoding="utf-8"), re.DOTALL)]
    code = re.sub(r'MODEL = ".*"', f"MODEL = {str(folder)!r}", code)
    (tmp_path / "classifier.py").write_text(code, encoding="utf-8")
    (tmp_path / "pairs.jsonl").write_text("\n".join(map(json.dumps, PAIRS)), encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    words = ["score", "--rankings", "pairs.jsonl", "--precision", "fp32"]
    for name, reward in (("a", str(folder)), ("b", "signal:classifier:score")):
        assert main([*words, "--reward", reward, "--out", name]) == 0
    one, other = (json.loads(Path(name, "report.json").read_text()) for name in "ab")
    assert one["accuracy"] == other["accuracy"]
    assert one["accuracy"]["pairs"] == 6


def _without_a_head(folder: Path) -> None:
    tokenizer = build_pair_tokenizer()
    BertForMaskedLM(BertConfig(**SIZES, vocab_size=len(tokenizer))).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _with_two_labels(folder: Path) -> None:
    build_encoder(folder, labels=2)


def _whose_padding_counts(folder: Path) -> None:
    build_encoder(folder, "FNet", type_vocab_size=2)


def _without_separator(folder: Path) -> None:
    build_encoder(folder)
    file = folder / "tokenizer_config.json"
    told = json.loads(file.read_text())
    del told["sep_token"]
    file.write_text(json.dumps(told))


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (_without_a_head, "An encoder needs a trained head"),
        (_with_two_labels, "is not a reward model (BertForSequenceClassification, 2 labels)"),
        (_whose_padding_counts, "Padding changes what"),
        (_without_separator, "has no separator, which its model needs"),
    ],
)
def test_others_are_refused(tmp_path: Path, refused: Any, build: Any, message: str) -> None:
    build(tmp_path / "model")
    (tmp_path / "pairs.jsonl").write_text("\n".join(map(json.dumps, PAIRS)), encoding="utf-8")
    words = ("score", "--rankings", tmp_path / "pairs.jsonl", "--reward", tmp_path / "model")
    assert message in refused(*words, "--precision", "fp32", "--out", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_model_with_a_decoder_of_its_own_is_refused() -> None:
    sizes = {f"{part}_{name}": 2 for part in ("encoder", "decoder") for name in ("layers",)}
    config = BartConfig(vocab_size=40, d_model=16, num_labels=1, **sizes)
    with pytest.raises(InputError, match="BartForSequenceClassification has no head that can"):
        RewardModule(BartForSequenceClassification(config))
