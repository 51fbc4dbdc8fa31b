"""A training with its learning curve: first on an eighth, a quarter and half of its prompts.

R/part-1-of-8, R/part-1-of-4 and R/part-1-of-2 are whole reward stages, each on prompts that the
next one has, too; then R is trained on all prompts, and its report has the curve.
"""

from typing import Any

from reward.data.loading import Data, describe_inputs, read_data
from reward.memory import require_memory
from reward.settings import RewardSettings
from reward.training.origin import reference_fingerprint, resolve_model
from reward.training.train import PARTS, part_folder, train_reward
from rlhf.config.paths import with_changes
from rlhf.errors import InputError
from rlhf.modeling.readers import tokenizer_of
from rlhf.parallel.distributed import device_bytes, start
from rlhf.parallel.sharding_choice import choose_sharding
from rlhf.records.ranked import read_manifest
from rlhf.run.intervals import MIN_PROMPTS
from rlhf.run.rundir import open_stage, stage_status

MIN_TRAIN_PROMPTS = 16  # an eighth of them are two


def train_learning_curve(settings: RewardSettings) -> dict[str, Any]:
    """Train on the parts that are not finished yet, then on all; returns the report.

    Raises:
        InputError: too few prompts for a curve, or as `train_reward`.
        GuardError: as `train_reward`.
    """
    settings = resolve_model(settings)
    sharding = choose_sharding(settings)
    accelerator = start(settings.precision, settings.seed, settings.ddp_comm_hook)
    read_manifest(settings.rankings)  # a missing export is refused before memory is planned
    parts = sharding.group or accelerator.num_processes
    require_memory(settings, device_bytes(settings.processes), sharding, parts)
    inputs = describe_inputs(settings)
    data = read_data(
        settings, tokenizer_of(inputs["model"]), reference_fingerprint(inputs["model"])
    )
    _require_enough(settings, data)
    prompts = len(data.train) + len(data.validation)
    run = open_stage(settings.out, "reward", settings, inputs, resume=settings.resume)
    accelerator.wait_for_everyone()
    if not run.is_done:
        with stage_status(run, settings.notify, is_complete=lambda: False):
            for part in PARTS:
                changes = {
                    "data.limit": str(-(-prompts // part)),
                    "out": part_folder(settings.out, part),
                    "learning_curve": False,
                    "resume": True,
                }
                train_reward(with_changes(settings, changes), sharding, is_member=True)
    return train_reward(with_changes(settings, {"resume": True}), sharding)


def _require_enough(settings: RewardSettings, data: Data) -> None:
    prompts = len(data.train) + len(data.validation)
    held_out = sum(group.num_preferences > 0 for group in data.held_out)
    if prompts >= MIN_TRAIN_PROMPTS and held_out >= MIN_PROMPTS:
        return
    raise InputError(
        f"--learning-curve needs at least {MIN_TRAIN_PROMPTS} prompts to train on and "
        f"{MIN_PROMPTS} held-out ones with a preference; {settings.rankings} gives {prompts} and "
        f"{held_out}",
        "Leave --learning-curve out, or rank responses of more prompts.",
    )
