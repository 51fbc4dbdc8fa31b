"""How a run used its device, what it waited for, and what it is told to change."""

import json
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from rlhf.parallel.distributed import start
from rlhf.parallel.waits import take_waits, waiting
from rlhf.planning import utilization
from rlhf.planning.flops import FlopCount
from rlhf.planning.utilization import Laps, advise, describe_use, matmul_rate, measure_rate
from tests.servers.commands import run_group

CLOCKS = ("seconds/sample", "seconds/update")
WAITS_FOR_THE_SLOW = """
import sys, time
from rlhf.parallel.distributed import global_sum, start
from rlhf.parallel.waits import take_waits
accelerator = start("fp32", 0)
global_sum(accelerator, 1.0)
take_waits()
time.sleep(0.6 * accelerator.process_index)
global_sum(accelerator, 1.0)
waited = take_waits()["ranks"]
if accelerator.is_main_process:
    print("WAITED", waited)
"""


def row(seconds: tuple[float, float], tflops: float, data: float = 0.0, ranks: float = 0.0) -> dict:
    return {
        "seconds/sample": seconds[0],
        "seconds/update": seconds[1],
        "seconds/waiting_for_data": data,
        "seconds/waiting_for_ranks": ranks,
        "speed/tflops": tflops,
        "speed/tokens_per_second": 100 * tflops,
        "speed/tokens_per_pass": 800.0,
    }


def test_the_rate_of_a_product_leaves_the_generators_alone() -> None:
    torch.manual_seed(0)
    before = torch.get_rng_state()
    matmul_rate.cache_clear()
    began = time.monotonic()
    rate = matmul_rate(torch.device("cpu"), torch.float32)
    assert time.monotonic() - began < 10  # 0.3 s on an idle machine
    assert torch.equal(torch.get_rng_state(), before)
    side = 256
    square = torch.ones(side, side)
    began = time.monotonic()
    for _ in range(20):
        square @ square
    assert rate > 0.2 * 20 * 2 * side**3 / (time.monotonic() - began)


def test_a_run_keeps_its_rate(tmp_path: Path) -> None:
    rate = measure_rate(start("fp32", 0), tmp_path / "speed.json")
    assert json.loads((tmp_path / "speed.json").read_text()) == {
        "matmul_tflops": pytest.approx(rate / 1e12, abs=1e-4)
    }


def test_laps_say_what_was_done_and_what_was_waited_for() -> None:
    laps = Laps(start("fp32", 0), rate=1e9)
    with waiting("data"):
        time.sleep(0.05)
    with waiting("ranks"):  # there are none
        time.sleep(0.05)
    laps.end("sample")
    laps.end("update")
    found = laps.metrics()
    # the other wait is a part of the lap that is no wait
    assert 0.05 <= found["seconds/waiting_for_data"] <= laps.seconds["seconds/sample"] - 0.04
    assert found["seconds/waiting_for_ranks"] == 0
    assert laps.seconds["seconds/sample"] >= 0.1
    assert found["speed/tflops"] == found["speed/utilization"] == 0
    assert {"speed/utilization_sample", "speed/utilization_update"} < set(found)
    assert take_waits() == {"data": 0.0, "ranks": 0.0}


@pytest.mark.parametrize("tensor_parallel", [1, 2])
def test_laps_of_two_processes_worked_out_by_hand(
    monkeypatch: pytest.MonkeyPatch, tensor_parallel: int
) -> None:
    """Both take 2 s and 3 s and do the same; of a model split over both, each does a half."""
    times = iter([10.0, 12.0, 15.0])
    works = iter([FlopCount(), FlopCount(4e12, 600, 3), FlopCount(9e12, 400, 1)])
    waits = iter([{}, {"data": 0.4, "ranks": 0.0}, {"data": 0.1, "ranks": 1.5}])
    monkeypatch.setattr(utilization, "time", SimpleNamespace(monotonic=lambda: next(times)))
    monkeypatch.setattr(utilization, "take_flops", lambda: next(works))
    monkeypatch.setattr(utilization, "take_waits", lambda: next(waits))
    monkeypatch.setattr(utilization, "global_sum", lambda _, numbers: 2 * numbers)
    laps = Laps(SimpleNamespace(num_processes=2), 4e12, tensor_parallel)
    laps.end("sample")
    laps.end("update")
    assert laps.seconds == {"seconds/sample": 2.0, "seconds/update": 3.0}
    # 1,000 tokens of each process in 5 s; 13 of 5 · 4 · 10¹² operations, 4 of 8, and 9 of 12
    assert laps.metrics() == {
        "speed/tokens_per_second": 400.0 / tensor_parallel,
        "speed/tokens_per_pass": 250.0,
        "speed/tflops": 2.6 / tensor_parallel,
        "speed/utilization": 0.65 / tensor_parallel,
        "speed/utilization_sample": 0.5 / tensor_parallel,
        "speed/utilization_update": 0.75 / tensor_parallel,
        "seconds/waiting_for_data": 0.5,
        "seconds/waiting_for_ranks": 1.5,
    }


