"""Training a reward model: rankings a second, part of the device's rate, peak against the plan.

`--kind packed` is what `rlhf train-reward` does, `--kind trl` trl's RewardTrainer on the same
judgments (`reward.py` in the folder above says how both are kept alike). All weights are trained
where the plan says that they fit this device, else adapters; activations are recomputed only where
they must be. Both kinds train the same way.

    rankings_per_second
    utilization    6 · parameters of the matrices · tokens / second (4 · with adapters: frozen
                   weights want no gradients) over the rate at which this device multiplies large
                   bf16 matrices; attention and recomputation are not counted
    of_plan        peak of the device over the planned one
    over_trl       rankings per second of `packed` over trl's
"""

import argparse
import sys
from pathlib import Path

from examples.benchmarks.gpu import machine, texts
from examples.benchmarks.gpu.models import RANK, write_model
from examples.benchmarks.gpu.results import (
    REPOSITORY,
    Line,
    find_result,
    measure,
    parse,
    parser_of,
    say,
)
from reward.memory import plan_memory
from reward.settings import BatchSettings, DataSettings, LoraSettings, RewardSettings
from rlhf.planning.planner import Shape, read_shape

sys.path.append(str(REPOSITORY / "examples" / "benchmarks"))  # where its judgements.py lies
from examples.benchmarks import reward as comparison

PROMPTS, TOKENS, PER_STEP = {"1b": 256, "6b": 64}, 8192, 16
LONGEST = texts.PROMPT.most + texts.RESPONSE.most + 32  # with what the chat template adds
WAYS = tuple((adapter, again) for adapter in ("none", "lora") for again in (False, True))


def planned_gib(folder: Path, shape: Shape, adapter: str, again: bool, tokens: int) -> float:
    """The peak that `rlhf train-reward --dry-run` plans."""
    settings = RewardSettings(
        rankings=folder,
        model=str(folder),
        out=folder,
        adapter=adapter,  # type: ignore[arg-type]  # the settings check it
        batch=BatchSettings(gradient_checkpointing=again, micro_tokens=tokens),
        data=DataSettings(max_length=min(LONGEST, tokens)),
        lora=LoraSettings(rank=RANK, alpha=2 * RANK),
    )
    return plan_memory(settings, shape).peak / machine.GIB


def train(arguments: argparse.Namespace) -> Line:
    """Train one epoch, the first way that fits."""
    folder = write_model(arguments)
    prompts, tokens = (3, 512) if arguments.rehearse else (PROMPTS[arguments.size], TOKENS)
    data = texts.write_judgments(
        arguments.work / f"judgments-{prompts}.jsonl", prompts, rehearse=arguments.rehearse
    )
    shape = read_shape(str(folder))
    plans = {(a, again): planned_gib(folder, shape, a, again, tokens) for a, again in WAYS}
    ways = WAYS[::-1] if arguments.rehearse and arguments.size == "6b" else WAYS  # tries the last
    fitting = [way for way in ways if plans[way] <= machine.memory_gib()]
    if not fitting:
        raise SystemExit(f"nothing fits {machine.memory_gib():.1f} GiB: {plans}")
    adapter, again = fitting[0]
    planned = plans[fitting[0]]
    say(f"adapter {adapter}, checkpointing {again}: {planned:.1f} GiB planned")
    rate = machine.matmul_rate()
    machine.forget_peak()
    metrics = comparison.work(
        argparse.Namespace(
            **{"kind": arguments.kind, "model": str(folder), "data": str(data), "seed": 0},
            **{"prompts": prompts, "held_out": 0, "repeat": 1, "tokens": tokens},
            **{"prompt_tokens": LONGEST, "response_tokens": LONGEST, "learning_rate": 1e-5},
            gradient_checkpointing=again,
            prompts_per_step=min(PER_STEP, prompts),
            lora_rank=RANK if adapter == "lora" else 0,
        )
    )
    result = {
        "rankings_per_second": metrics["rankings_per_second"],
        "adapter": adapter,
        "checkpointing": again,
        "seconds": metrics["seconds"],
        "loss": metrics["loss"],
        "matmul_tflops": rate / 1e12,
        "peak_gib": metrics["peak_gib"],
        "planned_gib": planned,
    }
    if "tokens" not in metrics:
        return result | compare(arguments, result)
    operations = (4 if adapter == "lora" else 6) * shape.trunk_linear * metrics["tokens"]
    return result | {
        "tokens_per_second": metrics["tokens"] / metrics["seconds"],
        "utilization": operations / metrics["seconds"] / rate,
        "of_plan": metrics["peak_gib"] / planned,
    }


def compare(arguments: argparse.Namespace, trl: Line) -> Line:
    """Our rankings per second over trl's, where ours were measured the same way."""
    ours = find_result(arguments, "reward_model", {"size": arguments.size, "kind": "packed"})
    ways = ("adapter", "checkpointing")
    if ours is None or any(ours[name] != trl[name] for name in ways):
        return {}
    return {"over_trl": ours["rankings_per_second"] / trl["rankings_per_second"]}


def main(argv: list[str] | None = None) -> None:
    """Run the stage."""
    parser = parser_of(__doc__)
    parser.add_argument("--size", choices=("1b", "6b"), default="1b")
    parser.add_argument("--kind", choices=("packed", "trl"), default="packed")
    arguments = parse(parser, argv)
    settings = {"size": arguments.size, "kind": arguments.kind}
    measure(arguments, "reward_model", settings, lambda: train(arguments))


if __name__ == "__main__":
    main()
