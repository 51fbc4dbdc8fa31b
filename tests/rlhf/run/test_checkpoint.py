import os
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator

from rlhf.errors import InputError
from rlhf.run.checkpoint import load_checkpoint, save_checkpoint
from tests.rlhf.run.saving.loop import Loop, names
from tests.servers.commands import run_program


def test_a_resumed_loop_goes_on_exactly(tmp_path: Path) -> None:
    loop = Loop()
    loop.steps(3)
    saved = save_checkpoint(loop.accelerator, tmp_path, 3, {"beta": 0.5, "seen": [1, 2]}, keep=1)
    assert saved == tmp_path / "step-000003"
    expected = loop.steps(4)

    resumed = Loop()
    progress = load_checkpoint(resumed.accelerator, tmp_path)
    assert progress == {"step": 3, "beta": 0.5, "seen": [1, 2]}
    assert resumed.steps(4) == expected


def test_nothing_to_resume(tmp_path: Path) -> None:
    assert load_checkpoint(Loop().accelerator, tmp_path / "checkpoints") is None


@pytest.mark.parametrize(
    ("keep", "kept"), [(1, ["step-000030"]), (2, ["step-000020", "step-000030"])]
)
def test_only_the_newest_are_kept(tmp_path: Path, keep: int, kept: list[str]) -> None:
    loop = Loop()
    for step in (5, 20, 30):
        save_checkpoint(loop.accelerator, tmp_path, step, {}, keep)
    assert names(tmp_path) == ["latest", *kept]
    assert (tmp_path / "latest").read_text(encoding="utf-8") == "step-000030"


def test_the_one_just_written_stays_though_an_abandoned_course_went_further(tmp_path: Path) -> None:
    loop = Loop()
    for step in (10, 20, 30):
        save_checkpoint(loop.accelerator, tmp_path, step, {}, keep=3)
    (tmp_path / "latest").write_text("step-000010", encoding="utf-8")
    save_checkpoint(loop.accelerator, tmp_path, 15, {}, keep=1)
    assert names(tmp_path) == ["latest", "step-000015"]


def test_a_step_can_be_saved_again(tmp_path: Path) -> None:
    loop = Loop()
    save_checkpoint(loop.accelerator, tmp_path, 5, {"try": 1}, keep=1)
    save_checkpoint(loop.accelerator, tmp_path, 5, {"try": 2}, keep=1)
    assert load_checkpoint(loop.accelerator, tmp_path) == {"step": 5, "try": 2}


def test_a_lost_checkpoint_is_named(tmp_path: Path) -> None:
    (tmp_path / "latest").write_text("step-000005", encoding="utf-8")
    with pytest.raises(InputError, match="step-000005 is gone or incomplete"):
        load_checkpoint(Loop().accelerator, tmp_path)


def test_a_checkpoint_is_on_the_disk_before_it_is_the_latest(tmp_path: Path, monkeypatch) -> None:
    flushed: list[Path] = []

    def flush(descriptor: int, real=os.fsync) -> None:
        flushed.append(Path(f"/proc/self/fd/{descriptor}").readlink())
        real(descriptor)

    monkeypatch.setattr(os, "fsync", flush)
    loop = Loop()
    loop.steps(1)
    saved = save_checkpoint(loop.accelerator, tmp_path, 5, {}, keep=1)
    partial = tmp_path / ".step-000005.partial"
    whole = [partial, *(partial / path.relative_to(saved) for path in saved.rglob("*"))]
    assert partial / "rng-0.pt" in whole
    names = flushed.index(tmp_path)  # where the folder has its name
    assert set(whole) <= set(flushed[:names])
    assert [path.name[:8] for path in flushed[names + 1 :]] == [".latest.", tmp_path.name[:8]]


KILLED = """
import os, signal, sys
from pathlib import Path
import torch
from accelerate import Accelerator
from rlhf.run import checkpoint

folder, moment = Path(sys.argv[1]), sys.argv[2]

def die(*_, **__):
    os.kill(os.getpid(), signal.SIGKILL)

accelerator = Accelerator(cpu=True)
model = accelerator.prepare(torch.nn.Linear(3, 1))
checkpoint.save_checkpoint(accelerator, folder, 1, {"good": True}, keep=1)
if moment == "while the state is written":
    torch.save = die
elif moment == "before the folder gets its name":
    Path.rename = die
elif moment == "before latest names it":
    Path.replace = die
elif moment == "before the old one is deleted":
    checkpoint.write_text_atomically = lambda *a, real=checkpoint.write_text_atomically: (
        real(*a), die())
checkpoint.save_checkpoint(accelerator, folder, 2, {"good": True}, keep=1)
"""


@pytest.mark.parametrize(
    ("moment", "step"),
    [
        ("while the state is written", 1),
        ("before the folder gets its name", 1),
        ("before latest names it", 1),
        ("before the old one is deleted", 2),
    ],
)
def test_a_kill_in_the_middle_of_a_save_leaves_a_usable_checkpoint(
    tmp_path: Path, moment: str, step: int
) -> None:
    run = tmp_path / "run"
    program = tmp_path / "program.py"
    program.write_text(KILLED, encoding="utf-8")
    done = run_program(program, run, moment)
    assert done.returncode == -9, done.stderr
    loop = Accelerator(cpu=True)
    loop.prepare(torch.nn.Linear(3, 1))
    assert load_checkpoint(loop, run) == {"step": step, "good": True}
    save_checkpoint(loop, run, 3, {}, keep=1)
    assert names(run)[-2:] == ["latest", "step-000003"]
