"""Supervised fine-tuning on demonstrations: trl's `SFTTrainer` inside our run folder.

The loss covers the tokens of answers only. Sequences are neither packed nor truncated. Where there
are test demonstrations, the held-out loss is measured before and after.
"""

import math
import time
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import (
    PreTrainedTokenizerBase,
    PrinterCallback,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)
from trl.trainer.sft_config import SFTConfig
from trl.trainer.sft_trainer import SFTTrainer

from policies.sft.demonstrations import Rows, read_demonstrations
from policies.sft.settings import SFTSettings
from rlhf.errors import ConfigError, GuardError, InputError
from rlhf.modeling.chat_template import TEMPLATE_KWARGS, template_kwargs
from rlhf.modeling.models import describe_model, load_causal_lm, save_model
from rlhf.modeling.readers import tokenizer_of
from rlhf.modeling.tokens import encode_prompt
from rlhf.parallel.distributed import choose_precision
from rlhf.records.jsonl import write_json
from rlhf.records.schema import Message, Prompt
from rlhf.run.metrics import Bar, append_metrics, forget_metrics_after, progress
from rlhf.run.rundir import RunDir, open_stage, stage_status

TRAINER_STATE = (
    "trainer_state.json"  # the Trainer writes it last: a checkpoint without it is incomplete
)
KEPT = ("loss", "grad_norm", "learning_rate")


def fine_tune(settings: SFTSettings) -> dict[str, Any]:
    """Run the stage and return its report; of a finished one, read the report.

    Raises:
        InputError: the demonstrations, the model or --out cannot be used.
        GuardError: the loss is not a number.
    """
    began = time.monotonic()
    rows, source_hash = read_demonstrations(settings.demonstrations)
    model = describe_model(settings.model, settings.chat_template_kwargs)
    tokenizer = tokenizer_of(model)
    _require_fitting(rows, tokenizer, settings.max_length)
    source = {"path": str(settings.demonstrations), "hash": source_hash}
    inputs = {"demonstrations": source, "model": model}
    arguments = _arguments(settings)
    run = open_stage(settings.out, "sft", settings, inputs, resume=settings.resume)
    if run.is_done:
        return run.read_report() | {"already_done": True}
    with stage_status(run):
        trainer = _build_trainer(settings, arguments, rows, tokenizer)
        before = _held_out_loss(trainer)
        _train(trainer, run, settings, len(rows["train"]))
        after = _held_out_loss(trainer)
        report = {
            "demonstrations": {split: len(of_split) for split, of_split in rows.items()},
            "held_out_loss": {"before": before, "after": after},
            "steps": trainer.state.global_step,
            "processes": arguments.world_size,
            "seconds": round(time.monotonic() - began, 1),
            "seed": settings.seed,
            "inputs": inputs,
        }
        if trainer.is_world_process_zero():
            network = trainer.accelerator.unwrap_model(trainer.model)
            save_model(network, tokenizer, run.model)
            write_json(run.report_json, report)
        trainer.accelerator.wait_for_everyone()
    return report


def _arguments(settings: SFTSettings) -> SFTConfig:
    on_cpu = not torch.cuda.is_available()
    arguments = SFTConfig(
        output_dir=str(RunDir(settings.out).checkpoints),
        seed=settings.seed,
        num_train_epochs=settings.epochs,
        per_device_train_batch_size=settings.micro_batch_size,
        per_device_eval_batch_size=settings.micro_batch_size,
        learning_rate=settings.learning_rate,
        warmup_steps=settings.warmup_fraction,
        lr_scheduler_type="linear",
        max_length=None,
        activation_checkpointing=settings.gradient_checkpointing,
        bf16=choose_precision(settings.precision) == "bf16",
        use_cpu=on_cpu,
        dataloader_pin_memory=not on_cpu,
        save_strategy="steps",
        save_steps=settings.save_every,
        save_total_limit=settings.keep_checkpoints,
        logging_steps=1,
        logging_nan_inf_filter=False,  # it would replace a NaN by the mean loss
        report_to="none",
        disable_tqdm=True,
    )
    at_once = settings.micro_batch_size * arguments.world_size
    if settings.batch_size % at_once:
        raise ConfigError(
            f"--batch-size is {settings.batch_size}, no multiple of {arguments.world_size} "
            f"processes × --micro-batch-size {settings.micro_batch_size}",
            f"Choose a multiple of {at_once}.",
        )
    arguments.gradient_accumulation_steps = settings.batch_size // at_once
    return arguments


