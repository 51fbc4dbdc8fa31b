"""`rlhf score`."""

from typing import Any

from reward.settings import ScoreSettings as Settings
from rlhf.commands.wording import counted

EXAMPLE = "rlhf score answers.jsonl --reward runs/first/reward --out scored.jsonl"


def run(settings: Settings) -> dict[str, Any]:
    """Write the reward of every response of a file."""
    from reward.scoring.files import score_file

    return score_file(settings)


def describe(settings: Settings, result: dict[str, Any]) -> str:
    """Where the rewards are, their mean and their spread."""
    return (
        f"Wrote the rewards of {counted(result['responses'], 'response')} to "
        f"{counted(result['prompts'], 'prompt')} into {result['out']}: mean {result['mean']:.2f}, "
        f"standard deviation {result['std']:.2f}."
    )
