import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator

from reward.memory import checkpoint_disk_bytes
from rlhf.errors import InputError
from rlhf.parallel.settings import ClusterSettings, TrainingParallelSettings
from rlhf.records.jsonl import write_json
from rlhf.run import preflight
from rlhf.run.rundir import RunDir
from tests.servers.commands import run_group
from tests.settings import changed, reward_settings

DIFFER = """
import json
import sys
from rlhf.parallel.distributed import start
from rlhf.errors import MismatchError
from rlhf.run.preflight import require_agreement
from rlhf.ranks import exit_process
accelerator = start("fp32", 0)
rank = accelerator.process_index
try:
    require_agreement(accelerator, json.loads(sys.argv[2])[rank])
except MismatchError as error:
    open(f"{sys.argv[1]}/error-{rank}", "w").write(str(error))
    exit_process(error.exit_code)
"""


@pytest.mark.parametrize(
    ("facts", "problem"),
    [
        (
            [{"input model": "abc", "same": "1"}, {"input model": "xyz", "same": "1"}],
            r"input model is xyz on rank 1 \(.+\) and abc on rank 0 \(.+\)",
        ),
        (
            [{"same": "1", "peft": "0.18"}, {"same": "1"}],
            r"peft is missing on rank 1 \(.+\) and 0.18 on rank 0 \(.+\)",
        ),
    ],
)
def test_processes_with_different_inputs_are_refused_with_the_rank(
    facts: list[dict[str, str]], problem: str, tmp_path: Path
) -> None:
    program = tmp_path / "program.py"
    program.write_text(DIFFER, encoding="utf-8")
    assert run_group(2, program, tmp_path, json.dumps(facts)).returncode == 2
    for rank in (0, 1):
        message = (tmp_path / f"error-{rank}").read_text(encoding="utf-8")
        assert re.fullmatch(
            f"The processes differ: {problem}\n  Install the same packages and give the same "
            r"files on every machine\.",
            message,
        )


def test_copies_of_an_input_are_the_same_to_all_processes_and_others_are_not(
    tmp_path: Path, tiny_model: Path
) -> None:
    for name in ("copy", "other"):
        shutil.copytree(tiny_model, tmp_path / name)
    weights = tmp_path / "other" / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-4000:] = bytes(4000)
    weights.write_bytes(content)

    def fact(path: Path | str) -> str:
        inputs = {"model": {"path": str(path), "hash": "of the main process"}}
        return preflight.describe_process(inputs)["input model"]

    assert fact(tiny_model) == fact(tmp_path / "copy") != fact(tmp_path / "other")
    assert fact(tmp_path / "gone") == fact("signal:a.b:c") == "not there"
    assert fact("nobody/nothing") == "not there"


def test_a_disk_without_room_is_refused(tmp_path: Path) -> None:
    free = shutil.disk_usage(tmp_path).free
    preflight.require_room(tmp_path / "new" / "out", 0)
    with pytest.raises(
        InputError, match=r"GiB free; the checkpoints and the model need about"
    ) as e:
        preflight.require_room(tmp_path / "new" / "out", 2 * free)
    assert e.value.problem.startswith(f"{tmp_path} has ")


def test_checkpoints_that_will_be_replaced_need_no_more_room(tmp_path: Path, monkeypatch) -> None:
    run = RunDir(tmp_path / "out")
    for folder, size in (("step-000001", 100), ("best/step-000001", 50)):
        (run.checkpoints / folder).mkdir(parents=True)
        (run.checkpoints / folder / "state").write_bytes(bytes(size))
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=60))
    preflight.require_room(run.path, 210)
    with pytest.raises(InputError, match="the checkpoints and the model need about"):
        preflight.require_room(run.path, 211)


def test_a_finished_run_needs_no_room(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    write_json(run.stage_file, {"stage": "ppo", "status": "done"})
    preflight.require_room(run.path, 2 * shutil.disk_usage(tmp_path).free)


def test_the_best_checkpoint_is_one_more_that_is_kept(tiny_model: Path) -> None:
    settings = reward_settings(rankings=Path("r"), model=str(tiny_model), out=Path("out"))
    kept = changed(settings, keep_checkpoints=2)
    assert (
        checkpoint_disk_bytes(changed(settings, eval_every=5))
        == checkpoint_disk_bytes(kept)
        > checkpoint_disk_bytes(settings)
    )


def test_room_by_hand() -> None:
    # three checkpoints of 12 bytes for each trained weight, 4 for each that is saved
    assert preflight.disk_bytes_of(10, 100, 2) == 3 * 120 + 400


def test_a_folder_that_is_not_shared_is_refused(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(preflight, "SHARED_SECONDS", 0.0)
    with pytest.raises(InputError, match=r"was made by rank 0, and .* does not see it"):
        preflight.require_shared(RunDir(tmp_path / "gone"))


def test_the_canary_trains_two_steps(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True)
    (found,) = preflight.run_canary(accelerator, tmp_path / "canary")
    assert 0 < found["error"] < 1e-5
    assert found["weights"] > 1
    assert not (tmp_path / "canary").exists()


def test_the_canary_runs_before_a_training_and_does_not_change_what_is_sampled(
    tmp_path: Path, tiny_model: Path, capsys
) -> None:
    settings = ClusterSettings(parallel=TrainingParallelSettings(preflight=True))
    inputs = {"model": {"path": str(tiny_model), "hash": "x"}}
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    preflight.check_before_training(Accelerator(cpu=True), settings, tmp_path / "run", inputs, 0)
    assert torch.rand(3).equal(expected)
    assert "Hardware canary: 1 of 1 devices passed" in capsys.readouterr().err


def test_a_broken_device_is_named() -> None:
    well = {"host": "a", "device": "GPU", "error": 1e-6, "weights": 10.0}
    preflight.require_passed([well, well])
    with pytest.raises(InputError, match=r"rank 1 \(b, GPU\) multiplies wrongly: off by 0\.3"):
        preflight.require_passed([well, {**well, "host": "b", "error": 0.3}])
    with pytest.raises(InputError, match=r"rank 1 \(a, GPU\) ended two steps with other weights"):
        preflight.require_passed([well, {**well, "weights": 10.5}])
    with pytest.raises(InputError, match="multiplies wrongly"):
        preflight.require_passed([{**well, "error": float("nan")}])


def test_a_product_is_compared_with_float64() -> None:
    assert preflight.product_error(torch.device("cpu")) < 1e-6


@pytest.mark.slow
def test_doctor_runs_the_canary_in_two_processes(tmp_path: Path) -> None:
    words = ["doctor", "--canary", "--processes", "2", "--path", str(tmp_path), "--min-disk", "0"]
    program = [sys.executable, "-m", "rlhf.cli", *words, "--min-memory", "0"]
    done = subprocess.run(program, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "rank 0 " in done.stdout
    assert "rank 1 " in done.stdout
