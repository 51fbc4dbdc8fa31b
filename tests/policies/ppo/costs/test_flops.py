"""The operations that PPO's metrics count are those of the profiler, phase by phase."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from policies.ppo.batches import choose_prompts, choose_reference_rows
from policies.ppo.rollout import (
    build_experience,
    measure_episodes,
    sample_episodes,
    score_episodes,
)
from policies.ppo.setup import set_up
from policies.ppo.train import update
from policies.ppo.update import Learner, StepData, reference_batch
from policies.reference.store import open_store
from rlhf.parallel.distributed import start
from rlhf.parallel.sharding import Sharding
from rlhf.planning.flops import take_flops
from rlhf.run.rundir import RunDir
from tests.policies.training import TrainingInputs, build_wide
from tests.settings import ppo_settings

PROFILED = 0.05


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> TrainingInputs:
    return build_wide(tmp_path_factory.mktemp("wide"), layers=3)


@pytest.mark.parametrize(
    "changes",
    [
        {"micro_tokens": 256},
        {"lora_rank": 8, "critic_trains": "head"},
    ],
    ids=["packed", "LoRA"],
)
def test_each_phase_counts_what_the_profiler_counts(
    wide: TrainingInputs, tmp_path: Path, changes: dict[str, Any]
) -> None:
    settings = ppo_settings(
        model=str(wide.model),
        reward=(str(wide.reward),),
        reference=wide.reference,
        out=tmp_path,
        precision="fp32",
        episodes_per_step=8,
        **changes,
    )
    accelerator = start("fp32", 0)
    store = open_store(wide.reference / "outputs", settings.model)
    training = set_up(settings, store, accelerator, Sharding(), RunDir(tmp_path))
    context = training.rollout
    prompts = choose_prompts(training.prompts, 1, settings.batch, 0, dp_rank=0, dp_size=1)
    found: dict[str, tuple[float, float]] = {}

    def counted(name: str, function: Callable[[], Any]) -> Any:
        take_flops()
        with FlopCounterMode(display=False) as profiler:
            result = function()
        found[name] = take_flops().flops, float(profiler.get_total_flops())
        return result

    with training.model_copy.weights_of(training.model) as model:
        episodes = counted("sample", lambda: sample_episodes(context, model.policy, prompts, 8))
        scores = counted("score", lambda: score_episodes(context, episodes))
        measured = counted("measure", lambda: measure_episodes(context, model, episodes, settings))
        experience = build_experience(
            context, episodes, scores, measured, settings, settings.kl.coefficient
        )
    rows = choose_reference_rows(prompts, 1, settings, torch.Generator().manual_seed(0))
    pad_id = int(training.tokenizer.pad_token_id)
    data = StepData(experience, reference_batch(rows, pad_id, accelerator.device))
    learner = Learner(
        accelerator, training.model, training.optimizer, settings, 1.0, settings.kl.coefficient
    )
    counted("update", lambda: update(learner, data, torch.Generator().manual_seed(0)))
    for phase, (ours, profiled) in found.items():
        assert profiled > 1e6, phase
        assert ours == pytest.approx(profiled, rel=PROFILED), phase