def _build_trainer(
    settings: SFTSettings, arguments: SFTConfig, rows: Rows, tokenizer: PreTrainedTokenizerBase
) -> SFTTrainer:
    kwargs = template_kwargs(tokenizer)  # trl reads them from each row
    data = {
        split: Dataset.from_list(
            [{**row, TEMPLATE_KWARGS: kwargs} if kwargs else row for row in of]
        )
        for split, of in rows.items()
        if of
    }
    trainer = SFTTrainer(
        model=load_causal_lm(settings.model),
        args=arguments,
        train_dataset=data["train"],
        eval_dataset=data.get("test"),
        processing_class=tokenizer,
    )
    trainer.remove_callback(PrinterCallback)
    return trainer


def _require_fitting(rows: Rows, tokenizer: PreTrainedTokenizerBase, max_length: int) -> None:
    lengths = [_length(row, tokenizer) for of_split in rows.values() for row in of_split]
    long = sum(length > max_length for length in lengths)
    if long:
        raise InputError(
            f"{long} of {len(lengths)} demonstrations have more than {max_length} tokens "
            f"(the longest {max(lengths)})",
            f"Add --max-length {max(lengths)} if the model's context allows, or remove them.",
        )


def _length(row: dict[str, Any], tokenizer: PreTrainedTokenizerBase) -> int:
    messages = tuple(Message.from_json(message) for message in row["prompt"])
    prompt = encode_prompt(tokenizer, Prompt.create(messages, "train", ""))
    answer = tokenizer(row["completion"][0]["content"], add_special_tokens=False)
    return len(prompt) + len(answer["input_ids"]) + 1


def _held_out_loss(trainer: SFTTrainer) -> float | None:
    if trainer.eval_dataset is None:
        return None
    return float(trainer.evaluate()["eval_loss"])


def _train(trainer: SFTTrainer, run: RunDir, settings: SFTSettings, num_rows: int) -> None:
    newest = _newest_checkpoint(run.checkpoints)
    done = int(newest.name.rpartition("-")[2]) if newest else 0
    forget_metrics_after(run.metrics_file, done)
    steps = math.ceil(num_rows / settings.batch_size) * settings.epochs
    with progress("fine-tuning", steps, done) as bar:
        trainer.add_callback(_Reporter(run, bar))
        trainer.train(resume_from_checkpoint=str(newest) if newest else None)


def _newest_checkpoint(folder: Path) -> Path | None:
    whole = [path.parent for path in folder.glob(f"checkpoint-*/{TRAINER_STATE}")]
    return max(whole, key=lambda path: int(path.name.rpartition("-")[2]), default=None)


class _Reporter(TrainerCallback):
    """Writes metrics.jsonl, moves the bar, and stops a run whose loss is not a number."""

    def __init__(self, run: RunDir, bar: Bar) -> None:
        self.run = run
        self.bar = bar

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **_: Any,
    ) -> None:
        """Called after each optimizer step."""
        if not logs or "loss" not in logs:
            return
        row = {name: float(logs[name]) for name in KEPT if name in logs}
        if not math.isfinite(row["loss"]):
            raise GuardError(
                f"The loss is not a number at step {state.global_step}",
                "Start a new --out with a lower --learning-rate or with --precision fp32.",
            )
        append_metrics(self.run.metrics_file, {"step": state.global_step, **row})
        self.bar.advance()
        self.bar.show(f"loss {row['loss']:.3f}")
