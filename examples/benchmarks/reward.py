"""Training a reward model: rankings per second here against trl's RewardTrainer, and accuracy.

Both see the same judgments (ties left out) as the same token ids, the same weights and head, bf16
autocast where the machine has it, fused AdamW with the same betas, rate and clipping, as many
prompts a step, and about as many tokens a forward pass. trl would recompute activations unless told
not to: it does so only where ours does. Each run is a process of its own that reports its time and
its peak memory. The mean losses over the pairs of the first prompts, on the untrained model, must
agree before anything counts; their gradients come with them, so that no time has first allocations
or a kernel's compiling in it.

    speed      rankings per second; runs of ours show what each part brings:
                   pairs     every judged pair on its own, as trl has it
                   groups    all pairs of a prompt at once, every response encoded once, rows padded
                   prompts   the prompt encoded once for its responses, each prompt a row alone
                   packed    several prompts in a row: what `rlhf train-reward` does
    accuracy   on held-out prompts after equal training, three seeds, with an interval
    linear     time for 1, 2 and 4 times the same data

    python examples/benchmarks/reward.py [speed|accuracy|linear] [--quick] [--json] [--data FILE]

Before it starts it says about how long it will take, and other sizes would; with --dry-run it stops
there. Speed, memory and linearity want an idle machine, accuracy does not. FILE holds lines
{"prompt", "responses", "pairs": [[i, j, "first" | "second" | "tie"], ...]}, or "tiers" instead of
pairs. Without it, random words of the same lengths: speed does not depend on what is said.
"""

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from judgements import Line, build_groups, epoch_tokens, pairs_per_pass, read_judgements

if TYPE_CHECKING:
    from reward.data.groups import Group
    from reward.training.step import TrainState

REPOSITORY = Path(__file__).parents[2]
MODEL = REPOSITORY / "models" / "SmolLM2-135M-Instruct"
SPEED_KINDS = ("trl", "pairs", "groups", "prompts", "packed")
ACCURACY_KINDS = ("trl", "packed")
REPEATS = (1, 2, 4)
LARGEST_LOSS_DIFFERENCE = 0.02  # bf16
SEEDS = (0, 1, 2)
RESAMPLES = 2000
SIZES = (4, 8, 16, 32, 64)
LOSS_PROMPTS = 2  # on which the untrained losses are compared
TFLOPS = 0.45  # of two cores with AMX, trained in bf16
STARTUP = 40.0  # seconds of a process before it trains


def wrap(model: Any, kind: str, tokens: int) -> "TrainState":
    """A model with all that our trainer wants."""
    from torch.optim import AdamW

    from reward.losses import Objective
    from reward.model.module import RewardModule
    from reward.training.step import TrainState
    from rlhf.modeling.attention.shared_prefix import share_prompts
    from rlhf.parallel.distributed import start

    accelerator = start("auto", 0)
    module = RewardModule(model)
    shared = kind in ("prompts", "packed")
    if shared and (obstacle := share_prompts(module.classifier)):
        raise SystemExit(f"prompts cannot be shared: {obstacle}")
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    optimizer = AdamW(trained, lr=0.0, weight_decay=0.0, fused=True)
    prepared, optimizer = accelerator.prepare(module, optimizer)
    budget = 1 if kind == "prompts" else tokens
    return TrainState(accelerator, prepared, optimizer, 0, budget, Objective(), shared)


def run_ours(lines: list[Line], held_out: list[Line], arguments: argparse.Namespace) -> Line:
    """Train one epoch with this project; before that the mean loss over the first pairs."""
    from reward.data.batches import epoch_order
    from reward.training.step import take_step

    kind = arguments.kind
    state = wrap(load_model(arguments), kind, arguments.tokens)
    groups = build_groups(lines, arguments, apart=kind == "pairs")
    loss = first_loss(state, build_groups(lines[:LOSS_PROMPTS], arguments, apart=kind == "pairs"))
    per_step = round(arguments.prompts_per_step * len(groups) / len(lines))
    order = epoch_order(len(groups), arguments.seed, 0)
    began = time.perf_counter()
    for first in range(0, len(groups), per_step):
        chosen = [groups[number] for number in order[first : first + per_step]]
        take_step(state, chosen, arguments.learning_rate)
    seconds = time.perf_counter() - began
    real, total = count_tokens(state, [groups[number] for number in order], per_step)
    metrics = {"loss": loss, "seconds": seconds, "real_tokens": real / total, "tokens": total}
    return metrics | judge(state, held_out, arguments)


