"""What running commands count: written to the heartbeat, rarely, and read with the time left."""

import json
import os
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rlhf.errors import InputError
from rlhf.records.jsonl import write_json
from rlhf.run import watchdog
from rlhf.run.metrics import progress
from rlhf.run.telemetry.progress_count import ProgressCount, duration
from rlhf.run.watchdog import beat, read_heartbeats, running_heartbeat, watching
from tests.pipeline.loop import run_loop

COUNTED = {"title": "t", "done": 1, "total": 4, "seconds_left": 2.5, "at": 7.0, "is_stage": True}


class Writes:
    """What is written as a heartbeat while it listens: the stage, and the content."""

    def __init__(self) -> None:
        self.found: list[tuple[str, dict[str, Any]]] = []
        self.listens = True
        sys.addaudithook(self.hear)

    def hear(self, event: str, given: tuple[Any, ...]) -> None:
        if self.listens and event == "os.rename" and str(given[1]).endswith("rank-00000.json"):
            stage = Path(given[1]).parent.parent.name
            self.found.append((stage, json.loads(Path(given[0]).read_text("utf-8"))))

    def counts(self, stage: str, title: str) -> list[dict[str, Any]]:
        works = [one["work"] for name, one in self.found if name == stage and one["work"]]
        return [work for work in works if work["title"] == title]


@pytest.fixture
def writes() -> Iterator[Writes]:
    listening = Writes()
    yield listening
    listening.listens = False


def ignore(error: Exception) -> None:
    """No stall is expected."""


def test_every_stage_of_a_run_counts(
    tmp_path: Path, tiny_model: Path, writes: Writes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watchdog, "SECONDS_BETWEEN_COUNTS", 0.0)
    run_loop(tmp_path, tiny_model)
    of_stages = {
        ("reward", "training the reward model"): True,
        ("reference", "writing reference outputs"): True,
        ("ppo", "training the policy"): True,
        ("evaluate", "sampling responses"): False,
        ("evaluate", "scoring responses"): False,
        ("evaluate", "measuring log-probs"): False,
    }
    for (stage, title), is_stage in of_stages.items():
        counts = writes.counts(stage, title)
        first, last = counts[0], counts[-1]
        assert (first["done"], first["seconds_left"]) == (0, None), title
        assert (last["done"], last["seconds_left"]) == (last["total"], 0.0), title
        assert {one["is_stage"] for one in counts} == {is_stage}, title
    totals = {title: writes.counts(stage, title)[0]["total"] for stage, title in of_stages}
    assert totals["writing reference outputs"] == 24  # two for each of 12 prompts
    assert totals["training the policy"] == 4
    assert totals["sampling responses"] == 8  # two for each of four test prompts
    assert totals["scoring responses"] == 8  # the stored ones have their rewards
    second = next(one for one in writes.counts("ppo", "training the policy") if one["done"] == 2)
    first = next(one for one in writes.counts("ppo", "training the policy") if one["done"] == 1)
    passed = second["at"] - first["at"]
    assert second["seconds_left"] == pytest.approx(first["seconds_left"] / 3 + passed, rel=0.05)
    for stage in ("reward", "reference", "ppo", "evaluate"):
        [done] = read_heartbeats(tmp_path / stage / "heartbeat")
        assert done.work is None


def test_counting_is_written_rarely(tmp_path: Path, writes: Writes) -> None:
    folder = tmp_path / "run" / "heartbeat"
    with watching(folder, None, ignore), progress("working", 1000) as bar:
        for _ in range(999):
            bar.advance()
        assert len(writes.found) == 3  # the start, the count, and the phase
        heartbeat = running_heartbeat(folder)
        assert heartbeat is not None
        assert heartbeat.doing == "working, 0 of 1,000"
        beat("saving")  # a phase is written at once, with the count
        heartbeat = running_heartbeat(folder)
        assert heartbeat is not None
        assert heartbeat.doing == "working, 999 of 1,000, saving"
    assert [one["work"] is None for _, one in writes.found[1:]] == [False, False, False, True]


def test_only_the_outer_bar_of_the_main_thread_counts(tmp_path: Path) -> None:
    with watching(tmp_path, None, ignore), progress("outside", 4, 1) as bar:
        with progress("inside", 9) as inner:
            inner.advance(5)
        thread = threading.Thread(target=lambda: progress("beside", 7).__enter__().advance())
        thread.start()
        thread.join()
        bar.advance(9)
        beat("ending")
        [heartbeat] = read_heartbeats(tmp_path)
    assert heartbeat.doing == "outside, 4 of 4, ending"  # never more than there are


def test_no_process_no_heartbeat(tmp_path: Path) -> None:
    of = {"rank": 0, "host": os.uname().nodename, "pid": 2**22}  # beyond the largest there can be
    write_json(tmp_path / "rank-00000.json", of)
    assert running_heartbeat(tmp_path) is None


def test_the_time_left_passes() -> None:
    now = time.time()
    work = ProgressCount(title="t", done=1, total=4, seconds_left=60.0, at=now - 20, is_stage=True)
    assert work.left() == pytest.approx(40, abs=1)
    assert work.share == 0.25
    ahead = ProgressCount(
        title="t", done=0, total=0, seconds_left=60.0, at=now + 900, is_stage=True
    )
    assert ahead.left() == 60  # the clock of another machine
    assert ahead.share == 1.0
    passed = ProgressCount(
        title="t", done=1, total=4, seconds_left=60.0, at=now - 61, is_stage=True
    )
    assert passed.left() is None


@pytest.mark.parametrize(
    ("changed", "problem"),
    [
        ({"title": 3}, "has 'title' as '3'"),
        ({"done": 5}, "counts 5 of 4"),
        ({"done": -1}, "counts -1 of 4"),
        ({"seconds_left": float("nan")}, "has 'seconds_left' as 'nan'"),
        ({"at": None}, "has 'at' as 'None'"),
        ({"total": 10**16}, "counts 1 of 1"),
    ],
)
def test_broken_counts_are_refused(tmp_path: Path, changed: dict[str, Any], problem: str) -> None:
    assert ProgressCount.of(COUNTED, "f").done == 1
    with pytest.raises(InputError, match=f"f {problem}"):
        ProgressCount.of({**COUNTED, **changed}, "f")


def test_a_heartbeat_that_lacks_a_count_is_named(tmp_path: Path) -> None:
    beat = {"rank": 0, "host": "h", "pid": 1, "work": {**COUNTED}}
    del beat["work"]["total"]
    file = tmp_path / "rank-00000.json"
    write_json(file, beat)
    with pytest.raises(InputError, match=r"rank-00000\.json has no 'total'"):
        read_heartbeats(tmp_path)


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(None, ""), (40.4, "40 s"), (89, "89 s"), (90, "2 min"), (3590, "1 h 00 min"),
     (12_000, "3 h 20 min")],
)  # fmt: skip
def test_durations(seconds: float | None, words: str) -> None:
    assert duration(seconds) == words