def test_the_rate_is_the_mean_of_all_processes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(utilization, "matmul_rate", lambda *_: 3e12)
    monkeypatch.setattr(utilization, "global_sum", lambda _, mine: mine + 5e12)  # the other's
    two = SimpleNamespace(
        num_processes=2, is_main_process=True, mixed_precision="no", device=torch.device("cpu")
    )
    assert measure_rate(two, tmp_path / "speed.json") == 4e12
    assert json.loads((tmp_path / "speed.json").read_text()) == {"matmul_tflops": 4.0}


def test_vllm_whose_operations_are_not_counted_is_not_blamed() -> None:
    rows = [row((9, 1), 0.01)]
    assert "--sampling.engine vllm" in describe_use(rows, 1e12, CLOCKS, "--longer")["advice"]
    found = describe_use(rows, 1e12, CLOCKS, "--longer", all_counted=False)
    assert found["advice"] == ""
    waited = [row((9, 1), 0.01, ranks=5.0)]
    found = describe_use(waited, 1e12, CLOCKS, "--longer", all_counted=False)
    assert found["advice"].startswith("50% of the time was spent waiting for other processes")


def test_a_runs_use_is_the_mean_over_its_time() -> None:
    # 4 s at 1 TFLOP/s and 12 s at 3 TFLOP/s: (4 + 36) / 16 = 2.5 of 10; 2 of 16 s for data
    rows = [{"step": 0}, row((3, 1), 1.0, data=2.0), row((2, 10), 3.0)]
    found = describe_use(rows, 1e13, CLOCKS, "--longer")
    assert found == {
        "seconds": 16.0,
        "tokens_per_second": 250.0,
        "tflops": 2.5,
        "matmul_tflops": 10.0,
        "utilization": 0.25,
        "waiting_for_data": 0.125,
        "waiting_for_ranks": 0.0,
        "advice": "",
    }
    assert describe_use([{"step": 1}], 1e13, CLOCKS, "--longer") is None


@pytest.mark.parametrize(
    ("utilization", "data", "ranks", "tokens", "sampling", "words"),
    [
        (0.5, 0.38, 0.1, 900, 0.1, "38% of the time was spent preparing batches: more processes"),
        (0.5, 0.1, 0.2, 900, 0.1, "20% of the time was spent waiting for other processes: larger"),
        (0.5, 0.19, 0.19, 900, 0.1, ""),
        (
            0.02,
            0.0,
            0.0,
            60,
            0.5,
            "2.0% of the device was used, and 50% of the time was spent samp",
        ),
        (0.02, 0.0, 0.0, 60, 0.1, "a forward pass had 60 tokens on average: longer passes take"),
        (0.02, 0.0, 0.0, 600, 0.1, ""),  # nothing that was measured says why
        (0.1, 0.0, 0.0, 60, 0.9, ""),
    ],
)
def test_only_measured_causes_are_named(
    utilization: float, data: float, ranks: float, tokens: float, sampling: float, words: str
) -> None:
    waits, phases = {"data": data, "ranks": ranks}, {"seconds/sample": sampling}
    said = advise(utilization, waits, tokens, phases, "--batch.micro-tokens")
    assert words in said
    assert bool(said) == bool(words)


def test_where_no_cause_was_measured_a_profile_shows_more() -> None:
    said = advise(0.02, {"data": 0.0, "ranks": 0.0}, 600, {}, "--longer", "--profile 3")
    assert said == (
        "2.0% of the device was used, and no wait or short pass explains it: --profile 3 shows "
        "where the time goes."
    )
    about = describe_use([row((1, 9), 0.01)], 1e12, CLOCKS, "--longer", profiling="--profile 3")
    assert about["advice"].endswith("--profile 3 shows where the time goes.")


@pytest.mark.slow
def test_a_process_says_how_long_it_waits_for_a_slower_one(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(WAITS_FOR_THE_SLOW)
    done = run_group(2, program)
    assert done.returncode == 0, done.stderr
    [waited] = [float(line.split()[1]) for line in done.stdout.splitlines() if "WAITED" in line]
    assert 0.4 < waited < 5
