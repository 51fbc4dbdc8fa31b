"""`rlhf loop` as people run it: a program of its own, which waits, is killed, and goes on."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from labeling_app.db.store import Store
from rlhf.cli import main
from rlhf.records.schema import Ranking
from rlhf.run.rundir import RunDir
from rlhf.run.watchdog import process_has_ended, read_heartbeats
from tests.labeling_app.conftest import build_prompt
from tests.pipeline.loop import SIGNAL, read_json, write_prompts
from tests.pipeline.signals import count_vowels
from tests.servers.commands import REPOSITORY
from tests.servers.listener import Listener
from tests.servers.waiting import wait_until

STAGES = """
stages:
  generate: {k: 4, max_new_tokens: 12, precision: fp32}
  round: {pick: 4, precision: fp32}
  train-reward: {precision: fp32}
  reference: {sampling: {samples: 2, max_new_tokens: 12}, precision: fp32}
  ppo: {steps: STEPS, batch: {episodes_per_step: 4}, precision: fp32}
  evaluate: {precision: fp32, samples: 2}
"""
TRAINING = ["train-reward", "reference", "ppo", "evaluate"]
SECONDS = 300.0  # for a stage on a busy machine


@dataclass(frozen=True)
class Folder:
    """A loop's file and folder."""

    path: Path

    @property
    def out(self) -> Path:
        return self.path / "out"

    @property
    def db(self) -> Path:
        return self.out / "labels.db"

    def start(self) -> "subprocess.Popen[bytes]":
        words = ["loop", "--config", str(self.path / "loop.yaml"), "--json"]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        with (self.path / "said").open("ab") as said, (self.path / "result").open("wb") as result:
            return subprocess.Popen(
                [sys.executable, "-m", "rlhf.cli", *words],
                cwd=REPOSITORY,
                env=environment,
                stdout=result,
                stderr=said,
            )

    def run(self) -> dict[str, Any]:
        """Run the loop to its end; its result."""
        process = self.start()
        assert process.wait(2 * SECONDS) == 0, self.said()
        found: dict[str, Any] = json.loads((self.path / "result").read_text().splitlines()[-1])
        return found

    def said(self) -> str:
        return (self.path / "said").read_text(encoding="utf-8")

    def commands(self) -> list[tuple[int, str, int | None]]:
        entries = read_json(self.out / "commands.json")["commands"]
        return [(one["round"], one["stage"], one["exit_code"]) for one in entries]

    def phase(self) -> str:
        return next((h.phase for h in read_heartbeats(self.out / "heartbeat")), "")


def new_folder(path: Path, model: Path, *lines: str, steps: int = 2) -> Folder:
    path.mkdir(exist_ok=True)
    prompts = write_prompts(path / "prompts.jsonl")
    top = [f"out: {path}/out", f"model: {model}", f"prompts: {prompts}", *lines]
    text = "\n".join(top) + STAGES.replace("STEPS", str(steps))
    (path / "loop.yaml").write_text(text, encoding="utf-8")
    return Folder(path)


def rank(db: Path, number: int) -> None:
    """One person's rankings of the first prompts, by vowels."""
    with Store(db) as store:
        rankings = [
            Ranking(
                id=f"by-ann-{record.prompt.id}",
                prompt_id=record.prompt.id,
                annotator="ann",
                kind="human",
                tiers=tuple(
                    (one.id,)
                    for one in sorted(record.responses, key=lambda r: -count_vowels("", r.text))
                ),
            )
            for record in store.ranked_prompts()
        ]
        store.add_rankings(rankings[:number])


def status(out: Path, capsys: pytest.CaptureFixture[str]) -> list[str]:
    capsys.readouterr()
    assert main(["status", str(out)]) == 0
    return [cell.strip() for cell in capsys.readouterr().out.splitlines()[1].split("  ") if cell]


@pytest.fixture
def listener() -> Iterator[Listener]:
    with Listener() as listening:
        yield listening


