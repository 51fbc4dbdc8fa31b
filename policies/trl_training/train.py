"""trl's trainers inside our run folder: settings, checkpoints, metrics and the saved model.

Nothing is packed and nothing is cut.
"""

import math
import time
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import fmean
from typing import Any, TypeVar

import torch
from transformers import (
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PrinterCallback,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)

from policies.trl_training.clock import StepClock
from policies.trl_training.fused_head import project_labels_only
from policies.trl_training.settings import TrainerSettings
from rlhf.errors import ConfigError, GuardError, InputError
from rlhf.modeling.attention.checkpointing import checkpointing_argument
from rlhf.modeling.logits.freed_memory import keep_freed_memory
from rlhf.modeling.models import save_model
from rlhf.modeling.tokens import encode_prompt
from rlhf.parallel.distributed import choose_precision
from rlhf.planning.price import cost_of
from rlhf.planning.utilization import describe_use, measure_rate
from rlhf.records.jsonl import JsonObject, write_json
from rlhf.records.schema import Message, Prompt
from rlhf.run.metrics import Bar, append_metrics, forget_metrics_after, progress, read_metrics
from rlhf.run.rundir import RunDir, StageInputs, open_stage, stage_status, watching_stage
from rlhf.run.watchdog import beat

TRAINER_STATE = "trainer_state.json"  # the Trainer writes it last: a checkpoint without it is half
KEPT = {"loss": "loss", "grad_norm": "grad_norm", "learning_rate": "learning_rate"}
OLD_NAME = "`(is_)?gradient_checkpointing"  # by which trl asks transformers
LONGER_PASSES = "--micro-batch-size"
Length = tuple[int, int]  # tokens of a prompt, and of its answer

Arguments = TypeVar("Arguments", bound=TrainingArguments)


def trainer_arguments(settings: TrainerSettings, kind: type[Arguments], **more: Any) -> Arguments:
    """The settings as trl takes them.

    Args:
        settings: of the command.
        kind: the arguments' class, that of one trainer.
        more: what this trainer alone takes.

    Raises:
        ConfigError: the batch cannot be shared among the processes.
    """
    on_cpu = not torch.cuda.is_available()
    usual = {
        "output_dir": str(RunDir(settings.out).checkpoints),
        "seed": settings.seed,
        "num_train_epochs": settings.epochs,
        "per_device_train_batch_size": settings.micro_batch_size,
        "per_device_eval_batch_size": 1,  # trl averages over batches, whatever their size
        "learning_rate": settings.learning_rate,
        "warmup_steps": settings.warmup_fraction,
        "lr_scheduler_type": "linear",
        "max_length": None,
        checkpointing_argument(kind): settings.gradient_checkpointing,
        "bf16": choose_precision(settings.precision) == "bf16",
        "use_cpu": on_cpu,
        "dataloader_pin_memory": not on_cpu,
        "save_strategy": "steps",
        "save_steps": settings.save_every,
        "save_total_limit": settings.keep_checkpoints,
        "logging_steps": 1,
        "logging_nan_inf_filter": False,  # it would tell of another step's loss in its place
        "report_to": "none",
        "disable_tqdm": True,
    }
    arguments = kind(**{**usual, **more})
    at_once = settings.micro_batch_size * arguments.world_size
    if settings.batch_size % at_once:
        raise ConfigError(
            f"--batch-size is {settings.batch_size}, no multiple of {arguments.world_size} "
            f"processes × --micro-batch-size {settings.micro_batch_size}",
            f"Choose a multiple of {at_once}.",
        )
    arguments.gradient_accumulation_steps = settings.batch_size // at_once
    return arguments


def count_tokens(
    tokenizer: PreTrainedTokenizerBase, prompt: Sequence[JsonObject], response: str
) -> Length:
    """Tokens of a prompt, and those of its response with the token that closes it."""
    messages = tuple(Message.from_json(message) for message in prompt)
    before = encode_prompt(tokenizer, Prompt.create(messages, "train", ""))
    return len(before), len(tokenizer(response, add_special_tokens=False)["input_ids"]) + 1


def forecast_amount(
    settings: TrainerSettings, lengths: Mapping[str, Sequence[Length]], **more: float
) -> dict[str, Any]:
    """The amount that a training reads, for forecasts of others: `rlhf.planning.forecast.Amount`.

    Args:
        settings: of the command.
        lengths: of the examples of each split.
        more: further fields, or others in place of these.
    """
    prompts, responses = zip(*lengths["train"], strict=True)
    return {
        "prompts": len(prompts),
        "held_out": len(lengths["test"]),
        "prompt_tokens": fmean(prompts),
        "response_tokens": fmean(responses),
        "epochs": settings.epochs,
        **more,
    }


def require_fitting(lengths: Iterable[Sequence[int]], max_length: int, noun: str) -> None:
    """Refuse examples that are too long.

    Args:
        lengths: of the parts of each, in tokens.
        max_length: tokens that an example may have.
        noun: what they are called.

    Raises:
        InputError: names how many are longer, and the longest.
    """
    whole = [sum(length) for length in lengths]
    long = sum(length > max_length for length in whole)
    if long:
        raise InputError(
            f"{long} of {len(whole)} {noun} have more than {max_length} tokens "
            f"(the longest {max(whole)})",
            f"Add --max-length {max(whole)} if the model's context allows, or remove them.",
        )


