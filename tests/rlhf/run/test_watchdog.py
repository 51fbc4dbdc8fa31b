import json
import threading
import time
from pathlib import Path

import pytest

from rlhf.records.jsonl import write_json
from rlhf.run import watchdog
from rlhf.run.watchdog import (
    Heartbeat,
    beat,
    describe_stall,
    find_slow,
    read_heartbeats,
    reporting_rank,
    watching,
)
from tests.servers.commands import Command, finish_group, start_group


def start_two(tmp_path: Path, program: str) -> tuple[Path, list[Command]]:
    """A run folder in which two processes execute a program."""
    file, run = tmp_path / "program.py", tmp_path / "run"
    write_json(run / "stage.json", {"stage": "ppo", "status": "running"})
    file.write_text(program, encoding="utf-8")
    return run, start_group(2, file, run)


def finish(group: list[Command]) -> tuple[list[int | None], str, str]:
    """Exit codes, outputs and errors, once all have ended; the others are killed after the first
    that fails, as torchrun does."""
    errors = finish_group(group).stderr
    codes = [process.returncode for process in group]
    return codes, "".join(process.communicate()[0] for process in group), errors


HANG = """
import os, sys, time
from pathlib import Path
import torch
from torch.distributed._functional_collectives import all_reduce
from rlhf.parallel.distributed import start, global_sum
from rlhf.run.rundir import RunDir, watching_stage
from rlhf.run.watchdog import beat
accelerator = start("fp32", 0)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1))
for _ in range({before}):
    {meet}
run = RunDir(Path(sys.argv[1]))
with watching_stage(run, 3.0):
    for step in (1, 2, 3):
        beat("sampling", step)
        time.sleep(0.5)
        beat("updating", step)
        if step == 2 and accelerator.process_index == 1:
            {hang}
        {meet}
"""
SLEEP = "time.sleep(300)"
STOP = "import signal; os.kill(os.getpid(), signal.SIGSTOP)"
SUM = "global_sum(accelerator, 1.0)"
WAIT = "all_reduce(torch.ones(1), 'sum', torch.distributed.group.WORLD).tolist()"
MULTIPLY = "[torch.ops.aten.mm(*[torch.ones(3000, 3000)] * 2) for _ in range(300)]"
BACKWARD = "model(torch.ones(1, 2)).sum().backward()"


@pytest.mark.parametrize(
    ("hang", "meet", "before", "waits_in"),
    [
        (SLEEP, SUM, 0, "global_sum"),
        (STOP, SUM, 0, "global_sum"),
        (MULTIPLY, SUM, 0, "global_sum"),  # both kinds of operators are called by torch/_ops.py
        (SLEEP, WAIT, 0, "wait_tensor"),
        # DDP talks before its second pass
        pytest.param(SLEEP, BACKWARD, 0, "_pre_forward", marks=pytest.mark.slow),
        (SLEEP, BACKWARD, 2, "_engine_run_backward"),  # and averages gradients below Python
    ],
)
def test_the_rank_that_hangs_is_named_within_timeout_and_ten_seconds(
    tmp_path: Path, hang: str, meet: str, before: int, waits_in: str
) -> None:
    run, group = start_two(tmp_path, HANG.format(hang=hang, meet=meet, before=before))
    second = run / "heartbeat" / "rank-00001.json"
    limit = time.monotonic() + 120
    while not (second.is_file() and json.loads(second.read_text())["step"] == 2):
        assert time.monotonic() < limit
        time.sleep(0.05)
    began = time.monotonic()
    while json.loads((run / "stage.json").read_text())["status"] == "running":
        assert time.monotonic() < began + 3 + 10
        time.sleep(0.05)
    error = json.loads((run / "stage.json").read_text())["error"]
    host, pid = (json.loads(second.read_text())[name] for name in ("host", "pid"))
    assert pid == group[1].pid
    assert error.startswith(
        f"No progress for 3 seconds: rank 1 ({host}, process {pid}) is stuck in 'updating' of "
        "step 2\n  The stacks of all ranks are in "
    )
    codes, _, errors = finish(group)
    assert f"error {error.splitlines()[0]}" in errors
    assert codes[0] == 75
    assert waits_in in (run / "heartbeat" / "rank-00000.stack").read_text()
    if "SIGSTOP" not in hang:
        assert "program.py" in (run / "heartbeat" / "rank-00001.stack").read_text()


WAITING = """
import os, sys, time
from pathlib import Path
from rlhf.parallel.distributed import start
from rlhf.run.rundir import RunDir, watching_stage
from rlhf.run.watchdog import beat
accelerator = start("fp32", 0)
with watching_stage(RunDir(Path(sys.argv[1])), 6.0):
    if accelerator.process_index == 0:
        for _ in range(90):
            time.sleep(0.1)
            beat("working")
        {then}
    accelerator.wait_for_everyone()
    time.sleep(3.0)  # work without a beat, of ranks that waited for longer than the timeout
print("ended well")
accelerator.end_training()
"""


@pytest.mark.parametrize("then", ["", SLEEP])
def test_a_rank_that_waits_for_a_working_one_is_not_stalled_until_that_one_is(
    tmp_path: Path, then: str
) -> None:
    run, group = start_two(tmp_path, WAITING.format(then=then))
    codes, shown, _ = finish(group)
    stage = json.loads((run / "stage.json").read_text())
    assert stage["status"] == ("interrupted" if then else "running")
    assert codes[1] == (75 if then else 0)
    assert shown.count("ended well") == (0 if then else 2)
    if then:
        assert stage["error"].startswith("No progress for 6 seconds: rank 0 (")
        assert "is stuck in 'working'" in stage["error"]


