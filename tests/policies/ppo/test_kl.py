import gc
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.distributed.fsdp import FSDPModule

from policies.ppo.kl import adjust, audit
from policies.ppo.setting_groups import KLSettings
from policies.ppo.settings import PPOSettings
from policies.reference.store import open_store
from rlhf.cli import main
from rlhf.errors import ConfigError
from rlhf.modeling.log_probs import Sequences
from rlhf.parallel.distributed import start
from rlhf.parallel.sharding import Sharding
from tests.pipeline.loop import SHORT, write_prompts
from tests.policies.ppo.updates import SETTINGS, build_model
from tests.settings import changed


def test_the_controller_moves_by_at_most_a_fifth_of_the_horizons_share() -> None:
    kl = KLSettings(target=0.02, horizon=100)
    assert adjust(0.5, 0.022, 10, kl) == pytest.approx(0.5 * (1 + 0.1 * 10 / 100))
    assert adjust(0.5, 9.0, 10, kl) == pytest.approx(0.5 * (1 + 0.2 * 10 / 100))
    assert adjust(0.5, -1.0, 10, kl) == pytest.approx(0.5 * (1 - 0.2 * 10 / 100))


def test_without_a_target_the_coefficient_stays() -> None:
    assert adjust(0.5, 9.0, 10, KLSettings()) == 0.5


def test_a_horizon_in_which_the_coefficient_could_turn_negative_is_refused() -> None:
    settings = PPOSettings(model="m", reward=("r",), reference=Path("y0"), out=Path("x"))
    kl = KLSettings(target=0.1, horizon=12)
    with pytest.raises(ConfigError, match=r"--kl\.horizon is 12: (.|\n)* more than 12\.8"):
        changed(settings, episodes_per_step=64, kl=kl)
    shortest = changed(settings, episodes_per_step=64, kl=replace(kl, horizon=13)).kl
    assert 0 < adjust(0.1, 0.0, 64, shortest) < 0.002


@pytest.fixture
def reference(tiny_model: Path, tmp_path: Path) -> Path:
    """Reference outputs of the tiny model."""
    prompts, out = write_prompts(tmp_path / "prompts.jsonl"), tmp_path / "reference"
    command = ["reference", "--prompts", str(prompts), "--model", str(tiny_model)]
    assert main([*command, "--out", str(out), "--samples", "1", *SHORT]) == 0
    return out / "outputs"


@pytest.mark.usefixtures("reference", "group")
def test_an_audit_frees_the_reference_model_that_it_has_sharded(
    reference: Path, tiny_model: Path
) -> None:
    accelerator, model = start("fp32", 0), build_model(tiny_model)
    sequences = Sequences.of([[5], [6]], [[7, 8, 9], [10]], 0)
    log_probs = torch.zeros(sequences.responses.ids.shape)
    store = open_store(reference)
    gc.collect()
    gc.disable()
    try:
        for _ in range(2):
            audit(accelerator, store, model, sequences, log_probs, SETTINGS, Sharding("fsdp"))
        alive = [one for one in gc.get_objects() if FSDPModule in type(one).__mro__]
    finally:
        gc.enable()
    assert alive == []
