"""Databases, stores and unfinished runs of an earlier version go on as they are.

earlier/runs.tar.gz was made at commit e4a9715, before settings stood in groups: a label database
and its export, a finished reward model and reference store, and a train-reward and a ppo run that
were stopped on the way. Flags below are spelled as they were then; the expected numbers are those
with which that commit ended the same runs.
"""

import json
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

from rlhf.run.metrics import read_metrics
from rlhf.run.rundir import RunDir
from tests.pipeline.earlier.archive import ARCHIVE

Run = Callable[..., tuple[int, str, str]]
REWARD = [
    *("train-reward", "--rankings", "rankings", "--model", "tiny", "--precision", "fp32"),
    *("--epochs", "40", "--save-every", "2", "--learning-rate", "1e-3"),
    *("--prompts-per-batch", "4", "--centring", "0.02", "--out", "reward-cut"),
]
PPO = [
    *("ppo", "--model", "tiny", "--reward", "reward", "--reference", "reference"),
    *("--steps", "9", "--save-every", "2", "--episodes-per-step", "4", "--precision", "fp32"),
    *("--samples-per-prompt", "2", "--advantages", "group", "--max-approx-kl", "0.3"),
    *("--learning-rate", "1e-3", "--micro-tokens", "200", "--kl.rows-per-episode", "1"),
    *("--out", "ppo-cut"),
]


@pytest.fixture
def earlier(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    with tarfile.open(ARCHIVE) as archive:
        archive.extraction_filter = getattr(tarfile, "data_filter", None)  # not before 3.11.4
        archive.extractall(tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_an_export_of_an_earlier_database_is_the_same(earlier: Path, run_rlhf: Run) -> None:
    code, _, said = run_rlhf("export", "--db", "labels.db", "--out", "again")
    assert code == 0, said
    for name in ("train.jsonl", "test.jsonl"):
        assert (earlier / "again" / name).read_bytes() == (earlier / "rankings" / name).read_bytes()
    again, before = (
        json.loads((earlier / folder / "manifest.json").read_text())
        for folder in ("again", "rankings")
    )
    newer = {name: again.pop(name) for name in again.keys() - before.keys()}
    assert newer == {
        "annotator_hours": 0.0,
        "replaced_by_decisions": 0,
        "prompts_without_responses": 0,
        "newest_ranking": again["rankings"],
        "newest_import": 1,
    }
    assert again == before


@pytest.mark.parametrize(
    ("arguments", "lines", "last"),
    [
        (REWARD, 80, {"loss": 0.224208, "accuracy": 1.0, "grad_norm": 0.08797}),
        (PPO, 9, {"reward/mean": 0.719898, "entropy": 5.924934, "grad_norm/policy": 0.816154}),
    ],
    ids=["train-reward", "ppo"],
)
def test_an_earlier_run_goes_on(
    earlier: Path, run_rlhf: Run, arguments: list[str], lines: int, last: dict[str, float]
) -> None:
    code, _, said = run_rlhf(*arguments, "--resume")
    assert code == 0, said
    out = earlier / arguments[-1]
    metrics = read_metrics(out / "metrics.jsonl")
    assert RunDir(out).read_stage()["status"] == "done"
    assert len(metrics) == lines
    assert {name: metrics[-1][name] for name in last} == pytest.approx(last, rel=1e-3)


@pytest.mark.parametrize("stage", ["ppo-cut", "reward-cut"])
def test_the_settings_file_of_an_earlier_run_is_read(
    earlier: Path, run_rlhf: Run, stage: str
) -> None:
    command = {"ppo-cut": "ppo", "reward-cut": "train-reward"}[stage]
    code, shown, said = run_rlhf(
        command, "--config", f"{stage}/config.yaml", "--resume", "--dry-run"
    )
    assert code == 0, said
    assert "0.001" in shown