def heartbeats(*states: tuple[int, bool | None]) -> list[Heartbeat]:
    return [
        Heartbeat(n, "host", 10 + n, beats, "p", 1, waits)
        for n, (beats, waits) in enumerate(states)
    ]


@pytest.mark.parametrize(
    ("states", "backward", "slow"),
    [
        ([(5, True), (5, False), (5, True)], [], [1]),  # one is busy while the others wait
        ([(5, True), (5, None)], [], [1]),  # one does not even answer
        ([(5, True)], [], [1]),  # one never came
        ([(6, True), (5, True)], [], [1]),  # all wait: one of them elsewhere
        ([(6, False), (5, False)], [], [1]),  # all are busy: one of them is behind
        ([(5, False), (5, False), (5, False)], [0, 2], [1]),  # DDP waits in the backward pass
        ([(5, True), (5, False), (5, True)], [1], [1]),  # its own, while the others wait
        ([(5, False), (5, False)], [0, 1], [0, 1]),  # it is unknown which one computes
    ],
)
def test_slow_ranks(states, backward: list[int], slow: list[int]) -> None:
    known = heartbeats(*states)
    for one in backward:
        known[one].in_backward = True
    assert find_slow(known, max(2, len(known))) == slow


@pytest.mark.parametrize(
    ("states", "slow"),
    [
        ([(6, False), (6, True), (5, False)], [2]),  # rank 0 reads a result: it looks busy
        ([(6, False), (5, True)], [0]),  # rank 1 surely waits
        ([(6, True), (5, True)], [1]),
        ([(6, False), (5, None)], [1]),
    ],
)
def test_slow_ranks_on_cuda(states, slow: list[int]) -> None:
    known = heartbeats(*states)
    for one in known:
        one.on_cuda, one.in_backward = True, one.rank == 2
    assert find_slow(known, len(known)) == slow


READING = """
import sys, time
from pathlib import Path
import torch
from rlhf.ranks import rank
from rlhf.run.rundir import RunDir, watching_stage
from rlhf.run.watchdog import beat
torch.cuda.is_initialized = lambda: True
run = Path(sys.argv[1])
(run / f"started-{rank()}").touch()
while len(list(run.glob("started-*"))) < 2:
    time.sleep(0.1)
with watching_stage(RunDir(run), 3.0):
    for _ in range(60 if rank() == 0 else 0):
        time.sleep(0.1)
        beat("working")
    if rank() == 0:
        (run / "result").touch()
    while not (run / "result").exists():  # in no collective operation, as in Tensor.item()
        time.sleep(0.1)
print("ended well")
"""


def test_a_rank_on_cuda_that_reads_the_result_of_a_working_one_is_not_stalled(
    tmp_path: Path,
) -> None:
    _, group = start_two(tmp_path, READING)
    codes, shown, errors = finish(group)
    assert (shown.count("ended well"), codes) == (2, [0, 0]), errors


def test_a_hung_rank_on_cuda_ends_a_run_whose_ranks_work_on_their_own(tmp_path: Path) -> None:
    alone = READING.replace("3.0)", "3.0, ranks_synchronize=False)").replace(
        "range(60 ", "range(600 "
    )
    began = time.monotonic()
    _, group = start_two(tmp_path, alone)
    codes, _, errors = finish(group)
    assert time.monotonic() - began < 45  # the working rank alone takes 60 s
    assert codes[1] == 75
    assert "No progress for 3 seconds: rank 1 (" in errors
    assert "rank 0 (" not in errors.partition("The stacks of all ranks")[0]


def test_one_rank_alone_is_the_slow_one() -> None:
    assert find_slow(heartbeats((5, False)), 1) == [0]


def test_the_first_rank_that_is_not_stuck_reports() -> None:
    assert reporting_rank([1], 2) == 0
    assert reporting_rank([0, 1], 3) == 2
    assert reporting_rank([0], 1) == 0


def test_a_rank_that_never_started_is_named(tmp_path: Path) -> None:
    error = describe_stall(heartbeats((5, True)), [1], 60, tmp_path)
    assert error.problem == "No progress for 60 seconds: rank 1 never started"
    assert f"The stacks of all ranks are in {tmp_path}." in error.remedy


def test_beats_are_counted_and_written_when_the_phase_changes(tmp_path: Path) -> None:
    with watching(tmp_path, 0, lambda error: None):
        beat("sampling", 3)
        beat()
        assert read_heartbeats(tmp_path)[0].phase == "sampling"
        beat("updating")
        (heartbeat,) = read_heartbeats(tmp_path)
    assert (heartbeat.rank, heartbeat.phase, heartbeat.step, heartbeat.beats) == (
        0,
        "updating",
        3,
        4,
    )


def test_the_watching_thread_writes_no_older_heartbeat_over_a_newer_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writes, written = threading.Event(), threading.Event()

    def write_slowly(path: Path, content: dict) -> None:
        in_thread = threading.current_thread() is not threading.main_thread()
        if in_thread:
            writes.set()
            time.sleep(0.1)
        write_json(path, content)
        if in_thread:
            written.set()

    monkeypatch.setattr(watchdog, "write_json", write_slowly)
    with watching(tmp_path, 10, lambda error: None):
        beat("sampling", 2)
        written.clear()
        writes.clear()
        assert writes.wait(60)
        beat("updating", 2)
        assert written.wait(60)
        assert json.loads((tmp_path / "rank-00000.json").read_text())["phase"] == "updating"


def test_work_that_goes_on_is_left_alone(tmp_path: Path) -> None:
    def refuse(error: Exception) -> None:
        raise AssertionError(error)

    with watching(tmp_path, 0.3, refuse):
        for _ in range(8):
            time.sleep(0.1)
            beat("working")
