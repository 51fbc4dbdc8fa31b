"""Memory and traffic of one rank of an FSDP group of up to 512, on a machine without any of them.

PyTorch's fake process group stands for the other ranks and fake tensors for all weights, so that
`rlhf.parallel.sharding` divides the model as it would there, and a training takes a step and more
passes: of a reward model, or of PPO's policy and critic, whose rollout is also read layer by layer
as with vLLM. What PyTorch's memory tracker saw at the peak, and the bytes of the collectives, are
compared with what `rlhf plan` says. vLLM itself, the reward model, and optimizers of PPO's frozen
models are not there.

    python -P examples/benchmarks/scale/ranks.py [--quick] [--json]

`-P`, because the script reward.py beside this one would hide the package.
"""

import argparse
import json
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import distributed
from torch._subclasses import FakeTensorMode
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from torch.distributed.fsdp import register_fsdp_forward_method
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, LlamaConfig

from policies.ppo.models.actor_critic import PolicyAndCritic, call_with_root_gathered
from reward.model.module import RewardModule
from rlhf.modeling import log_probs
from rlhf.modeling.attention.checkpointing import checkpoint_activations
from rlhf.modeling.attention.layout import TrunkInputs, last_tokens
from rlhf.modeling.log_probs import Sequences
from rlhf.modeling.models import load_config
from rlhf.parallel.sharding import Sharding, accumulating, autocast_forward, make_mesh, shard
from rlhf.planning.plan import GIB
from rlhf.planning.planner import Shape, read_shape
from rlhf.planning.strategies import FSDP, FSDP_BF16_WEIGHTS, Load, Option, phase_bytes, sizes_of
from rlhf.planning.traffic import communication_bytes, reading_traffic

REPOSITORY = Path(__file__).parents[3]
SIX = str(REPOSITORY / "examples" / "six_billion" / "llama_6b")
SEVENTY = str(REPOSITORY / "examples" / "cluster" / "llama_70b")


@dataclass(frozen=True)
class Case:
    """A model on so many ranks; `group` of them divide one copy (0: all).

    `stage` is reward, or ppo: updating, or reading: the log-probs and values of a rollout.
    `bf16_weights`: as with `--precision bf16-weights`.
    """

    model: str
    ranks: int
    batch: int
    length: int
    checkpointing: bool = False
    group: int = 0
    stage: str = "reward"
    bf16_weights: bool = False

    @property
    def option(self) -> Option:
        """Its row in `rlhf plan`."""
        return FSDP_BF16_WEIGHTS if self.bf16_weights else FSDP


CASES = (
    Case(SIX, 8, 4, 512),
    Case(SIX, 64, 4, 512),
    Case(SIX, 64, 4, 512, group=8),
    Case(SIX, 8, 4, 512, bf16_weights=True),
    Case(SEVENTY, 64, 4, 1024, checkpointing=True),
    Case(SEVENTY, 512, 4, 1024, checkpointing=True),
    Case(SEVENTY, 512, 4, 1024, checkpointing=True, group=64),
    Case(SIX, 8, 4, 512, checkpointing=True, stage="ppo"),
    Case(SIX, 8, 4, 512, checkpointing=True, stage="ppo", bf16_weights=True),
    Case(SEVENTY, 64, 2, 1024, checkpointing=True, stage="ppo"),
    Case(SEVENTY, 512, 4, 1024, checkpointing=True, stage="ppo"),
    Case(SIX, 8, 4, 512, stage="reading"),
    Case(SIX, 8, 4, 512, stage="reading", bf16_weights=True),
    Case(SEVENTY, 64, 4, 1024, stage="reading"),
    Case(SEVENTY, 512, 4, 1024, stage="reading"),
)


class Traffic(TorchDispatchMode):
    """Adds up the bytes that this rank sends: all but its own part of every whole tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.sent = 0.0

    def __torch_dispatch__(self, function: Any, types: Any, inputs: Any = (), named: Any = None):  # noqa: ANN204 — whatever the operation returns
        if function.namespace == "c10d":
            tensors = [leaf for leaf in tree_leaves(inputs) if isinstance(leaf, torch.Tensor)]
            whole = max(tensor.nbytes for tensor in tensors)
            members = max(distributed.get_world_size(group) for group in groups_of(inputs))
            turns = 2 if "allreduce" in function.__name__ else 1
            self.sent += turns * whole * (members - 1) / members
        return function(*inputs, **(named or {}))


def groups_of(inputs: Any) -> list[Any]:
    """The process groups among an operation's arguments."""
    return [
        distributed.ProcessGroup.unbox(leaf)
        for leaf in tree_leaves(inputs)
        if isinstance(leaf, torch.ScriptObject)
        and "ProcessGroup" in str(leaf._type())  # a ReduceOp is another
    ]


def build(case: Case) -> tuple[RewardModule | PolicyAndCritic, torch.optim.Optimizer]:
    """Models without storage, to be divided as `--sharding fsdp` does; in a fake mode."""
    config = load_config(case.model)
    config.num_labels, config.pad_token_id = 1, 0
    kinds = [AutoModelForSequenceClassification]
    kinds += [AutoModelForCausalLM] * (case.stage != "reward")
    classifier, *policies = (
        kind.from_config(config, dtype=torch.float32, trust_remote_code=False) for kind in kinds
    )
    for model in (classifier, *policies) if case.checkpointing else ():
        checkpoint_activations(model)
    module: RewardModule | PolicyAndCritic = RewardModule(classifier)
    if policies:
        module = PolicyAndCritic(policies[0], classifier, 0.0)
    module.train(case.stage != "reading")
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-5, fused=True)
    return module, optimizer


