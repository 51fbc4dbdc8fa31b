"""Train a reward model on rankings: the stage is `train_reward`, its loop `_train`.

Differs from InstructGPT (arXiv 2203.02155): AdamW with eps 1e-5, linear warm-up and linear decay
to 0; rewards are scaled at the end, on reference outputs if the dataset has enough of them.
"""

import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch.optim import AdamW
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from reward.accuracy import Accuracy, pair_accuracy, plain_accuracy
from reward.data.batches import epoch_order
from reward.data.loading import Data, describe_inputs, held_out_as_before, read_data
from reward.data.thresholds import Thresholds
from reward.losses import Objective
from reward.memory import checkpoint_disk_bytes, require_memory
from reward.model.module import RewardModule
from reward.report.health import collect_verdicts, count_by_prompt
from reward.report.learning_curve import Point, measure_curve
from reward.report.thumbs import describe_thumbs
from reward.settings import RewardSettings
from reward.training.baseline import base_log_probs
from reward.training.evaluation import Best, compare, evaluate
from reward.training.fit_head import fit_head
from reward.training.origin import reference_fingerprint, resolve_model
from reward.training.save import (
    describe_run,
    measure_scale,
    save_result,
    write_report,
)
from reward.training.step import TrainState, fit_thresholds, score_groups, take_step
from rlhf.diagnose import as_input_error
from rlhf.errors import GuardError
from rlhf.modeling.adapters import add_adapters, four_bits
from rlhf.modeling.attention.checkpointing import checkpoint_activations
from rlhf.modeling.attention.shared_prefix import share_prompts
from rlhf.modeling.models import is_reward_model, new_reward_model
from rlhf.modeling.pairs import has_token_types
from rlhf.modeling.readers import tokenizer_of
from rlhf.parallel.distributed import device_bytes, start
from rlhf.parallel.sharding import Sharding, prepare
from rlhf.parallel.sharding_choice import choose_sharding
from rlhf.planning.flops import count_flops
from rlhf.planning.price import cost_of
from rlhf.planning.utilization import PROFILING, Laps, describe_use, measure_rate
from rlhf.records.documents import REMEDY
from rlhf.records.ranked import read_manifest
from rlhf.run.checkpoint import (
    last_good,
    load_checkpoint,
    newest_checkpoint,
    save_checkpoint,
)
from rlhf.run.metrics import append_metrics, forget_metrics_after, progress, read_metrics
from rlhf.run.rundir import RunDir
from rlhf.run.saving.saver import Saver
from rlhf.run.stage import training_stage
from rlhf.run.watchdog import beat

ADAM_BETAS = (0.9, 0.95)
ADAM_EPS = 1e-5  # PyTorch's 1e-8 makes the first steps of a fresh head far too large
DETAILS = ("health", "worst", "held_out_counts")  # in report.json, too long for a terminal
LONGER_PASSES = "--batch.micro-tokens, --batch.prompts"
PARTS = (8, 4, 2)  # a learning curve trains on 1/8, 1/4 and 1/2 of the train prompts, then on all


@dataclass(frozen=True)
class Findings:
    """Results that a checkpoint must keep: accuracy before training, best evaluation, thresholds.

    `thresholds` are the state of `reward.data.thresholds`.
    """

    before: Accuracy | None
    best: Best | None = None
    thresholds: dict[str, list[float]] = field(default_factory=dict)

    @classmethod
    def from_json(cls, saved: dict[str, Any]) -> "Findings":
        """The findings from a checkpoint, saved by `asdict`.

        Raises:
            InputError: the checkpoint is broken.
        """
        with as_input_error("The progress.json of the checkpoint is broken", REMEDY):
            before, best = saved["before"], saved["best"]
            return cls(
                Accuracy(**before) if before else None,
                Best(**best) if best else None,
                saved.get("thresholds", {}),
            )


