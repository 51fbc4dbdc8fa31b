"""Two processes go on from a trained head as one does: the whole stage.

What a step under every strategy makes of such a head is in test_sharding.py.
"""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from reward.train import train_reward
from rlhf.parallel.distributed import run_processes
from rlhf.records.ranked import write_ranked
from rlhf.run.metrics import read_metrics
from rlhf.run.rundir import RunDir
from tests.pipeline.loop import REPOSITORY
from tests.reward.conftest import build_record
from tests.settings import reward_settings

KINDS: dict[str, dict[str, Any]] = {
    "fsdp": {"sharding": "fsdp"},
    "tensor_parallel": {"tensor_parallel": 2},
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
from reward.train import train_reward

rankings, model, out = map(Path, sys.argv[1:4])
training = json.loads(sys.argv[4])
for name, changes in json.loads(sys.argv[5]).items():
    given = {"rankings": rankings, "model": str(model), "out": out / name}
    train_reward(reward_settings(**given, **training, **changes))
"""


@pytest.fixture(scope="module")
def runs(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A reward model, and trainings that go on from it: one process's, and two processes'."""
    folder = tmp_path_factory.mktemp("going_on")
    records = [build_record(n, "test" if n % 3 == 0 else "train") for n in range(12)]
    write_ranked(folder / "rankings", records, {})
    for name, start, more in (
        ("rm", tiny_model, {"epochs": 2, "seed": 0}),
        ("one", folder / "rm", {}),
    ):
        given = {"rankings": folder / "rankings", "model": str(start), "out": folder / name}
        train_reward(reward_settings(**given, **{**TRAINING, **more}))
    program = folder / "program.py"
    program.write_text(PROGRAM, encoding="utf-8")
    words = [folder / "rankings", folder / "rm", folder, json.dumps(TRAINING), json.dumps(KINDS)]
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("PYTHONPATH", str(REPOSITORY))
        assert run_processes([sys.executable, str(program), *map(str, words)], 2) == 0
    return folder


@pytest.mark.parametrize("kind", KINDS)
def test_a_trained_head_stays_and_trains_as_with_one_process(runs: Path, kind: str) -> None:
    expected, found = (RunDir(runs / name) for name in ("one", kind))
    report, earlier = found.read_report(), RunDir(runs / "rm").read_report()
    assert earlier["accuracy"]["value"] > 0.9  # a fresh head would be a coin
    assert report["accuracy_before_training"] == earlier["accuracy"]
    assert report["started_from"]["path"] == f"{runs}/rm/model"
    rows, others = (read_metrics(run.metrics_file) for run in (found, expected))
    losses = [[row["loss"] for row in curve] for curve in (rows, others)]
    assert losses[0] == pytest.approx(losses[1], abs=1e-4)
    assert losses[0][0] < 0.4  # with a fresh head log 2
    assert len(rows) == 2
