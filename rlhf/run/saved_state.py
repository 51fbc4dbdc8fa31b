"""Reading a saved training state as data: nothing that its files name is called.

PyTorch's distributed checkpoint unpickles the list of its tensors and every value that is no tensor
(a learning rate, say), and pickled data may name any function to be called. Here they may name the
few classes that such files consist of.
"""

import pickle
from io import BytesIO
from pathlib import Path, PosixPath
from typing import Any, final

import torch
from torch import serialization
from torch.distributed.checkpoint import filesystem, metadata, state_dict_loader
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import ReadItem

METADATA = ".metadata"
NAMED: dict[tuple[str, str], Any] = {
    (module.__name__, name): getattr(module, name)
    for module, names in (
        (torch, ("Size",)),
        (serialization, ("_get_layout",)),
        (filesystem, ("_StorageInfo",)),
        (
            metadata,
            (
                "_MEM_FORMAT_ENCODING",
                "BytesStorageMetadata",
                "ChunkStorageMetadata",
                "Metadata",
                "MetadataIndex",
                "StorageMeta",
                "TensorProperties",
                "TensorStorageMetadata",
            ),
        ),
    )
    for name in names
}


def load_data(content: dict[str, Any], folder: Path, *, alone: bool) -> None:
    """Fill a state with what `torch.distributed.checkpoint` has saved of it.

    Args:
        content: the state to be filled, whose tensors say what is wanted of the saved ones.
        folder: where it was saved.
        alone: this process is the only one.

    Raises:
        UnpicklingError: a file names what no such state consists of.
        Exception: of any kind, where files are broken, lost or another model's.
    """
    reader = _DataReader(folder)
    reader.read_metadata()  # PyTorch would log a failure with its traceback, and look elsewhere
    try:
        state_dict_loader.load(
            content, storage_reader=reader, planner=_DataPlanner(), no_dist=alone
        )
    except CheckpointException as failed:  # no `Exception`, though what it holds is
        raise next(failure for failure, _ in failed.failures.values()) from None


class _DataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        """Where it was saved from is a path, whose class has another module in later Pythons."""
        if (module, name) in NAMED:
            return NAMED[module, name]
        if name == PosixPath.__name__ and module.startswith("pathlib"):
            return PosixPath
        kind = getattr(torch, name, None) if module == "torch" else None
        if isinstance(kind, torch.dtype):
            return kind
        raise pickle.UnpicklingError(f"it names {module}.{name}, which no checkpoint of ours does")


@final
class _DataReader(FileSystemReader):
    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        """The list of saved tensors, all in files of its own folder."""
        with (Path(self.path) / METADATA).open("rb") as stream:
            found = _DataUnpickler(stream).load()
        if not isinstance(found, Metadata):
            raise pickle.UnpicklingError(f"its {METADATA} holds no list of tensors")
        for place in found.storage_data.values():
            if Path(place.relative_path).name != place.relative_path:
                raise pickle.UnpicklingError(
                    f"it names the file {place.relative_path} outside itself"
                )
        found.storage_meta = found.storage_meta or StorageMeta()
        found.storage_meta.load_id = self.load_id
        return found


@final
class _DataPlanner(DefaultLoadPlanner):
    def load_bytes(self, read_item: ReadItem, value: BytesIO) -> None:
        """One value that is no tensor; PyTorch reads our copy of it."""
        copy = BytesIO()
        torch.save(torch.load(value, weights_only=True), copy)
        copy.seek(0)
        super().load_bytes(read_item, copy)