def train_reward(
    settings: RewardSettings, sharding: Sharding | None = None, *, is_member: bool = False
) -> dict[str, Any]:
    """Run the whole stage and return its report; of a finished stage only read the report.

    Args:
        settings: of the stage.
        sharding: by default chosen from the settings.
        is_member: one model of an ensemble, which reports to `--notify` itself.

    Raises:
        InputError: the rankings, the model or --out cannot be used.
        ConfigError: the training does not fit into memory.
        GuardError: the loss is not finite, or the trained model gives all responses one reward.
    """
    began = time.monotonic()
    settings = resolve_model(settings)
    sharding = sharding or choose_sharding(settings)
    accelerator = start(settings.precision, settings.seed, settings.ddp_comm_hook)
    read_manifest(settings.rankings)  # a missing export is refused before memory is planned
    parts = sharding.group or accelerator.num_processes
    require_memory(settings, device_bytes(settings.processes), sharding, parts)
    inputs = describe_inputs(settings)
    tokenizer = tokenizer_of(inputs["model"])
    data = read_data(settings, tokenizer, reference_fingerprint(inputs["model"]))
    disk = checkpoint_disk_bytes(settings)
    with training_stage(accelerator, "reward", settings, inputs, disk, is_member=is_member) as run:
        if run.is_done:
            return _read_done(run)
        pad_id = int(tokenizer.pad_token_id)
        likelier_wins = _measure_base_model(settings, accelerator, sharding, data, pad_id)
        rate = measure_rate(accelerator, run.speed_file)
        state = _build_state(settings, accelerator, sharding, tokenizer, data)
        findings = _train(settings, run, state, data, rate)
        held_out = score_groups(state, data.held_out)
        scale, reference = measure_scale(state, data, held_out)
        level = fit_thresholds(state, data.train)
        save_result(state, run, tokenizer, scale)
        report = {
            "accuracy": plain_accuracy(pair_accuracy(data.held_out, held_out)),
            "accuracy_before_training": plain_accuracy(findings.before),
            "head": settings.head,
            "likelier_wins": plain_accuracy(likelier_wins),
            **describe_run(settings, data, run, scale, findings.best),
            **describe_thumbs(settings, data, state.thresholds, level, held_out, scale, state.bias),
            "shared_prompt": state.shared,
            "use": describe_steps(read_metrics(run.metrics_file), rate),
            "cost": cost_of(run, settings.price_per_hour),
            "processes": accelerator.num_processes,
            "seconds": round(time.monotonic() - began, 1),
        }
        if accelerator.is_main_process:
            verdicts = collect_verdicts(data.held_out, held_out)
            if settings.learning_curve:
                counts = {"held_out_counts": count_by_prompt(verdicts)}
                report["learning_curve"] = _measure_parts(run, {**report, **counts})
            write_report(run, report, verdicts, reference, tokenizer)
        accelerator.wait_for_everyone()
    return report


def describe_steps(rows: Sequence[dict[str, Any]], rate: float) -> dict[str, Any] | None:
    """How training steps used their devices: `rlhf.planning.utilization.Use`.

    Args:
        rows: their metrics.
        rate: of a matrix product, in operations a second.
    """
    return describe_use(rows, rate, ("seconds",), LONGER_PASSES, profiling=PROFILING)


def part_folder(out: Path, part: int) -> Path:
    """Where the training on 1 / `part` of the prompts of a learning curve is."""
    return out / f"part-1-of-{part}"


def _measure_parts(run: RunDir, report: dict[str, Any]) -> dict[str, Any]:
    """The learning curve of the finished parts of a run and of the whole."""
    parts = [RunDir(part_folder(run.path, part)).read_report() for part in PARTS]
    return measure_curve([Point.of(measured) for measured in (*parts, report)])


def _read_done(run: RunDir) -> dict[str, Any]:
    report = run.read_report()
    return {name: report[name] for name in report if name not in DETAILS} | {"already_done": True}


def _measure_base_model(
    settings: RewardSettings, accelerator: Accelerator, sharding: Sharding, data: Data, pad_id: int
) -> Accuracy | None:
    """How often the preferred response is the more likely one under the base model.

    None if the base model may not fit into one process, if it is a reward model, which has no
    likelihoods, or if no pair is held out.
    """
    compared = [group for group in data.held_out if group.pairs]
    is_sharded = sharding.is_sharded or settings.adapter == "qlora"
    if is_sharded or is_reward_model(settings.model) or not compared:
        return None
    tokens = settings.batch.micro_tokens
    likelier = base_log_probs(
        settings.model, accelerator, compared, tokens, pad_id, shared=settings.batch.share_prompt
    )
    return pair_accuracy(compared, likelier)


def _build_state(
    settings: RewardSettings,
    accelerator: Accelerator,
    sharding: Sharding,
    tokenizer: PreTrainedTokenizerBase,
    data: Data,
) -> TrainState:
    """The model with its head and its optimizer, ready for `take_step`."""
    pad_id = int(tokenizer.pad_token_id)
    classifier = _load_classifier(settings, accelerator, pad_id, sharding)
    classifier.config.reads_thinking = settings.data.reads_thinking  # saved, for scoring
    if settings.batch.gradient_checkpointing:
        checkpoint_activations(classifier)
    module = RewardModule(classifier, token_types=has_token_types(tokenizer))
    obstacle = share_prompts(classifier) if settings.batch.share_prompt else None
    if obstacle:
        message = f"Every response repeats its prompt, which takes longer: {obstacle}."
        accelerator.print(message, file=sys.stderr)
    trained = [value for value in module.parameters() if value.requires_grad]
    optimizer = AdamW(trained, lr=0.0, betas=ADAM_BETAS, eps=ADAM_EPS, weight_decay=0, fused=True)
    count_flops(classifier)
    prepared, prepared_optimizer = prepare(
        accelerator,
        module,
        optimizer,
        sharding,
        bf16_weights=settings.precision == "bf16-weights",
        fp32_modules=module.fp32_modules,
    )
    return TrainState(
        accelerator=accelerator,
        module=prepared,
        optimizer=prepared_optimizer,
        pad_id=pad_id,
        tokens_per_batch=settings.batch.micro_tokens,
        objective=Objective(settings.loss, settings.objective.margin, settings.objective.centering),
        shared=settings.batch.share_prompt and obstacle is None,
        tensor_parallel=sharding.tensor_parallel,
        bias=float(getattr(classifier.config, "reward_bias", 0.0)),
        thresholds=Thresholds(data.train, [*data.validation, *data.held_out]),
    )


