"""`rlhf ppo`: train a policy against a reward model, held near the original by its stored outputs.

Differs from the PPO of InstructGPT (arXiv 2203.02155): the KL term is the forward KL on reference
outputs that were stored ahead of time, a loss beside the clip loss instead of a penalty in the
reward, so no reference model is in memory; and the reward is centred on the stored outputs of the
same prompt.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from transformers import PreTrainedTokenizerBase

from policies.actor_critic import PolicyAndCritic
from policies.audit import (
    audit_reverse_kl,
    load_reference_model,
    measure_forward_kl,
)
from policies.generate import sample_responses
from policies.invariants import check_reference, check_step
from policies.reference_store import (
    ReferenceRow,
    ReferenceStore,
    open_store,
    require_reference_of,
)
from policies.rollout import Rollout, collect_rollout
from policies.settings import PPOSettings
from policies.update import reference_batch, update
from reward.scoring import Scorer, load_scorer
from rlhf.checkpoint import load_checkpoint, save_checkpoint
from rlhf.distributed import RANK_SEED_STRIDE, global_sum, start
from rlhf.errors import ConfigError, InputError
from rlhf.jsonl import write_json
from rlhf.metrics import append_metrics, forget_metrics_after, progress, read_metrics
from rlhf.models import (
    describe_model,
    load_causal_lm,
    load_reward_model,
    model_folder,
    require_same_tokenizer,
    save_model,
)
from rlhf.rundir import RunDir, open_stage, require_done, stage_status
from rlhf.tokens import load_tokenizer, pad_right

ADAM_EPSILON = 1e-5  # PyTorch's default of 1e-8 makes early approx-KL several times larger
AUDIT_PROMPTS = 64
STEP_SEED_STRIDE = 1_000_003


@dataclass(frozen=True)
class Training:
    """What the loop works with; `prompts` are the stored rows of every training prompt."""

    accelerator: Accelerator
    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    tokenizer: PreTrainedTokenizerBase
    scorer: Scorer
    store: ReferenceStore
    prompts: Sequence[tuple[ReferenceRow, ...]]
    reference_rewards: dict[str, list[float]]
    settings: PPOSettings
    run: RunDir

    @property
    def plain_model(self) -> PolicyAndCritic:
        """Policy and critic without the wrappers of data parallelism."""
        model: PolicyAndCritic = self.accelerator.unwrap_model(self.model)
        return model


def train_policy(settings: PPOSettings) -> dict[str, Any]:
    """Run the stage and return its report.

    Raises:
        InputError: an input is missing, unfinished, or belongs to another model.
        GuardError: a step-0 invariant does not hold, or a loss is not a number.
    """
    reference = require_done(settings.reference, "reference", "outputs")
    store = open_store(reference.outputs)
    model = describe_model(settings.model)
    reward = describe_model(model_folder(settings.reward, "reward", "model"))
    require_reference_of(store, model)
    require_same_tokenizer(reward, model)
    stored = {"path": str(reference.path), "hash": store.content_hash}
    inputs = {"model": model, "reward": reward, "reference": stored}
    accelerator = start(settings.precision, settings.seed)
    _require_even_split(settings, accelerator.num_processes)
    run = open_stage(settings.out, "ppo", settings, inputs, resume=settings.resume)
    accelerator.wait_for_everyone()
    if run.is_done:
        return run.read_report()
    with stage_status(run):
        training = _set_up(settings, store, reward["path"], accelerator, run)
        progress_so_far = load_checkpoint(accelerator, run.checkpoints)
        done = progress_so_far["step"] if progress_so_far else 0
        forget_metrics_after(run.metrics_file, done)
        if done == 0:
            check_reference(
                accelerator,
                training.plain_model.policy,
                training.tokenizer,
                [rows[0] for rows in training.prompts[:AUDIT_PROMPTS]],
                store.sampling.temperature,
                [r for values in training.reference_rewards.values() for r in values],
            )
        train_loop(training, done)
        if accelerator.is_main_process:
            save_model(training.plain_model.policy, training.tokenizer, run.policy)
            write_json(run.report_json, report(training))
        accelerator.wait_for_everyone()
    return run.read_report()


def train_loop(training: Training, done: int) -> None:
    """Sample, score, update, report; once per step."""
    settings, accelerator = training.settings, training.accelerator
    with progress("ppo", total=settings.steps, done=done) as bar:
        for step in range(done + 1, settings.steps + 1):
            began = time.monotonic()
            set_learning_rates(training, step)
            chosen = choose_prompts(training, step)
            rollout = collect_rollout(
                accelerator,
                training.plain_model,
                training.tokenizer,
                training.scorer,
                chosen,
                training.reference_rewards,
                training.store.sampling,
                settings,
            )
            sampled = time.monotonic()
            generator = torch.Generator().manual_seed(_step_seed(training, step))
            rows = choose_reference_rows(chosen, step, settings, generator)
            statistics = update(
                accelerator,
                training.model,
                training.optimizer,
                rollout,
                reference_batch(rows, int(training.tokenizer.pad_token_id), accelerator.device),
                settings,
                training.store.sampling.temperature,
                generator,
            )
            row = {"step": step, **describe_rollout(accelerator, rollout), **statistics}
            row["seconds/sample"] = round(sampled - began, 2)
            row["seconds/update"] = round(time.monotonic() - sampled, 2)
            check_step(
                row,
                accelerator.mixed_precision,
                training.run.checkpoints,
                single_update=settings.epochs * settings.minibatches == 1,
            )
            append_metrics(training.run.metrics_file, row)
            bar.show(f"reward {row['reward/mean']:+.2f}  kl {row['kl/forward_k3_per_token']:.3f}")
            bar.advance()
            if step % settings.save_every == 0 and step < settings.steps:
                save_checkpoint(
                    accelerator, training.run.checkpoints, step, {}, settings.keep_checkpoints
                )


def choose_prompts(training: Training, step: int) -> list[tuple[ReferenceRow, ...]]:
    """This process's share of a step's prompts: each once per epoch, newly shuffled."""
    total = training.settings.episodes_per_step
    prompts = training.prompts
    rank, ranks = training.accelerator.process_index, training.accelerator.num_processes
    chosen = []
    for position in range((step - 1) * total + rank, step * total, ranks):
        epoch, place = divmod(position, len(prompts))
        generator = torch.Generator().manual_seed(training.settings.seed + epoch)
        order = torch.randperm(len(prompts), generator=generator)
        chosen.append(prompts[int(order[place])])
    return chosen


def choose_reference_rows(
    chosen: Sequence[tuple[ReferenceRow, ...]],
    step: int,
    settings: PPOSettings,
    generator: torch.Generator,
) -> list[ReferenceRow]:
    """Stored rows of the step's prompts for the KL term; M samples of a prompt take turns."""
    if settings.kl.source == "none":
        return []
    count = max(1, round(len(chosen) * settings.kl.rows_per_episode))
    picked = torch.randperm(len(chosen), generator=generator)[:count].tolist()
    return [chosen[index][step % len(chosen[index])] for index in picked]


