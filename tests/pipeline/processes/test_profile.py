"""`--profile` on both trainings."""

import json
from pathlib import Path

from tests.pipeline.loop import Loop


def phases(out: Path) -> list[str]:
    assert (out / "profile" / "trace-rank-00000.json.gz").stat().st_size > 10_000
    content = json.loads((out / "profile" / "phases.json").read_text(encoding="utf-8"))
    return [one["phase"] for one in content]


def test_a_step_of_each_training_is_profiled(loop: Loop, run_rlhf, tmp_path: Path) -> None:
    code, _, shown = run_rlhf(*loop.ppo_arguments(tmp_path / "ppo", "--profile", "1", steps=2))
    assert code == 0, shown
    assert phases(tmp_path / "ppo")[:4] == ["sampling", "scoring", "measuring", "updating"]
    words = ["train-reward", "--rankings", loop.path("rankings"), "--model", str(loop.model)]
    options = ["--precision", "fp32", "--prompts-per-batch", "2", "--profile", "1"]
    code, _, shown = run_rlhf(*words, *options, "--out", str(tmp_path / "reward"))
    assert code == 0, shown
    assert phases(tmp_path / "reward") == ["computing gradients", "stepping"]
