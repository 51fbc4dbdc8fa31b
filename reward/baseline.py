"""What the model thought before any training: how likely it finds each response."""

from collections.abc import Iterator, Sequence
from itertools import islice

import torch
from accelerate import Accelerator
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import PreTrainedModel

from reward.batches import lay_out, num_tokens, plan_step
from reward.groups import Group
from reward.model import Inputs, states
from reward.prefix import share_prompts
from reward.step import gather_by_prompt
from rlhf.metrics import progress
from rlhf.models import load_causal_lm


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

    The mean and not the sum, which would prefer short responses whatever they say.

    Args:
        name: the language model that the reward model started from.
        accelerator: device, precision and processes.
        groups: prompts with responses.
        tokens: in one forward pass, padding included.
        pad_id: what to pad with.
        shared: read a prompt once for all its responses, where the model can.
    """
    dtype = torch.bfloat16 if accelerator.mixed_precision == "bf16" else torch.float32
    model = load_causal_lm(name, dtype).to(accelerator.device).eval()
    shared = shared and share_prompts(model) is None
    plans = plan_step(groups, accelerator.num_processes, tokens, shared=shared)
    passes = plans[accelerator.process_index]
    found: list[tuple[str, list[float]]] = []
    with progress("asking the base model", len(passes)) as bar, torch.no_grad():
        for part in passes:
            inputs = lay_out(part, pad_id, shared=shared).to(accelerator.device)
            hidden = states(model, inputs)
            responses = [response for group in part for response in group.responses]
            told = zip(responses, _before(part, inputs), strict=True)
            values = iter([_mean(model, response, hidden[places]) for response, places in told])
            found += [
                (group.prompt_id, list(islice(values, len(group.responses)))) for group in part
            ]
            bar.advance()
    return gather_by_prompt(accelerator, found, groups)


def _before(groups: Sequence[Group], inputs: Inputs) -> Iterator[list[int]]:
    """For every response, where the token before each of its tokens stands."""
    ends = iter(inputs.reads.tolist())
    start = 0  # of the prompt in a packed row
    for group in groups:
        for response, end in zip(group.responses, ends, strict=False):
            own = range(end - len(response) + 1, end)
            first = start + len(group.prompt) - 1 if inputs.layout else end - len(response)
            yield [first, *own] if response else []
        start += num_tokens(group, shared=True)


def _mean(model: PreTrainedModel, response: Sequence[int], hidden: Float[Tensor, "R d"]) -> float:
    """The mean log-probability of a response's tokens; 0 for none."""
    if not response:
        return 0.0
    logits = model.get_output_embeddings()(hidden).float()  # (R, V)
    return -float(cross_entropy(logits, torch.tensor(response, device=logits.device)))