def set_learning_rates(training: Training, step: int) -> None:
    """Anneal both learning rates linearly to 0 over the run."""
    remaining = 1 - (step - 1) / training.settings.steps
    peaks = (training.settings.learning_rate, training.settings.critic_learning_rate)
    for group, peak in zip(training.optimizer.param_groups, peaks, strict=True):
        group["lr"] = peak * remaining


def describe_rollout(accelerator: Accelerator, rollout: Rollout) -> dict[str, float]:
    """Means over all episodes, and over all tokens, of all processes."""
    mask = rollout.response_mask
    residual = (rollout.returns - rollout.old_values)[mask].double()
    returns = rollout.returns[mask].double()
    sums = global_sum(
        accelerator,
        torch.stack(
            [
                torch.tensor(float(len(rollout.scores))).to(accelerator.device),
                mask.sum(),
                rollout.scores.sum(),
                rollout.centered.sum(),
                rollout.shaped.sum(),
                rollout.finished.sum(),
                rollout.entropy.sum(),
                returns.sum(),
                (returns**2).sum(),
                residual.sum(),
                (residual**2).sum(),
            ]
        ),
    ).tolist()
    episodes, tokens = sums[0], sums[1]
    returns_variance = sums[8] / tokens - (sums[7] / tokens) ** 2
    residual_variance = sums[10] / tokens - (sums[9] / tokens) ** 2
    return {
        "reward/mean": sums[2] / episodes,
        "reward/centered": sums[3] / episodes,
        "reward/shaped": sums[4] / episodes,
        "eos_rate": sums[5] / episodes,
        "length": tokens / episodes,
        "entropy": sums[6] / tokens,
        "value/explained_variance": 1 - residual_variance / max(returns_variance, 1e-12),
    }


