"""Logits of padded batches: what blocks and packed rows are compared with."""

from typing import Any

import torch
from torch import Tensor

from rlhf.modeling.log_probs import Sequences
from rlhf.modeling.logits.projection import float32_logits


def response_logits(model: Any, sequences: Sequences) -> Tensor:
    """Logits (B, R, V), in float32, of the distribution each response token came from."""
    prompt, batch = sequences.prompts.ids.shape[1], sequences.joined
    kept = torch.arange(prompt - 1, batch.ids.shape[1] - 1)
    with float32_logits(model):
        logits: Tensor = model(**batch.model_inputs, logits_to_keep=kept).logits
    return logits
