"""`rlhf score`."""

from typing import Any

from reward.settings import ScoreSettings as Settings

__all__ = ["Settings", "run"]


def run(settings: Settings) -> dict[str, Any]:
    """Give every response of a file its reward."""
    from reward.scoring.files import score_file

    return score_file(settings)
