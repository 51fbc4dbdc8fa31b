"""A run folder records what its stage is and how it ended, and nobody's files are overwritten."""

import os
import signal
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread

import pytest

from rlhf.errors import InputError, InterruptedRunError
from rlhf.run.rundir import open_stage, require_done, stage_status
from tests.rlhf.run.stages import INPUTS, Settings, finish, open_ppo


def test_a_stage_starts_beside_files_that_it_knows_of(tmp_path: Path) -> None:
    (tmp_path / "labels.db").touch()
    settings, known = Settings(out=tmp_path), {"labels.db", "loop.log"}
    with pytest.raises(InputError, match=r"exists \(not a run folder\)\n  Choose another --out.$"):
        open_stage(tmp_path, "loop", settings, {}, resume=False)
    (tmp_path / "notes.txt").touch()
    with pytest.raises(InputError, match=r"exists but is not a run folder \(no config.yaml\)"):
        open_stage(tmp_path, "loop", settings, {}, resume=True, beside=known)
    (tmp_path / "notes.txt").unlink()
    run = open_stage(tmp_path, "loop", settings, {}, resume=True, beside=known)
    assert run.read_stage()["status"] == "running"


def test_the_key_to_a_chat_stays_out_of_the_files(tmp_path: Path) -> None:
    run = open_ppo(tmp_path / "run", notify="https://hooks.example/secret")
    assert "notify: null" in run.config_file.read_text(encoding="utf-8")
    assert "hooks.example" not in run.stage_file.read_text(encoding="utf-8")
    open_ppo(tmp_path / "run", notify="https://hooks.example/secret", resume=True)


def test_a_new_stage_records_what_it_is(tmp_path: Path) -> None:
    run = open_ppo(tmp_path / "runs" / "ppo")
    stage = run.read_stage()
    assert (stage["stage"], stage["status"], stage["seed"]) == ("ppo", "running", 3)
    assert stage["inputs"] == INPUTS
    assert stage["versions"]["torch"].startswith("2.")
    assert stage["hardware"]["cpus"] >= 1
    assert stage["started_at"].endswith("+00:00")
    assert "steps: 10" in run.config_file.read_text(encoding="utf-8")
    assert not run.is_done


def test_how_a_stage_ended(tmp_path: Path) -> None:
    run = open_ppo(tmp_path / "ppo")

    def end(error: BaseException) -> None:
        with stage_status(run):
            raise error

    for error, status in ((KeyboardInterrupt(), "interrupted"),
                          (InterruptedRunError("stopped", "go on"), "interrupted"),
                          (ValueError("oh"), "failed")):  # fmt: skip
        with pytest.raises(type(error)):
            end(error)
        assert run.read_stage()["status"] == status
    assert run.read_stage()["error"] == "ValueError: oh"
    finish(run)
    assert run.is_done
    assert "error" not in run.read_stage()
    assert run.read_stage()["inputs"] == INPUTS


def test_an_existing_folder_is_never_overwritten(tmp_path: Path) -> None:
    run = open_ppo(tmp_path / "ppo")
    finish(run)
    before = run.stage_file.read_text(encoding="utf-8")
    with pytest.raises(InputError) as caught:
        open_ppo(run.path)
    assert str(caught.value) == (
        f"{run.path} already exists (done)\n"
        "  Choose another --out, or add --resume to show its result again."
    )
    assert run.stage_file.read_text(encoding="utf-8") == before


@pytest.mark.parametrize("resume", [True, False])
def test_a_folder_of_somebody_else_is_left_alone(tmp_path: Path, resume: bool) -> None:
    (tmp_path / "thesis.tex").write_text("mine", encoding="utf-8")
    words = r"no config\.yaml" if resume else "already exists .not a run folder."
    with pytest.raises(InputError, match=words):
        open_ppo(tmp_path, resume=resume)
    assert [file.name for file in tmp_path.iterdir()] == ["thesis.tex"]


def test_only_the_main_process_looks_and_writes(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("RANK", "1")
    run = open_ppo(tmp_path / "ppo")
    with stage_status(run):
        pass
    assert not run.path.exists()


def test_the_next_stage_reads_a_finished_one(tmp_path: Path) -> None:
    run = open_ppo(tmp_path / "ppo")
    finish(run)
    run.report_json.write_text('{"steps": 10}', encoding="utf-8")
    found = require_done(run.path, "ppo", "policy")
    assert found == run
    assert found.read_report() == {"steps": 10}


def test_require_done_says_what_is_missing_and_the_command_that_makes_it(tmp_path: Path) -> None:
    out = tmp_path / "ppo"

    def refusal(stage: str = "ppo", result: str = "policy") -> str:
        with pytest.raises(InputError) as caught:
            require_done(out, stage, result)
        return str(caught.value)

    assert refusal() == (
        f"{out} does not hold a finished ppo stage (no stage.json)\n"
        f"  Make it first: rlhf ppo --out {out} …"
    )
    run = open_ppo(out)
    assert refusal() == (
        f"The ppo stage in {out} is running, not done\n"
        f"  Finish it first: rlhf ppo --config {out / 'config.yaml'} --resume"
    )
    finish(run)
    assert refusal("reward", "model") == (
        f"{out} is a run of rlhf ppo, not of rlhf train-reward\n"
        "  Give the --out folder of rlhf train-reward."
    )
    run.policy.rmdir()
    assert refusal() == f"{out} has no policy folder\n  Make it again with rlhf ppo."


def test_a_stage_that_others_have_yet_to_complete_stays_running(tmp_path: Path) -> None:
    run = open_ppo(tmp_path / "ppo")
    with stage_status(run, is_complete=run.report_json.is_file):
        pass
    assert run.read_stage()["status"] == "running"
    with stage_status(run, is_complete=run.report_json.is_file):
        run.report_json.write_text("{}", encoding="utf-8")
    assert run.is_done


@pytest.fixture
def sigterm() -> Iterator[None]:
    """SIGTERM interrupts, as in every command."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    yield
    signal.signal(signal.SIGTERM, before)


class Lost(RuntimeError):
    """Another rank was ended by SIGTERM, which comes here while the loss of it is recorded."""

    def __str__(self) -> str:
        signal.raise_signal(signal.SIGTERM)
        return "connection closed by peer"


@pytest.mark.usefixtures("sigterm")
def test_a_signal_while_a_failure_is_recorded_interrupts(tmp_path: Path) -> None:
    run = open_ppo(tmp_path / "ppo")
    with pytest.raises(KeyboardInterrupt), stage_status(run):
        raise Lost
    assert run.read_stage()["status"] == "interrupted"
    assert "error" not in run.read_stage()


@pytest.mark.usefixtures("sigterm")
def test_a_failure_that_is_recorded_stays_one(tmp_path: Path) -> None:
    """SIGTERM comes while the chat is told of it."""
    run = open_ppo(tmp_path / "ppo")

    class Chat(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(1)

    with HTTPServer(("localhost", 0), Chat) as server:
        thread = Thread(target=server.handle_request)
        thread.start()
        address = f"http://localhost:{server.server_port}"
        with pytest.raises(KeyboardInterrupt), stage_status(run, address):
            raise ValueError("oh")
        thread.join()
    assert run.read_stage()["status"] == "failed"
    assert run.read_stage()["error"] == "ValueError: oh"
