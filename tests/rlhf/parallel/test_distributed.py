import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from rlhf.errors import ConfigError
from rlhf.parallel import distributed
from rlhf.ranks import is_main_process
from rlhf.run.rundir import RunDir
from rlhf.run.watchdog import process_has_ended, read_heartbeats
from tests.servers.commands import finish_group, run_program, start_group, start_process
from tests.servers.waiting import wait_until

MAIN = """
import os, sys
os.environ.pop("OMP_NUM_THREADS", None)
from rlhf.parallel.distributed import run_processes
from rlhf.errors import RlhfError
try:
    sys.exit(run_processes([sys.executable, *sys.argv[2:]], int(sys.argv[1])))
except RlhfError as error:
    print("error", error, file=sys.stderr)
    sys.exit(error.exit_code)
"""


def run_group(tmp_path: Path, program: str) -> subprocess.CompletedProcess[str]:
    """Run a program in two processes, which are new interpreters."""
    file, launcher = tmp_path / "program.py", tmp_path / "launcher.py"
    file.write_text(program, encoding="utf-8")
    launcher.write_text(MAIN, encoding="utf-8")
    return run_program(launcher, 2, file)


def run_forks(tmp_path: Path, program: str) -> tuple[int, list[str]]:
    """Run a program in two processes that nobody launches: the exit code, all lines, sorted."""
    file = tmp_path / "program.py"
    file.write_text(program, encoding="utf-8")
    group = start_group(2, file)
    code = finish_group(group).returncode
    return code, sorted(line for one in group for line in one.communicate()[0].splitlines())


SUMS = """
import os
import torch
from rlhf.parallel.distributed import from_main, global_sum, global_sum_dict, on_main, start
from rlhf.ranks import is_main_process
accelerator = start("fp32", seed=5)
rank = accelerator.process_index
total = global_sum(accelerator, torch.tensor([1.0 + rank, 10.0]))  # (1, 10) + (2, 10)
number = global_sum(accelerator, 0.5)
named = global_sum_dict(accelerator, {"loss": torch.tensor(0.25 + rank), "pairs": 2 + 3 * rank})
words = (rank, is_main_process(), total.tolist(), total.dtype, number.item(), named,
         torch.initial_seed(), torch.get_num_threads(), from_main([f"seen by {rank}"]),
         on_main(lambda: f"worked on {rank}"))
os.write(1, (" ".join(map(str, words)) + "\\n").encode())  # one write: the two do not mix
accelerator.end_training()
"""


