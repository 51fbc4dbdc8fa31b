"""A model of two layers, small enough to count its numbers by hand."""

from rlhf.planning.plan import Plan
from rlhf.planning.planner import Shape

# 100 tokens of vocabulary, 2 layers, d = 8, f = 16, queries 8 wide, keys 4 wide, tied embeddings:
# a layer has q 64 + k 32 + v 32 + o 64 + three MLP matrices of 128 + two norms of 8 = 592
LAYER = 64 + 32 + 32 + 64 + 3 * 128
SHAPE = Shape(
    parameters=800 + 2 * (LAYER + 16) + 8,
    trunk=800 + 2 * (LAYER + 16) + 8,
    linear=2 * LAYER + 800,
    trunk_linear=2 * LAYER,
    lora_rows=2 * (16 + 12 + 12 + 16 + 3 * 24),
    layers=2,
    hidden=8,
    inner=16,
    query_width=8,
    key_width=4,
    vocabulary=100,
    gated=True,
)


def sizes(plan: Plan, phase: str) -> dict[str, float]:
    """Bytes of everything that is held in a phase, by its name."""
    return {item.what: item.size for item in (*plan.always, *plan.phases[phase])}
