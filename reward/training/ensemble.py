"""`--seeds`: reward models from several seeds that score as one; they differ where they are unsure.

R/member-0, R/member-1, … are whole reward stages; R/model holds the models of all, as described in
`reward.scoring.scorer`.
"""

import os
import shutil
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import torch
from accelerate import Accelerator

from reward.accuracy import pair_accuracy, plain_accuracy
from reward.data.annotators import weigh_annotators
from reward.data.loading import Data, describe_inputs, read_data
from reward.report.thumbs import Threshold, combine_thresholds, pointwise_accuracy
from reward.scoring.scorer import combine_members, load_scorer
from reward.settings import Combine, RewardSettings
from reward.training.origin import describe_origin, reference_fingerprint, resolve_model
from reward.training.step import rows_of
from reward.training.train import describe_steps, train_reward
from rlhf.modeling.readers import tokenizer_of
from rlhf.modeling.tokens import pad_right
from rlhf.parallel.distributed import start
from rlhf.parallel.sharding import Sharding
from rlhf.parallel.sharding_choice import choose_sharding
from rlhf.planning.price import cost_of
from rlhf.planning.utilization import measure_rate
from rlhf.records.jsonl import new_folder, write_json
from rlhf.run.metrics import read_metrics
from rlhf.run.rundir import RunDir, open_stage, stage_status, watching_stage

REPORTED = ("accuracy", "accuracy_before_training")  # of every member


def train_ensemble(settings: RewardSettings) -> dict[str, Any]:
    """Train one member for each of `settings.seeds` and join them; returns the report.

    Raises:
        InputError: the rankings, the model or --out cannot be used.
        GuardError: as `train_reward`.
    """
    began = time.monotonic()
    settings = resolve_model(settings)
    sharding = choose_sharding(settings)
    accelerator = start(settings.precision, settings.seed, settings.ddp_comm_hook)
    inputs = describe_inputs(settings)
    tokenizer = tokenizer_of(inputs["model"])
    data = read_data(settings, tokenizer, reference_fingerprint(inputs["model"]))
    run = open_stage(settings.out, "reward", settings, inputs, resume=settings.resume)
    accelerator.wait_for_everyone()
    if run.is_done:
        return run.read_report() | {"already_done": True}
    with stage_status(run, settings.notify):
        folders = [run.path / f"member-{number}" for number in range(len(settings.seeds))]
        members = [
            replace(settings, seed=seed, seeds=(), out=folder, resume=True)
            for seed, folder in zip(settings.seeds, folders, strict=True)
        ]
        reports = [train_reward(member, sharding, is_member=True) for member in members]
        threshold = combine_thresholds(reports)
        with watching_stage(run, settings.parallel.stall_timeout, settings.notify):
            if accelerator.is_main_process:
                _join(run, folders)
            accelerator.wait_for_everyone()
            pad_id = int(tokenizer.pad_token_id)
            measured = _measure(folders, accelerator, sharding, data, pad_id, threshold)
            rate = measure_rate(accelerator, run.speed_file)  # as the members measured it
        steps = [row for folder in folders for row in read_metrics(RunDir(folder).metrics_file)]
        report = {
            **measured,
            "held_out": {"prompts": len(data.held_out), "from": data.held_out_source},
            "annotators": weigh_annotators(data.train, settings.loss, data.annotators),
            "started_from": describe_origin(inputs["model"]),
            "members": {
                folder.name: {"seed": seed, **{name: report[name] for name in REPORTED}}
                for folder, seed, report in zip(folders, settings.seeds, reports, strict=True)
            },
            "use": describe_steps(steps, rate),
            "cost": cost_of(run, settings.price_per_hour),
            "seconds": round(time.monotonic() - began, 1),
        }
        if accelerator.is_main_process:
            write_json(run.report_json, report)
        accelerator.wait_for_everyone()
    return report


def _join(run: RunDir, folders: list[Path]) -> None:
    """Put the members' models into one folder, by hard links where possible."""
    with new_folder(run.model) as whole:
        for number, folder in enumerate(folders):
            target = whole / f"member-{number}" if number else whole
            shutil.copytree(RunDir(folder).model, target, copy_function=_link, dirs_exist_ok=True)


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:  # another disk, or one without hard links
        shutil.copy2(source, target)


def _measure(
    folders: list[Path],
    accelerator: Accelerator,
    sharding: Sharding,
    data: Data,
    pad_id: int,
    threshold: Threshold | None,
) -> dict[str, Any]:
    """Accuracy on held-out preferences for every way to combine, and the disagreement of members.

    Only one member at a time is in memory, as in training. With thresholds of thumbs, also the
    accuracy of the mean of the members on thumbs.
    """
    sequences = [group.prompt + response for group in data.held_out for response in group.responses]
    prompts = [group.prompt_id for group in data.held_out for _ in group.responses]
    batch = pad_right(sequences, pad_id)
    each = torch.cat(
        [
            load_scorer(str(folder), accelerator, sharding=sharding).each(batch, prompts=prompts)
            for folder in folders
        ]
    )
    rows = {
        combine: rows_of(data.held_out, combine_members(each, combine))
        for combine in get_args(Combine)
    }
    accuracies = {combine: pair_accuracy(data.held_out, rows[combine]) for combine in rows}
    thumbs = threshold and pointwise_accuracy(data.held_out, rows["mean"], threshold)
    return ({"accuracy_on_thumbs": thumbs} if threshold else {}) | {
        "accuracy": plain_accuracy(accuracies["mean"]),
        "accuracy_of_the_worst_case": plain_accuracy(accuracies["worst"]),
        "disagreement": float(each.std(dim=0).mean()),
    }
