"""What the Runs page says of rounds and stages, on folders made by hand."""

import os
import socket
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from labeling_app.web.runs import picture
from labeling_app.web.runs.loop_file import LoopFile
from labeling_app.web.runs.progress import StageView, read_rounds
from rlhf.records.jsonl import write_json
from tests.rlhf.run.loops.folders import make_loop, make_round

FIRST = ("generate", "export", "ppo", "evaluate")
LATER = ("round", *FIRST[1:])


@pytest.fixture
def file(tmp_path: Path) -> LoopFile:
    out = make_loop(tmp_path / "loop", model="m", status="running")
    names = {"first": FIRST, "later": LATER}
    limits = {"rounds": 3, "stop_without_gain": True}
    return LoopFile(path=tmp_path / "l.yaml", out=out, open=(), **names, **limits)


def entry(number: int, stage: str, seconds: float | None = 60.0, code: int | None = 0) -> dict:
    """A line of commands.json; without seconds it has not ended, and began 30 seconds ago."""
    ended = {} if seconds is None else {"seconds": seconds}
    started = datetime.now(UTC) - timedelta(seconds=30)
    both = {"round": number, "stage": stage, "started_at": started.isoformat()}
    return {**both, "exit_code": None if seconds is None else code, **ended}


def write_commands(file: LoopFile, *entries: dict[str, Any]) -> None:
    write_json(file.run.commands_file, {"commands": list(entries)})


def stages(file: LoopFile, number: int, *, is_running: bool = True) -> dict[str, StageView]:
    rounds = read_rounds(file, is_running=is_running)
    return {stage.name: stage for stage in rounds[number].stages}


def test_nothing_has_begun(file: LoopFile) -> None:
    assert read_rounds(file, is_running=False) == []


def test_a_stage_is_done_by_its_folder_or_its_exit_code(file: LoopFile) -> None:
    make_round(file.out, 0, evaluate="running")
    write_commands(
        file,
        entry(0, "generate", None),  # the loop was killed, and the next one went on with export
        entry(0, "export", 5.0, code=75),
        entry(0, "export", 7.0),
        entry(0, "ppo", None),  # the same; its folder says done
        entry(0, "evaluate", None),
    )
    found = stages(file, 0)
    assert [one.status for one in found.values()] == ["done", "done", "done", "running"]
    assert found["export"].seconds == 12.0
    assert found["ppo"].seconds is None  # nobody saw its end
    assert found["evaluate"].seconds == pytest.approx(30, abs=5)
    assert found["evaluate"].left_seconds is None  # nothing to estimate it by
    stopped = stages(file, 0, is_running=False)
    assert stopped["evaluate"].status == "stopped"


def test_the_time_left_is_that_of_the_same_stage_in_the_round_before(file: LoopFile) -> None:
    make_round(file.out, 0)
    make_round(file.out, 1, evaluate="")
    earlier = [entry(0, "generate"), entry(0, "export", 2.0), entry(0, "ppo", 300.0)]
    first = [*earlier, entry(0, "evaluate", 100.0)]
    later = [entry(1, "round"), entry(1, "export", 3.0), entry(1, "ppo", 310.0)]
    write_commands(file, *first, *later)
    ahead = stages(file, 1)["evaluate"]
    assert (ahead.status, ahead.left_seconds) == ("not started", 100.0)
    later_round = read_rounds(file, is_running=True)[1]
    assert later_round.left_seconds == 100.0
    assert later_round.left_in_words == (
        "About 2 min left, if every stage takes as long as in the round before."
    )
    write_commands(file, *first, *later, entry(1, "evaluate", None))
    assert stages(file, 1)["evaluate"].left_seconds == pytest.approx(70, abs=5)
    assert read_rounds(file, is_running=True)[0].left_seconds is None  # done


def test_a_stage_that_takes_longer_than_before_has_no_estimate(file: LoopFile) -> None:
    make_round(file.out, 0)
    make_round(file.out, 1, evaluate="")
    write_commands(
        file,
        *(entry(0, name, 10.0) for name in FIRST),
        *(entry(1, name, 10.0) for name in LATER[:-1]),
        entry(1, "evaluate", None),
    )
    assert stages(file, 1)["evaluate"].left_seconds is None
    assert read_rounds(file, is_running=True)[1].left_seconds is None


def write_beat(folder: Path, phase: str, work: dict[str, Any] | None, pid: int = 0) -> None:
    """The heartbeat of a stage that this process runs, else another one."""
    of = {"rank": 0, "host": socket.gethostname(), "pid": pid or os.getpid()}
    write_json(folder / "heartbeat" / "rank-00000.json", {**of, "phase": phase, "work": work})


def counted(title: str, done: int, total: int, left: float | None, **more: Any) -> dict[str, Any]:
    both = {"title": title, "done": done, "total": total, "seconds_left": left}
    return {**both, "at": time.time() - 10, "is_stage": True, **more}


