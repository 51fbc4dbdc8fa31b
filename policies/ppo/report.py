"""The end of `rlhf ppo`: save the policy, audit it and report."""

from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedModel

from policies.ppo.models.actor_critic import call_with_root_gathered, save_policy
from policies.ppo.rollout_metrics import forecast_amount
from policies.ppo.setup import LoopState, Training
from policies.reference.audit import AuditSamples, audit_policy, measure_for_audit
from policies.reference.store import ReferenceRow
from policies.sampling.generate import Sample, sample_responses
from rlhf.parallel.distributed import from_main, seed_all
from rlhf.parallel.master_weights import float32_model
from rlhf.parallel.sharding import unwrap
from rlhf.planning.price import cost_of
from rlhf.planning.utilization import PROFILING, describe_use
from rlhf.records.jsonl import write_json
from rlhf.run.metrics import read_metrics

AUDIT_PROMPTS = 64
CLOCKS = ("seconds/sample", "seconds/score", "seconds/update")
LONGER_PASSES = "--batch.micro-tokens, --batch.micro-batch-size"


def finish(training: Training, state: LoopState) -> None:
    """Save the policy, audit it and write the report."""
    accelerator, run = training.accelerator, training.run
    is_sharded = training.rollout.sharding.is_sharded
    # whether all ranks call the policy, or the engine
    needs_all_ranks = is_sharded or training.settings.sampling.engine_tensor_parallel > 1
    joins_audit = needs_all_ranks or accelerator.is_main_process
    policy = unwrap(float32_model(training.model, training.optimizer))
    save_policy(accelerator, policy, training.tokenizer, run.policy)
    with training.policy_copy.weights_of(unwrap(training.model).policy) as plain:
        samples = sample_for_audit(training, plain) if joins_audit else []
    with training.model_copy.weights_of(training.model) as model:
        if joins_audit:
            measured = call_with_root_gathered(
                model, lambda: measure_samples(training, model.policy, samples)
            )
    if joins_audit:
        content = build_report(training, measured)
    if accelerator.is_main_process:
        cost = cost_of(run, training.settings.price_per_hour)
        kept = {"critic_fit": state.critic_fit, "frozen_bytes": training.frozen_bytes, "cost": cost}
        write_json(run.report_json, {**content, **kept})
    accelerator.wait_for_everyone()


def sample_for_audit(training: Training, policy: PreTrainedModel) -> list[Sample]:
    """The trained policy's responses to the prompts of the audit."""
    seed_all(training.settings.seed)
    samples = sample_responses(
        training.rollout.sampler,
        policy,
        training.tokenizer,
        [group[0].prompt_ids for group in audit_prompts(training)],
        training.store.sampling,
        training.settings.sampling.batch_size,
    )
    # every rank scores the same ones
    return from_main(samples) if training.rollout.sharding.shards_weights else samples


def audit_prompts(training: Training) -> Sequence[tuple[ReferenceRow, ...]]:
    """The reference rows of each prompt of the audit: held-out ones, else training prompts."""
    return (training.store.by_prompt("test") or training.prompts)[:AUDIT_PROMPTS]


def measure_samples(
    training: Training, policy: PreTrainedModel, samples: Sequence[Sample]
) -> AuditSamples:
    """The measurements that the audit needs from the policy itself."""
    return measure_for_audit(
        training.accelerator,
        policy,
        training.tokenizer,
        training.store,
        audit_prompts(training),
        [sample.token_ids for sample in samples],
        holds_reference=training.settings.holds_reference,
    )


def build_report(training: Training, samples: AuditSamples) -> dict[str, Any]:
    """Audit both KLs and sum up the run; gathered weights are gone when a reference is loaded."""
    settings = training.settings
    kl = audit_policy(
        training.accelerator,
        samples,
        training.tokenizer,
        training.store,
        training.rollout.sharding,
    )
    history = read_metrics(training.run.metrics_file)
    rate, engine = training.matmul_rate, settings.sampling.engine
    return {
        "steps": settings.steps,
        "seed": settings.seed,
        "amount": forecast_amount(settings, training.store, history),
        "reward": {"first": history[0]["reward/mean"], "last": history[-1]["reward/mean"]},
        "kl": kl,
        "seconds": round(sum(row[name] for row in history for name in CLOCKS), 1),
        "use": describe_use(
            history,
            rate,
            CLOCKS,
            LONGER_PASSES,
            all_counted=engine != "vllm",
            profiling=PROFILING,
        ),
    }
