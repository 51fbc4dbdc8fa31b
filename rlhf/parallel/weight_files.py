"""Write a sharded model's weights as Hugging Face files, without holding the model anywhere.

The files are those of `save_pretrained`, byte for byte. Weights are gathered one at a time, and the
main process writes each at its place in its file. Where the files store weights in another form
than the model does (the experts of a mixture, say), those of one layer are gathered together.

PyTorch can write such files too (`HuggingFaceStorageWriter`), but every process writes its parts
first and they are read and written again, under the names and in the forms of the training.
"""

import json
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby
from math import prod
from pathlib import Path

import torch
from accelerate import Accelerator
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors import safe_open
from torch import Tensor
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from rlhf.parallel.gathered_model import gather_on_main, without_storage

Gather = Callable[[Tensor], Tensor]
Weights = Callable[[Gather], Iterable[tuple[str, Tensor]]]

FILE_NAMES = SAFE_WEIGHTS_NAME.replace(".", "{suffix}.", 1)
FILE_SIZE = "50GB"  # of `save_pretrained`
ALIGNMENT = 8  # of the data in a safetensors file
LAYER = re.compile(r".*?\.\d+\.")


@dataclass(frozen=True)
class WeightFiles:
    """The weights of a model, to be written into files.

    Attributes:
        accelerator: whose processes hold the weights.
        model: a model without storage, of the class and config that are saved.
        weights: iterates over the weights by their names in `model`. It is given a function that
            makes a tensor whole, and passes all tensors that it reads through it, in every process.
        file_size: the maximum of a file, as `save_pretrained` has it; one weight may be larger.
    """

    accelerator: Accelerator
    model: PreTrainedModel
    weights: Weights
    file_size: int | str = FILE_SIZE

    def write(self, folder: Path) -> None:
        """Write the files, and their index if there are several; all processes call it."""
        locations: dict[str, tuple[Path, int]] = {}
        if self.accelerator.is_main_process:
            locations = self._lay_out(folder)
        for name, value in self._each():
            path, offset = locations.pop(name)
            with path.open("r+b") as stream:
                stream.seek(offset)
                stream.write(value.contiguous().numpy().data)
        assert not locations

    def find_differences(self, folder: Path) -> list[str]:
        """Weights whose values in the files are other ones; all processes call it.

        Returns:
            Their names, in the main process; nothing in others.
        """
        index = folder / SAFE_WEIGHTS_INDEX_NAME
        files: dict[str, str] = {}
        if self.accelerator.is_main_process and index.is_file():
            files = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        differing = []
        for name, value in self._each():
            # opened for every weight, or what was read would stay in memory
            with safe_open(folder / files.get(name, SAFE_WEIGHTS_NAME), "pt") as stream:
                if not torch.equal(stream.get_tensor(name), value):
                    differing.append(name)
        return differing

    def _each(self) -> Iterator[tuple[str, Tensor]]:
        """The weights as the files have them, in the main process; others only take part."""
        if not self.accelerator.is_main_process:
            for _ in self.weights(self._gather):
                pass
            return
        ignored = set(self.model._keys_to_ignore_on_save or ())
        unit = self._find_unit()
        for _, group in groupby(self.weights(self._gather), lambda item: unit(item[0])):
            weights = {name: value.float() for name, value in group if name not in ignored}
            yield from revert_weight_conversion(self.model, weights).items()

    def _gather(self, value: Tensor) -> Tensor:
        is_main = self.accelerator.is_main_process
        gathered = gather_on_main(self.accelerator, value)
        return gathered.cpu() if is_main else without_storage(gathered)

    def _outlines(self) -> dict[str, Tensor]:
        ignored = set(self.model._keys_to_ignore_on_save or ())
        return {
            name: value.float()
            for name, value in self.weights(without_storage)
            if name not in ignored
        }

    def _find_unit(self) -> Callable[[str], str]:
        """Return the function that names the group in which a weight must be converted."""
        outlines = self._outlines()
        wanted = _shapes(revert_weight_conversion(self.model, dict(outlines)))
        for unit in (_itself, _layer):
            converted: dict[str, Tensor] = {}
            for _, names in groupby(outlines, unit):
                part = {name: outlines[name] for name in names}
                converted |= revert_weight_conversion(self.model, part)
            if _shapes(converted) == wanted:
                return unit
        return lambda name: ""

    def _lay_out(self, folder: Path) -> dict[str, tuple[Path, int]]:
        """Write the index and the heads of all files; return file and offset of every weight."""
        converted = revert_weight_conversion(self.model, self._outlines())
        # parts of one tensor would each count as the whole
        outlines = {name: torch.empty_like(tensor) for name, tensor in converted.items()}
        split = split_torch_state_dict_into_shards(
            outlines, filename_pattern=FILE_NAMES, max_shard_size=self.file_size
        )
        locations: dict[str, tuple[Path, int]] = {}
        for file, names in split.filename_to_tensors.items():
            head, offsets = _head({name: outlines[name] for name in sorted(names)})
            (folder / file).write_bytes(head)
            locations |= {name: (folder / file, offset) for name, offset in offsets.items()}
        if split.is_sharded:
            total = {"total_parameters": self.model.num_parameters(), **split.metadata}
            index = {"metadata": total, "weight_map": split.tensor_to_filename}
            text = json.dumps(index, indent=2, sort_keys=True) + "\n"
            (folder / SAFE_WEIGHTS_INDEX_NAME).write_text(text, encoding="utf-8")
        return locations


def _shapes(outlines: dict[str, Tensor]) -> dict[str, torch.Size]:
    return {name: outline.shape for name, outline in outlines.items()}


def _itself(name: str) -> str:
    return name


def _layer(name: str) -> str:
    match = LAYER.match(name)
    return match.group() if match else name


def _head(outlines: dict[str, Tensor]) -> tuple[bytes, dict[str, int]]:
    """The head of a safetensors file of float32 tensors, and where the data of each begins."""
    spans, end = {}, 0
    for name, outline in outlines.items():
        spans[name] = (end, end := end + prod(outline.shape) * 4)
    tensors = {
        name: {"dtype": "F32", "shape": list(outline.shape), "data_offsets": list(spans[name])}
        for name, outline in outlines.items()
    }
    content = {"__metadata__": {"format": "pt"}, **tensors}
    text = json.dumps(content, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % ALIGNMENT)
    head = len(text).to_bytes(8, "little") + text
    return head, {name: len(head) + begin for name, (begin, _) in spans.items()}
