"""A program for two processes: models of which each reads its part, against models read whole.

python -m tests.pipeline.processes.loading FOLDER : each process writes what it found of the models
in the folder as FOLDER/found.RANK.
"""

import ctypes
import gc
import json
import re
import sys
import threading
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
from rlhf.parallel.layers import stored_at
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
    wanted: tuple[Held, ...] = ("whole", "files")
    for held in wanted:
        found.append(use(accelerator, load(held), sharding))
    return all(
        one.dtype == other.dtype and one.equal(other) for one, other in zip(*found, strict=True)
    )


def place_of_weights(model: PreTrainedModel) -> str:
    """Where a model's weights are before it is sharded: in its files, here, or in the main process.

    A new head and adapters may be elsewhere.
    """
    trunk = {name: one for name, one in model.base_model.named_parameters() if "lora" not in name}
    if all(stored_at(one) for one in trunk.values()):
        return "files" if all(one.is_meta for one in trunk.values()) else "?"
    return "elsewhere" if all(one.is_meta for one in trunk.values()) else "here"


def spoil(folder: Path, keeper: int) -> None:
    """Overwrite with NaN what only the other one of two processes needs.

    Process 0 has the first half of a tensor's rows, and one more if their number is odd.
    """
    for path in folder.glob("*.safetensors"):
        data = bytearray(path.read_bytes())
        length = int.from_bytes(data[:8], "little")
        head = json.loads(data[8 : 8 + length])
        head.pop("__metadata__")
        for one in head.values():
            begin, end = (8 + length + offset for offset in one["data_offsets"])
            rows = one["shape"][0]
            middle = begin + (end - begin) // rows * ((rows + 1) // 2)
            others = (middle, end) if keeper == 0 else (begin, middle)
            data[slice(*others)] = b"\xff" * (others[1] - others[0])
        path.write_bytes(data)


def spoiled_is_same(accelerator: Accelerator, folder: Path) -> bool:
    """Whether a process's part is that of the plain model if all else in its files is spoiled."""
    fsdp, mine = Sharding("fsdp"), folder / f"spoiled.{rank()}"
    plain = trained(accelerator, load_causal_lm(str(folder / "several files"), held="whole"), fsdp)
    model = load_causal_lm(str(mine), held="files")
    assert place_of_weights(model) == "files"
    spoil(mine, keeper=rank())
    found = trained(accelerator, model, fsdp)
    return all(one.equal(other) for one, other in zip(plain, found, strict=True))


def memory(field: str) -> int:
    status = Path("/proc/self/status").read_text()
    return 1024 * int(re.search(rf"{field}:\s+(\d+)", status)[1])  # type: ignore[index]


def peak_growth(
    accelerator: Accelerator, load: Callable[[Sharding], torch.nn.Module]
) -> dict[str, int]:
    """Bytes by which this process's memory grows at most until a training can begin.

    Its `own` is looked at every few milliseconds; what is `resident` includes pages of files, of
    which the system maps as many as it likes around those that are read.
    """
    accelerator.free_memory()
    gc.collect()
    own, done = [memory("RssAnon")], threading.Event()

    def look() -> None:
        while not done.wait(0.003):
            own.append(memory("RssAnon"))

    watcher = threading.Thread(target=look)
    watcher.start()
    Path("/proc/self/clear_refs").write_text("5")  # the peak is that of now
    before = memory("VmRSS")
    sharding = Sharding("fsdp")
    model = load(sharding)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    prepare(accelerator, model, optimizer, sharding)
    resident = memory("VmHWM") - before
    done.set()
    watcher.join()
    return {"own": max(own) - own[0], "resident": resident}


def policy_and_critic(accelerator: Accelerator, folder: str, sharding: Sharding) -> PolicyAndCritic:
    """What PPO trains: two models of this folder."""
    settings = ppo_settings(model=folder, reward=(SIGNAL,), reference=Path(), out=Path())
    tokenizer: Any = SimpleNamespace(pad_token_id=0)
    model, _ = build_models(settings, tokenizer, None, accelerator, sharding)
    return model


def refusal(work: Callable[[], object]) -> str:
    try:
        work()
    except InputError as error:
        return str(error)
    return ""


def shard_without_files(accelerator: Accelerator, folder: Path) -> None:
    """Shard a model after one process has lost a file."""
    mine = folder / f"lost later.{rank()}"
    model = load_causal_lm(str(mine), held="files")
    accelerator.wait_for_everyone()
    if rank() == 1:
        (mine / "model.safetensors").unlink()
    trained(accelerator, model, Sharding("fsdp"))


def main(path: str) -> None:
    return_what_is_freed()
    accelerator = start("fp32", 0)
    folder, fsdp = Path(path), Sharding("fsdp")
    large = str(folder / "large")

    def policy(name: str) -> LoadModel:
        return lambda held: load_causal_lm(str(folder / name), held=held)

    def new_reward(name: str) -> LoadModel:
        return lambda held: new_reward_model(str(folder / name), 0, 7, held=held)

    def reward(held: Held) -> PreTrainedModel:
        return load_reward_model(str(folder / "reward"), held=held)

    cases: dict[str, tuple[LoadModel, Any, Sharding]] = {
        "tied embeddings": (policy("tiny"), trained, fsdp),
        "adapters": (lambda held: adapted(str(folder / "tiny"), held), trained, fsdp),
        "fresh head": (new_reward("tiny"), trained, fsdp),
        "trained head": (new_reward("reward"), trained, fsdp),
        "frozen": (reward, frozen, fsdp),
        "frozen under ZeRO 3": (reward, frozen, Sharding("zero3")),
        "groups of one": (policy("tiny"), trained, Sharding("fsdp", group=1)),
        "offloaded": (policy("tiny"), trained, Sharding("fsdp", offload=True)),
        "uneven vocabulary": (policy("uneven"), trained, fsdp),
        "several files": (policy("several files"), trained, fsdp),
        "bf16 files": (policy("bf16"), trained, fsdp),
        "tied, but two matrices": (policy("two"), trained, fsdp),
        "pytorch_model.bin": (policy("binary"), trained, fsdp),
        "experts": (policy("experts"), trained, fsdp),
        "other files": (policy(f"other.{rank()}"), trained, fsdp),
    }
    different = {"files of the same sizes": policy(f"same sizes.{rank()}")}
    loads = {name: load for name, (load, *_) in cases.items()} | different
    refused = {
        "broken": lambda: load_causal_lm(str(folder / "broken"), held="files"),
        "lacking": lambda: load_causal_lm(str(folder / "lacking"), held="files"),
        "lost later": lambda: shard_without_files(accelerator, folder),
    }
    found = {
        "refusals": {name: refusal(work) for name, work in refused.items()},
        "places": {name: place_of_weights(load("files")) for name, load in loads.items()},
        "same": {name: is_same(accelerator, *case) for name, case in cases.items()},
        "spoiled": spoiled_is_same(accelerator, folder),
        # what is imported on first use is there
        "peak": peak_growth(
            accelerator, lambda how: load_causal_lm(large, held=how.held(trained=True))
        ),
        "peak of sending": peak_growth(
            accelerator,
            lambda how: load_causal_lm(str(folder / "large.bin"), held=how.held(trained=True)),
        ),
        "peak of both": peak_growth(
            accelerator, lambda how: policy_and_critic(accelerator, str(folder / "rounded"), how)
        ),
    }
    (folder / f"found.{rank()}").write_text(json.dumps(found), encoding="utf-8")
    exit_process(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
