"""A program for two processes: saves sharded models, and what they gather whole for comparison.

python -m tests.pipeline.processes.saving TINY LARGE OUT : models in OUT, and in OUT/found.RANK by
how much memory grew. With OUT only a large model is saved there.
"""

import gc
import json
import sys
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator

from reward.training.save import require_same_files, scaled_weights
from rlhf.errors import GuardError
from rlhf.modeling.adapters import add_adapters, merged_weights, save_sharded
from rlhf.modeling.heads import empty_causal_lm, empty_reward_model
from rlhf.modeling.models import load_causal_lm, new_reward_model, save_model
from rlhf.modeling.tokens import load_tokenizer
from rlhf.parallel.distributed import start
from rlhf.parallel.sharding import Sharding, prepare, unwrap
from rlhf.parallel.weight_files import WeightFiles
from rlhf.ranks import exit_process, rank
from tests.pipeline.processes.loading import memory, return_what_is_freed
from tests.pipeline.processes.state import full_state


def prepared(accelerator: Accelerator, model: Any, sharding: Sharding) -> Any:
    accelerator.free_memory()
    wanted = [one for one in model.parameters() if one.requires_grad]
    optimizer = torch.optim.AdamW(wanted, lr=1e-2)
    return prepare(accelerator, model, optimizer, sharding)[0]


def save_both(accelerator: Accelerator, tiny: str, out: Path, sharding: Sharding) -> None:
    """Save a policy with adapters, part by part as `ours` and from its whole state as `theirs`."""
    model = load_causal_lm(tiny, held=sharding.held(trained=True))
    if not sharding.is_tensor_parallel:
        add_adapters(model, 2, 4, seed=0)
        with torch.no_grad():
            for name, value in model.named_parameters():
                if ".lora_B" in name:
                    value.normal_(generator=torch.Generator().manual_seed(1))
    module = prepared(accelerator, model, sharding)
    tokenizer, plain = load_tokenizer(tiny), unwrap(module)
    state = plain.state_dict(keep_vars=True)
    save_sharded(accelerator, plain, state, tokenizer, out / "ours")
    whole = full_state(accelerator, module)
    if accelerator.is_main_process:
        merged = merged_weights(plain, whole)
        for name in plain.all_tied_weights_keys:
            del merged[name]
        empty = empty_causal_lm(plain.config)
        empty.generation_config = plain.generation_config
        save_model(empty, tokenizer, out / "theirs", merged)
    accelerator.wait_for_everyone()


def check_reward(accelerator: Accelerator, tiny: str, out: Path) -> str:
    """Save a reward model, and say what a check finds after one weight has changed."""
    sharding = Sharding("fsdp")
    model = new_reward_model(tiny, 0, 7, held=sharding.held(trained=True))
    module = prepared(accelerator, model, sharding)
    state = module.state_dict(keep_vars=True)
    plain = empty_reward_model(module.config, 0.5)

    files = WeightFiles(accelerator, plain, lambda gather: scaled_weights(module, state, 2, gather))
    save_model(plain, load_tokenizer(tiny), out, files=files)
    require_same_files(out, files)
    other = WeightFiles(accelerator, plain, lambda gather: scaled_weights(module, state, 3, gather))
    try:
        require_same_files(out, other)
    except GuardError as error:
        return str(error)
    return ""


def growth(accelerator: Accelerator, tiny: str, large: str, out: Path) -> int:
    """Bytes by which this process's memory grows at most while a model is saved."""
    sharding = Sharding("fsdp")
    model = load_causal_lm(large, held=sharding.held(trained=True))
    module = prepared(accelerator, model, sharding)
    tokenizer = load_tokenizer(tiny)
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # the peak is that of now
    before = memory("VmRSS")
    save_sharded(accelerator, module, module.state_dict(keep_vars=True), tokenizer, out)
    return memory("VmHWM") - before


def main(tiny: str, large: str, out: str, only: str = "") -> None:
    return_what_is_freed()
    accelerator = start("fp32", 0)
    folder = Path(out)
    if only:
        growth(accelerator, tiny, large, folder / only)
        exit_process(0)
    save_both(accelerator, tiny, folder / "fsdp", Sharding("fsdp"))
    save_both(accelerator, tiny, folder / "offloaded", Sharding("fsdp", offload=True))
    save_both(accelerator, tiny, folder / "tensor-parallel", Sharding(tensor_parallel=2))
    found = {
        "refusal": check_reward(accelerator, tiny, folder / "reward"),
        "growth": growth(accelerator, tiny, large, folder / "large"),
    }
    save_both(accelerator, tiny, folder / "zero3", Sharding("zero3"))
    (folder / f"found.{rank()}").write_text(json.dumps(found), encoding="utf-8")
    exit_process(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