def first_loss(state: "TrainState", groups: "list[Group]") -> float:
    """The mean loss over pairs before training; gradients are computed and thrown away."""
    from torch.nn.functional import logsigmoid

    from reward.data.batches import to_pair_tensors
    from reward.training.step import forward, my_passes

    total, number = 0.0, 0
    state.module.train()
    for part in my_passes(state, groups):
        rewards = forward(state, part)
        pairs = to_pair_tensors(part, rewards.device)
        loss = -logsigmoid(rewards[pairs.first] - rewards[pairs.second]).sum()
        loss.backward()
        total, number = total + loss.item(), number + len(pairs.first)
    state.optimizer.zero_grad()
    return total / number


def count_tokens(state: "TrainState", groups: "list[Group]", per_step: int) -> tuple[int, int]:
    """Tokens that are not padding, and all that the forward passes of an epoch see."""
    from reward.data.batches import lay_out, num_tokens
    from reward.training.step import my_passes

    real = total = 0
    for first in range(0, len(groups), per_step):
        for part in my_passes(state, groups[first : first + per_step]):
            size = lay_out(part, state.pad_id, shared=state.shared).ids.numel()
            filled = sum(num_tokens(group, shared=False) for group in part)
            real += size if state.shared else filled  # packed rows have no padding
            total += size
    return real, total


def judge(state: "TrainState", held_out: list[Line], arguments: argparse.Namespace) -> Line:
    """Of each held-out prompt's pairs, how many are ordered as judged, and how many there are."""
    from reward.accuracy import count_right
    from reward.training.step import score_groups

    if not held_out:
        return {}
    groups = build_groups(held_out, arguments, apart=False)
    rows = score_groups(state, groups)
    return {"right": [count_right(group, row) for group, row in zip(groups, rows, strict=True)]}


def run_trl(lines: list[Line], held_out: list[Line], arguments: argparse.Namespace) -> Line:
    """Train one epoch with trl's RewardTrainer on the same token ids."""
    import torch
    from datasets import Dataset
    from trl import RewardConfig, RewardTrainer

    from rlhf.modeling.attention.checkpointing import checkpointing_argument
    from rlhf.modeling.tokens import load_tokenizer
    from rlhf.parallel.distributed import choose_precision

    groups = build_groups(lines, arguments, apart=True)
    rows = [
        {"chosen_ids": [*g.prompt, *g.responses[0]], "rejected_ids": [*g.prompt, *g.responses[1]]}
        for g in groups
    ]
    per_pass = pairs_per_pass(build_groups(lines, arguments, apart=False), arguments.tokens)
    pairs_per_step = arguments.prompts_per_step * len(groups) / len(lines)
    first_pairs = len(build_groups(lines[:LOSS_PROMPTS], arguments, apart=True))
    with tempfile.TemporaryDirectory() as folder:
        config = RewardConfig(
            output_dir=folder,
            per_device_train_batch_size=per_pass,
            per_device_eval_batch_size=per_pass,
            gradient_accumulation_steps=max(1, round(pairs_per_step / per_pass)),
            num_train_epochs=1,
            learning_rate=arguments.learning_rate,
            lr_scheduler_type="constant",
            weight_decay=0.0,
            max_length=None,
            bf16=choose_precision("auto") == "bf16",
            **{checkpointing_argument(RewardConfig): arguments.gradient_checkpointing},
            use_cpu=not torch.cuda.is_available(),
            seed=arguments.seed,
            report_to="none",
            save_strategy="no",
            logging_strategy="no",
            disable_tqdm=True,
        )
        trainer = RewardTrainer(
            model=load_model(arguments),
            args=config,
            train_dataset=Dataset.from_list(rows),
            processing_class=load_tokenizer(arguments.model),
        )
        loss = mean_loss_of_trl(trainer, first_pairs)
        began = time.perf_counter()
        trainer.train()
        seconds = time.perf_counter() - began
    trained = trainer.accelerator.unwrap_model(trainer.model, keep_fp32_wrapper=False)
    judged = judge(wrap(trained, "groups", arguments.tokens), held_out, arguments)
    return {"loss": loss, "seconds": seconds, "pairs_per_pass": per_pass} | judged


def mean_loss_of_trl(trainer: Any, pairs: int) -> float:
    """The mean loss over the first pairs before training; gradients are thrown away."""
    total, number = 0.0, 0
    trainer.model.train()
    for batch in trainer.get_eval_dataloader(trainer.train_dataset.select(range(pairs))):
        with trainer.accelerator.autocast(), trainer.compute_loss_context_manager():
            loss = trainer.compute_loss(trainer.model, trainer._prepare_inputs(batch))
        loss.backward()
        size = len(batch["input_ids"]) // 2
        total, number = total + loss.item() * size, number + size
    trainer.model.zero_grad()
    return total / number


