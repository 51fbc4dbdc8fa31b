"""A program for two processes: a training whose checkpoints are written on a slow disk.

python -m tests.pipeline.processes.background MODEL RUN ASYNCHRONOUS : ASYNCHRONOUS is 0 or 1. It
continues from the newest checkpoint of RUN; the main process writes RUN/weights.safetensors.
"""

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from rlhf.modeling.models import load_causal_lm
from rlhf.parallel.distributed import start
from rlhf.parallel.settings import CheckpointSettings
from rlhf.parallel.sharding import Sharding, prepare
from rlhf.ranks import exit_process
from rlhf.run.checkpoint import load_checkpoint
from rlhf.run.saving.saver import Saver
from tests.pipeline.processes.state import full_state

STEPS, EVERY = 30, 4
SECONDS = 0.02  # for each tensor, of which a checkpoint has about seventy


def slow_down(plain: Callable[..., None]) -> Callable[..., None]:
    def save(*given: Any, **named: Any) -> None:
        time.sleep(SECONDS)
        plain(*given, **named)

    return save


def main(folder: str, out: str, asynchronous: str) -> None:
    accelerator = start("fp32", 0)
    torch.manual_seed(accelerator.process_index)
    sharding, run = Sharding("fsdp"), Path(out)
    model = load_causal_lm(folder, held=sharding.held(trained=True))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    prepared, stepper = prepare(accelerator, model, optimizer, sharding)
    saved = load_checkpoint(accelerator, run / "checkpoints") or {"step": 0}
    settings = CheckpointSettings(every=EVERY, asynchronous=asynchronous == "1")
    saver = Saver(accelerator, run / "checkpoints", settings)
    torch.save = slow_down(torch.save)
    with saver.saving_on_sigterm():
        for step in range(saved["step"] + 1, STEPS + 1):
            loss = prepared(torch.randint(5, 60, (2, 8))).logits.square().mean()
            accelerator.backward(loss)
            stepper.step()
            stepper.zero_grad()
            saver.after_step(step, {})
    state = full_state(accelerator, prepared)
    if accelerator.is_main_process:
        kept = {name: value.clone() for name, value in state.items()}
        save_file(kept, run / "weights.safetensors")
    accelerator.wait_for_everyone()
    exit_process(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
