"""Train a reward model on rankings: the stage is `train_reward`, its loop `_train`.

Differs from InstructGPT (arXiv 2203.02155): AdamW with eps 1e-5, linear warm-up and linear decay
to 0, and the scale of the rewards is fixed at the end, on reference outputs where the dataset has
them.
"""

import sys
import time
from dataclasses import asdict
from typing import Any

import torch
from accelerate import Accelerator
from torch.optim import AdamW

from reward.accuracy import Accuracy, pair_accuracy
from reward.batches import epoch_order
from reward.data import Data, read_data
from reward.finish import describe_run, measure_scale, plain_accuracy, save_result, write_report
from reward.head import fit_head
from reward.health import collect_verdicts
from reward.model import RewardModule
from reward.objective import Objective
from reward.prefix import share_prompts
from reward.settings import RewardSettings
from reward.step import Trainee, score_groups, take_step
from rlhf.checkpoint import load_checkpoint, save_checkpoint
from rlhf.distributed import start
from rlhf.errors import GuardError
from rlhf.metrics import append_metrics, forget_metrics_after, progress
from rlhf.models import describe_model, new_reward_model
from rlhf.ranked import read_manifest
from rlhf.rundir import RunDir, open_stage, stage_status
from rlhf.tokens import load_tokenizer

ADAM_BETAS = (0.9, 0.95)
ADAM_EPS = 1e-5  # PyTorch's 1e-8 makes the first steps of a fresh head far too large
DETAILS = ("health", "worst")  # in report.json, too long for a terminal


def train_reward(settings: RewardSettings) -> dict[str, Any]:
    """Run the whole stage and return its report; the report of a finished one is only read.

    Raises:
        InputError: the rankings, the model or --out cannot be used.
        GuardError: the loss is not a number, or the trained model tells no two responses apart.
    """
    began = time.monotonic()
    accelerator = start(settings.precision, settings.seed)
    model = describe_model(settings.model)
    tokenizer = load_tokenizer(settings.model)
    manifest = read_manifest(settings.rankings)
    data = read_data(settings, tokenizer, model["hash"])
    rankings = {"path": str(settings.rankings), "hash": str(manifest["content_hash"])}
    inputs = {"rankings": rankings, "model": model}
    run = open_stage(settings.out, "reward", settings, inputs, resume=settings.resume)
    accelerator.wait_for_everyone()
    if run.is_done:
        report = run.read_report()
        return {name: report[name] for name in report if name not in DETAILS} | {
            "already_done": True
        }

    with stage_status(run):
        trainee = _build_trainee(settings, accelerator, int(tokenizer.pad_token_id))
        before = _train(settings, run, trainee, data)
        held_out = score_groups(trainee, data.held_out)
        scale, reference = measure_scale(trainee, data, held_out)
        save_result(trainee, run, tokenizer, scale)
        report = {
            "accuracy": plain_accuracy(pair_accuracy(data.held_out, held_out)),
            "accuracy_before_training": plain_accuracy(before),
            **describe_run(data, run, scale),
            "shared_prompt": trainee.shared,
            "processes": accelerator.num_processes,
            "seconds": round(time.monotonic() - began, 1),
        }
        if accelerator.is_main_process:
            write_report(
                run, report, collect_verdicts(data.held_out, held_out), reference, tokenizer
            )
        accelerator.wait_for_everyone()
    return report


def _build_trainee(settings: RewardSettings, accelerator: Accelerator, pad_id: int) -> Trainee:
    """The model with its new head and its optimizer, ready for `take_step`."""
    classifier = new_reward_model(settings.model, pad_id, settings.seed)
    if settings.gradient_checkpointing:
        classifier.activation_checkpointing_enable({"use_reentrant": False})
    module = RewardModule(classifier)
    obstacle = share_prompts(module) if settings.share_prompt else None
    if obstacle:
        words = f"Every response repeats its prompt, which takes longer: {obstacle}."
        accelerator.print(words, file=sys.stderr)
    optimizer = AdamW(
        module.parameters(), lr=0.0, betas=ADAM_BETAS, eps=ADAM_EPS, weight_decay=0, fused=True
    )
    module, optimizer = accelerator.prepare(module, optimizer)
    return Trainee(
        accelerator=accelerator,
        module=module,
        optimizer=optimizer,
        pad_id=pad_id,
        tokens_per_batch=settings.tokens_per_batch,
        objective=Objective(settings.loss, settings.margin, settings.centring),
        shared=settings.share_prompt and obstacle is None,
    )


def _train(settings: RewardSettings, run: RunDir, trainee: Trainee, data: Data) -> Accuracy | None:
    """Take every step, from the newest checkpoint on; returns the accuracy before training."""
    per_epoch = -(-len(data.train) // settings.prompts_per_batch)
    total = per_epoch * settings.epochs
    warmup = max(1, round(settings.warmup_fraction * total))

    saved = load_checkpoint(trainee.accelerator, run.checkpoints)
    done = int(saved["step"]) if saved else 0
    forget_metrics_after(run.metrics_file, done)
    if saved:
        before = Accuracy(**saved["before"]) if saved["before"] else None
    else:
        before = pair_accuracy(data.held_out, score_groups(trainee, data.held_out))
        if settings.head == "fitted":
            fit_head(trainee, data.train)

    with progress("training the reward model", total, done) as bar:
        for step in range(done, total):
            began = time.monotonic()
            epoch, place = divmod(step, per_epoch)
            order = epoch_order(len(data.train), settings.seed, epoch)
            chosen = order[place * settings.prompts_per_batch :][: settings.prompts_per_batch]
            rate = settings.learning_rate * anneal(step, total, warmup)
            row = take_step(trainee, [data.train[number] for number in chosen], rate)
            _stop_if_broken(row, step + 1, run)
            seconds = round(time.monotonic() - began, 3)
            append_metrics(
                run.metrics_file,
                {"step": step + 1, "epoch": epoch + 1, **row}
                | {"learning_rate": rate, "seconds": seconds},
            )
            bar.advance()
            bar.show(f"loss {row['loss']:.3f}, accuracy {row['accuracy']:.2f}")
            if settings.save_every and (step + 1) % settings.save_every == 0:
                state = {"before": asdict(before) if before else None}
                keep = settings.keep_checkpoints
                save_checkpoint(trainee.accelerator, run.checkpoints, step + 1, state, keep)
    return before


def anneal(step: int, total: int, warmup: int) -> float:
    """Factor on the learning rate: a rise to 1 over `warmup` steps, then a line down to 0."""
    if step < warmup:
        return (step + 1) / warmup
    return (total - step) / (total - warmup)


def _stop_if_broken(row: dict[str, float], step: int, run: RunDir) -> None:
    if torch.tensor([row["loss"], row["grad_norm"]]).isfinite().all():
        return
    newest = sorted(run.checkpoints.glob("step-*"))
    kept = f"The last good state is {newest[-1]}" if newest else "There is no checkpoint yet"
    raise GuardError(
        f"Loss or gradient is not a number at step {step} (loss {row['loss']}, gradient norm "
        f"{row['grad_norm']})",
        f"{kept}. Start again in another --out with a smaller --learning-rate or --precision fp32.",
    )