def load_model(arguments: argparse.Namespace) -> Any:
    """The same model with the same head, and adapters if any, for everybody."""
    import torch

    from rlhf.modeling.adapters import add_adapters
    from rlhf.modeling.attention.checkpointing import checkpoint_activations
    from rlhf.modeling.models import new_reward_model

    rank = arguments.lora_rank
    dtype = torch.bfloat16 if rank else torch.float32
    model = new_reward_model(arguments.model, 0, arguments.seed, dtype)
    if rank:
        add_adapters(model, rank, 2 * rank, arguments.seed)
    if arguments.gradient_checkpointing:
        checkpoint_activations(model)
    return model


def work(arguments: argparse.Namespace) -> Line:
    """Train in this process; return also the rankings per second and the peak of its memory."""
    whole = read_judgements(arguments.data, arguments.prompts + arguments.held_out)
    lines, held_out = whole[: arguments.prompts], whole[arguments.prompts :]
    lines = lines * arguments.repeat
    metrics = (run_trl if arguments.kind == "trl" else run_ours)(lines, held_out, arguments)
    speed = len(lines) / metrics["seconds"]
    return {**metrics, "rankings_per_second": speed, "peak_gib": peak_memory()}


def peak_memory() -> float:
    """GiB at the peak of this process: of the GPU where there is one."""
    import torch

    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20  # KiB


def measure(arguments: argparse.Namespace, **changes: Any) -> Line:
    """Run one kind in a fresh process."""
    settings = {**vars(arguments), **changes}
    names = ("kind", "model", "data", "prompts", "held_out", "repeat", "seed", "tokens")
    names += ("prompt_tokens", "response_tokens", "learning_rate", "lora_rank", "prompts_per_step")
    given = [(name, settings[name]) for name in names if settings[name] is not None]
    flags = [word for name, value in given for word in (f"--{name.replace('_', '-')}", str(value))]
    flags += ["--gradient-checkpointing"] if arguments.gradient_checkpointing else []
    command = [sys.executable, __file__, arguments.what, *flags]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, cwd=REPOSITORY)
    return {**changes, **json.loads(done.stdout.splitlines()[-1])}


def measure_speed(arguments: argparse.Namespace) -> Line:
    """Rankings per second of trl and of every kind of ours."""
    runs: list[Line] = []
    for kind in arguments.kinds.split(","):
        run = measure(arguments, kind=kind, held_out=0)
        runs.append(run)
        speed = run["rankings_per_second"]
        trl, above = (
            baseline["rankings_per_second"] for baseline in (runs[0], runs[max(0, len(runs) - 2)])
        )
        print(
            f"{kind:8} {speed:7.3f} rankings/s  x{speed / trl:.2f} of trl"
            f"  x{speed / above:.2f} of the line above  "
            f"loss {run['loss']:.4f}  peak {run['peak_gib']:.1f} GiB  "
            f"real tokens {run.get('real_tokens', float('nan')):.1%}"
        )
    difference = max(abs(run["loss"] - runs[0]["loss"]) for run in runs)
    if difference > LARGEST_LOSS_DIFFERENCE:
        raise SystemExit(f"the losses differ by {difference:.3f}: that is not the same work")
    ratio = runs[-1]["rankings_per_second"] / runs[0]["rankings_per_second"]
    return {"ratio": round(ratio, 2), "runs": runs}


def measure_accuracy(arguments: argparse.Namespace) -> Line:
    """Held-out accuracy of both, and the difference with its interval over prompts."""
    import numpy as np

    runs, right = [], {}
    for kind in ACCURACY_KINDS:
        for seed in SEEDS[:1] if arguments.quick else SEEDS:
            run = measure(arguments, kind=kind, seed=seed)
            counts = np.array(run.pop("right"))  # (prompts, 2): right, pairs
            right.setdefault(kind, []).append(counts)
            runs.append({**run, "accuracy": counts[:, 0].sum() / counts[:, 1].sum()})
            print(f"{kind:8} seed {seed}  accuracy {runs[-1]['accuracy']:.3f}")
    pairs = right["trl"][0][:, 1]
    gain = np.mean(right["packed"], axis=0)[:, 0] - np.mean(right["trl"], axis=0)[:, 0]
    drawn = np.random.default_rng(0).integers(len(gain), size=(RESAMPLES, len(gain)))
    low, high = np.quantile(gain[drawn].sum(axis=1) / pairs[drawn].sum(axis=1), [0.025, 0.975])
    value = float(gain.sum() / pairs.sum())
    print(f"ours less trl's: {value:+.3f}, 95 % interval {low:+.3f} to {high:+.3f}")
    return {"value": value, "low": float(low), "high": float(high), "runs": runs}


