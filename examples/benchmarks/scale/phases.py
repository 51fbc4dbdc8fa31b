"""Memory of each phase of PPO in a process of DDP, by a dry run, beside what `rlhf plan` says.

Fake tensors stand for all weights, so models of any size run on a machine without room for them:
policy, critic and a frozen reward model, gradients that stay as in DDP's buckets, and AdamW's
moments. The project's own modules read a rollout, compute gradients, step and audit; PyTorch's
memory tracker says what there was at the peak. Sampling is not here: its loop reads numbers, and
fake tensors have none. Reference rows of the KL term are left out.

    python -P examples/benchmarks/scale/phases.py [--quick] [--json]

`-P`, because the script reward.py beside this one would hide the package.
"""

import argparse
import json
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, LlamaConfig

from policies.ppo.models.actor_critic import PolicyAndCritic
from rlhf.modeling import log_probs
from rlhf.modeling.attention.checkpointing import checkpoint_activations
from rlhf.modeling.log_probs import SCORE_BATCH, Sequences, response_log_probs
from rlhf.modeling.models import load_config
from rlhf.parallel.master_weights import MasterOptimizer
from rlhf.planning.plan import GIB
from rlhf.planning.planner import read_shape
from rlhf.planning.strategies import DDP, DDP_BF16_WEIGHTS, Load, Option, phase_bytes

SIX = str(Path(__file__).parents[3] / "examples" / "six_billion" / "llama_6b")
PROCESSES = 8


@dataclass(frozen=True)
class Case:
    """A model, and the sequences of one forward pass; half of their tokens are the prompt."""

    model: str
    batch: int
    length: int
    checkpointing: bool = False
    bf16_weights: bool = False

    @property
    def option(self) -> Option:
        """Its row in `rlhf plan`."""
        return DDP_BF16_WEIGHTS if self.bf16_weights else DDP


CASES = tuple(
    Case(SIX, 2, 2048, checkpointing=again, bf16_weights=rounded)
    for again in (False, True)
    for rounded in (False, True)
)


def build(case: Case) -> tuple[PolicyAndCritic, nn.Module, Any]:
    """Policy and critic, a frozen reward model, and the optimizer, without storage."""
    config = load_config(case.model)
    config.num_labels, config.pad_token_id = 1, 0
    policy, critic, reward = (
        kind.from_config(config, dtype=torch.float32, trust_remote_code=False)
        for kind in (AutoModelForCausalLM, *[AutoModelForSequenceClassification] * 2)
    )
    for model in (policy, critic) if case.checkpointing else ():
        checkpoint_activations(model)
    module = PolicyAndCritic(policy, critic, 0.0)
    module.train(case.checkpointing)
    optimizer: Any = torch.optim.AdamW(module.parameters(), lr=1e-5, fused=True)
    if case.bf16_weights:
        optimizer = MasterOptimizer(optimizer, module, module.fp32_modules)
    return module, reward.requires_grad_(False), optimizer


@contextmanager
def tracking(phase: str, held: tuple[Any, ...], peaks: dict[str, float]) -> Iterator[None]:
    """Note the bytes at the peak of a phase, with those of what is held before it begins."""
    tracker = MemTracker()
    tracker.track_external(*held)
    with tracker:
        yield
    ((_, peak),) = tracker.get_tracker_snapshot("peak").items()
    peaks[phase] = float(peak["Total"])