def test_two_processes_sum_over_ranks_and_have_their_own_seeds(tmp_path: Path) -> None:
    done = run_group(tmp_path, SUMS)
    assert done.returncode == 0, done.stderr
    threads = max(1, (os.cpu_count() or 1) // 2)
    sums = "[3.0, 20.0] torch.float64 1.0 {'loss': 1.5, 'pairs': 7.0}"
    assert sorted(done.stdout.splitlines()) == [
        f"0 True {sums} 5 {threads} ['seen by 0'] worked on 0",
        f"1 False {sums} {5 + 100_003} {threads} ['seen by 0'] worked on 0",
    ]


BUG = """
import os, sys, time
from rlhf.errors import LostPeerError
from rlhf.parallel.distributed import on_main, start
from rlhf.ranks import exit_process
start("fp32", 0)
try:
    on_main(lambda: {}["gone"])
except LostPeerError as error:
    os.write(1, f"{os.environ['RANK']} {error}\\n".encode())
    exit_process(3)
except KeyError:
    os.write(1, f"{os.environ['RANK']} a KeyError\\n".encode())
    exit_process(3)
"""


def test_a_bug_in_the_main_process_ends_the_others_too(tmp_path: Path) -> None:
    code, lines = run_forks(tmp_path, BUG)
    assert code == 3
    assert lines == [
        "  Read its own message for the cause.",
        "0 a KeyError",
        "1 The main process has failed",
    ]


FAIL = """
import os, sys, time
rank = os.environ["RANK"]
if rank == "{rank}":
    sys.exit({code})
time.sleep(60)
"""


@pytest.mark.parametrize(("rank", "code"), [(0, 3), (1, 2), (1, 7)])
def test_the_exit_code_of_the_failing_process_is_passed_on(
    tmp_path: Path, rank: int, code: int
) -> None:
    began = time.monotonic()
    done = run_group(tmp_path, FAIL.format(rank=rank, code=code))
    assert done.returncode == code
    assert time.monotonic() - began < 40  # the process that sleeps was ended


CRASH_AND_REFUSE = """
import os, signal, sys, time
from pathlib import Path
ready = Path(__file__).with_name("ready")
if os.environ["RANK"] == "1":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(2))
    ready.touch()
    time.sleep(60)
while not ready.exists():
    time.sleep(0.01)
sys.exit(1)
"""


def test_what_a_process_says_on_purpose_goes_before_the_crash_of_another(tmp_path: Path) -> None:
    assert run_group(tmp_path, CRASH_AND_REFUSE).returncode == 2


def test_a_killed_process_is_named_and_the_run_can_be_resumed(tmp_path: Path) -> None:
    kill = "import os, time; os.environ['RANK'] == '1' and os.kill(os.getpid(), 9); time.sleep(60)"
    done = run_group(tmp_path, kill)
    assert done.returncode == 75
    assert "error Process 1 was killed by SIGKILL\n  If memory ran out, " in done.stderr


def test_a_stopped_group_stops_its_processes_and_can_be_resumed(tmp_path: Path) -> None:
    file = tmp_path / "program.py"
    file.write_text("import os, time; os.write(1, b'ready\\n'); time.sleep(60)", encoding="utf-8")
    words = [sys.executable, "-c", MAIN, "2", str(file)]
    group = subprocess.Popen(
        words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    assert group.stdout is not None
    assert [group.stdout.readline() for _ in range(2)] == ["ready\n"] * 2
    group.send_signal(signal.SIGTERM)
    _, shown = group.communicate(timeout=30)
    assert group.returncode == 75
    assert "error The processes were stopped\n  Run the same command with --resume" in shown
    with pytest.raises(ProcessLookupError):
        os.killpg(group.pid, 0)


@pytest.mark.slow
def test_a_real_command_in_two_processes_works_and_reports_the_users_mistake(
    tmp_path: Path, tiny_model: Path
) -> None:
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "out"
    prompts.write_text('{"prompt": "How was it?"}\n{"prompt": "Who?"}\n', encoding="utf-8")
    words = ["reference", "--prompts", str(prompts), "--model", str(tiny_model)]
    words += ["--out", str(out), "--max-new-tokens", "4", "--processes", "2", "--json"]
    program = [sys.executable, "-m", "rlhf.cli", *words]
    done = subprocess.run(program, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["rows"] == 2  # one object, of the main process

    again = subprocess.run(program, capture_output=True, text=True, check=False)
    assert again.returncode == 2
    assert again.stderr == (
        f"error {out} already exists (done)\n"
        "  Choose another --out, or add --resume to show its result again.\n"
    )
    assert again.stdout == ""


def test_launch_returns_for_one_process_and_inside_a_group(monkeypatch) -> None:
    distributed.launch(1)
    monkeypatch.setenv("RANK", "1")
    distributed.launch(2)
    assert not is_main_process()
    monkeypatch.delenv("RANK")
    assert is_main_process()


def test_precision() -> None:
    assert distributed.choose_precision("bf16") == "bf16"
    assert distributed.choose_precision("fp32") == "no"
    with pytest.raises(
        ConfigError, match=r"--precision is 'fp16'\n  Use one of auto, bf16, bf16-weights, fp32"
    ):
        distributed.choose_precision("fp16")


@pytest.mark.parametrize(("supported", "expected"), [(True, "bf16"), (False, "no")])
@pytest.mark.parametrize("gpu", [True, False])
def test_auto_precision_follows_the_device(
    monkeypatch, gpu: bool, supported: bool, expected: str
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    monkeypatch.setattr(
        torch.cuda, "is_bf16_supported", lambda including_emulation: gpu and supported
    )
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: not gpu and supported)
    assert distributed.choose_precision("auto") == expected


def test_one_processs_work_is_not_repeated_by_a_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="2 processes were started"):
        distributed.start_alone("fp32", seed=0)


def test_seeds_beyond_32_bits_come_round() -> None:
    drawn = []
    for seed in (5, 2**32 + 5, 4295 * 1_000_003):  # the last: of the 4295th shard of a store
        distributed.seed_all(seed)
        drawn.append((torch.rand(()).item(), float(np.random.rand())))
    assert drawn[0] == drawn[1] != drawn[2]


GROUPS = """
import os, sys
from torch.distributed import distributed_c10d
from rlhf.parallel.distributed import COLLECTIVE_TIMEOUT, start
from rlhf.parallel.sharding import make_mesh
accelerator = start("fp32", seed=0)
mesh = make_mesh(accelerator.device, 2, 1)
groups = list(distributed_c10d._world.pg_map)
waits = {one._get_backend(accelerator.device).options._timeout for one in groups}
os.write(1, f"{len(groups)} {waits == {COLLECTIVE_TIMEOUT}} {mesh.shape}\\n".encode())
accelerator.end_training()
"""


def test_groups_of_groups_wait_as_long_as_the_watchdog_needs(tmp_path: Path) -> None:
    code, lines = run_forks(tmp_path, GROUPS)
    assert code == 0
    assert lines == ["2 True (2, 1)"] * 2  # all processes, and its own row


def test_processes_whose_launcher_was_killed_save_their_state_and_end(
    tmp_path: Path, tiny_model: Path
) -> None:
    """They would hold the devices and the folder, and finish a run that somebody resumes."""
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "out"
    prompts.write_text("".join(f'{{"prompt": "Is it {n}?"}}\n' for n in range(4000)))
    words = ["reference", "--prompts", str(prompts), "--model", str(tiny_model)]
    words += ["--out", str(out), "--max-new-tokens", "16", "--processes", "2"]
    launcher = start_process(*words)
    beats = RunDir(out).heartbeat
    wait_until(lambda: len(read_heartbeats(beats)) == 2)
    launcher.kill()
    launcher.wait()
    wait_until(lambda: all(map(process_has_ended, read_heartbeats(beats))))
    assert RunDir(out).read_stage()["status"] == "interrupted", launcher.communicate()[1]
