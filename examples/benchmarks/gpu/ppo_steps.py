"""PPO with one engine: episodes a second, phases, the sampler's gap, peak against the plan.

`--size 1b` trains all weights of policy and critic with the KL term on stored outputs, `--size 6b`
adapters on one frozen model (`--lora.share-base`) with `--kl.source adapter`. Activations are
recomputed only where the plan says that they must be. The first step warms up; what is given is the
median of the others. Nothing is saved: the steps are those of `rlhf ppo`, without its checkpoints.

    episodes_per_second
    sample, score, update     seconds of the phases
    sampled_per_second        answer tokens while sampling
    updated_per_second        tokens of prompts and answers while updating
    utilization               of the update: 6 · parameters of the matrices · tokens / second for
                              each of policy and critic (4 · with adapters), over the matmul rate
    sampler_gap               nats a token between the sampler's log-probs and the trainer's
"""

import argparse
import re
from dataclasses import replace
from pathlib import Path
from statistics import fmean, median

from examples.benchmarks.gpu import machine, texts
from examples.benchmarks.gpu.models import (
    RANK,
    write_model,
    write_reward_adapter,
    write_reward_model,
)
from examples.benchmarks.gpu.results import Line, measure, parse, parser_of, say
from policies.ppo import setting_groups as groups
from policies.ppo.memory import plan_memory
from policies.ppo.settings import PPOSettings
from policies.ppo.setup import set_up
from policies.ppo.train import check_policy_is_reference, take_step, warm_up_critic
from policies.reference.build import build_reference
from policies.reference.settings import ReferenceSettings, SamplingSettings
from policies.reference.store import open_store
from rlhf.parallel.distributed import start
from rlhf.parallel.sharding_choice import choose_sharding
from rlhf.planning.planner import read_shape
from rlhf.run.rundir import RunDir, require_done

PROMPTS, EPISODES, STEPS, TOKENS = 64, 64, 4, 8192
LONGEST_ANSWER = 3 * texts.ANSWER
PHASES = ("sample", "score", "update")


def prepare(arguments: argparse.Namespace) -> PPOSettings:
    """Model, reward model and reference outputs, as far as they are not there; the settings."""
    small = arguments.rehearse
    episodes, tokens = (4, 256) if small else (EPISODES, TOKENS)
    model = write_model(arguments)
    shares = arguments.size == "6b"
    reward = (write_reward_adapter if shares else write_reward_model)(arguments, model)
    prompts = texts.write_prompts(
        arguments.work / "prompts.jsonl", 4 if small else PROMPTS, rehearse=small
    )
    reference = arguments.work / f"reference-{model.name}"
    build_reference(
        ReferenceSettings(
            prompts=prompts,
            model=str(model),
            out=reference,
            sampling=SamplingSettings(
                max_new_tokens=LONGEST_ANSWER // (texts.REHEARSAL if small else 1)
            ),
            batch_size=episodes,
            resume=reference.exists(),
        )
    )
    settings = PPOSettings(
        model=str(model),
        reward=(str(reward),),
        reference=reference,
        out=arguments.work / "ppo",  # stays empty
        steps=2 if small else STEPS,
        batch=groups.BatchSettings(episodes_per_step=episodes, micro_tokens=tokens),
        sampling=groups.SamplingSettings(engine=arguments.engine, batch_size=episodes),
    )
    if shares:
        settings = replace(
            settings,
            lora=groups.LoraSettings(rank=RANK, share_base=True),
            kl=groups.KLSettings(source="adapter", coefficient=0.05),
        )
    return settings


def planned_gib(settings: PPOSettings) -> float:
    """The peak that `rlhf ppo --dry-run` plans."""
    match = re.search(r"^peak +([\d.]+)", plan_memory(settings), re.MULTILINE)
    assert match
    return float(match[1])


def fitting(settings: PPOSettings) -> tuple[PPOSettings, float]:
    """The settings with checkpointing where it must be, and the planned peak."""
    again = replace(settings, batch=replace(settings.batch, gradient_checkpointing=True))
    plans = [(candidate, planned_gib(candidate)) for candidate in (settings, again)]
    for candidate, planned in plans:
        if planned <= machine.memory_gib():
            return candidate, planned
    raise SystemExit(f"nothing fits {machine.memory_gib():.1f} GiB: {[gib for _, gib in plans]}")


def take_steps(settings: PPOSettings) -> list[Line]:
    """The metrics of every step but the first, each with its seconds."""
    store = open_store(require_done(settings.reference, "reference", "outputs").outputs)
    accelerator = start(settings.precision, settings.seed)
    run = RunDir(Path(settings.out))
    training = set_up(settings, store, accelerator, choose_sharding(settings), run)
    with training.model_copy.weights_of(training.model) as plain:
        check_policy_is_reference(training, plain)
        warm_up_critic(training, plain)
    rows: list[Line] = []
    for step in range(1, settings.steps + 1):
        began = machine.now()
        row = take_step(training, step, settings.kl.coefficient)
        rows.append({**row, "seconds": machine.now() - began})
        phases = "  ".join(f"{name} {row[f'seconds/{name}']:.2f} s" for name in PHASES)
        say(
            f"step {step}  {rows[-1]['seconds']:.2f} s  {phases}  length {row['length']:.0f}  "
            f"gap {row['sampler_gap']:.4f}  peak {machine.peak_gib():.3g} GiB"
        )
    return rows[1:]


def train(arguments: argparse.Namespace) -> Line:
    """Prepare, train, and say what a step took."""
    settings, planned = fitting(prepare(arguments))
    say(f"checkpointing {settings.batch.gradient_checkpointing}: {planned:.1f} GiB planned")
    rate = machine.matmul_rate()
    machine.forget_peak()
    rows = take_steps(settings)
    peak = machine.peak_gib()
    episodes = settings.batch.episodes_per_step
    seconds = {name: median(max(0.01, row[f"seconds/{name}"]) for row in rows) for name in PHASES}
    answered = episodes * fmean(row["length"] for row in rows)
    store = open_store(require_done(settings.reference, "reference", "outputs").outputs)
    read = answered + episodes * fmean(len(row.prompt_ids) for row in store.rows)
    operations = 2 * (4 if settings.lora.rank else 6) * read_shape(settings.model).trunk_linear
    return {
        "episodes_per_second": episodes / median(row["seconds"] for row in rows),
        **seconds,
        "sampled_per_second": answered / seconds["sample"],
        "updated_per_second": read / seconds["update"],
        "utilization": operations * read / seconds["update"] / rate,
        "sampler_gap": max(row["sampler_gap"] for row in rows),
        "eos_rate": fmean(row["eos_rate"] for row in rows),
        "length": answered / episodes,
        "peak_gib": peak,
        "planned_gib": planned,
        "of_plan": peak / planned,
        "checkpointing": settings.batch.gradient_checkpointing,
        "matmul_tflops": rate / 1e12,
    }


def main(argv: list[str] | None = None) -> None:
    """Run the stage."""
    parser = parser_of(__doc__)
    parser.add_argument("--size", choices=("1b", "6b"), default="1b")
    parser.add_argument("--engine", choices=("generate", "continuous", "vllm"), default="generate")
    arguments = parse(parser, argv)
    settings = {"size": arguments.size, "engine": arguments.engine}
    measure(arguments, "ppo_steps", settings, lambda: train(arguments))


if __name__ == "__main__":
    main()
