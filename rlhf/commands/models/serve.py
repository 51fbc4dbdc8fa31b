"""`rlhf serve`: a reward model at an address."""

from typing import Any

from reward.serving.settings import ServeSettings as Settings
from rlhf.commands.wording import counted

EXAMPLE = "rlhf serve --reward runs/first/reward"


def run(settings: Settings) -> dict[str, Any]:
    """Answer what `--reward http://…` asks, with a reward model that several runs share."""
    from reward.serving.serve import serve_reward

    return serve_reward(settings)


def describe(settings: Settings, result: dict[str, Any]) -> str:
    """What was scored while the model was served."""
    return (
        f"Scored {counted(result['responses'], 'response')} in "
        f"{counted(result['requests'], 'request')}."
    )
