"""Policy and critic in two processes: what is gathered, what is not, and whole commands."""

import json
from pathlib import Path
from typing import Any

import pytest

from rlhf.planning.planner import read_shape
from rlhf.run.rundir import RunDir
from tests.policies.training import TrainingInputs, metrics_of
from tests.servers.commands import run_group

STEPS = 2
PROGRAM = """
import json, sys
from pathlib import Path

from torch.distributed.tensor import DTensor

from policies.ppo import kl
from policies.reference import audit
from rlhf.cli import main
from rlhf.parallel.gathered_model import GatheredModel
from rlhf.parallel.sharding import unwrap
from rlhf.ranks import exit_process, rank

gathered, loaded = [], []
fill, load = GatheredModel._fill, audit.load_reference_model

def note_fill(copy, model):
    sizes = (getattr(one, "ds_numel", one.numel()) for one in unwrap(model).parameters())
    gathered.append(sum(sizes))
    fill(copy, model)

def note_load(*inputs):
    model = load(*inputs)
    loaded.append(all(isinstance(one, DTensor) for one in model.parameters()))
    return model

GatheredModel._fill = note_fill
audit.load_reference_model = kl.load_reference_model = note_load

found = {}
for name, command in json.loads(Path(sys.argv[1]).read_text()).items():
    gathered.clear()
    loaded.clear()
    code = main(command)
    found[name] = {"code": code, "gathered": list(gathered), "loaded": list(loaded)}
Path(sys.argv[1]).with_suffix(f".{rank()}").write_text(json.dumps(found))
exit_process(0)
"""
CASES = {
    "ddp": ("--sharding", "ddp"),
    "fsdp": ("--sharding", "fsdp", "--kl.audit-every", "2"),
    "zero3": ("--sharding", "zero3"),
}


@pytest.fixture(scope="module")
def runs(training: TrainingInputs, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The runs of CASES, and what both processes saw: `seen.0`, `seen.1`."""
    folder = tmp_path_factory.mktemp("sharded")
    commands = {
        name: training.arguments(folder / name, *options, steps=STEPS)
        for name, options in CASES.items()
    }
    (folder / "program.py").write_text(PROGRAM, encoding="utf-8")
    (folder / "seen.json").write_text(json.dumps(commands), encoding="utf-8")
    done = run_group(2, folder / "program.py", folder / "seen.json")
    assert done.returncode == 0, done.stderr
    return folder


def seen(runs: Path, name: str) -> dict[str, Any]:
    """What the main process saw of a run; both gathered the same."""
    main, other = (json.loads((runs / f"seen.{rank}").read_text())[name] for rank in (0, 1))
    assert main["code"] == other["code"] == 0
    assert main["gathered"] == other["gathered"]
    found: dict[str, Any] = main
    return found


def test_fsdp_gathers_the_policy_to_sample_and_never_the_critic(runs: Path, training) -> None:
    found, shape = seen(runs, "fsdp"), read_shape(str(training.model))
    assert found["gathered"] == [shape.parameters] * (STEPS + 1)  # and once to audit
    assert found["loaded"] == [True, True]  # the original, in both audits: sharded


def test_zero_3_gathers_the_critic_only_to_measure(runs: Path, training: TrainingInputs) -> None:
    shape = read_shape(str(training.model))
    policy, both = shape.parameters, shape.parameters + shape.reward_parameters
    measured_first = [both]  # the reference's log-probs, and the critic's fit
    assert seen(runs, "zero3")["gathered"] == measured_first + [policy, both] * (STEPS + 1)


@pytest.mark.parametrize("sharding", ["fsdp", "zero3"])
def test_numbers_are_those_of_ddp(runs: Path, sharding: str) -> None:
    assert seen(runs, "ddp")["gathered"] == []
    found, expected = metrics_of(runs / sharding), metrics_of(runs / "ddp")
    for mine, theirs in zip(found, expected, strict=True):
        assert {name: mine[name] for name in theirs} == pytest.approx(theirs, rel=1e-3, abs=1e-5)
    reports = [RunDir(runs / name).read_report()["kl"] for name in (sharding, "ddp")]
    for kind in ("forward", "reverse"):
        mine, theirs = (one[kind]["nats"] for one in reports)
        assert mine == pytest.approx(theirs, rel=1e-3, abs=1e-4)
