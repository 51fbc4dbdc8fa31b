"""`rlhf ppo`: train a policy against a reward model, held near the original by its stored outputs.

Differs from the PPO of InstructGPT (arXiv 2203.02155): the KL term is the forward KL on reference
outputs that were stored ahead of time, a loss beside the clip loss instead of a penalty in the
reward, so no reference model is in memory; and rewards are reported as gains over the stored
outputs of the same prompt.
"""

import math
import sys
import time
from dataclasses import replace
from typing import Any

import torch
from transformers import PreTrainedModel

from policies.ppo.episodes import choose_prompts, choose_reference_rows, deal
from policies.ppo.guards import normal_of, watch
from policies.ppo.invariants import check_reference, check_step
from policies.ppo.kl import adjust, audit, describe_reverse_kl, require_top_k
from policies.ppo.memory import room_for
from policies.ppo.models.actor_critic import PolicyAndCritic
from policies.ppo.models.critic import fit_critic
from policies.ppo.models.shared_base import require_shared_base
from policies.ppo.pretraining import describe_texts, pieces_per_step, stack_pieces
from policies.ppo.rollout import (
    Rollout,
    collect_rollout,
    describe_correction,
    describe_rollout,
    describe_values,
)
from policies.ppo.settings import PPOSettings
from policies.ppo.setup import Training, set_up
from policies.ppo.update import KL_ESTIMATORS, reference_batch, update
from policies.reference.audit import (
    AuditSamples,
    audit_policy,
    measure_forward_kl,
    sample_for_audit,
)
from policies.reference.store import open_store, require_reference_of, require_training_prompts
from policies.rewards.sources import describe_rewards
from rlhf.errors import ConfigError
from rlhf.modeling.adapters import save_merged
from rlhf.modeling.log_probs import Sequences
from rlhf.modeling.models import (
    describe_model,
    reward_head,
)
from rlhf.parallel.distributed import RANK_SEED_STRIDE, seed_all, start
from rlhf.parallel.gathered_model import full_state
from rlhf.parallel.sharding import assign, unwrap
from rlhf.parallel.sharding_choice import choose_sharding
from rlhf.records.documents import Kinds, require_kinds
from rlhf.records.jsonl import write_json
from rlhf.run.checkpoint import Saver, load_checkpoint, newest_checkpoint
from rlhf.run.metrics import append_metrics, forget_metrics_after, progress, read_metrics
from rlhf.run.preflight import check_before_training, require_shared
from rlhf.run.profiling import profiling
from rlhf.run.rundir import open_stage, require_done, stage_status, watching_stage
from rlhf.run.tracking import tracking
from rlhf.run.watchdog import beat

AUDIT_PROMPTS = 64
CLOCKS = ("seconds/sample", "seconds/score", "seconds/update")
AUDITED_KL = "kl_audit/reverse_k1_per_token"
CONTROL_PROMPTS = 16
FACTS: Kinds = {  # what a checkpoint keeps beside weights
    "critic_fit": dict | None,
    "guard_counts": dict,
    "audited_kl": int | float | None,
    "kl_coefficient": int | float,
}
GUARD_PROMPTS = 10_000
MEASURED_KL = (  # what the controller steers by, the first that a step has
    "kl/held_out_forward_k3_per_token",
    "kl/reverse_k1_per_token",
    *(name for name, _ in KL_ESTIMATORS.values()),
)
STEP_SEED_STRIDE = 1_000_003


