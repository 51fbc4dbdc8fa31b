"""Encoders are refused as models and work as functions, as the guide says."""

import json
import re
from pathlib import Path

import pytest
from transformers import BertConfig, BertForSequenceClassification

from rlhf.cli import main
from tests.conftest import build_tokenizer

GUIDE = Path(__file__).parents[3] / "examples" / "guides" / "reward.md"
PAIRS = [{"prompt": f"p{n}", "chosen": f"good {n}", "rejected": f"bad {n}"} for n in range(6)]


@pytest.fixture
def encoder(tmp_path: Path) -> Path:
    tokenizer = build_tokenizer()
    sizes = {"hidden_size": 16, "intermediate_size": 32, "max_position_embeddings": 64}
    layers = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_labels": 1}
    config = BertConfig(vocab_size=len(tokenizer), **sizes, **layers)
    BertForSequenceClassification(config).save_pretrained(tmp_path / "encoder-model")
    tokenizer.save_pretrained(tmp_path / "encoder-model")
    return tmp_path / "encoder-model"


def test_the_function_of_the_guide_scores(
    encoder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ((code,),) = [re.findall(r"```python\n(.*?)```", GUIDE.read_text(encoding="utf-8"), re.DOTALL)]
    code = re.sub(r'MODEL = ".*"', f"MODEL = {str(encoder)!r}", code)
    (tmp_path / "encoder.py").write_text(code, encoding="utf-8")
    (tmp_path / "pairs.jsonl").write_text("\n".join(map(json.dumps, PAIRS)), encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    words = ["score", "--rankings", "pairs.jsonl", "--reward", "signal:encoder:score"]
    assert main([*words, "--precision", "fp32", "--out", "out"]) == 0
    assert json.loads(Path("out", "report.json").read_text())["accuracy"]["pairs"] == 6


def test_an_encoder_as_a_reward_model_is_refused_in_one_sentence(
    encoder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "pairs.jsonl").write_text("\n".join(map(json.dumps, PAIRS)), encoding="utf-8")
    words = ["score", "--rankings", str(tmp_path / "pairs.jsonl"), "--reward", str(encoder)]
    assert main([*words, "--precision", "fp32", "--out", str(tmp_path / "out")]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "BertForSequenceClassification has no linear head `score`" in said
    assert "An encoder can score as a function: --reward signal:package.module:function." in said
