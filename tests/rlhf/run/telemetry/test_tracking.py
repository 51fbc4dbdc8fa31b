import os
from pathlib import Path

import pytest
from accelerate import Accelerator

from rlhf.errors import ConfigError
from rlhf.parallel.settings import ClusterSettings
from rlhf.run.telemetry.tracking import flat, tracking


def test_tensorboard_files_hold_what_was_logged(tmp_path: Path) -> None:
    accumulators = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    accelerator, out = Accelerator(cpu=True), tmp_path / "demo" / "ppo"
    with tracking(accelerator, "tensorboard", out, ClusterSettings(sharding="fsdp")):
        for step in (1, 2, 3):
            accelerator.log({"step": step, "loss": step / 4}, step=step)
    (file,) = (out / "tracking" / "demo-ppo").glob("events.*")
    read = accumulators.EventAccumulator(str(file)).Reload()
    assert [(one.step, one.value) for one in read.Scalars("loss")] == [
        (1, 0.25),
        (2, 0.5),
        (3, 0.75),
    ]
    (kept,) = (out / "tracking" / "demo-ppo").glob("*/hparams.yml")
    assert "sharding: fsdp" in kept.read_text(encoding="utf-8")
    assert accelerator.trackers == []


@pytest.mark.filterwarnings("ignore::FutureWarning")  # mlflow would rather have a database
def test_every_run_has_an_mlflow_file_store_with_what_was_logged(
    tmp_path: Path, monkeypatch
) -> None:
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # to read them after the block
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    for member in ("member-0", "member-1"):
        accelerator, out = Accelerator(cpu=True), tmp_path / member
        with tracking(accelerator, "mlflow", out, ClusterSettings(sharding="fsdp")):
            for step in (1, 2, 3):
                accelerator.log({"step": step, "loss": step / 4}, step=step)
        assert "MLFLOW_TRACKING_URI" not in os.environ
        client = mlflow.MlflowClient((out / "tracking").as_uri())
        (experiment,) = client.search_experiments(filter_string=f"name LIKE '%{member}'")
        (run,) = client.search_runs([experiment.experiment_id])
        assert run.info.status == "FINISHED"
        assert run.data.params["sharding"] == "fsdp"
        logged = client.get_metric_history(run.info.run_id, "loss")
        assert [(one.step, one.value) for one in logged] == [(1, 0.25), (2, 0.5), (3, 0.75)]


def test_no_tracker_is_the_default(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True)
    with tracking(accelerator, "none", tmp_path / "out", ClusterSettings()):
        accelerator.log({"loss": 1.0}, step=1)
    assert not (tmp_path / "out").exists()


def test_a_missing_package_is_named(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("rlhf.run.telemetry.tracking.filter_trackers", lambda names, folder: [])
    block = tracking(Accelerator(cpu=True), "trackio", tmp_path / "out", ClusterSettings())
    with pytest.raises(ConfigError, match="--track trackio needs the package trackio"), block:
        pass


def test_settings_become_dotted_names() -> None:
    assert flat({"kl": {"source": "none"}, "paths": ["a"], "none": None, "seed": 1}) == {
        "kl.source": "none",
        "paths": "['a']",
        "none": "None",
        "seed": 1,
    }
