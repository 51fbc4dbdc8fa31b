"""Two processes go on from a trained head as one does: the whole stage.

What a step under every strategy makes of such a head is in test_sharding.py.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from reward.training.train import train_reward
from rlhf.records.ranked import write_ranked
from rlhf.run.metrics import read_metrics
from rlhf.run.rundir import RunDir
from tests.reward.conftest import build_record
from tests.reward.encoders import build_encoder
from tests.servers.commands import run_group
from tests.settings import reward_settings

KINDS: dict[str, dict[str, Any]] = {
    "fsdp": {"sharding": "fsdp"},
    "tensor_parallel": {"tensor_parallel": 2},
}
ENCODERS: dict[str, dict[str, Any]] = {
    "ddp": {},
    "fsdp": {"sharding": "fsdp"},
    "zero3": {"sharding": "zero3"},
}
TRAINING = {
    "precision": "fp32",
    "prompts_per_batch": 4,
    "learning_rate": 1e-3,
    "save_every": None,
    "seed": 1,
}
PROGRAM = """
import json
import sys
from pathlib import Path
from tests.settings import reward_settings
from reward.training.train import train_reward

rankings, out = map(Path, sys.argv[1:3])
training = json.loads(sys.argv[3])
for model, kinds in json.loads(sys.argv[4]).items():
    for name, changes in kinds.items():
        given = {"rankings": rankings, "model": str(out / model), "out": out / f"{model}-{name}"}
        train_reward(reward_settings(**given, **training, **changes))
"""


@pytest.fixture(scope="module")
def runs(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A reward model, and trainings that go on from it: one process's, and two processes'."""
    folder = tmp_path_factory.mktemp("going_on")
    records = [build_record(n, "test" if n % 3 == 0 else "train") for n in range(12)]
    write_ranked(folder / "rankings", records, {})
    build_encoder(folder / "encoder")
    for name, start, more in (
        ("rm", tiny_model, {"epochs": 2, "seed": 0}),
        ("rm-one", folder / "rm", {}),
        ("encoder-one", folder / "encoder", {}),
    ):
        given = {"rankings": folder / "rankings", "model": str(start), "out": folder / name}
        train_reward(reward_settings(**given, **{**TRAINING, **more}))
    program = folder / "program.py"
    program.write_text(PROGRAM, encoding="utf-8")
    kinds = {"rm": KINDS, "encoder": ENCODERS}
    words = [folder / "rankings", folder, json.dumps(TRAINING), json.dumps(kinds)]
    done = run_group(2, program, *words)
    assert done.returncode == 0, done.stderr[-4000:]
    return folder


@pytest.mark.parametrize("kind", KINDS)
def test_a_trained_head_stays_and_trains_as_with_one_process(runs: Path, kind: str) -> None:
    expected, found = (RunDir(runs / f"rm-{name}") for name in ("one", kind))
    report, earlier = found.read_report(), RunDir(runs / "rm").read_report()
    assert earlier["accuracy"]["value"] > 0.9  # a fresh head would be a coin
    assert report["accuracy_before_training"] == earlier["accuracy"]
    assert report["started_from"]["path"] == f"{runs}/rm/model"
    rows, others = (read_metrics(run.metrics_file) for run in (found, expected))
    losses = [[row["loss"] for row in curve] for curve in (rows, others)]
    assert losses[0] == pytest.approx(losses[1], abs=1e-4)
    assert losses[0][0] < 0.4  # with a fresh head log 2
    assert len(rows) == 2


@pytest.mark.parametrize("kind", ENCODERS)
def test_a_classifier_of_text_pairs_trains_as_with_one_process(runs: Path, kind: str) -> None:
    expected, found = (RunDir(runs / f"encoder-{name}") for name in ("one", kind))
    rows, others = (read_metrics(run.metrics_file) for run in (found, expected))
    for name in ("loss", "grad_norm", "accuracy"):
        assert [r[name] for r in rows] == pytest.approx([r[name] for r in others], rel=1e-4)
    before, after = (one.read_report()["accuracy_before_training"] for one in (expected, found))
    assert before == after
