"""A stage with two settings, and the metrics and the report that it leaves."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Stage:
    out: Path
    steps: int = 2
    seed: int = 0


METRICS = [{"step": n, "loss": 1.0 / n, "reward/mean": 0.5, "length": 7} for n in (1, 2, 3)]
RATE = {"value": 0.5, "low": 0.4, "high": 0.6, "n": 9}
REPORT = {
    "accuracy": RATE,
    "reward": {"first": 0.1, "last": 0.2},
    "verdict": {"judge": "gold"},
    "win_rate": {"gold": RATE, "reward": RATE},
    "rows": 3,
    "prompts": 1,
}
