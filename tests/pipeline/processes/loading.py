"""A program for two processes: models that only the main one reads, against models that each reads.

python -m tests.pipeline.processes.loading TINY REWARD LARGE ROUNDED BROKEN OUT : each process
writes what it found as OUT.RANK.
"""

import ctypes
import gc
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from accelerate import Accelerator
from transformers import PreTrainedModel

from policies.ppo.models.actor_critic import PolicyAndCritic
from policies.ppo.setup import build_models
from rlhf.errors import InputError
from rlhf.modeling.adapters import add_adapters
from rlhf.modeling.models import load_causal_lm, load_reward_model, new_reward_model
from rlhf.parallel.distributed import start
from rlhf.parallel.sharding import Held, Sharding, prepare, shard_frozen
from rlhf.ranks import exit_process, rank
from tests.pipeline.loop import SIGNAL as VOWELS
from tests.settings import ppo_settings

TEXT = [[5, 6, 7, 8]]
SIGNAL = f"signal:{VOWELS}"
M_MMAP_THRESHOLD = -3  # malloc.h
LoadModel = Callable[[Held], PreTrainedModel]


def return_what_is_freed() -> None:
    """Let memory of more than 128 KiB go back to the system as soon as it is freed."""
    assert ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 131072)


def adapted(folder: str, held: Held) -> PreTrainedModel:
    model = load_causal_lm(folder, held=held)
    add_adapters(model, rank=4, alpha=8, seed=3)
    return model


def trained(accelerator: Accelerator, model: PreTrainedModel, sharding: Sharding) -> list[Any]:
    """This process's part of all weights before and after a step, the buffers, and the loss."""
    wanted = [one for one in model.parameters() if one.requires_grad]
    optimizer = torch.optim.AdamW(wanted, lr=1e-2, fused=True)
    prepared, stepper = prepare(accelerator, model, optimizer, sharding)
    before = parts(prepared)
    loss = prepared(torch.tensor(TEXT)).logits.square().mean()
    loss.backward()
    stepper.step()
    after = parts(prepared)
    assert not all(torch.equal(*pair) for pair in zip(before, after, strict=True))
    return [*before, *after, *prepared.buffers(), loss.detach()]


def frozen(accelerator: Accelerator, model: PreTrainedModel, sharding: Sharding) -> list[Any]:
    shard_frozen(accelerator, model, sharding)
    with torch.no_grad():
        return [*parts(model), *model.buffers(), model(torch.tensor(TEXT)).logits]


def parts(model: torch.nn.Module) -> list[torch.Tensor]:
    named = model.named_parameters(remove_duplicate=False)
    return [value.to_local().clone() for _, value in named]  # type: ignore[attr-defined]


def is_same(accelerator: Accelerator, load: LoadModel, use: Any, sharding: Sharding) -> bool:
    """Whether a model is the same bit for bit, however it is read."""
    found = []
    wanted: tuple[Held, ...] = ("whole", "main")
    for held in wanted:
        model = load(held)
        empty = all(one.is_meta for name, one in model.named_parameters() if "lora" not in name)
        assert empty == (held == "main" and rank() > 0)
        found.append(use(accelerator, model, sharding))
    return all(
        one.dtype == other.dtype and one.equal(other) for one, other in zip(*found, strict=True)
    )


def memory(field: str) -> int:
    status = Path("/proc/self/status").read_text()
    return 1024 * int(re.search(rf"{field}:\s+(\d+)", status)[1])  # type: ignore[index]


def peak_growth(accelerator: Accelerator, load: Callable[[Sharding], torch.nn.Module]) -> int:
    """Bytes by which this process's memory grows at most until a training can begin."""
    accelerator.free_memory()
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # the peak is that of now
    before = memory("VmRSS")
    sharding = Sharding("fsdp")
    model = load(sharding)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    prepare(accelerator, model, optimizer, sharding)
    return memory("VmHWM") - before


def policy_and_critic(accelerator: Accelerator, folder: str, sharding: Sharding) -> PolicyAndCritic:
    """What PPO trains: two models of this folder."""
    settings = ppo_settings(model=folder, reward=(SIGNAL,), reference=Path(), out=Path())
    tokenizer: Any = SimpleNamespace(pad_token_id=0)
    model, _ = build_models(settings, tokenizer, None, accelerator, sharding)
    return model


def refusal(folder: str) -> str:
    try:
        load_causal_lm(folder, held="main")
    except InputError as error:
        return str(error)
    return ""


def main(tiny: str, reward: str, large: str, rounded: str, broken: str, out: str) -> None:
    return_what_is_freed()
    accelerator = start("fp32", 0)
    fsdp = Sharding("fsdp")
    cases: dict[str, tuple[LoadModel, Any, Sharding]] = {
        "tied embeddings": (lambda held: load_causal_lm(tiny, held=held), trained, fsdp),
        "adapters": (lambda held: adapted(tiny, held), trained, fsdp),
        "fresh head": (lambda held: new_reward_model(tiny, 0, 7, held=held), trained, fsdp),
        "trained head": (lambda held: new_reward_model(reward, 0, 7, held=held), trained, fsdp),
        "frozen": (lambda held: load_reward_model(reward, held=held), frozen, fsdp),
        "frozen under ZeRO 3": (
            *(lambda held: load_reward_model(reward, held=held), frozen),
            Sharding("zero3"),
        ),
        "groups of one": (
            *(lambda held: load_causal_lm(tiny, held=held), trained),
            Sharding("fsdp", group=1),
        ),
        "offloaded": (
            *(lambda held: load_causal_lm(tiny, held=held), trained),
            Sharding("fsdp", offload=True),
        ),
    }
    found = {
        "refusal": refusal(broken),
        "same": {name: is_same(accelerator, *case) for name, case in cases.items()},
        # what is imported on first use is there
        "peak": peak_growth(
            accelerator, lambda how: load_causal_lm(large, held=how.held(trained=True))
        ),
        "peak of both": peak_growth(
            accelerator, lambda how: policy_and_critic(accelerator, rounded, how)
        ),
    }
    Path(f"{out}.{rank()}").write_text(json.dumps(found), encoding="utf-8")
    exit_process(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
