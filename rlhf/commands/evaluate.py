"""`rlhf evaluate`."""

from typing import Any

from policies.settings import EvaluateSettings as Settings

__all__ = ["Settings", "run"]


def run(settings: Settings) -> dict[str, Any]:
    """Compare a policy with the stored reference outputs."""
    from policies.evaluate import evaluate_policy

    return evaluate_policy(settings)
