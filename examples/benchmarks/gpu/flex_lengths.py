"""FlexAttention over rows of 20 lengths: it must stay compiled, whatever length comes next.

Rows are laid out as in reward training, prompts with their responses, for the heads of both models,
with gradients and without, in that mixed order in which training and scoring call it. PyTorch
silently computes all T × T scores when it has compiled too often; here that is an error. For every
length:

    first_s        seconds of the first pass, compiling included
    forward_ms     of a later forward pass without gradients
    training_ms    of a later forward and backward pass
    products_ms    of a forward and backward pass of plain matrix products, which attend without it
    scratch_gib    peak of a training pass over its inputs; all scores would take scores_gib
"""

import argparse
import random
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor
from torch._dynamo.exc import FailOnRecompileLimitHit

from examples.benchmarks.gpu import machine, texts
from examples.benchmarks.gpu.results import Line, measure, parse, parser_of, say
from rlhf.modeling.attention.flex import flex_prefix_attention
from rlhf.modeling.attention.layout import Segment, Segments
from rlhf.modeling.attention.prefix_matmul import prefix_attention

HEADS = {"6b": (32, 32, 128), "1b": (32, 8, 64)}  # query heads, key heads, size
SHORTEST, LONGEST, LENGTHS = 400, 8192, 20
REPEATS = 5


def layouts(lengths: int, longest: int, shorter: int) -> list[Segments]:
    """Rows with more and more tokens, each filled with prompts and four responses to each."""
    generator = random.Random(0)
    prompt, response = texts.PROMPT.shorter(shorter), texts.RESPONSE.shorter(shorter)
    rows = []
    for number in range(lengths):
        shortest = SHORTEST // shorter
        tokens = round(shortest * (longest / shortest) ** (number / max(1, lengths - 1)))
        row: list[Segment] = []
        while tokens > 8:
            wanted = [prompt.draw(generator), *(response.draw(generator) for _ in range(4))]
            segment_lengths = [min(length, tokens // 5) for length in wanted]
            row.append(Segment(segment_lengths[0], tuple(segment_lengths[1:])))
            tokens -= sum(segment_lengths)
            if len(row) > 1 and generator.random() < 0.1:
                break  # not every row is full
        rows.append(tuple(row))
    generator.shuffle(rows)
    return rows


def tokens_of(layout: Segments) -> int:
    """Tokens of a row."""
    return sum(stretch.prompt + sum(stretch.responses) for stretch in layout)


def random_row(heads: tuple[int, int, int], tokens: int) -> list[Tensor]:
    """Queries, keys and values; on CPUs FlexAttention has no backward pass."""
    query, key, size = heads
    is_gpu = machine.name() == "cuda"
    options = {"dtype": torch.bfloat16 if is_gpu else torch.float32, "requires_grad": is_gpu}
    shapes = [(1, number, tokens, size) for number in (query, key, key)]
    return [torch.randn(shape, device=machine.name(), **options) for shape in shapes]


def seconds_of(work: Callable[[], object], repeats: int = 1) -> float:
    """Seconds of one call."""
    began = machine.now()
    for _ in range(repeats):
        work()
    return (machine.now() - began) / repeats


def try_layout(layout: Segments, heads: tuple[int, int, int]) -> Line:
    """Times and memory of one row."""
    tokens, (query_heads, _, size) = tokens_of(layout), heads
    row = random_row(heads, tokens)
    scale, is_gpu = size**-0.5, machine.name() == "cuda"

    def forward() -> Tensor:
        with torch.no_grad():
            return flex_prefix_attention(*row, layout, scale)

    def learn(attended: Tensor) -> None:
        if attended.requires_grad:
            attended.sum().backward()

    def train() -> None:
        learn(flex_prefix_attention(*row, layout, scale))

    def products() -> None:
        query, key, value = (tensor[0].transpose(0, 1) for tensor in row)
        learn(prefix_attention(query, key, value, layout, scale))

    first = seconds_of(lambda: (train(), forward()))
    products()
    machine.forget_peak()
    before = torch.cuda.memory_allocated() / machine.GIB if is_gpu else 0.0
    train()
    scratch = machine.peak_gib() - before if is_gpu else 0.0
    return {
        "heads": heads,
        "tokens": tokens,
        "first_s": round(first, 3),
        "forward_ms": round(1e3 * seconds_of(forward, REPEATS), 3),
        "training_ms": round(1e3 * seconds_of(train, REPEATS), 3),
        "products_ms": round(1e3 * seconds_of(products, REPEATS), 3),
        "scratch_gib": round(scratch, 4),
        "scores_gib": round(4 * query_heads * tokens**2 / machine.GIB, 4),
    }


def run(arguments: argparse.Namespace) -> Line:
    """All rows, the head shapes in turns; `falls_back` names those that PyTorch gave up on."""
    is_gpu = machine.name() == "cuda"
    small = arguments.rehearse
    rows = layouts(3, 64, 16) if small else layouts(LENGTHS, LONGEST, 1)
    heads = [(4, 2, 16)] if small else list(HEADS.values())
    compiled: AbstractContextManager[object] = nullcontext()
    if not is_gpu:
        compiled = torch.compiler.set_stance("force_eager")
    measurements, falls_back = [], []
    with compiled:
        for layout in rows:
            for shape in heads:
                try:
                    measurements.append(try_layout(layout, shape))
                    say(str(measurements[-1]))
                except FailOnRecompileLimitHit:
                    falls_back.append([*shape, tokens_of(layout)])
                    say(f"falls back to all scores: {falls_back[-1]}")
    return {"compiled": is_gpu, "falls_back": falls_back, "lengths": measurements}


def main(argv: list[str] | None = None) -> None:
    """Run the stage."""
    arguments = parse(parser_of(__doc__), argv)
    measure(arguments, "flex_lengths", {}, lambda: run(arguments))


if __name__ == "__main__":
    main()
