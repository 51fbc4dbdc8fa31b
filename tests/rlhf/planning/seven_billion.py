"""A model of seven billion parameters, and a training of it."""

from rlhf.planning.planner import Shape
from rlhf.planning.strategies import Load

GIB = 2**30
SHAPE = Shape(
    parameters=7_000_000_000,
    trunk=6_900_000_000,
    linear=6_800_000_000,
    trunk_linear=6_700_000_000,
    lora_rows=2_000_000,
    layers=32,
    hidden=4096,
    inner=11008,
    query_width=4096,
    key_width=4096,
    vocabulary=32000,
    gated=True,
)
LOAD = Load(length=512, batch=4, checkpointing=False, lora_rank=16)
BOTH = 7_000_000_000 + 6_900_000_000 + 4096  # policy and critic
CRITIC = 6_900_000_000 + 4096
OUTSIDE = 2 * 32001 * 4096 + 100_000_000 + 4096  # embeddings and norms, output matrix, head
