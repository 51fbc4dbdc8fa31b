"""What an evaluation needs, at the smallest size: a store, a reward model, two policies."""

import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from accelerate.state import AcceleratorState
from torch import distributed as dist
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from rlhf.cli import main
from rlhf.modeling.models import new_reward_model, save_model
from rlhf.modeling.tokens import load_tokenizer
from rlhf.run.rundir import RunDir
from tests.conftest import build_once, build_tiny_model
from tests.pipeline.loop import SHORT, SIGNAL, write_prompts
from tests.policies.training import settings, training
from tests.servers.judge import JudgeServer

__all__ = ["inputs", "settings", "training"]


@dataclass(frozen=True)
class Inputs:
    """Folders that tests read and must not write into."""

    folder: Path

    def path(self, name: str) -> str:
        return str(self.folder / name)

    def arguments(self, out: Path, *more: str) -> list[str]:
        """The command line of an evaluation, with the signal as gold unless `more` names one."""
        gold = () if "--gold" in more else ("--gold", SIGNAL)
        return [
            *("evaluate", "--policy", self.path("policy"), "--reward", self.path("reward")),
            *("--reference", self.path("reference"), *gold, "--samples", "2"),
            *("--precision", "fp32", "--out", str(out), *more),
        ]


@pytest.fixture(scope="session")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Inputs:
    """Two random policies of one tokenizer, the reference outputs of a third model, a reward."""
    return Inputs(build_once(tmp_path_factory, "evaluation", _build_inputs))


def _build_inputs(folder: Path) -> None:
    for seed, name in enumerate(("original", "policy", "rival")):
        build_tiny_model(folder / name, seed=seed)
    tokenizer = load_tokenizer(str(folder / "original"))
    reward = new_reward_model(str(folder / "original"), int(tokenizer.pad_token_id), seed=0)
    save_model(reward, tokenizer, folder / "reward")
    prompts = write_prompts(folder / "prompts.jsonl")
    arguments = ["--model", str(folder / "original"), "--out", str(folder / "reference"), *SHORT]
    assert main(["reference", "--prompts", str(prompts), "--samples", "3", *arguments]) == 0


@pytest.fixture(scope="session")
def done(inputs: Inputs, tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    """An evaluation with a rival and a judge model that likes the longer answer; only read it."""

    def build(folder: Path) -> None:
        with JudgeServer() as server:
            judge = ["--judge-endpoint", server.url, "--judge-model", "m"]
            against = ["--against", inputs.path("rival")]
            assert main(inputs.arguments(folder / "evaluate", *judge, *against)) == 0

    return RunDir(build_once(tmp_path_factory, "done", build) / "evaluate")


@pytest.fixture
def already_loaded(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """For every model that is loaded, how many loaded before it still have weights in memory."""
    models: list[weakref.ref] = []
    counts: list[int] = []

    def has_weights(model: weakref.ref) -> bool:
        found = model()
        return found is not None and not all(one.is_meta for one in found.parameters())

    def watch(kind: type) -> None:
        load = kind.from_pretrained

        def watched(*args, **kwargs):
            counts.append(sum(map(has_weights, models)))
            found = load(*args, **kwargs)
            models.append(weakref.ref(found[0] if isinstance(found, tuple) else found))
            return found

        monkeypatch.setattr(kind, "from_pretrained", watched)

    watch(AutoModelForCausalLM)
    watch(AutoModelForSequenceClassification)
    return counts


@pytest.fixture
def group(tmp_path: Path) -> Iterator[None]:
    """A group of one process."""
    AcceleratorState._reset_state(True)
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1)
    yield
    dist.destroy_process_group()
    AcceleratorState._reset_state(True)