def test_what_a_stage_counts_says_how_much_is_left(file: LoopFile) -> None:
    folder = make_round(file.out, 0, ppo="running", evaluate="") / "ppo"
    write_beat(folder, "sampling", counted("training the policy", 5, 20, 130.0))
    write_commands(file, entry(0, "generate"), entry(0, "export"), entry(0, "ppo", None))
    found = stages(file, 0)["ppo"]
    assert found.doing == "training the policy, 5 of 20, sampling"
    assert found.share == 0.25
    assert found.left_seconds == pytest.approx(120, abs=5)  # 10 of the 130 seconds have passed
    write_beat(folder, "sampling", counted("training the policy", 5, 20, 7.0))
    assert stages(file, 0)["ppo"].left_seconds is None  # the estimate is used up
    write_beat(folder, "saving", None)
    assert stages(file, 0)["ppo"].doing == "saving"
    write_beat(folder, "sampling", counted("training the policy", 5, 20, 130.0), pid=2**22)
    assert stages(file, 0)["ppo"].doing == ""  # of an attempt that was killed


def test_a_command_without_a_run_folder_counts_too(file: LoopFile) -> None:
    write_beat(file.out / "round-0" / "generate", "starting", counted("sampling", 3, 12, 50.0))
    write_commands(file, entry(0, "generate", None))
    found = stages(file, 0)["generate"]
    assert (found.status, found.share) == ("running", 0.25)
    assert found.left_seconds == pytest.approx(40, abs=5)


def test_a_part_of_a_stage_says_what_is_left_of_that_part(file: LoopFile) -> None:
    folder = make_round(file.out, 0, evaluate="running") / "evaluate"
    part = counted("sampling responses", 1024, 2048, 50.0, is_stage=False)
    write_beat(folder, "sampling responses", part)
    before = [entry(0, name, 30.0) for name in FIRST[:-1]]
    write_commands(file, *before, entry(0, "evaluate", None))
    found = stages(file, 0)["evaluate"]
    assert found.doing == "sampling responses, 1,024 of 2,048, about 40 s left of this part"
    assert (found.share, found.left_seconds) == (0.5, None)  # nothing tells what follows

    folder = make_round(file.out, 1, evaluate="running") / "evaluate"
    write_beat(folder, "sampling responses", part)
    later = [*before, *(entry(1, name, 30.0) for name in LATER[:-1]), entry(1, "evaluate", None)]
    for took, left in ((100.0, 70), (60.0, 40)):  # at least that of the part
        write_commands(file, entry(0, "evaluate", took), *later)
        found = stages(file, 1)["evaluate"]
        assert found.left_seconds == pytest.approx(left, abs=5)


def test_the_first_round_says_what_is_known_of_it(file: LoopFile) -> None:
    folder = make_round(file.out, 0, ppo="running", evaluate="") / "ppo"
    write_commands(file, entry(0, "generate"), entry(0, "export"), entry(0, "ppo", None))
    [first] = read_rounds(file, is_running=True)
    assert first.left_in_words == ""  # no step yet
    write_beat(folder, "sampling", counted("training the policy", 5, 20, 130.0))
    [first] = read_rounds(file, is_running=True)
    assert first.left_seconds is None
    assert first.left_in_words == (
        "About 2 min left in ppo. Not known before a round has done it: evaluate."
    )
    [first] = read_rounds(file, is_running=False)
    assert first.left_in_words == ""


@pytest.mark.parametrize("code", [None, 1])
def test_a_generate_that_runs_again_for_new_prompts_was_done_before(
    file: LoopFile, code: int | None
) -> None:
    make_round(file.out, 0, ppo="", evaluate="")
    again = entry(0, "generate", None) | {"exit_code": code}
    write_commands(file, entry(0, "generate", 900.0), again)
    assert stages(file, 0)["generate"].status == "done"


def test_the_reports_that_can_be_read(file: LoopFile) -> None:
    make_round(file.out, 0)
    make_round(file.out, 1, evaluate="running")
    write_commands(file, entry(0, "generate"), entry(1, "round"))
    assert [one.reports for one in read_rounds(file, is_running=True)] == [["evaluate"], []]


def test_the_points_of_the_picture() -> None:
    rate = {"value": 0.75, "low": 0.5, "high": 1.0}
    few = {"value": 0.25, "low": None, "high": None}
    first, second, third = picture.points(
        [
            {"round": 0, "win_rate": {"original": rate, "before": rate}},
            {"round": 1, "win_rate": {"original": few, "before": rate}},
        ]
    )
    height = picture.HEIGHT - picture.TOP - picture.BOTTOM
    assert (first.series, first.y) == ("original", picture.TOP + height / 4)
    assert (first.low, first.high) == (picture.TOP + height / 2, picture.TOP)
    assert first.label == "round 0 wins 75 % against the original, interval 50–100 %"
    assert (second.low, second.label) == (None, "round 1 wins 25 % against the original")
    assert third.label.startswith("round 1 wins 75 % against the policy before")
    width = picture.WIDTH - picture.LEFT - picture.RIGHT
    assert first.x == picture.LEFT + width / 4 - picture.APART
    assert third.x == picture.LEFT + 3 * width / 4 + picture.APART
