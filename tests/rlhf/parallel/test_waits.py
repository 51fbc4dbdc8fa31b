"""The fast process of two says for how long it waited for the slow one, in every training."""

import json
from pathlib import Path
from typing import Any

import pytest

from rlhf.run.metrics import read_metrics
from tests.policies.sft.demonstrations import LINES
from tests.reward.conftest import build_record, export
from tests.servers.commands import run_group

LAG = 0.6  # seconds that process 1 takes longer for a step, in its passes
DDP = f"""
import time
import torch
from torch import nn
from rlhf.parallel.distributed import global_sum, start
from rlhf.parallel.sharding import accumulating, backward
from rlhf.parallel.waits import take_waits
accelerator = start("fp32", 0)
model = accelerator.prepare(nn.Linear(2, 1, bias=False))
global_sum(accelerator, 1.0)
take_waits()
waited = []
for last in (False, True):
    with accumulating(accelerator, model, last=last):
        rows = torch.tensor([[1.0, 2.0]]) * (1 + accelerator.process_index)
        loss = model(rows).sum()
        time.sleep({LAG} / 2 * accelerator.process_index)
        backward(accelerator, model, loss)
    waited.append(take_waits()["ranks"])
if accelerator.is_main_process:
    print(*waited, *model.module.weight.grad.flatten().tolist())
"""
SLOWED = """
import os, pydoc, sys, time
from rlhf.cli import main
owner = pydoc.locate("{owner}")
plain = getattr(owner, "{name}")

def slow(*arguments, **named):
    result = plain(*arguments, **named)
    time.sleep({seconds} * int(os.environ["RANK"]))
    return result

setattr(owner, "{name}", slow)
sys.exit(main(sys.argv[1:]))
"""
SIZES = ("--precision", "fp32", "--epochs", "1")


def test_only_the_pass_that_averages_gradients_waits_for_the_slower_process(
    tmp_path: Path,
) -> None:
    program = tmp_path / "program.py"
    program.write_text(DDP)
    done = run_group(2, program)
    assert done.returncode == 0, done.stderr
    early, last, *gradient = map(float, done.stdout.split())
    assert early == 0
    # both passes of the other process took 0.3 s longer
    assert LAG - 0.1 < last < LAG + 0.5
    # two passes with (1, 2) here and (2, 4) there, averaged
    assert gradient == [3.0, 6.0]


def sft(folder: Path, tiny_model: Path) -> list[str]:
    lines = folder / "lines.jsonl"
    lines.write_text("\n".join(map(json.dumps, LINES)))
    words = ["sft", "--demonstrations", str(lines), "--model", str(tiny_model)]
    return [*words, "--batch-size", "4", "--micro-batch-size", "1"]


def train_reward(folder: Path, tiny_model: Path) -> list[str]:
    rankings = export(folder / "rankings", [build_record(number) for number in range(8)])
    words = ["train-reward", "--rankings", str(rankings), "--model", str(tiny_model)]
    return [*words, "--prompts-per-batch", "4", "--head", "random"]


@pytest.mark.parametrize(
    ("command", "slowed"),
    [
        # a process has two passes in a step of 4 examples, and one in a step of 4 prompts
        (sft, ("trl.SFTTrainer", "compute_loss", 2)),
        (train_reward, ("reward.training.step", "sum_of_losses", 1)),
    ],
    ids=["sft", "train-reward"],
)
def test_the_metrics_of_a_training_have_the_lag_of_the_slower_process(
    tmp_path: Path, tiny_model: Path, command: Any, slowed: tuple[str, str, int]
) -> None:
    owner, name, times = slowed
    program = tmp_path / "program.py"
    program.write_text(SLOWED.format(owner=owner, name=name, seconds=LAG / times))
    out = tmp_path / "out"
    words = [*command(tmp_path, tiny_model), "--out", str(out), *SIZES]
    done = run_group(2, program, *words)
    assert done.returncode == 0, done.stderr
    rows = read_metrics(out / "metrics.jsonl")
    assert rows
    for row in rows:  # the mean of 0.6 s in one process and nothing in the other
        assert LAG / 2 - 0.1 < row["seconds/waiting_for_ranks"] < LAG / 2 + 1
