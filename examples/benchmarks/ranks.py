"""Memory and traffic of one rank of an FSDP group of up to 512, on a machine without any of them.

PyTorch's fake process group stands for the other ranks and fake tensors for all weights, so that
`rlhf.parallel.sharding` divides the model as it would there, and a reward training takes a step
and more passes. What PyTorch's memory tracker saw at the peak, and the bytes of the collectives,
are compared with what `rlhf plan` says.

    python -P examples/benchmarks/ranks.py [--quick] [--json]

`-P`, because the script reward.py beside this one would hide the package.
"""

import argparse
import json
import tempfile
import warnings
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import distributed, nn
from torch._subclasses import FakeTensorMode
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForSequenceClassification, LlamaConfig

from reward.model.module import RewardModule
from rlhf.modeling.attention.layout import Inputs, last_tokens
from rlhf.modeling.models import load_config
from rlhf.parallel.sharding import Sharding, accumulating, arrange, autocast_forward, shard
from rlhf.planning.plan import GIB
from rlhf.planning.planner import Shape, read_shape
from rlhf.planning.strategies import Load, communication_bytes, sizes_of, stage_bytes

REPOSITORY = Path(__file__).parents[2]
SIX = str(REPOSITORY / "examples" / "six_billion" / "llama_6b")
SEVENTY = str(REPOSITORY / "examples" / "cluster" / "llama_70b")


@dataclass(frozen=True)
class Case:
    """A model on so many ranks; `group` of them divide one copy (0: all)."""

    model: str
    ranks: int
    batch: int
    length: int
    checkpointing: bool = False
    group: int = 0


CASES = (
    Case(SIX, 8, 4, 512),
    Case(SIX, 64, 4, 512),
    Case(SIX, 64, 4, 512, group=8),
    Case(SEVENTY, 64, 4, 1024, checkpointing=True),
    Case(SEVENTY, 512, 4, 1024, checkpointing=True),
    Case(SEVENTY, 512, 4, 1024, checkpointing=True, group=64),
)


class Traffic(TorchDispatchMode):
    """Adds up the bytes that this rank sends: all but its own part of every whole tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.sent = 0.0

    def __torch_dispatch__(self, function: Any, types: Any, inputs: Any = (), named: Any = None):  # noqa: ANN204 — whatever the operation returns
        if function.namespace == "c10d":
            tensors = [one for one in tree_leaves(inputs) if isinstance(one, torch.Tensor)]
            whole = max(tensor.nbytes for tensor in tensors)
            members = max(distributed.get_world_size(one) for one in groups_of(inputs))
            turns = 2 if "allreduce" in function.__name__ else 1
            self.sent += turns * whole * (members - 1) / members
        return function(*inputs, **(named or {}))


def groups_of(inputs: Any) -> list[Any]:
    """The process groups among an operation's arguments."""
    return [
        distributed.ProcessGroup.unbox(one)
        for one in tree_leaves(inputs)
        if isinstance(one, torch.ScriptObject)
        and "ProcessGroup" in str(one._type())  # a ReduceOp is another
    ]


def build(case: Case, accelerator: Accelerator) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A reward model without storage, divided as `--sharding fsdp` does; in a fake mode."""
    config = load_config(case.model)
    config.num_labels, config.pad_token_id = 1, 0
    classifier = AutoModelForSequenceClassification.from_config(
        config, dtype=torch.float32, trust_remote_code=False
    )
    if case.checkpointing:
        classifier.activation_checkpointing_enable({"use_reentrant": False})
    module = RewardModule(classifier).train()
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-5, fused=True)
    return module, optimizer


def measure(case: Case) -> dict[str, float]:
    """The peak of a pass that finds gradients and moments, and what two passes send."""
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=case.ranks)
    mesh = arrange(torch.device("cpu"), case.ranks, case.group)  # reads numbers: nothing fake
    with FakeTensorMode(allow_non_fake_inputs=True):
        module, optimizer = build(case, accelerator)
        autocast_forward(accelerator, module)
        shard(module, optimizer, Sharding("fsdp", group=case.group), mesh, bf16=True)
        ids = torch.full((case.batch, case.length), 5)
        inputs = Inputs(ids, last_tokens(torch.full((case.batch,), case.length), case.length))

        def compute(*, last: bool) -> None:
            with accumulating(accelerator, module, last=last):
                module(inputs).sum().backward()

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


def plan(case: Case, shape: Shape) -> dict[str, float]:
    """What the planner says of the same."""
    load = Load(case.length, case.batch, case.checkpointing, 16, case.group)
    sizes = sizes_of("reward", shape, load)
    return {
        "bytes": stage_bytes("reward", "FSDP", shape, load, case.ranks),
        "sent": communication_bytes("FSDP", sizes, 2, case.ranks, case.group),
    }


def run_case(case: Case) -> dict[str, Any]:
    """Measured and planned, and their ratios."""
    found, planned = measure(case), plan(case, read_shape(case.model))
    ratios = {f"{name} ratio": round(found[name] / planned[name], 3) for name in found}
    return {
        **asdict(case),
        "model": Path(case.model).name,
        "measured": found,
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
            words = [f"{name}={run[name]}" for name in asdict(case)]
            words += [
                f"{name}: measured {run['measured'][name] / GIB:.2f} GiB, planned "
                f"{run['planned'][name] / GIB:.2f} GiB, ratio {run[f'{name} ratio']}"
                for name in run["measured"]
            ]
            print(*words, flush=True)
    if arguments.json:
        worst = max((run["bytes ratio"] for run in runs), key=lambda ratio: abs(ratio - 1))
        versions = {name: version(name) for name in ("torch", "transformers")}
        print(json.dumps({"ratio": worst, "runs": runs, "versions": versions}))


if __name__ == "__main__":
    main()
