"""The parts of `rlhf.parallel.sharding` that use DeepSpeed; importing this imports DeepSpeed.

DeepSpeed has one gradient norm, over all parameters; here policy and critic are clipped separately,
as under every other strategy.
"""

import copyreg
import logging
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any, final

import deepspeed
import torch
from deepspeed.ops import __compatible_ops__ as compatible_operators
from deepspeed.ops.op_builder.cpu import ShareMemCommBuilder
from deepspeed.runtime.checkpoint_engine import TorchCheckpointEngine
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
from deepspeed.runtime.zero.config import ZeroStageEnum
from deepspeed.runtime.zero.stage_1_and_2 import INITIAL_MICRO_STEP_ID
from deepspeed.utils import safe_set_full_fp32_param
from deepspeed.utils.logging import logger
from deepspeed.utils.tensor_fragment import fragment_address
from torch import Tensor, nn
from torch.optim import Optimizer

from rlhf.parallel.settings import BUCKET


@final
class ZeroOptimizer(Optimizer):
    """DeepSpeed's optimizer with the interface of PyTorch's."""

    def __init__(self, engine: Any) -> None:  # no super().__init__: the groups are the engine's
        self.engine = engine

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The groups whose learning rates are used."""
        groups: list[dict[str, Any]] = self.engine.optimizer.param_groups
        return groups

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update the weights, without clipping."""
        self.engine.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear all gradients, also those already sharded and averaged."""
        zero = self.engine.optimizer
        zero.zero_grad(set_to_none=True)
        if self.engine.zero_optimization_stage() == 3:
            zero.averaged_gradients = {}
        else:
            zero.averaged_gradients = dict.fromkeys(zero.averaged_gradients)
            zero.micro_step_id = INITIAL_MICRO_STEP_ID


# classes in DeepSpeed's files besides tensors
NAMED = (DynamicLossScaler, LossScaler, ZeroStageEnum, fragment_address)
# Python 3.11.0 to 3.11.3 would save it as a call of getattr, which is not read as data
copyreg.pickle(ZeroStageEnum, lambda stage: (ZeroStageEnum, (stage.value,)))


@final
class _DataEngine(TorchCheckpointEngine):  # type: ignore[misc]
    """Reads DeepSpeed's files as data: no code named in them is called."""

    def load(self, path: str, map_location: Any = None) -> Any:
        with torch.serialization.safe_globals(list(NAMED)):
            return torch.load(path, map_location=map_location, weights_only=True)


def load_state(engine: Any, folder: Path, tag: str) -> None:
    """Load what the engine has saved.

    Raises:
        UnpicklingError: a file names a class or function that is not part of a state.
        Exception: of any kind, where files are broken, missing or of another model.
    """
    if type(engine.checkpoint_engine) is TorchCheckpointEngine:  # others load weights only
        engine.checkpoint_engine = _DataEngine(engine._config)
    path, _ = engine.load_checkpoint(str(folder), tag=tag)
    if path is None:
        raise FileNotFoundError(f"{folder / tag} holds no state of DeepSpeed's")


def prepare(
    model: nn.Module, optimizer: Optimizer, stage: int, offload: bool, given: dict[str, Any]
) -> tuple[nn.Module, Optimizer]:
    """A DeepSpeed engine of ZeRO stage 1 to 3, and its optimizer; `model` is on its device.

    `offload` keeps the optimizer, and with stage 3 the weights, in main memory. `given` is the
    user's own DeepSpeed configuration, which takes precedence.
    """
    logger.setLevel(logging.ERROR)  # it logs every setting
    warnings.filterwarnings("ignore", "`torch.distributed", FutureWarning)  # names it still uses
    compatible_operators[ShareMemCommBuilder.NAME] = False  # a minute of compiling, for CPUs only
    target = {"device": "cpu"}
    zero: dict[str, Any] = {"stage": stage, **({"offload_optimizer": target} if offload else {})}
    zero["reduce_bucket_size"] = BUCKET  # default 5·10⁸, held twice
    if offload and stage == 3:
        zero["offload_param"] = target
    config = {
        "zero_optimization": zero,
        **{name: value for name, value in given.items() if value != "auto"},
        "train_micro_batch_size_per_gpu": 1,  # required, but batches are made here
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 0.0,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 10**9,
    }
    config.pop("train_batch_size", None)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    return engine, ZeroOptimizer(engine)


def clip_gradients(engine: Any, parameters: Iterable[Tensor], max_norm: float) -> float:
    """Clip the gradients of some parameters to `max_norm`; returns the norm before clipping."""
    zero = engine.optimizer
    wanted = {id(parameter) for parameter in parameters}
    stage3 = engine.zero_optimization_stage() == 3
    groups = zero.fp16_groups if stage3 else zero.bit16_groups
    mine = [i for i, group in enumerate(groups) if any(id(p) in wanted for p in group)]
    norms = zero._get_norm_groups() if stage3 else _norms_of_stage_2(zero)
    norm = torch.stack([torch.as_tensor(norms[i]).double() for i in mine]).norm()
    scale = float(max_norm / (norm + 1e-6))
    if scale < 1:
        for i in mine:
            for gradient in _gradients(zero, i, stage3):
                gradient.mul_(scale)
    return float(norm)


def _norms_of_stage_2(zero: Any) -> list[Any]:
    own = zero.params_in_partition
    if zero.cpu_offload:
        return [zero.complete_grad_norm_calculation_for_cpu_offload(group) for group in own]
    return [
        zero.get_grad_norm_direct(zero.averaged_gradients[i], group) for i, group in enumerate(own)
    ]


def _gradients(zero: Any, group: int, stage3: bool) -> list[Tensor]:
    """The averaged gradients of one group."""
    if stage3 and zero.offload_optimizer:
        return [zero.fp32_partitioned_groups_flat[group].grad]
    if not stage3 and zero.cpu_offload:
        return [zero.single_partition_of_fp32_groups[group].grad]
    return list(zero.averaged_gradients[group])


def whole(parameter: Any) -> Tensor:
    """The whole of a parameter that ZeRO 3 has sharded, on every process."""
    with deepspeed.zero.GatheredParameters([parameter]):
        copied: Tensor = parameter.data.clone()
    return copied


def assign(parameter: Any, value: Tensor) -> None:
    """Overwrite a parameter and the float32 original that the optimizer works on."""
    value = value.to(parameter.device, torch.float32)
    if hasattr(parameter, "ds_id"):
        with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0):
            parameter.data.copy_(value)
    else:
        parameter.data.copy_(value)
    safe_set_full_fp32_param(parameter, value)
