"""Which rows share a forward and backward: rows of like length, so many, or so many tokens of them.

Letters: N rows, B rows of one batch, R and W widths of two paddings of the same tokens.
"""

from accelerate import Accelerator
from jaxtyping import Bool, Int, Shaped
from torch import Tensor

from rlhf.modeling.log_probs import Sequences
from rlhf.parallel.distributed import global_max


def split_by_length(lengths: Int[Tensor, " N"], size: int, tokens: int) -> list[Int[Tensor, " B"]]:
    """Places of rows, shortest first, in batches.

    Args:
        lengths: of the rows.
        size: rows in a batch, where `tokens` is 0.
        tokens: most of them in a batch, padding included; a longer row is a batch of its own.
    """
    order = lengths.argsort()
    if not tokens:
        return list(order.split(size))
    counts: list[int] = []
    for length in lengths[order].tolist():
        if counts and (counts[-1] + 1) * length <= tokens:
            counts[-1] += 1
        else:
            counts.append(1)
    return list(order.split(counts))


def split_alike(accelerator: Accelerator, parts: list[Tensor]) -> list[Tensor]:
    """As many batches as the process with the most: where weights are divided, all take part."""
    wanted = int(global_max(accelerator, len(parts)))
    parts = list(parts)
    while len(parts) < wanted:
        fullest = max(range(len(parts)), key=lambda place: len(parts[place]))
        parts[fullest : fullest + 1] = parts[fullest].tensor_split(2)
    return parts


def arrange(sequences: Sequences, tokens: int) -> Sequences:
    """A batch without the columns that are padding in every row; shifted where tokens count."""
    return sequences.end_aligned() if tokens else sequences.trimmed()


def refit(
    values: Shaped[Tensor, "B R *K"], mask: Bool[Tensor, "B R"], other: Bool[Tensor, "B W"]
) -> Shaped[Tensor, "B W *K"]:
    """Values of real tokens, moved to where another padding of the same rows has these tokens."""
    moved = values.new_zeros((*other.shape, *values.shape[2:]))
    moved[other] = values[mask]
    return moved