def measure(case: Case) -> dict[str, float]:
    """Bytes at the peak of each phase."""
    peaks: dict[str, float] = {}
    with FakeTensorMode(allow_non_fake_inputs=True):
        module, reward, optimizer = build(case)
        log_probs._returns_logits_unchanged[module.policy] = True  # found out by reading numbers
        compute = computing(case, module)
        compute()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)  # DDP's gradients stay in its buckets
        held = held_by(module, reward, optimizer)
        with tracking("reading the rollout", held, peaks), torch.no_grad(), autocast():
            module.read(sequences_of(case, case.batch), case.batch, 1.0)
        with tracking("measuring the KL", held, peaks), torch.no_grad(), autocast():
            response_log_probs(module.policy, sequences_of(case, SCORE_BATCH), 1.0)
        original = AutoModelForCausalLM.from_config(
            load_config(case.model), dtype=torch.float32, trust_remote_code=False
        )
        log_probs._returns_logits_unchanged[original] = True
        # it is frozen, so autocast keeps no copies; the tracker wants weights with gradients
        once = autocast(cache_enabled=False)
        with tracking("auditing", (*held, original), peaks), torch.no_grad(), once:
            response_log_probs(original, sequences_of(case, SCORE_BATCH), 1.0)
        del original
        with tracking("computing gradients", held, peaks):
            compute()
        with tracking("stepping", held, peaks):
            optimizer.step()
    return peaks


def held_by(module: nn.Module, reward: nn.Module, optimizer: Any) -> tuple[Any, ...]:
    """All that a process holds at all times: masters of bf16 weights, too."""
    masters = getattr(optimizer, "masters", None)
    return (
        module,
        reward,
        getattr(optimizer, "optimizer", optimizer),
        *([masters] if masters else []),
    )


def autocast(*, cache_enabled: bool = True) -> torch.autocast:
    """As the trainings' `--precision bf16`."""
    return torch.autocast("cpu", torch.bfloat16, cache_enabled=cache_enabled)


def sequences_of(case: Case, rows: int) -> Sequences:
    """Prompts and responses of equal length."""
    half = [[5] * (case.length // 2)] * rows
    return Sequences.of(half, half, 0)


def computing(case: Case, module: PolicyAndCritic) -> Callable[[], None]:
    """Forward and backward pass of policy and critic."""
    sequences = sequences_of(case, case.batch)

    def compute() -> None:
        with autocast():
            read, values, _ = module(sequences, case.batch, 1.0)
            (read.sum() + values.sum()).backward()

    return compute


def run_case(case: Case) -> dict[str, Any]:
    """Measured and planned bytes of every phase that is measured."""
    load = Load(case.length, case.batch, case.checkpointing, 16, kl_rows=0)
    planned = phase_bytes("ppo", case.option, read_shape(case.model), load, PROCESSES)
    measured = measure(case)
    return {
        **asdict(case),
        "model": Path(case.model).name,
        "phases": {
            phase: {"measured": size, "planned": planned[phase], "ratio": size / planned[phase]}
            for phase, size in measured.items()
        },
    }


def small_cases(folder: str) -> list[Case]:
    """A small model of the same kind."""
    sizes = {"vocab_size": 4096, "hidden_size": 512, "intermediate_size": 1536}
    heads = {"num_hidden_layers": 12, "num_attention_heads": 8, "num_key_value_heads": 8}
    LlamaConfig(**sizes, **heads).save_pretrained(folder)
    return [
        Case(folder, 4, 128),
        Case(folder, 4, 128, bf16_weights=True),
        Case(folder, 8, 128, checkpointing=True),
    ]


def main() -> None:
    """Measure all cases and print them."""
    warnings.filterwarnings("ignore")  # about fake tensors, once for each kind of operation
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="only a small model")
    parser.add_argument("--json", action="store_true", help="one JSON object on the last line")
    arguments = parser.parse_args()
    runs = []
    with tempfile.TemporaryDirectory() as folder:
        for case in small_cases(folder) if arguments.quick else CASES:
            runs.append(run_case(case))
            print(*(f"{name}={runs[-1][name]}" for name in asdict(case)))
            for phase, memory in runs[-1]["phases"].items():
                sizes = f"{memory['measured'] / GIB:8.2f} / {memory['planned'] / GIB:8.2f} GiB"
                print(f"  {phase:20} {sizes}  {memory['ratio']:.3f}", flush=True)
    if arguments.json:
        print(json.dumps({"runs": runs}))


if __name__ == "__main__":
    main()
