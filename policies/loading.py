"""Language models that are asked something and let go: where several are, one is in memory."""

from collections.abc import Iterator
from contextlib import contextmanager

from accelerate import Accelerator
from torch import nn
from transformers import PreTrainedModel

from policies.packing import pack_prefixes
from policies.reference_store import ReferenceStore, require_reference_of
from rlhf.models import describe_model, load_causal_lm


@contextmanager
def in_memory(model: PreTrainedModel) -> Iterator[PreTrainedModel]:
    """A model for as long as it is asked: its weights leave memory then, whoever names it."""
    try:
        yield model
    finally:
        nn.Module.to(model, "meta")


def load_reference_model(
    store: ReferenceStore, accelerator: Accelerator, *, together: bool = False
) -> PreTrainedModel:
    """Load the model that made a store, frozen, to be asked; `together` all processes hold one.

    Raises:
        InputError: the model is not where the manifest says, or has changed.
    """
    path = store.manifest["model"]["path"]
    require_reference_of(store, describe_model(path))
    model: PreTrainedModel = load_causal_lm(path, together=together).to(accelerator.device)
    pack_prefixes(model)
    model.requires_grad_(False)  # autocast would keep a copy of every weight
    model.eval()
    return model