def report(training: Training) -> dict[str, Any]:
    """Audit both KLs on held-out prompts (else on training prompts) and sum up the run."""
    accelerator, store, settings = training.accelerator, training.store, training.settings
    groups = (store.by_prompt("test") or list(training.prompts))[:AUDIT_PROMPTS]
    rows = [row for group in groups for row in group]
    policy, temperature = training.plain_model.policy, store.sampling.temperature
    prompts = [group[0].prompt_ids for group in groups]
    set_seed(settings.seed)
    samples = sample_responses(
        accelerator, policy, training.tokenizer, prompts, store.sampling, settings.sample_batch_size
    )
    reference = load_reference_model(store, accelerator)
    history = read_metrics(training.run.metrics_file)
    return {
        "steps": settings.steps,
        "seed": settings.seed,
        "reward": {"first": history[0]["reward/mean"], "last": history[-1]["reward/mean"]},
        "kl": {
            "forward": measure_forward_kl(
                accelerator, policy, training.tokenizer, rows, temperature
            ),
            "reverse": {
                **audit_reverse_kl(
                    accelerator,
                    policy,
                    reference,
                    training.tokenizer,
                    prompts,
                    samples,
                    temperature,
                ),
                "audit": "measured after training with the reference model loaded",
            },
        },
        "seconds": round(sum(row["seconds/sample"] + row["seconds/update"] for row in history), 1),
    }


def _require_even_split(settings: PPOSettings, processes: int) -> None:
    share = processes * settings.minibatches
    if settings.episodes_per_step % share:
        raise ConfigError(
            f"--episodes-per-step {settings.episodes_per_step} does not divide into {processes} "
            f"processes × {settings.minibatches} minibatches",
            f"Make it a multiple of {share}.",
        )


def _step_seed(training: Training, step: int) -> int:
    rank: int = training.accelerator.process_index
    return training.settings.seed + RANK_SEED_STRIDE * rank + STEP_SEED_STRIDE * step


def _set_up(
    settings: PPOSettings,
    store: ReferenceStore,
    reward_path: str,
    accelerator: Accelerator,
    run: RunDir,
) -> Training:
    tokenizer = load_tokenizer(settings.model)
    critic = load_reward_model(reward_path)
    bias = float(getattr(critic.config, "reward_bias", 0.0))
    plain = PolicyAndCritic(load_causal_lm(settings.model), critic, bias)
    optimizer = torch.optim.AdamW(
        [
            {"params": plain.policy.parameters(), "lr": settings.learning_rate},
            {"params": plain.critic.parameters(), "lr": settings.critic_learning_rate},
        ],
        betas=(0.9, 0.95),
        eps=ADAM_EPSILON,
        weight_decay=0.0,
        fused=True,
    )
    model, optimizer = accelerator.prepare(plain, optimizer)
    scorer = load_scorer(reward_path, accelerator)
    prompts = store.by_prompt("train")
    if not prompts:
        raise InputError(
            "The reference store has no training prompts (split train)",
            "Make it from prompts of the train split: rlhf reference --prompts DIR …",
        )
    rewards = _reference_rewards(store, reward_path, scorer, accelerator, tokenizer)
    return Training(
        accelerator, model, optimizer, tokenizer, scorer, store, prompts, rewards, settings, run
    )


def _reference_rewards(
    store: ReferenceStore,
    reward_path: str,
    scorer: Scorer,
    accelerator: Accelerator,
    tokenizer: PreTrainedTokenizerBase,
) -> dict[str, list[float]]:
    """r(y0) by prompt: the stored ones where this reward model made them, else computed now."""
    stored_by = store.manifest["reward"]
    if stored_by is not None and stored_by["hash"] == describe_model(reward_path)["hash"]:
        rewards = [float(row.reward or 0.0) for row in store.rows]
    else:
        rewards = score_rows(store.rows, scorer, accelerator, tokenizer)
    grouped: dict[str, list[float]] = {}
    for row, reward in zip(store.rows, rewards, strict=True):
        grouped.setdefault(row.prompt.id, []).append(reward)
    return grouped


def score_rows(
    rows: Sequence[ReferenceRow],
    scorer: Scorer,
    accelerator: Accelerator,
    tokenizer: PreTrainedTokenizerBase,
    batch_size: int = 32,
) -> list[float]:
    """The reward of every stored reference output."""
    pad_id = int(tokenizer.pad_token_id)
    rewards: list[float] = []
    for first in range(0, len(rows), batch_size):
        part = rows[first : first + batch_size]
        batch = pad_right([row.prompt_ids + row.response_ids for row in part], pad_id)
        rewards += scorer(batch.to(accelerator.device)).tolist()
    return rewards
