"""Reads a saved training state as data, without executing anything in its files.

PyTorch's distributed checkpoint unpickles the list of its tensors and every value that is not a
tensor (a learning rate, say), and pickled data may call any function. Here only the few classes are
allowed that such files consist of.
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
    """Fill a state with what `torch.distributed.checkpoint` has saved.

    Its tensors decide which parts of the saved ones are read. `alone`: there is one process.

    Raises:
        UnpicklingError: a file names a class or function that is not part of a state.
        Exception: of any kind, where files are broken, missing or of another model.
    """
    reader = _DataReader(folder)
    reader.read_metadata()  # or PyTorch would log a failure with its traceback, and look elsewhere
    try:
        state_dict_loader.load(
            content, storage_reader=reader, planner=_DataPlanner(), no_dist=alone
        )
    except CheckpointException as failed:  # it is not an `Exception`, but holds one
        raise next(failure for failure, _ in failed.failures.values()) from None


def _member(kind: Any, name: str) -> Any:
    """The member of PyTorch's enum of memory formats, which Python 3.11.0 to 3.11.3 save by name.

    Raises:
        UnpicklingError: another attribute is asked for.
    """
    if kind is not metadata._MEM_FORMAT_ENCODING:
        raise pickle.UnpicklingError("it names builtins.getattr, which no checkpoint contains")
    return metadata._MEM_FORMAT_ENCODING[name]


class _DataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        """A class of NAMED, a path (whose module differs between Pythons) or a dtype."""
        if (module, name) in NAMED:
            return NAMED[module, name]
        if (module, name) == ("builtins", "getattr"):
            return _member
        if name == PosixPath.__name__ and module.startswith("pathlib"):
            return PosixPath
        kind = getattr(torch, name, None) if module == "torch" else None
        if isinstance(kind, torch.dtype):
            return kind
        raise pickle.UnpicklingError(f"it names {module}.{name}, which no checkpoint contains")


@final
class _DataReader(FileSystemReader):
    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        """The list of saved tensors, which must all be in files of this folder."""
        with (Path(self.path) / METADATA).open("rb") as stream:
            listing = _DataUnpickler(stream).load()
        if not isinstance(listing, Metadata):
            raise pickle.UnpicklingError(f"its {METADATA} is not a list of tensors")
        for storage in listing.storage_data.values():
            if Path(storage.relative_path).name != storage.relative_path:
                raise pickle.UnpicklingError(
                    f"it names the file {storage.relative_path} outside itself"
                )
        listing.storage_meta = listing.storage_meta or StorageMeta()
        listing.storage_meta.load_id = self.load_id
        return listing


@final
class _DataPlanner(DefaultLoadPlanner):
    def load_bytes(self, read_item: ReadItem, value: BytesIO) -> None:
        """Check a value that is not a tensor, and pass PyTorch a clean copy."""
        copy = BytesIO()
        torch.save(torch.load(value, weights_only=True), copy)
        copy.seek(0)
        super().load_bytes(read_item, copy)