def train_policy(settings: PPOSettings) -> dict[str, Any]:
    """Run the stage and return its report.

    Raises:
        InputError: an input is missing, unfinished, or belongs to another model.
        GuardError: a step-0 invariant does not hold, or a loss is not a number.
    """
    reference = require_done(settings.reference, "reference", "outputs")
    store = open_store(reference.outputs, settings.model)
    model = describe_model(settings.model, store.template_kwargs)
    require_reference_of(store, model)
    require_top_k(store, settings.kl)
    require_training_prompts(store)
    stored = {"path": str(reference.path), "hash": store.content_hash}
    inputs = {"model": model, "reference": stored, **describe_rewards(settings.reward, model)}
    inputs |= describe_texts(settings.ptx.data)
    require_shared_base(settings, model)
    sharding = choose_sharding(settings)
    if sharding.is_sharded and settings.lora.share_base:
        raise ConfigError(
            f"--lora.share-base leaves little to shard with --sharding {sharding.strategy}",
            "Leave --sharding out: every process holds the one frozen model.",
        )
    accelerator = start(settings.precision, settings.seed)
    if sharding.is_tensor_parallel:
        seed_all(settings.seed)  # all processes sample the same
    _require_even_split(settings, accelerator.num_processes // settings.tensor_parallel)
    check_before_training(accelerator, settings, settings.out, inputs, room_for(settings))
    run = open_stage(settings.out, "ppo", settings, inputs, resume=settings.resume)
    accelerator.wait_for_everyone()
    require_shared(run)
    if run.is_done:
        return run.read_report()
    url = settings.notify
    tracked = tracking(accelerator, settings.track, run.path, settings)
    profiled = profiling(accelerator, settings.profile, run.profile)
    watched = watching_stage(run, settings.stall_timeout, url)
    with stage_status(run, url), watched, tracked, profiled:
        training = set_up(settings, store, accelerator, sharding, run)
        saved = load_checkpoint(accelerator, run.checkpoints) or {"step": 0}
        done = saved["step"]
        facts: dict[str, Any] = {"critic_fit": None, "guard_counts": {}, "audited_kl": None}
        facts["kl_coefficient"] = settings.kl.coefficient
        require_kinds(saved, FACTS, f"{run.checkpoints} (progress.json)")
        facts |= {name: saved[name] for name in facts if name in saved}
        forget_metrics_after(run.metrics_file, done)
        if done == 0:
            facts["critic_fit"] = before_training(training)
        train_loop(training, done, facts)
        finish(training, facts)
    return run.read_report()


def before_training(training: Training) -> dict[str, Any] | None:
    """Check that the policy is the reference, and fit the critic; returns what the fit found."""
    with training.gathered() as plain:
        if not training.settings.lora.four_bit_base:  # of which the stored log-probs are not
            check_reference(
                training.accelerator,
                plain.policy,
                training.tokenizer,
                [rows[0] for rows in training.prompts[:AUDIT_PROMPTS]],
                training.store.sampling.temperature,
            )
        if not (training.settings.has_critic and training.settings.critic.warmup):
            return None
        found = fit_critic(
            training.accelerator,
            plain,
            training.prompts,
            training.reference_rewards,
            training.settings,
            int(training.tokenizer.pad_token_id),
        )
        trained: PolicyAndCritic = unwrap(training.model)
        trained.value_bias.copy_(plain.value_bias)
        assign(reward_head(trained.critic).weight, reward_head(plain.critic).weight)
    return found


def train_loop(training: Training, done: int, facts: dict[str, Any]) -> None:
    """Sample, score, update, report; once per step. `facts` travel in the checkpoints."""
    settings, accelerator = training.settings, training.accelerator
    saver = Saver(
        accelerator,
        training.run.checkpoints,
        every_steps=settings.checkpoint.every,
        every_minutes=settings.save_minutes,
        keep=settings.checkpoint.keep,
    )
    some = training.prompts[:: 1 + len(training.prompts) // GUARD_PROMPTS]
    normal = normal_of([row for rows in some for row in rows])
    with progress("ppo", total=settings.steps, done=done) as bar, saver.listening():
        for step in range(done + 1, settings.steps + 1):
            kl = replace(settings.kl, coefficient=facts["kl_coefficient"])
            row = take_step(training, replace(settings, kl=kl), step)
            newest = newest_checkpoint(training.run.checkpoints)
            check_step(
                row,
                accelerator.mixed_precision,
                newest,
                single_update=settings.optim.epochs * settings.optim.minibatches == 1,
            )
            append_metrics(training.run.metrics_file, row)
            accelerator.log(row, step=step)
            measured = next((row[name] for name in MEASURED_KL if name in row), None)
            facts["audited_kl"] = row.get(AUDITED_KL, facts["audited_kl"])  # stands till the next
            known = [value for value in (measured, facts["audited_kl"]) if value is not None]
            facts["guard_counts"] = watch(
                row,
                max(known, default=None),
                normal,
                settings.guards,
                facts["guard_counts"],
                newest,
                lambda words: accelerator.print(words, file=sys.stderr),
            )
            if measured is not None:
                facts["kl_coefficient"] = adjust(
                    kl.coefficient, measured, settings.batch.episodes_per_step, kl
                )
            shown = "" if measured is None else f"  kl {measured:.3f}"
            bar.show(f"reward {row['reward/mean']:+.2f}{shown}")
            bar.advance()
            doubtful = settings.guards.patience and facts["guard_counts"]
            is_last = step == settings.steps
            saver.after_step(step, facts, is_good=not doubtful, is_last=is_last)


def take_step(training: Training, settings: PPOSettings, step: int) -> dict[str, float]:
    """One step of sampling and updating; its metrics."""
    accelerator, store = training.accelerator, training.store
    beat("sampling", step)
    began = time.monotonic()
    rates = set_learning_rates(training, step)
    chosen = choose_prompts(
        training.prompts,
        step,
        settings.batch.episodes_per_step // settings.batch.samples_per_prompt,
        settings.batch.samples_per_prompt,
        settings.seed,
        rank=training.dp_rank,
        ranks=training.dp_size,
    )
    with training.gathered() as plain:
        rollout = collect_rollout(
            accelerator,
            plain,
            training.tokenizer,
            training.reward,
            training.reference_policy,
            chosen,
            training.reference_rewards,
            store.sampling,
            settings,
            training.sampler,
        )
        measured = measure_kl(training, plain, rollout, settings, step)
    beat("updating", step)
    scored = time.monotonic()
    generator = torch.Generator().manual_seed(_step_seed(training, step))
    rows = choose_reference_rows(
        chosen[:: settings.batch.samples_per_prompt], step, settings, generator
    )
    statistics = update(
        accelerator,
        training.model,
        training.optimizer,
        rollout,
        reference_batch(rows, int(training.tokenizer.pad_token_id), accelerator.device),
        settings,
        store.sampling.temperature,
        generator,
        choose_texts(training, step),
    )
    described = describe_rollout(accelerator, rollout)
    described |= describe_correction(accelerator, rollout, settings)
    row = {"step": step, **described, **measured, **statistics, **rates}
    if settings.has_critic:
        row |= describe_values(accelerator, rollout)
    row["seconds/sample"] = round(rollout.sampled_at - began, 2)
    row["seconds/score"] = round(scored - rollout.sampled_at, 2)
    row["seconds/update"] = round(time.monotonic() - scored, 2)
    return row


def choose_texts(training: Training, step: int) -> Sequences | None:
    """This process's pieces of pretraining text in a step; None where there are no texts."""
    if not training.texts:
        return None
    accelerator, settings = training.accelerator, training.settings
    ranks = training.dp_size
    pieces = deal(
        training.texts,
        step,
        ranks * pieces_per_step(settings, ranks),
        settings.seed,
        rank=training.dp_rank,
        ranks=ranks,
    )
    return stack_pieces(pieces, int(training.tokenizer.pad_token_id), accelerator.device)


def measure_kl(
    training: Training,
    model: PolicyAndCritic,
    rollout: Rollout,
    settings: PPOSettings,
    step: int,
) -> dict[str, float]:
    """The KLs of a step that are not part of its update, and the coefficient."""
    accelerator, kl = training.accelerator, settings.kl
    found: dict[str, float] = {}
    if rollout.reference_log_probs is not None:
        found |= describe_reverse_kl(
            accelerator, rollout.old_log_probs, rollout.reference_log_probs, rollout.response_mask
        )
    elif kl.audit_every and step % kl.audit_every == 0:
        found |= audit(
            accelerator,
            training.store,
            model,
            rollout.sequences,
            rollout.old_log_probs,
            settings.batch.micro_batch_size,
            tensor_parallel=settings.tensor_parallel > 1,
            holds_reference=settings.holds_reference,
        )
    if kl.target is None:
        return found
    if kl.source == "reference":
        held_out = training.store.by_prompt("test") or training.prompts
        rows = [group[0] for group in held_out[:CONTROL_PROMPTS]]
        measured = measure_forward_kl(
            accelerator, model.policy, training.tokenizer, rows, training.store.sampling.temperature
        )
        found["kl/held_out_forward_k3_per_token"] = measured["per_token"]
    return found | {"kl/coefficient": kl.coefficient}


def set_learning_rates(training: Training, step: int) -> dict[str, float]:
    """Anneal both learning rates linearly to 0 over the run; what they are now, as metrics."""
    settings = training.settings
    remaining = 1 - (step - 1) / settings.steps
    peaks = {"policy": settings.optim.learning_rate, "critic": settings.critic.learning_rate}
    rates = {}
    # without a critic there is only the first group
    for group, (name, peak) in zip(training.optimizer.param_groups, peaks.items(), strict=False):
        group["lr"] = rates[f"learning_rate/{name}"] = peak * remaining
    return rates


def finish(training: Training, facts: dict[str, Any]) -> None:
    """Save the policy, audit it and write the report."""
    accelerator, run = training.accelerator, training.run
    tensor_parallel = training.settings.tensor_parallel > 1
    with training.gathered() as plain:
        whole = full_state(accelerator, plain.policy) if tensor_parallel else None
        if accelerator.is_main_process:
            save_merged(plain.policy, training.tokenizer, run.policy, whole)
        if tensor_parallel or accelerator.is_main_process:
            heard = hear(training, plain.policy)
    if tensor_parallel or accelerator.is_main_process:
        found = report(training, heard)
    if accelerator.is_main_process:
        kept = {"critic_fit": facts["critic_fit"], "frozen_bytes": training.frozen_bytes}
        write_json(run.report_json, {**found, **kept})
    accelerator.wait_for_everyone()


def hear(training: Training, policy: PreTrainedModel) -> AuditSamples:
    """Let the trained policy answer held-out prompts (else training prompts) for the audit."""
    store, settings = training.store, training.settings
    groups = (store.by_prompt("test") or training.prompts)[:AUDIT_PROMPTS]
    seed_all(settings.seed)
    return sample_for_audit(
        training.accelerator,
        policy,
        training.tokenizer,
        store,
        groups,
        settings.sampling.batch_size,
        sampler=training.sampler,
        holds_reference=settings.holds_reference,
    )


def report(training: Training, heard: AuditSamples) -> dict[str, Any]:
    """Audit both KLs and sum up the run; gathered weights are gone when a reference comes."""
    settings = training.settings
    kl = audit_policy(
        training.accelerator,
        heard,
        training.tokenizer,
        training.store,
        tensor_parallel=settings.tensor_parallel > 1,
    )
    history = read_metrics(training.run.metrics_file)
    return {
        "steps": settings.steps,
        "seed": settings.seed,
        "reward": {"first": history[0]["reward/mean"], "last": history[-1]["reward/mean"]},
        "kl": kl,
        "seconds": round(sum(row[name] for row in history for name in CLOCKS), 1),
    }


def _require_even_split(settings: PPOSettings, processes: int) -> None:
    share = processes * math.lcm(settings.optim.minibatches, settings.batch.samples_per_prompt)
    if settings.batch.episodes_per_step % share:
        raise ConfigError(
            f"--batch.episodes-per-step {settings.batch.episodes_per_step} does not divide into "
            f"{processes} processes × {settings.optim.minibatches} minibatches, with "
            f"{settings.batch.samples_per_prompt} samples of each prompt in one process",
            f"Make it a multiple of {share}.",
        )


def _step_seed(training: Training, step: int) -> int:
    stride = RANK_SEED_STRIDE * training.dp_rank
    return training.settings.seed + stride + STEP_SEED_STRIDE * step
