"""How long the steps of trl's trainers take, what their models do, and what they wait for."""

import time
from collections.abc import Callable, Iterator
from functools import wraps
from itertools import islice
from typing import Any

import torch
from peft import PeftModel
from transformers import Trainer

from rlhf.parallel.sharding import wait_for_slower
from rlhf.parallel.waits import Cause, waiting
from rlhf.planning.flops import count_flops, count_fused_head
from rlhf.planning.utilization import Laps


class StepClock:
    """Measures the steps of a trainer, each from before its batches are prepared.

    It replaces what the trainer calls to fetch batches, to gather numbers of all processes and to
    begin a backward pass, with functions that do the same and count the seconds of waiting.

    Args:
        trainer: of trl or transformers, before its first step.
        rate: of a matrix product, in operations a second.
    """

    def __init__(self, trainer: Trainer, rate: float) -> None:
        self._accelerator = trainer.accelerator
        self._rate = rate
        self._fetch = trainer.get_batch_samples
        trainer.get_batch_samples = self._begin  # type: ignore[method-assign]
        self._accelerator.gather = _counted("ranks", self._accelerator.gather)
        self._trainer = trainer
        self._backward = self._accelerator.backward
        self._accelerator.backward = self._wait_and_go_back
        model: Any = trainer.model
        plain = model.get_base_model() if isinstance(model, PeftModel) else model
        count_flops(plain, keeps_logits=True)
        count_fused_head(model)

    def _begin(
        self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device
    ) -> tuple[list[Any], torch.Tensor | int | None]:
        """Begin a step: fetch the batches of one optimizer step."""
        self._began = time.monotonic()
        self._laps = Laps(self._accelerator, self._rate)
        with waiting("data"):
            fetched = list(islice(epoch_iterator, num_batches))
        return self._fetch(iter(fetched), num_batches, device)

    def _wait_and_go_back(self, loss: torch.Tensor, **named: Any) -> None:
        """Wait for slower processes before DDP averages gradients, then go back."""
        wait_for_slower(self._accelerator, self._trainer.model_wrapped)
        self._backward(loss, **named)

    def end(self) -> dict[str, float]:
        """End a step: its seconds in this process, and the metrics of its speed over all."""
        seconds = round(time.monotonic() - self._began, 3)
        self._laps.end("step")
        return {"seconds": seconds, **self._laps.metrics()}


def _counted(cause: Cause, function: Callable[..., Any]) -> Callable[..., Any]:
    """The same function, whose seconds count as waits."""

    @wraps(function)
    def call(*arguments: Any, **named: Any) -> Any:
        with waiting(cause):
            return function(*arguments, **named)

    return call
