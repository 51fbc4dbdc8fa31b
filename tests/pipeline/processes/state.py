"""What a model that several processes hold looks like as a whole."""

from accelerate import Accelerator
from torch import Tensor, nn

from rlhf.parallel.gathered_model import gather_on_main
from rlhf.parallel.sharding import unwrap


def full_state(accelerator: Accelerator, model: nn.Module) -> dict[str, Tensor]:
    """The whole state of a prepared model by plain names, in the main process; empty in others.

    All processes call it: sharded weights are gathered one at a time, into main memory.
    """
    state: dict[str, Tensor] = {}
    for name, value in unwrap(model).state_dict(keep_vars=True).items():
        gathered = gather_on_main(accelerator, value)
        if accelerator.is_main_process:
            state[name] = gathered
    return state
