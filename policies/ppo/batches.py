"""The data of a step: its prompts, reference rows and pretraining texts, and how they are batched.

Which prompts and rows a step uses is the same on every machine and after a resume. Rows that share
a forward pass have similar lengths; a pass is limited by rows or by tokens.

Pretraining texts (PPO-ptx, arXiv 2203.02155, section 3.5) add γ E[log π(x)] over ordinary text x to
the objective, which keeps abilities that no reward asks for; γ was 27.8, with a KL penalty of
0.02. Here the loss grows by γ times the mean of −log π over the tokens of all processes, at
temperature 1, in the same optimizer step as the policy loss. Texts are split into chunks, and not
joined.

Letters: N rows, B rows of one batch, R and W widths of two paddings of the same tokens.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch
from accelerate import Accelerator
from jaxtyping import Bool, Int, Shaped
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from policies.ppo.setting_groups import BatchSettings
from policies.ppo.settings import PPOSettings
from policies.reference.store import ReferenceRow
from rlhf.errors import InputError
from rlhf.modeling.log_probs import Sequences
from rlhf.modeling.tokens import send
from rlhf.parallel.distributed import global_max, on_main
from rlhf.planning.plan import count_rows
from rlhf.records.fingerprints import file_hash
from rlhf.records.jsonl import PLAIN_TEXT, read_lines, text_of

Item = TypeVar("Item")


def choose_prompts(
    prompts: Sequence[tuple[ReferenceRow, ...]],
    step: int,
    batch: BatchSettings,
    seed: int,
    *,
    dp_rank: int,
    dp_size: int,
) -> list[tuple[ReferenceRow, ...]]:
    """The prompts of a step that are this process's: each once per epoch, newly shuffled.

    Args:
        prompts: the reference rows of every training prompt.
        step: from 1.
        batch: episodes of a step, over all processes, and samples of each prompt; a prompt is
            repeated as often, one after the other.
        seed: of the shuffling.
        dp_rank: which data-parallel part this process computes.
        dp_size: how many parts there are.
    """
    samples = batch.samples_per_prompt
    per_step = batch.episodes_per_step // samples
    chosen = items_of_step(prompts, step, per_step, seed, dp_rank=dp_rank, dp_size=dp_size)
    return [rows for rows in chosen for _ in range(samples)]


def items_of_step(
    items: Sequence[Item], step: int, per_step: int, seed: int, *, dp_rank: int, dp_size: int
) -> list[Item]:
    """The items of a step that are this process's: each once per epoch, newly shuffled.

    Args:
        items: all there are.
        step: from 1.
        per_step: items of a step, over all processes.
        seed: of the shuffling.
        dp_rank: which data-parallel part this process computes.
        dp_size: how many parts there are.
    """
    positions = range((step - 1) * per_step + dp_rank, step * per_step, dp_size)
    epochs_and_indices = [divmod(position, len(items)) for position in positions]
    orders = {
        epoch: torch.randperm(len(items), generator=torch.Generator().manual_seed(seed + epoch))
        for epoch in {epoch for epoch, _ in epochs_and_indices}
    }
    return [items[int(orders[epoch][index])] for epoch, index in epochs_and_indices]


def choose_reference_rows(
    chosen: Sequence[tuple[ReferenceRow, ...]],
    step: int,
    settings: PPOSettings,
    generator: torch.Generator,
) -> list[ReferenceRow]:
    """Reference rows of the step's prompts for the KL term; M samples of a prompt take turns."""
    if settings.kl.source != "reference":
        return []
    count = count_rows(len(chosen), settings.kl.rows_per_prompt)
    picked = torch.randperm(len(chosen), generator=generator)[:count].tolist()
    return [chosen[index][step % len(chosen[index])] for index in picked]


def split_by_length(
    lengths: Int[Tensor, " N"], size: int, tokens: int | None
) -> list[Int[Tensor, " B"]]:
    """Indices of rows, shortest first, in batches.

    Args:
        lengths: of the rows.
        size: rows in a batch, where `tokens` is not given.
        tokens: the most in a batch, padding included; a longer row is a batch of its own.
    """
    order = lengths.argsort()
    if tokens is None:
        return list(order.split(size))
    counts: list[int] = []
    for length in lengths[order].tolist():
        if counts and (counts[-1] + 1) * length <= tokens:
            counts[-1] += 1
        else:
            counts.append(1)
    return list(order.split(counts))


def equalize_batch_count(accelerator: Accelerator, parts: list[Tensor]) -> list[Tensor]:
    """Split the largest batches until every process has equally many.

    Sharded weights need all processes in every pass.
    """
    wanted = int(global_max(accelerator, len(parts)))
    parts = list(parts)
    while len(parts) < wanted:
        fullest = max(range(len(parts)), key=lambda index: len(parts[index]))
        parts[fullest : fullest + 1] = parts[fullest].tensor_split(2)
    return parts


def trim_padding(sequences: Sequences, tokens: int | None) -> Sequences:
    """A batch without the columns that are padding in every row.

    With a limit on tokens, rows are also shifted to end together.
    """
    return sequences.trimmed() if tokens is None else sequences.end_aligned()


