"""A baseline from the model before training: how likely it finds each response."""

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

import torch
from accelerate import Accelerator
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import PreTrainedModel

from reward.data.batches import lay_out, plan_step
from reward.data.groups import Group
from reward.training.step import gather_by_prompt
from rlhf.modeling.attention.layout import TrunkInputs, response_positions
from rlhf.modeling.attention.shared_prefix import share_prompts
from rlhf.modeling.models import load_causal_lm
from rlhf.run.metrics import progress

LOGITS_AT_ONCE = 2048  # tokens of a forward pass: each may have logits for a whole vocabulary


def base_log_probs(
    name: str,
    accelerator: Accelerator,
    groups: Sequence[Group],
    tokens: int,
    pad_id: int,
    *,
    shared: bool,
) -> list[list[float]]:
    """Mean log-probability per token of every response of every group, on every process.

    The mean, not the sum, which would always prefer short responses.

    Args:
        name: the language model that training starts from.
        accelerator: device, precision and processes.
        groups: prompts with responses.
        tokens: in one forward pass, padding included; at most LOGITS_AT_ONCE. A prompt is never
            split, so one with many tokens is a pass of its own.
        pad_id: id of the padding token.
        shared: encode a prompt once for all its responses, where the model can.
    """
    dtype = torch.bfloat16 if accelerator.mixed_precision == "bf16" else torch.float32
    model = load_causal_lm(name, dtype).to(accelerator.device).eval()
    shared = shared and share_prompts(model) is None
    tokens = min(tokens, LOGITS_AT_ONCE)
    plans = plan_step(groups, accelerator.num_processes, tokens, shared=shared)
    passes = [part for part in plans[accelerator.process_index] if part]
    log_probs: list[tuple[str, list[float]]] = []
    with progress("measuring log-probs of the base model", len(passes)) as bar, torch.no_grad():
        for part in passes:
            inputs = lay_out(part, pad_id, shared=shared).to(accelerator.device)
            responses = [response for group in part for response in group.responses]
            positions = [torch.tensor(own, dtype=torch.long) for own in _before(part, inputs)]
            answered = zip(responses, _logits(model, inputs, positions), strict=True)
            values = iter([_mean(response, logits) for response, logits in answered])
            log_probs += [
                (group.prompt_id, list(islice(values, len(group.responses)))) for group in part
            ]
            bar.advance()
    return gather_by_prompt(accelerator, log_probs, groups)


def _before(groups: Sequence[Group], inputs: TrunkInputs) -> Iterator[list[int]]:
    """For every response, the position of the token before each of its tokens."""
    responses = [response for group in groups for response in group.responses]
    if inputs.layout:
        positions: Iterator[Sequence[int]] = response_positions(inputs.layout)
    else:
        positions = (range(end + 1) for end in inputs.reads.tolist())
    for response, own in zip(responses, positions, strict=True):
        yield list(own[-len(response) - 1 : -1]) if response else []


def _logits(
    model: PreTrainedModel, inputs: TrunkInputs, positions: Sequence[Int[Tensor, " R"]]
) -> Iterator[Float[Tensor, "R V"]]:
    """For every response the logits at its positions, counted over the rows laid end to end.

    The whole model computes them, because many scale or cap the product of the output matrix.
    """
    width = inputs.ids.shape[1]
    columns = torch.cat(list(positions)).remainder(width).unique()
    network: Any = model
    logits = network(**inputs.model_inputs, logits_to_keep=columns.to(inputs.ids.device)).logits
    for own in positions:
        yield logits[own // width, torch.searchsorted(columns, own % width)]


def _mean(response: Sequence[int], logits: Float[Tensor, "R V"]) -> float:
    """The mean log-probability of a response's tokens; 0 for none."""
    if not response:
        return 0.0
    return -float(cross_entropy(logits.float(), torch.tensor(response, device=logits.device)))
