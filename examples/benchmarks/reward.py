"""Training a reward model: rankings per second here against trl's RewardTrainer.

Both see the same judgements (ties left out), the same weights and head, bf16 autocast where the
machine has it, AdamW, no gradient checkpointing. Each run is a process of its own that reports its
time and its peak memory. The losses of both on the untrained model must agree before anything is
timed. Besides trl's, four runs of ours show where the time goes:

    pairs     every judged pair on its own, as trl has it
    groups    all pairs of a prompt at once, every response encoded once, rows padded
    shared    the prompt encoded once for all its responses, packed rows

    python examples/benchmarks/reward.py [--quick] [--json] [--data FILE] [--prompts N]

FILE holds lines {"prompt", "responses", "pairs": [[i, j, "first" | "second" | "tie"], ...]}, or
"tiers" instead of pairs. Without it, random words of the same lengths: speed does not depend on
what is said.
"""

import argparse
import gzip
import json
import random
import resource
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from reward.groups import Group

REPOSITORY = Path(__file__).parents[2]
MODEL = REPOSITORY / "models" / "SmolLM2-135M-Instruct"
OURS = ("pairs", "groups", "shared")
PAIRS_PER_PASS = 2  # trl's per-device batch: 4 sequences of 800 tokens
PROMPTS_PER_STEP = 4
LARGEST_LOSS_DIFFERENCE = 0.02  # bf16


def read_judgements(path: str | None, prompts: int, words: int) -> list[dict[str, Any]]:
    """Prompts with responses and [winner, loser] pairs, responses cut to `words` words."""
    if path is None:
        lines = list(random_judgements(prompts))
    else:
        opener = gzip.open if path.endswith(".gz") else open
        with opener(path, "rt", encoding="utf-8") as stream:
            lines = [json.loads(line) for line, _ in zip(stream, range(prompts), strict=False)]
    for line in lines:
        line["responses"] = [" ".join(text.split()[:words]) for text in line["responses"]]
        if "pairs" in line:
            strict = [(i, j, won) for i, j, won in line["pairs"] if won != "tie"]
            line["pairs"] = [[i, j] if won == "first" else [j, i] for i, j, won in strict]
        else:
            line["pairs"] = [
                [i, j] for a, b in combinations(line["tiers"], 2) for i in a for j in b
            ]
    return [line for line in lines if line["pairs"]]


def random_judgements(prompts: int) -> list[dict[str, Any]]:
    """Four responses of about 100 tokens to prompts of about 700, all six pairs judged."""
    generator = random.Random(0)
    vocabulary = ["time", "people", "water", "house", "music", "light", "paper", "river", "green"]

    def text(low: int, high: int) -> str:
        return " ".join(generator.choices(vocabulary, k=generator.randint(low, high)))

    pairs = [[i, j, "first"] for i, j in combinations(range(4), 2)]
    return [
        {"prompt": text(600, 800), "responses": [text(40, 160) for _ in range(4)], "pairs": pairs}
        for _ in range(prompts)
    ]


def build_groups(lines: list[dict[str, Any]], *, apart: bool) -> "list[Group]":
    """Groups of our trainer; `apart` makes every pair a prompt of its own."""
    from reward.groups import Group
    from rlhf.records import Message, Prompt, Response
    from rlhf.tokens import encode_prompt, encode_response, load_tokenizer

    tokenizer = load_tokenizer(str(MODEL))
    groups = []
    for number, line in enumerate(lines):
        chat = (Message(role="user", content=line["prompt"]),)
        prompt = tuple(encode_prompt(tokenizer, Prompt.create(chat, "train", "")))
        responses = [
            tuple(encode_response(tokenizer, Response(id="", prompt_id="", text=t, model=""), ""))
            for t in line["responses"]
        ]
        if apart:
            groups += [
                Group(f"{number}-{i}-{j}", prompt, (responses[i], responses[j]), (pair_of(0, 1),))
                for i, j in line["pairs"]
            ]
        else:
            judged = tuple(pair_of(i, j) for i, j in line["pairs"])
            groups.append(Group(str(number), prompt, tuple(responses), judged))
    return groups


def pair_of(winner: int, loser: int) -> Any:
    """A judged pair of our trainer."""
    from reward.groups import Pair

    return Pair(winner, loser, 1.0, 0, "benchmark")


def run_ours(kind: str, lines: list[dict[str, Any]], tokens: int) -> dict[str, float]:
    """Train one epoch with this project; first the mean loss over all pairs, untrained."""
    import torch
    from torch.optim import AdamW

    from reward.model import RewardModule
    from reward.objective import Objective
    from reward.prefix import share_prompts
    from reward.step import Trainee, score_groups, take_step
    from rlhf.distributed import start

    accelerator = start("auto", 0)
    module = RewardModule(load_model())
    shared = kind == "shared"
    if shared and (obstacle := share_prompts(module)):
        raise SystemExit(f"prompts cannot be shared: {obstacle}")
    optimizer = AdamW(module.parameters(), lr=1e-6, fused=True)
    module, optimizer = accelerator.prepare(module, optimizer)
    trainee = Trainee(accelerator, module, optimizer, 0, tokens, Objective(), shared)
    groups = build_groups(lines, apart=kind == "pairs")
    rewards = score_groups(trainee, groups)
    losses = [
        float(-torch.nn.functional.logsigmoid(torch.tensor(row[pair.first] - row[pair.second])))
        for group, row in zip(groups, rewards, strict=True)
        for pair in group.pairs
    ]
    per_step = PROMPTS_PER_STEP * (6 if kind == "pairs" else 1)
    began = time.perf_counter()
    for first in range(0, len(groups), per_step):
        take_step(trainee, groups[first : first + per_step], 1e-6)
    return {"loss": sum(losses) / len(losses), "seconds": time.perf_counter() - began}