def measure(case: Case) -> dict[str, float]:
    """The peak of a pass that finds gradients and moments, and what two passes send."""
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=case.ranks)
    # their numbers are read, so they are not fake
    mesh = make_mesh(torch.device("cpu"), case.ranks, case.group)
    rows = [[5] * (case.length // 2)] * case.batch
    sequences = Sequences.of(rows, rows, 0)
    with FakeTensorMode(allow_non_fake_inputs=True):
        module, optimizer = build(case)
        autocast_forward(accelerator, module)
        shard(
            module,
            optimizer,
            Sharding("fsdp", group=case.group),
            mesh,
            bf16=True,
            bf16_weights=case.bf16_weights,
            fp32_modules=module.fp32_modules,
        )
        compute = computing(case, accelerator, module, sequences)
        with Traffic() as traffic:
            compute(last=False)
            compute(last=True)
        optimizer.step()
        optimizer.zero_grad()
        compute(last=False)
        with FSDPMemTracker(module, optimizer) as tracker:
            compute(last=True)
    distributed.destroy_process_group()
    ((_, peak),) = tracker.get_tracker_snapshot("peak").items()
    return {"bytes": peak["Total"], "sent": traffic.sent}


def computing(
    case: Case, accelerator: Accelerator, module: Any, sequences: Sequences
) -> Callable[..., None]:
    """A pass: forward and backward, or forward alone to read a rollout."""
    ids = torch.full((case.batch, case.length), 5)
    inputs = TrunkInputs(ids, last_tokens(torch.full((case.batch,), case.length), case.length))
    if case.stage != "reward":
        log_probs._returns_logits_unchanged[module.policy] = True  # found out by reading numbers
    if case.stage == "reading":
        register_fsdp_forward_method(module, "run")

    def compute(*, last: bool) -> None:
        with accumulating(accelerator, module, last=last):
            if case.stage == "reward":
                module(inputs).sum().backward()
            elif case.stage == "ppo":
                token_log_probs, values, _ = module(sequences, case.batch, 1.0)
                (token_log_probs.sum() + values.sum()).backward()
            else:
                with torch.no_grad(), accelerator.autocast():
                    call_with_root_gathered(module, lambda: module.read(sequences, case.batch, 1.0))

    return compute


def plan(case: Case, shape: Shape) -> dict[str, float]:
    """The memory and traffic that the planner expects of the same."""
    load = Load(case.length, case.batch, case.checkpointing, 16, case.group, vllm=1, kl_rows=0)
    stage = "reward" if case.stage == "reward" else "ppo"
    sizes = sizes_of(stage, shape, load)
    phases = phase_bytes(stage, case.option, shape, load, case.ranks)
    # the frozen reward model, and for a forward pass the trained models' moments
    absent = 4 * sizes.frozen + (8 * sizes.trained if case.stage == "reading" else 0)
    phase = "reading the rollout" if case.stage == "reading" else "computing gradients"
    held = phases[phase] - absent / (case.group or case.ranks)
    sent = communication_bytes(case.option, sizes, 2, case.ranks, case.group)
    if case.stage == "reading":
        sent = 2 * reading_traffic(case.option, sizes) * (case.ranks - 1) / case.ranks
    return {"bytes": held, "sent": sent}


def run_case(case: Case) -> dict[str, Any]:
    """Measured and planned, and their ratios."""
    measured, planned = measure(case), plan(case, read_shape(case.model))
    ratios = {f"{name} ratio": round(measured[name] / planned[name], 3) for name in measured}
    return {
        **asdict(case),
        "model": Path(case.model).name,
        "measured": measured,
        "planned": planned,
        **ratios,
    }


def small_cases(folder: str) -> list[Case]:
    """A model that is large enough for its parts to be divided by 512."""
    sizes = {"vocab_size": 1024, "hidden_size": 512, "intermediate_size": 1536}
    heads = {"num_hidden_layers": 12, "num_attention_heads": 8, "num_key_value_heads": 8}
    LlamaConfig(**sizes, **heads).save_pretrained(folder)
    return [
        Case(folder, 2, 4, 128),
        Case(folder, 64, 4, 128, group=8),
        Case(folder, 512, 4, 128),
        Case(folder, 64, 4, 128, stage="ppo"),
        Case(folder, 64, 4, 128, stage="reading"),
        Case(folder, 64, 4, 128, bf16_weights=True),
        Case(folder, 64, 4, 128, stage="ppo", bf16_weights=True),
        Case(SIX, 8, 4, 512, bf16_weights=True),
        Case(SIX, 8, 4, 512, checkpointing=True, stage="ppo", bf16_weights=True),
        Case(SIX, 8, 4, 512, stage="reading", bf16_weights=True),
    ]


def main() -> None:
    """Measure all cases and print them."""
    warnings.filterwarnings("ignore")  # about fake tensors, once for each kind of operation
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="only a small model")
    parser.add_argument("--json", action="store_true", help="one JSON object on the last line")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        runs = []
        for case in small_cases(folder) if arguments.quick else CASES:
            runs.append(run_case(case))
            run = runs[-1]
            parts = [f"{name}={run[name]}" for name in asdict(case)]
            parts += [
                f"{name}: measured {run['measured'][name] / GIB:.2f} GiB, planned "
                f"{run['planned'][name] / GIB:.2f} GiB, ratio {run[f'{name} ratio']}"
                for name in run["measured"]
            ]
            print(*parts, flush=True)
    if arguments.json:
        worst = max((run["bytes ratio"] for run in runs), key=lambda ratio: abs(ratio - 1))
        versions = {name: version(name) for name in ("torch", "transformers")}
        print(json.dumps({"ratio": worst, "runs": runs, "versions": versions}))


if __name__ == "__main__":
    main()