def in_length_order(
    sequences: Sequences, size: int, tokens: int | None = None
) -> Iterator[tuple[Tensor, Sequences]]:
    """Batches of rows of similar length, shortest first: their indices, and the rows themselves.

    Both are in main memory.

    Args:
        sequences: all rows.
        size: rows in a batch, where `tokens` is not given.
        tokens: as in `split_by_length`.
    """
    sequences = sequences.on_host
    lengths = sequences.joined.mask.sum(dim=1)
    for rows in split_by_length(lengths, size, tokens):
        yield rows, trim_padding(sequences.rows(rows), tokens)


@dataclass(frozen=True)
class PaddingMap:
    """Moves values of real tokens to where another padding of the same rows has these tokens.

    Attributes:
        source_indices: of each value in the rows laid end to end; 0 at padding.
        mask: real tokens of the other padding.
    """

    source_indices: Int[Tensor, "B W"]
    mask: Bool[Tensor, "B W"]

    @classmethod
    def between(
        cls,
        mask: Bool[Tensor, "N R"],
        target_mask: Bool[Tensor, "B W"],
        device: torch.device,
        rows: Int[Tensor, " B"] | None = None,
    ) -> "PaddingMap":
        """From one padding to the other, planned in main memory.

        Args:
            mask: real tokens of the padding that the values have.
            target_mask: real tokens of the padding that they get.
            device: of the values.
            rows: the rows of `mask` that `target_mask` has; by default all.
        """
        numbers = torch.arange(mask.numel()).view_as(mask)
        chosen = slice(None) if rows is None else rows
        source_indices = torch.zeros(target_mask.shape, dtype=torch.long)
        source_indices[target_mask] = numbers[chosen][mask[chosen]]
        return cls(send(source_indices, device), send(target_mask, device))

    def __call__(self, values: Shaped[Tensor, "N R *K"]) -> Shaped[Tensor, "B W *K"]:
        """The values at their new positions; 0 at padding."""
        moved = values.flatten(0, 1)[self.source_indices]
        padding = ~self.mask
        return moved.masked_fill(padding.view(*padding.shape, *[1] * (moved.dim() - 2)), 0)


def ptx_input(path: Path | None) -> dict[str, dict[str, str]]:
    """The file of texts as a stage's input; nothing where there is none. All processes call this.

    Raises:
        InputError: there is no such file.
    """
    return {} if path is None else {"ptx": on_main(lambda: _describe_file(path))}


def _describe_file(path: Path) -> dict[str, str]:
    if not path.is_file():
        raise InputError(
            f"No such file: {path}",
            'Give --ptx.data lines such as {"text": "…"}, or a .txt file with a text on each line.',
        )
    return {"path": str(path), "hash": file_hash(path)}


def read_chunks(
    path: Path, tokenizer: PreTrainedTokenizerBase, length: int, limit: int
) -> list[list[int]]:
    """Token ids of chunks of 2 to `length` tokens, in the order of the file.

    Args:
        path: JSON Lines with `text`, or a .txt file with a text on each line.
        tokenizer: the policy's.
        length: most tokens of a chunk.
        limit: how many chunks are wanted; what comes after them is not read.

    Raises:
        InputError: there is no text, or a line cannot be read.
    """
    chunks: list[list[int]] = []
    for text in _texts(path):
        ids: list[int] = tokenizer(text, verbose=False)["input_ids"]
        parts = [ids[first : first + length] for first in range(0, len(ids), length)]
        chunks += [part for part in parts if len(part) > 1]  # the first token is only read
        if len(chunks) >= limit:
            break
    if not chunks:
        raise InputError(f"{path} holds no text", "Give --ptx.data a file with texts to keep.")
    return chunks[:limit]


def _texts(path: Path) -> Iterator[str]:
    is_plain = path.name.endswith(PLAIN_TEXT)
    for location, line in read_lines(path):
        yield line.strip() if is_plain else text_of(line, location)


def chunks_per_step(settings: PPOSettings, processes: int) -> int:
    """Chunks of text of one process in one step; every minibatch has at least one."""
    wanted = round(settings.batch.episodes_per_step * settings.ptx.per_episode / processes)
    return max(settings.optim.minibatches, wanted)


def stack_chunks(chunks: Sequence[list[int]], pad_id: int, device: torch.device) -> Sequences:
    """Chunks as sequences whose prompt is their first token."""
    prompts = [ids[:1] for ids in chunks]
    return Sequences.of(prompts, [ids[1:] for ids in chunks], pad_id).to(device)


@dataclass(frozen=True)
class StepTexts:
    """The pretraining texts of every step.

    Attributes:
        chunks: of all texts, as token ids.
        per_step: how many a step takes, over all processes.
        seed: of their order.
        dp_rank: which part of them this process computes.
        dp_size: how many parts there are.
        pad_id: pads them.
        device: where they are needed.
    """

    chunks: Sequence[list[int]]
    per_step: int
    seed: int
    dp_rank: int
    dp_size: int
    pad_id: int
    device: torch.device

    def of_step(self, step: int) -> Sequences:
        """This process's texts in a step, counted from 1."""
        rank = {"dp_rank": self.dp_rank, "dp_size": self.dp_size}
        chunks = items_of_step(self.chunks, step, self.per_step, self.seed, **rank)
        return stack_chunks(chunks, self.pad_id, self.device)