def measure_linearity(arguments: argparse.Namespace) -> Line:
    """Seconds for 1, 2 and 4 times the same prompts, against proportional."""
    runs: list[Line] = []
    for repeat in REPEATS[:2] if arguments.quick else REPEATS:
        runs.append(measure(arguments, kind="packed", repeat=repeat, held_out=0))
        off = runs[-1]["seconds"] / repeat / runs[0]["seconds"] - 1
        print(f"{repeat}x  {runs[-1]['seconds']:.1f} s  {off:+.1%} off proportional")
    return {"value": off, "runs": runs}


MEASUREMENTS = {
    "speed": measure_speed,
    "accuracy": measure_accuracy,
    "linear": measure_linearity,
}


def announce(arguments: argparse.Namespace) -> None:
    """Print about how many minutes the runs will take, and would with other numbers of prompts."""
    from rlhf.planning.planner import read_shape

    lines = read_judgements(arguments.data, arguments.prompts + arguments.held_out)
    groups = build_groups(lines, arguments, apart=False)
    runs = {
        "speed": [(kind, 1) for kind in arguments.kinds.split(",")],
        "linear": [("packed", repeat) for repeat in REPEATS],
        "accuracy": [(kind, 1) for kind in ACCURACY_KINDS for _ in SEEDS],
    }[arguments.what]
    second = arguments.tflops * 1e12 / (6 * read_shape(arguments.model).trunk_linear)  # in tokens
    judged = arguments.held_out if arguments.what == "accuracy" else 0

    def minutes(prompts: int) -> float:
        passes = [
            (repeat * prompts + LOSS_PROMPTS) * epoch_tokens(groups, kind)
            + judged / 3 * epoch_tokens(groups, "groups")
            for kind, repeat in runs
        ]
        return (sum(passes) / len(groups) / second + STARTUP * len(runs)) / 60

    others = ", ".join(f"{size}: {minutes(size):.0f}" for size in SIZES)
    print(
        f"{arguments.what}: about {minutes(arguments.prompts):.0f} minutes for {arguments.prompts} "
        f"prompts, at {arguments.tflops} TFLOP/s; --prompts {others}",
        flush=True,
    )


def main() -> None:
    """Measure what is asked for, or do the work of one process."""
    sys.path[0] = str(REPOSITORY)  # this file would hide the package of the same name
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("what", nargs="?", choices=tuple(MEASUREMENTS), default="speed")
    parser.add_argument("--quick", action="store_true", help="a few prompts, to see it run")
    parser.add_argument("--json", action="store_true", help="one JSON object on the last line")
    parser.add_argument("--kinds", default=",".join(SPEED_KINDS), help="the runs of `speed`")
    parser.add_argument("--model", default=str(MODEL))
    parser.add_argument("--gradient-checkpointing", action="store_true", help="of both")
    parser.add_argument("--lora-rank", type=int, default=0, help="train adapters; 0: all weights")
    parser.add_argument("--data", help="judgements; random words when not given")
    parser.add_argument("--prompts", type=int, default=16, help="to train on")
    parser.add_argument("--held-out", type=int, default=64, help="to measure accuracy on")
    parser.add_argument("--prompts-per-step", type=int, default=4)
    parser.add_argument("--prompt-tokens", type=int, default=10_000, help="cut prompts there")
    parser.add_argument("--response-tokens", type=int, default=10_000, help="cut responses there")
    parser.add_argument("--tokens", type=int, default=2048, help="in one forward pass of ours")
    parser.add_argument("--learning-rate", type=float, default=1e-5)
    parser.add_argument("--tflops", type=float, default=TFLOPS, help="to estimate the time by")
    parser.add_argument("--dry-run", action="store_true", help="only estimate the time")
    for name, kind in (("--kind", str), ("--seed", int), ("--repeat", int)):
        parser.add_argument(name, type=kind, help=argparse.SUPPRESS)
    parser.set_defaults(seed=0, repeat=1)
    arguments = parser.parse_args()
    if arguments.kind:
        print(json.dumps(work(arguments)))
        return
    if arguments.quick:
        arguments.prompts, arguments.held_out, arguments.kinds = 2, 2, "trl,packed"
    announce(arguments)
    if arguments.dry_run:
        return
    result = MEASUREMENTS[arguments.what](arguments)
    if arguments.json:
        versions = {name: version(name) for name in ("torch", "transformers", "trl")}
        print(json.dumps({**result, "versions": versions}))


if __name__ == "__main__":
    main()