def run_trl(lines: list[dict[str, Any]]) -> dict[str, float]:
    """Train one epoch with trl's RewardTrainer on the same token ids."""
    import torch
    from datasets import Dataset
    from trl import RewardConfig, RewardTrainer

    from rlhf.distributed import choose_precision
    from rlhf.tokens import load_tokenizer

    groups = build_groups(lines, apart=True)
    rows = [
        {"chosen_ids": [*g.prompt, *g.responses[0]], "rejected_ids": [*g.prompt, *g.responses[1]]}
        for g in groups
    ]
    with tempfile.TemporaryDirectory() as folder:
        config = RewardConfig(
            output_dir=folder,
            per_device_train_batch_size=PAIRS_PER_PASS,
            gradient_accumulation_steps=PROMPTS_PER_STEP * 6 // PAIRS_PER_PASS,
            num_train_epochs=1,
            learning_rate=1e-6,
            max_length=None,
            bf16=choose_precision("auto") == "bf16",
            activation_checkpointing=False,
            use_cpu=not torch.cuda.is_available(),
            report_to="none",
            save_strategy="no",
            logging_strategy="no",
            disable_tqdm=True,
        )
        trainer = RewardTrainer(
            model=load_model(),
            args=config,
            train_dataset=Dataset.from_list(rows),
            processing_class=load_tokenizer(str(MODEL)),
        )
        loss = mean_loss_of_trl(trainer)
        began = time.perf_counter()
        trainer.train()
        return {"loss": loss, "seconds": time.perf_counter() - began}


def mean_loss_of_trl(trainer: Any) -> float:
    """The mean loss over all pairs before training."""
    import torch

    total, number = 0.0, 0
    trainer.model.eval()
    with torch.no_grad():
        for batch in trainer.get_eval_dataloader(trainer.train_dataset):
            with trainer.compute_loss_context_manager():
                loss = trainer.compute_loss(trainer.model, trainer._prepare_inputs(batch))
            pairs = len(batch["input_ids"]) // 2
            total, number = total + float(loss) * pairs, number + pairs
    trainer.model.train()
    return total / number


def load_model() -> Any:
    """The same model with the same head for everybody."""
    from rlhf.models import new_reward_model

    return new_reward_model(str(MODEL), 0, seed=0)


def measure(kind: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Run one kind in a fresh process."""
    words = [sys.executable, __file__, "--kind", kind, "--prompts", str(arguments.prompts)]
    words += ["--words", str(arguments.words), "--tokens", str(arguments.tokens)]
    words += ["--data", arguments.data] if arguments.data else []
    done = subprocess.run(words, stdout=subprocess.PIPE, text=True, check=True, cwd=REPOSITORY)
    return {"kind": kind, **json.loads(done.stdout.splitlines()[-1])}


def work(kind: str, lines: list[dict[str, Any]], tokens: int) -> dict[str, float]:
    """What a process of its own does: train, and say how long it took and what it held."""
    found = run_trl(lines) if kind == "trl" else run_ours(kind, lines, tokens)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20  # KiB → GiB
    return {**found, "rankings_per_second": len(lines) / found["seconds"], "peak_gib": peak}


def main() -> None:
    """Measure every kind and print the ratios."""
    sys.path[0] = str(REPOSITORY)  # this file would hide the package of the same name
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="two prompts, trl and ours only")
    parser.add_argument("--json", action="store_true", help="one JSON object on the last line")
    parser.add_argument("--data", help="judgements; random words when not given")
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--words", type=int, default=10_000, help="cut responses to so many")
    parser.add_argument("--tokens", type=int, default=2048, help="in one forward pass of ours")
    parser.add_argument("--kind", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.kind:
        lines = read_judgements(arguments.data, arguments.prompts, arguments.words)
        print(json.dumps(work(arguments.kind, lines, arguments.tokens)))
        return
    arguments.prompts = 2 if arguments.quick else arguments.prompts
    runs = []
    for kind in ("trl", "shared") if arguments.quick else ("trl", *OURS):
        runs.append(measure(kind, arguments))
        run, speed = runs[-1], runs[-1]["rankings_per_second"]
        against = speed / runs[0]["rankings_per_second"]
        print(
            f"{kind:7} {speed:7.3f} rankings/s  x{against:.2f}  loss {run['loss']:.4f}  "
            f"peak {run['peak_gib']:.1f} GiB"
        )
    difference = max(abs(run["loss"] - runs[0]["loss"]) for run in runs)
    if difference > LARGEST_LOSS_DIFFERENCE:
        raise SystemExit(f"the losses differ by {difference:.3f}: that is not the same work")
    if arguments.json:
        ratio = runs[-1]["rankings_per_second"] / runs[0]["rankings_per_second"]
        versions = {name: version(name) for name in ("torch", "transformers", "trl")}
        print(json.dumps({"ratio": round(ratio, 2), "runs": runs, "versions": versions}))


if __name__ == "__main__":
    main()
