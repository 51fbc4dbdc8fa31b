"""What the model thought before any training: how likely it finds each response."""

from collections.abc import Sequence

import torch
from accelerate import Accelerator
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import PreTrainedModel

from reward.batches import lay_out, plan_step
from reward.groups import Group
from reward.step import gather_by_prompt
from rlhf.metrics import progress
from rlhf.models import load_causal_lm


def base_log_probs(
    name: str, accelerator: Accelerator, groups: Sequence[Group], tokens: int, pad_id: int
) -> list[list[float]]:
    """Mean log-probability per token of every response of every group, on every process.

    The mean and not the sum, which would prefer short responses whatever they say.

    Args:
        name: the language model that the reward model started from.
        accelerator: device, precision and processes.
        groups: prompts with responses.
        tokens: in one forward pass, padding included.
        pad_id: what to pad with.
    """
    dtype = torch.bfloat16 if accelerator.mixed_precision == "bf16" else torch.float32
    model = load_causal_lm(name, dtype).to(accelerator.device).eval()
    plans = plan_step(groups, accelerator.num_processes, tokens, shared=False)
    passes = plans[accelerator.process_index]
    found: list[tuple[str, list[float]]] = []
    with progress("asking the base model", len(passes)) as bar, torch.no_grad():
        for part in passes:
            ids = lay_out(part, pad_id, shared=False).ids.to(accelerator.device)
            hidden = model.base_model(input_ids=ids, use_cache=False).last_hidden_state
            row = 0
            for group in part:
                rows = slice(row, row + len(group.responses))
                found.append((group.prompt_id, _of_group(model, group, ids[rows], hidden[rows])))
                row = rows.stop
            bar.advance()
    return gather_by_prompt(accelerator, found, groups)


def _of_group(
    model: PreTrainedModel, group: Group, ids: Int[Tensor, "K T"], hidden: Float[Tensor, "K T d"]
) -> list[float]:
    head = model.get_output_embeddings()
    start = len(group.prompt)
    values = []
    for response, row, states in zip(group.responses, ids, hidden, strict=True):
        end = start + len(response)
        logits = head(states[start - 1 : end - 1]).float()  # (R, V): a token is told before it
        values.append(-float(cross_entropy(logits, row[start:end])) if response else 0.0)
    return values