@contextmanager
def trainer_stage(
    stage: str, settings: TrainerSettings, arguments: TrainingArguments, inputs: StageInputs
) -> Iterator[RunDir]:
    """Open the run folder for a training, record how the block ends, and keep a heartbeat.

    Every process calls this. If the run is already finished, the block runs with nothing around
    it: look at `run.is_done` first and return the report.

    Raises:
        InputError: the folder cannot be used.
    """
    run = open_stage(settings.out, stage, settings, inputs, resume=settings.resume)
    arguments.distributed_state.wait_for_everyone()
    if run.is_done:
        yield run
        return
    if arguments.use_cpu:
        keep_freed_memory()
        project_labels_only()
    with stage_status(run), watching_stage(run, None), warnings.catch_warnings():
        warnings.filterwarnings("ignore", OLD_NAME, FutureWarning)
        yield run


def held_out(trainer: Trainer) -> dict[str, float] | None:
    """The trainer's metrics on the test examples; None where there are none."""
    if trainer.eval_dataset is None:
        return None
    beat("measuring")
    trainer.remove_callback(PrinterCallback)  # it would print what the report has
    return dict(trainer.evaluate())


def held_out_loss(trainer: Trainer) -> float | None:
    """The mean loss of the test examples; None where there are none."""
    metrics = held_out(trainer)
    return None if metrics is None else float(metrics["eval_loss"])


def train(
    trainer: Trainer,
    run: RunDir,
    settings: TrainerSettings,
    num_rows: int,
    kept: Mapping[str, str] | None = None,
) -> dict[str, Any] | None:
    """Train from the newest checkpoint, or from the start; how the device was used.

    Args:
        trainer: of trl.
        run: its folder, open.
        settings: of the command.
        num_rows: examples of an epoch.
        kept: further metrics of a step for metrics.jsonl: their name there by the trainer's name.

    Raises:
        GuardError: the loss is not a number.
    """
    newest = _newest_checkpoint(run.checkpoints)
    done = int(newest.name.rpartition("-")[2]) if newest else 0
    forget_metrics_after(run.metrics_file, done)
    steps = math.ceil(num_rows / settings.batch_size) * settings.epochs
    trainer.remove_callback(PrinterCallback)
    rate = measure_rate(trainer.accelerator, run.speed_file)
    clock = StepClock(trainer, rate)
    with progress("fine-tuning", steps, done, is_stage=True) as bar:
        trainer.add_callback(_Reporter(run, bar, {**KEPT, **(kept or {})}, clock))
        trainer.train(resume_from_checkpoint=str(newest) if newest else None)
    return describe_use(read_metrics(run.metrics_file), rate, ("seconds",), LONGER_PASSES)


def finish(
    trainer: Trainer,
    network: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    folder: Path,
    report: dict[str, Any],
) -> None:
    """Save the trained model and the report; all processes call this.

    Args:
        trainer: that has trained.
        network: what is saved.
        tokenizer: saved beside it.
        folder: of the saved model, in the run folder.
        report: what report.json is to hold.
    """
    if trainer.is_world_process_zero():
        beat("saving")
        save_model(network, tokenizer, folder)
        write_json(RunDir(folder.parent).report_json, report)
    trainer.accelerator.wait_for_everyone()


def ending(
    trainer: Trainer,
    settings: TrainerSettings,
    inputs: StageInputs,
    use: dict[str, Any] | None,
    began: float,
) -> dict[str, Any]:
    """The end of every report.

    Args:
        trainer: that has trained.
        settings: of the command.
        inputs: path and hash of each.
        use: what `train` returned.
        began: when, on the monotonic clock.
    """
    return {
        "steps": trainer.state.global_step,
        "processes": trainer.args.world_size,
        "seconds": round(time.monotonic() - began, 1),
        "use": use,
        "cost": cost_of(RunDir(settings.out), settings.price_per_hour),
        "seed": settings.seed,
        "inputs": inputs,
    }


def _newest_checkpoint(folder: Path) -> Path | None:
    whole = [path.parent for path in folder.glob(f"checkpoint-*/{TRAINER_STATE}")]
    return max(whole, key=lambda path: int(path.name.rpartition("-")[2]), default=None)


class _Reporter(TrainerCallback):
    """Writes metrics.jsonl, moves the bar, and stops a run whose loss is not a number."""

    def __init__(self, run: RunDir, bar: Bar, kept: Mapping[str, str], clock: StepClock) -> None:
        self.run = run
        self.bar = bar
        self.kept = kept
        self.clock = clock

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **_: Any,
    ) -> None:
        """One optimizer step was taken."""
        if not logs or "loss" not in logs:
            return
        row = {name: float(logs[theirs]) for theirs, name in self.kept.items() if theirs in logs}
        if not math.isfinite(row["loss"]):
            raise GuardError(
                f"The loss is not a number at step {state.global_step}",
                "Start again in another --out with a smaller --learning-rate or --precision fp32.",
            )
        row |= self.clock.end()
        append_metrics(self.run.metrics_file, {"step": state.global_step, **row})
        beat(step=state.global_step)
        self.bar.advance()
        self.bar.show(f"loss {row['loss']:.3f}")
