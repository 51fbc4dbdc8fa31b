"""`rlhf reference`."""

from typing import Any

from policies.settings import ReferenceSettings as Settings

__all__ = ["Settings", "run"]


def run(settings: Settings) -> dict[str, Any]:
    """Store what the original model answers to every prompt, with log-probs."""
    from policies.reference import build_reference
    from rlhf.distributed import launch

    launch(settings.processes)
    return build_reference(settings)
