"""`rlhf ppo`: trains a policy on a reward, with a KL term that keeps it near the original model.

By default (`--kl.source reference`) it differs from the PPO of InstructGPT (arXiv 2203.02155): the
KL term is the forward KL on reference outputs that were stored ahead of time, added to the loss,
and no reference model is in memory. `--kl.source resident` and `adapter` subtract the reverse KL
from the rewards, as InstructGPT does. `reward/mean` is the raw score, `reward/centered` the gain
over the mean of the prompt's reference outputs.
"""

import sys
from dataclasses import asdict
from typing import Any

import torch

from policies.formulas import FORWARD_KL
from policies.ppo.batches import (
    choose_prompts,
    choose_reference_rows,
    ptx_input,
)
from policies.ppo.checks import average_references, check_guards, check_reference, check_step
from policies.ppo.kl import adjust, audit, require_top_k, reverse_kl_metrics
from policies.ppo.memory import checkpoint_disk_bytes, require_memory
from policies.ppo.models.actor_critic import PolicyAndCritic, call_with_root_gathered
from policies.ppo.models.critic import fit_critic
from policies.ppo.models.shared_base import require_shared_base
from policies.ppo.report import AUDIT_PROMPTS, finish
from policies.ppo.rollout import (
    Episodes,
    TokenStats,
    build_experience,
    measure_episodes,
    sample_episodes,
    score_episodes,
)
from policies.ppo.rollout_metrics import (
    sample_metrics,
    sampler_metrics,
    value_metrics,
)
from policies.ppo.settings import PPOSettings
from policies.ppo.setup import STATE, LoopState, Training, require_even_split, set_up
from policies.ppo.update import (
    Learner,
    LossSums,
    StepData,
    TokenCounts,
    compute_gradients,
    every_minibatch,
    mean_approx_kl,
    reference_batch,
    step_metrics,
)
from policies.reference.audit import measure_forward_kl
from policies.reference.loading import open_store_on_main
from policies.reference.store import require_reference_of, require_training_prompts
from policies.rewards import describe_rewards
from rlhf.modeling.heads import reward_head
from rlhf.modeling.models import describe_for_all, require_trainable
from rlhf.parallel.distributed import RANK_SEED_STRIDE, device_bytes, seed_all, start
from rlhf.parallel.sharding import assign, clear_gradients, clip_gradients, unwrap
from rlhf.parallel.sharding_choice import choose_sharding
from rlhf.parallel.waits import waiting
from rlhf.planning.utilization import Laps
from rlhf.records.documents import require_kinds
from rlhf.run.checkpoint import load_checkpoint, newest_checkpoint
from rlhf.run.metrics import append_metrics, forget_metrics_after, progress
from rlhf.run.rundir import require_done
from rlhf.run.saving.saver import Saver
from rlhf.run.stage import training_stage
from rlhf.run.watchdog import beat

AUDITED_KL = "kl_audit/reverse_k1_per_token"
CONTROL_PROMPTS = 16
GUARD_PROMPTS = 10_000
MEASURED_KL = (  # what the controller steers by, the first that a step has
    "kl/held_out_forward_k3_per_token",
    "kl/reverse_k1_per_token",
    *(name for name, _ in FORWARD_KL.values()),
)
STEP_SEED_STRIDE = 1_000_003


