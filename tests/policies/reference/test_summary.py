"""`rlhf reference --inspect`: every number by hand."""

import json
from pathlib import Path

import pytest

from rlhf.cli import main
from tests.policies.stores import build_store


def inspect(out: Path, capsys: pytest.CaptureFixture[str], *more: str) -> tuple[int, str, str]:
    code = main(["reference", "--inspect", "--out", str(out), *more])
    output = capsys.readouterr()
    return code, output.out, output.err


def test_the_numbers_of_a_small_store(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    build_store(tmp_path / "store", train=2, test=1, per_shard=1, rewarded=True)
    code, out, _ = inspect(tmp_path / "store", capsys, "--json")
    assert code == 0
    found = json.loads(out)
    assert found["prompts"] == {"train": 2, "test": 1}
    assert (found["rows"], found["shards"], found["reused"]) == (6, 3, 0)
    # lengths 1 2 | 2 3 | 3 1
    assert found["length"] == pytest.approx(
        {"mean": 2, "std": (4 / 6) ** 0.5, "min": 1, "median": 2, "p95": 3, "max": 3}
    )
    assert found["prompt_length"]["mean"] == pytest.approx(7 / 3)
    assert found["eos_rate"] == 0.5
    assert found["mean_log_prob"] == pytest.approx(-(0.5 * 3 + 1.0 * 5 + 1.5 * 4) / 12)
    assert found["mean_entropy"] == pytest.approx((1.0 * 6 + 2.0 * 6) / 12)
    assert found["reward"]["path"] == "runs/reward"
    assert (found["reward"]["mean"], found["reward"]["max"]) == (1.0, 2.0)
    assert found["examples"][-1] == {
        "split": "test",
        "prompt": "p2",
        "response": "answer 2.1",
        "length": 1,
        "finished": False,
        "mean_log_prob": -1.5,
        "reward": 2.0,
    }


def test_people_read_a_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    build_store(tmp_path / "store", train=2, test=1)
    code, out, _ = inspect(tmp_path / "store", capsys)
    assert code == 0
    assert out == (
        f"{tmp_path / 'store'}: reference outputs of models/original\n"
        "6 rows: 2 training and 1 test prompts × 2, in 2 shards; 0 reused\n"
        "sampled at temperature 0.7, at most 3 tokens, precision fp32\n"
        "\n"
        "prompt tokens    mean 2.333   std 0.4714   min 2   median 2   p95 3   max 3\n"
        "response tokens  mean 2   std 0.8165   min 1   median 2   p95 3   max 3\n"
        "EOS rate         0.500\n"
        "mean log-prob    -1.042 nats per token\n"
        "mean entropy     1.500 nats per token\n"
        "\n"
        "[train] p0\n"
        "→ answer 0.0\n"
        "  (1 tokens, -0.50 nats per token)\n"
        "\n"
        "[train] p1\n"
        "→ answer 1.1\n"
        "  (3 tokens, -1.00 nats per token)\n"
        "\n"
        "[test] p2\n"
        "→ answer 2.1\n"
        "  (1 tokens, cut at the length limit, -1.50 nats per token)\n"
    )


def test_every_shard_is_checked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    outputs = build_store(tmp_path / "store", train=20, test=0, per_shard=1)
    last = outputs / "train-00019.parquet"
    last.write_bytes((outputs / "train-00018.parquet").read_bytes())
    code, out, err = inspect(tmp_path / "store", capsys)
    assert (code, out) == (2, "")
    assert f"{last} is missing or was changed" in err


def test_there_must_be_a_store(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = inspect(tmp_path / "none", capsys)
    assert code == 2
    assert "none does not hold a finished reference stage" in err
