"""Open a reference store together with the model that it came from."""

from pathlib import Path

from accelerate import Accelerator
from transformers import PreTrainedModel

from policies.reference.store import (
    ReferenceStore,
    open_store,
    read_manifest,
    require_reference_of,
)
from rlhf.errors import InputError
from rlhf.modeling.attention.packing import pack_prefixes
from rlhf.modeling.models import describe_model, load_causal_lm
from rlhf.parallel.distributed import on_main
from rlhf.parallel.sharding import Sharding, shard_frozen
from rlhf.planning.flops import count_flops
from rlhf.run.rundir import RunDir


def open_store_and_find_model(folder: Path, policy: str) -> ReferenceStore:
    """Open a store whose model will be loaded, and fail now if that cannot be found.

    Its path is taken from the manifest, else from the inputs of the run that trained `policy`, a
    folder of weights.

    Raises:
        InputError: the model is at neither path, or the store cannot be used.
    """
    store = open_store(folder)
    trained = RunDir(Path(policy).parent).read_stage().get("inputs", {})
    paths = [store.model, *([trained["model"]["path"]] if "model" in trained else [])]
    problems = []
    for path in paths:
        try:
            require_reference_of(store, describe_model(path, store.template_kwargs))
        except InputError as error:
            problems.append(error.problem)
        else:
            return store if path == store.model else open_store(folder, path)
    raise InputError(
        f"The model that made the reference outputs in {folder} was not found: {problems[0]}",
        f"Restore it at {store.model}, or put a link there: the reverse KL is measured with it.",
    )


def open_store_on_main(folder: Path, model: str) -> ReferenceStore:
    """Open a store in all processes, of which the main one alone checks shards.

    Args:
        folder: of the store.
        model: folder of the model that made it.

    Raises:
        InputError: as `open_store`, in every process.
    """
    opened: list[ReferenceStore] = []
    on_main(lambda: opened.append(open_store(folder, model)))
    return opened[0] if opened else ReferenceStore(folder, read_manifest(folder), model)


def load_reference_model(
    store: ReferenceStore, accelerator: Accelerator, sharding: Sharding | None = None
) -> PreTrainedModel:
    """Load the model that made a store, frozen, and sharded where asked; else it is whole.

    Raises:
        InputError: the model is not where the store says, or has changed.
    """
    require_reference_of(store, describe_model(store.model, store.template_kwargs))
    sharding = sharding or Sharding()
    model = load_causal_lm(store.model, held=sharding.held(trained=False))
    pack_prefixes(model)
    count_flops(model)
    model.requires_grad_(False)  # autocast would keep a copy of every weight
    model.eval()
    shard_frozen(accelerator, model, sharding, exact=True)
    return model
