"""`rlhf status` and the page Runs show the same time left of a running stage."""

import os
import socket
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from labeling_app.web.runs.loop_file import LoopFile
from labeling_app.web.runs.progress import read_rounds
from rlhf.records.jsonl import write_json
from rlhf.run.status import read_run
from rlhf.run.telemetry.progress_count import duration
from tests.rlhf.run.loops.folders import make_loop, make_round

STAGES = ("generate", "ppo", "evaluate")


@pytest.mark.parametrize(
    ("is_stage", "took", "shown"),
    [
        # what it counts is the stage; the round before does not matter
        (True, 3000.0, "sampling, 1 of 4, about 10 min left"),
        # nothing is counted: 3030 s in the round before, less the 30 s that it has run
        (None, 3030.0, "loading, about 50 min left"),
        (None, None, "loading"),
        # a part is counted: the stage takes as long as before, but at least as long as the part
        (
            False,
            3030.0,
            "sampling, 1 of 4, loading, about 10 min left of this part, about 50 min left",
        ),
        (
            False,
            60.0,
            "sampling, 1 of 4, loading, about 10 min left of this part, about 10 min left",
        ),
        (
            False,
            None,
            "sampling, 1 of 4, loading, about 10 min left of this part",
        ),
    ],
)
def test_both_say_the_same(
    tmp_path: Path, is_stage: bool | None, took: float | None, shown: str
) -> None:
    """Ten minutes are left of what is counted; None: nothing is."""
    work = {"title": "sampling", "done": 1, "total": 4, "seconds_left": 600.0, "at": time.time()}
    out = make_loop(tmp_path / "loop", model="m", status="running")
    make_round(out, 0)
    folder = make_round(out, 1, evaluate="running") / "evaluate"
    me = {"rank": 0, "host": socket.gethostname(), "pid": os.getpid()}
    phase = "sampling" if is_stage else "loading"
    counted = None if is_stage is None else {**work, "is_stage": is_stage}
    write_json(folder / "heartbeat" / "rank-00000.json", {**me, "phase": phase, "work": counted})
    started = (datetime.now(UTC) - timedelta(seconds=30)).isoformat()
    old = {"started_at": started, "exit_code": 0}
    entries: list[dict[str, Any]] = [{"round": 0, "stage": "ppo", "seconds": 9.0, **old}]
    if took:
        entries.append({"round": 0, "stage": "evaluate", "seconds": took, **old})
    entries.append({"round": 1, "stage": "evaluate", "started_at": started, "exit_code": None})
    write_json(out / "commands.json", {"commands": entries})

    file = LoopFile(
        path=tmp_path / "l.yaml",
        out=out,
        open=(),
        first=STAGES,
        later=STAGES,
        rounds=3,
        stop_without_gain=True,
    )
    [*_, view] = read_rounds(file, is_running=True)[1].stages
    left = "" if view.left_seconds is None else f", about {duration(view.left_seconds)} left"
    assert f"{view.doing}{left}" == shown
    assert read_run(out, {})["evaluate in round-1"]["phase"] == shown
    assert read_run(folder, {})["evaluate"]["phase"] == shown