def test_a_loop_waits_for_people_and_goes_on_after_it_was_killed(
    tmp_path: Path, tiny_model: Path, capsys: pytest.CaptureFixture[str], listener: Listener
) -> None:
    lines = ("new_rankings: 12", "rounds: 2", f"notify: {listener.url}")
    folder = new_folder(tmp_path, tiny_model, *lines, steps=40)
    process = folder.start()
    wait_until(lambda: folder.phase().startswith("waiting"))
    rank(folder.db, 11)
    wait_until(lambda: folder.phase() == "waiting for rankings: 11 of 12")
    assert [cell for n, cell in enumerate(status(folder.out, capsys)) if n != 2] == [
        *("loop", "waiting", "waiting for rankings: 11 of 12")
    ]
    second = folder.start()  # nothing runs twice
    assert second.wait(SECONDS) == 2
    assert f"Process {process.pid} on " in folder.said()
    assert "Wait for it, or stop it and type the same again" in folder.said()
    assert not (folder.out / "round-0" / "rankings").exists()
    with Store(folder.db) as store:
        new = build_prompt("A prompt that somebody adds meanwhile?")
        store.add_prompts([new])  # gets responses at once
        wait_until(lambda: len(store.responses(new.id)) == 4)
    wait_until(lambda: folder.commands()[2:] == [(0, "generate", 0)])  # else it would be ended
    assert folder.phase() == "waiting for rankings: 11 of 12"
    rank(folder.db, 12)

    # killed alone: its child goes on, and the next loop waits for it
    ppo = RunDir(folder.out / "round-0" / "ppo")
    wait_until(lambda: read_heartbeats(ppo.heartbeat))
    process.kill()
    process.wait()
    [child] = read_heartbeats(ppo.heartbeat)
    process = folder.start()
    wait_until(lambda: "which an earlier loop has started, still runs" in folder.said())
    assert f"rlhf ppo (process {child.pid})" in folder.said()
    assert process.wait(2 * SECONDS) == 0
    assert read_heartbeats(ppo.heartbeat)[0].pid == child.pid

    report = folder.run()  # of a finished loop
    names = ("import", "generate", "generate", "export", "train-reward", "reference")
    assert folder.commands() == [
        *((0, name, 0) for name in names),
        (0, "ppo", None),
        (0, "evaluate", 0),
    ]
    [done] = report["rounds"]
    assert (done["rankings"], done["new_rankings"]) == (12, 12)
    assert done["win_rate"]["before"]["low"] is None  # of four prompts there is no interval
    assert "no gain" in report["stopped"]
    assert report["stopped_by"] == "stop_without_gain"
    assert report == read_json(folder.out / "report.json")
    assert status(folder.out, capsys)[3] == report["stopped"]
    assert [one["status"] for one in listener.heard] == ["waiting", "done"]
    assert listener.url not in (folder.out / "config.yaml").read_text(encoding="utf-8")


def stop_in(folder: Folder, stage: RunDir, sent: int) -> None:
    """Start a loop and send it a signal in a stage: both end as they should."""
    before = [beat.pid for beat in read_heartbeats(stage.heartbeat)]
    process = folder.start()
    wait_until(lambda: any(one.pid not in before for one in read_heartbeats(stage.heartbeat)))
    process.send_signal(sent)
    assert process.wait(SECONDS) == 75
    assert stage.read_stage()["status"] == "interrupted"
    assert all(map(process_has_ended, read_heartbeats(stage.heartbeat)))
    assert "interrupted Run the same command again." in folder.said()


@pytest.mark.slow
def test_two_rounds_by_a_signal_with_interruptions(tmp_path: Path, tiny_model: Path) -> None:
    lines = (f"annotator: signal:{SIGNAL}", "rounds: 2", "stop_without_gain: false")
    folder = new_folder(tmp_path, tiny_model, *lines, steps=40)
    reward, ppo = (
        RunDir(folder.out / f"round-{n}" / name) for n, name in enumerate(("reward", "ppo"))
    )

    # killed together with its child
    process = folder.start()
    wait_until(lambda: read_heartbeats(reward.heartbeat))
    process.kill()
    process.wait()
    [child] = read_heartbeats(reward.heartbeat)
    os.kill(child.pid, signal.SIGKILL)
    assert reward.read_stage()["status"] == "running"

    # killed alone while it samples the policy, which goes on and is not repeated
    process = folder.start()
    child_file = folder.out / ".child"
    wait_until(lambda: child_file.read_text(encoding="utf-8").startswith("rlhf round"))
    process.kill()
    process.wait()

    # asked to stop: the child saves its state and ends
    for sent in (signal.SIGINT, signal.SIGTERM):
        stop_in(folder, ppo, sent)

    report = folder.run()
    assert folder.commands() == [
        *((0, name, 0) for name in ("import", "generate", "annotate", "export")),
        (0, "train-reward", None),
        *((0, name, 0) for name in TRAINING),
        (1, "round", None),
        *((1, name, 0) for name in ("annotate", "export", *TRAINING[:2])),
        *((1, "ppo", code) for code in (75, 75, 0)),
        (1, "evaluate", 0),
    ]
    assert report["stopped"] == "2 of 2 rounds are done."
    assert report["stopped_by"] == "rounds"
    # the second round ranks its four prompts anew, with the policy's answers
    counts = [(one["rankings"], one["new_rankings"]) for one in report["rounds"]]
    assert counts == [(12, 12), (12, 4)]
    inputs = read_json(ppo.stage_file)["inputs"]
    assert inputs["model"]["path"] == str(folder.out / "round-0" / "ppo" / "policy")
    compared = read_json(folder.out / "round-1" / "evaluate" / "report.json")
    assert set(compared["rival"]["win_rate"]) == {"reward", "gold"}
    assert compared["inputs"]["reference"]["path"] == str(folder.out / "round-0" / "reference")