def train_policy(settings: PPOSettings) -> dict[str, Any]:
    """Run the stage and return its report.

    Raises:
        InputError: an input is missing, unfinished, or belongs to another model.
        GuardError: a check before the first step fails, or a loss is not a number.
    """
    require_trainable(settings.model)
    reference = require_done(settings.reference, "reference", "outputs")
    sharding = choose_sharding(settings)
    accelerator = start(settings.precision, settings.seed)
    require_memory(settings, sharding, device_bytes(settings.processes))
    store = open_store_on_main(reference.outputs, settings.model)
    model = describe_for_all(settings.model, store.template_kwargs)
    require_reference_of(store, model)
    require_top_k(store, settings.kl)
    require_training_prompts(store)
    stored = {"path": str(reference.path), "hash": store.content_hash}
    inputs = {"model": model, "reference": stored, **describe_rewards(settings.reward, model)}
    inputs |= ptx_input(settings.ptx.data)
    require_shared_base(settings, model, sharding)
    if sharding.is_tensor_parallel:
        seed_all(settings.seed)  # all processes sample the same
    require_even_split(settings, accelerator.num_processes // settings.parallel.tensor_parallel)
    with training_stage(
        accelerator, "ppo", settings, inputs, checkpoint_disk_bytes(settings)
    ) as run:
        if run.is_done:
            return run.read_report()
        training = set_up(settings, store, accelerator, sharding, run)
        saved = load_checkpoint(accelerator, run.checkpoints) or {"step": 0}
        require_kinds(saved, STATE, f"{run.checkpoints} (progress.json)")
        state = LoopState.of(saved, settings)
        forget_metrics_after(run.metrics_file, saved["step"])
        if saved["step"] == 0:
            with training.model_copy.weights_of(training.model) as plain:
                check_policy_is_reference(training, plain)
                state.critic_fit = warm_up_critic(training, plain)
        train_loop(training, saved["step"], state)
        finish(training, state)
    return run.read_report()


def check_policy_is_reference(training: Training, plain: PolicyAndCritic) -> None:
    """Check that the policy gives the reference outputs the log-probs that the store has.

    A policy on 4 bits is not checked: the stored log-probs are of unquantized weights.

    Raises:
        GuardError: they differ.
    """
    if training.settings.lora.four_bit_base:
        return
    inputs = (
        training.tokenizer,
        [rows[0] for rows in training.prompts[:AUDIT_PROMPTS]],
        training.store.sampling.temperature,
    )
    call_with_root_gathered(
        plain, lambda: check_reference(training.accelerator, plain.policy, *inputs)
    )


def warm_up_critic(training: Training, plain: PolicyAndCritic) -> dict[str, Any] | None:
    """Fit the critic's head, if settings want it; what the fit has found.

    The head of `plain` is fitted, which may be a copy, and that of the trained model is set to it.
    """
    if not (training.settings.has_critic and training.settings.critic.warmup):
        return None
    critic_fit = fit_critic(
        training.accelerator,
        plain,
        training.prompts,
        training.rollout.reference_rewards,
        training.settings,
        int(training.tokenizer.pad_token_id),
        training.rollout.sharding,
    )
    trained: PolicyAndCritic = unwrap(training.model)
    trained.value_bias.copy_(plain.value_bias)
    assign(reward_head(trained.critic).weight, reward_head(plain.critic).weight)
    return critic_fit


def train_loop(training: Training, done: int, state: LoopState) -> None:
    """Take steps `done` + 1 to the last; check, report and save after each."""
    settings, accelerator, run = training.settings, training.accelerator, training.run
    saver = Saver(accelerator, run.checkpoints, settings.checkpoint)
    sampled = training.prompts[:: 1 + len(training.prompts) // GUARD_PROMPTS]
    reference_means = average_references([row for rows in sampled for row in rows])
    is_single = settings.optim.epochs * settings.optim.minibatches == 1
    with (
        progress("training the policy", settings.steps, done, is_stage=True) as bar,
        saver.saving_on_sigterm(),
    ):
        for step in range(done + 1, settings.steps + 1):
            metrics = take_step(training, step, state.kl_coefficient)
            newest = newest_checkpoint(run.checkpoints)
            check_step(metrics, accelerator.mixed_precision, newest, single_update=is_single)
            append_metrics(run.metrics_file, metrics)
            accelerator.log(metrics, step=step)
            step_kl = next((metrics[name] for name in MEASURED_KL if name in metrics), None)
            state.audited_kl = metrics.get(AUDITED_KL, state.audited_kl)  # valid until the next
            measured_kls = [value for value in (step_kl, state.audited_kl) if value is not None]
            state.guard_counts = check_guards(
                metrics,
                max(measured_kls, default=None),
                reference_means,
                settings.guards,
                state.guard_counts,
                newest,
                lambda message: accelerator.print(message, file=sys.stderr),
            )
            if step_kl is not None:
                episodes = settings.batch.episodes_per_step
                state.kl_coefficient = adjust(state.kl_coefficient, step_kl, episodes, settings.kl)
            shown = "" if step_kl is None else f"  kl {step_kl:z.3f}"
            bar.show(f"reward {metrics['reward/mean']:+z.2f}{shown}")
            bar.advance()
            has_warning = settings.guards.patience and state.guard_counts
            is_last = step == settings.steps
            saver.after_step(step, asdict(state), is_good=not has_warning, is_last=is_last)


def take_step(training: Training, step: int, kl_coefficient: float) -> dict[str, float]:
    """One step of PPO: rollout, scores, advantages, losses and optimizer steps; its metrics.

    Args:
        training: the run.
        step: from 1.
        kl_coefficient: weight of the KL term in this step.
    """
    accelerator, context, settings = training.accelerator, training.rollout, training.settings
    laps = Laps(accelerator, training.matmul_rate, settings.parallel.tensor_parallel)
    beat("sampling", step)
    rates = set_learning_rates(training, step)
    with waiting("data"):
        prompts = choose_prompts(
            training.prompts,
            step,
            settings.batch,
            settings.seed,
            dp_rank=training.dp_rank,
            dp_size=training.dp_size,
        )
    with training.policy_copy.weights_of(unwrap(training.model).policy) as policy:
        episodes = sample_episodes(context, policy, prompts, settings.sampling.batch_size)
    laps.end("sample")
    scores = score_episodes(context, episodes)
    with training.model_copy.weights_of(training.model) as model:
        measured = measure_episodes(context, model, episodes, settings)
        experience = build_experience(context, episodes, scores, measured, settings, kl_coefficient)
        step_kls = call_with_root_gathered(
            model, lambda: kl_metrics(training, model, episodes, measured, step, kl_coefficient)
        )
    beat("updating", step)
    laps.end("score")
    generator = torch.Generator().manual_seed(_step_seed(training, step))
    with waiting("data"):
        reference_rows = choose_reference_rows(
            prompts[:: settings.batch.samples_per_prompt], step, settings, generator
        )
        pad_id = int(training.tokenizer.pad_token_id)
        references = reference_batch(reference_rows, pad_id, accelerator.device)
        texts = training.texts.of_step(step) if training.texts else None
    data = StepData(experience, references, texts)
    temperature = context.sampling.temperature
    learner = Learner(
        accelerator, training.model, training.optimizer, settings, temperature, kl_coefficient
    )
    statistics = update(learner, data, generator)
    laps.end("update")
    metrics = {"step": step, **sample_metrics(accelerator, episodes, scores, measured)}
    cap = settings.sampling.correction_cap
    metrics |= sampler_metrics(context, episodes, experience, cap)
    metrics |= {**step_kls, **statistics, **rates}
    if settings.advantages == "gae":
        metrics |= value_metrics(accelerator, experience)
    return metrics | laps.seconds | laps.metrics()


def update(learner: Learner, data: StepData, generator: torch.Generator) -> dict[str, float]:
    """Run the epochs of one step; the metrics of its losses and gradients.

    Ends early when approx-KL exceeds `target_kl`; `updates` counts the optimizer steps taken.
    """
    optim = learner.settings.optim
    policy_and_critic: PolicyAndCritic = unwrap(learner.model)
    norms = {f"grad_norm/{name}": 0.0 for name in policy_and_critic.parts}
    device = learner.accelerator.device
    sums, counts = LossSums.zero(device, torch.float64), TokenCounts.zero(device)
    updates = 0
    for minibatch in every_minibatch(data, optim.epochs, optim.minibatches, generator):
        new_sums, new_counts = compute_gradients(learner, data, minibatch)
        sums.add(new_sums)
        counts += new_counts
        if mean_approx_kl(new_sums, new_counts) > optim.target_kl:
            clear_gradients(learner.model, learner.optimizer)
            break
        for name, part in policy_and_critic.parts.items():
            norms[f"grad_norm/{name}"] = clip_gradients(
                learner.accelerator, learner.model, part.parameters(), optim.max_grad_norm
            )
        learner.optimizer.step()
        clear_gradients(learner.model, learner.optimizer)
        updates += 1
    return {**step_metrics(sums, counts, learner.settings), "updates": updates, **norms}


def kl_metrics(
    training: Training,
    model: PolicyAndCritic,
    episodes: Episodes,
    measured: TokenStats,
    step: int,
    kl_coefficient: float,
) -> dict[str, float]:
    """The KLs of a step that are not part of its update, and the coefficient.

    * The reverse KL of the episodes, if the reference's log-probs of them are measured in every
      step; else in every `--kl.audit-every`th step as an audit, for which the original model is
      loaded or the adapters are switched off.
    * With `--kl.target` and stored reference outputs, the forward KL on those of held-out prompts,
      by which the coefficient is adapted.
    * With `--kl.target`, `kl/coefficient`.
    """
    accelerator, kl = training.accelerator, training.settings.kl
    metrics: dict[str, float] = {}
    if measured.reference_log_probs is not None:
        metrics |= reverse_kl_metrics(
            accelerator, measured.log_probs, measured.reference_log_probs, episodes.mask
        )
    elif kl.audit_every and step % kl.audit_every == 0:
        metrics |= audit(
            accelerator,
            training.store,
            model,
            episodes.sequences,
            measured.log_probs,
            training.settings,
            training.rollout.sharding,
        )
    if kl.target is None:
        return metrics
    if kl.source == "reference":
        held_out = training.store.by_prompt("test") or training.prompts
        rows = [group[0] for group in held_out[:CONTROL_PROMPTS]]
        held_out_kl = measure_forward_kl(
            accelerator, model.policy, training.tokenizer, rows, training.store.sampling.temperature
        )
        metrics["kl/held_out_forward_k3_per_token"] = held_out_kl["per_token"]
    return metrics | {"kl/coefficient": kl_coefficient}


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


def _step_seed(training: Training, step: int) -> int:
    stride = RANK_SEED_STRIDE * training.dp_rank
    return training.settings.seed + stride + STEP_SEED_STRIDE * step