def _load_classifier(
    settings: RewardSettings, accelerator: Accelerator, pad_id: int, sharding: Sharding
) -> PreTrainedModel:
    """A model with a head; frozen weights have the precision of the computation."""
    if settings.adapter == "none":
        return new_reward_model(
            settings.model, pad_id, settings.seed, held=sharding.held(trained=True)
        )
    dtype = torch.bfloat16 if accelerator.mixed_precision == "bf16" else torch.float32
    is_packed = settings.adapter == "qlora"
    packing = four_bits(dtype, "--adapter qlora", "--adapter lora") if is_packed else None
    classifier = new_reward_model(settings.model, pad_id, settings.seed, dtype, packing)
    add_adapters(classifier, settings.lora.rank, settings.lora.alpha, settings.seed)
    return classifier


def _train(
    settings: RewardSettings, run: RunDir, state: TrainState, data: Data, matmul_rate: float
) -> Findings:
    """Take all steps after the newest checkpoint, and load the best weights at the end."""
    per_epoch = -(-len(data.train) // settings.batch.prompts)
    total = per_epoch * settings.optim.epochs
    warmup = max(1, round(settings.optim.warmup_fraction * total))
    done, findings = _begin(settings, run, state, data)
    best = findings.best
    saver = Saver(state.accelerator, run.checkpoints, settings.checkpoint)
    counted = progress("training the reward model", total, done, is_stage=True)
    with counted as bar, saver.saving_on_sigterm():
        for step in range(done, total):
            if best and best.is_stale(settings.evaluation.patience):
                break
            beat("computing gradients", step + 1)
            began = time.monotonic()
            laps = Laps(state.accelerator, matmul_rate, state.tensor_parallel)
            epoch, step_in_epoch = divmod(step, per_epoch)
            order = epoch_order(len(data.train), settings.seed, epoch)
            chosen = order[step_in_epoch * settings.batch.prompts :][: settings.batch.prompts]
            rate = settings.optim.learning_rate * anneal(step, total, warmup)
            row = take_step(state, [data.train[number] for number in chosen], rate)
            _stop_if_broken(row, step + 1, run)
            seconds = round(time.monotonic() - began, 3)
            laps.end("step")
            row = {"step": step + 1, "epoch": epoch + 1, **row, "learning_rate": rate}
            row |= laps.metrics()
            if _is_due(settings.evaluation.every, step + 1, total):
                row |= evaluate(state, data.validation)
                best = compare(best, step + 1, row["validation_loss"])
                if best.step == step + 1:
                    save_checkpoint(state.accelerator, run.best_checkpoint, step + 1, {}, 1)
            append_metrics(run.metrics_file, {**row, "seconds": seconds})
            state.accelerator.log(row, step=step + 1)
            bar.advance()
            accuracy = row.get("accuracy", row.get("thumbs_accuracy", 0.0))
            bar.show(f"loss {row['loss']:.3f}, accuracy {accuracy:.2f}")
            learned = replace(findings, best=best, thresholds=state.thresholds.state())
            saver.after_step(step + 1, asdict(learned))
    if best:
        load_checkpoint(state.accelerator, run.best_checkpoint)
    return replace(findings, best=best)


def _begin(
    settings: RewardSettings, run: RunDir, state: TrainState, data: Data
) -> tuple[int, Findings]:
    """Load the newest checkpoint, else fit the head and measure the accuracy; steps done so far."""
    saved = load_checkpoint(state.accelerator, run.checkpoints)
    done = int(saved["step"]) if saved else 0
    forget_metrics_after(run.metrics_file, done)
    if saved:
        findings = Findings.from_json(saved)
        state.thresholds.restore(findings.thresholds)
        return done, findings
    if settings.head == "fitted":
        fit_head(state, data.train)
    fit_thresholds(state, data.train)
    if not settings.optim.epochs:  # accuracy is measured at the end, of the same weights
        return 0, Findings(None)
    held_out = held_out_as_before(settings, data, run.inputs["model"])
    return 0, Findings(pair_accuracy(held_out, score_groups(state, held_out)))


def _is_due(every: int | None, step: int, total: int) -> bool:
    """Whether to evaluate after this step: every `every` steps, and after the last one."""
    return every is not None and (step % every == 0 or step == total)


def anneal(step: int, total: int, warmup: int) -> float:
    """Factor on the learning rate: linear from 0 to 1 over `warmup` steps, then linear to 0."""
    if step < warmup:
        return (step + 1) / warmup
    return (total - step) / (total - warmup)


def _stop_if_broken(row: dict[str, float], step: int, run: RunDir) -> None:
    if torch.tensor([row["loss"], row["grad_norm"]]).isfinite().all():
        return
    raise GuardError(
        f"Loss or gradient is not a number at step {step} (loss {row['loss']}, gradient norm "
        f"{row['grad_norm']})",
        f"{last_good(newest_checkpoint(run.checkpoints))}. Start again in another --out with a "
        "smaller --optim.learning-rate or --precision fp32.",
    )
