"""`rlhf loop`: all commands of a round, again and again, until a round does not gain."""

import shlex
from typing import Any

from rlhf.commands.loop.settings import LoopSettings as Settings

EXAMPLE = "rlhf loop --config examples/rounds/loop.yaml"


def run(settings: Settings) -> dict[str, Any]:
    """Repeat rounds of sampling, ranking, training and evaluation; the same command resumes.

    Each stage is one of the other commands, in its own process. The next round starts from the
    newest policy.
    """
    from rlhf.commands.loop.opened import open_settings
    from rlhf.commands.loop.run import run_rounds
    from rlhf.commands.loop.stages import require_valid

    require_valid(settings)
    open_settings(settings)
    return run_rounds(settings)


def describe(settings: Settings, result: dict[str, Any]) -> str:
    """A line for each round, why the loop stopped, and which policy gained last."""
    from rlhf.commands.loop.report import table

    policy = result["policy"]
    last = result["rounds"][-1]["round"]
    return "\n".join(
        [
            table(result["rounds"]),
            f"Stopped: {result['stopped']}",
            f"The newest policy that gained: {policy}" if policy else "No policy gained.",
            f"Report of the last round: {settings.round_folder(last) / 'evaluate/report.html'}",
        ]
    )


def commands(settings: Settings) -> str:
    """The commands of the first round and of the next one, for --dry-run."""
    from rlhf.commands.loop.opened import open_settings
    from rlhf.commands.loop.stages import launch_of, require_valid, stages_of_round

    require_valid(settings)
    open_settings(settings)
    lines = []
    for number, title in ((0, "Round 0"), (1, "Round 1, and later ones alike")):
        lines.append(f"{title}:")
        for stage in stages_of_round(settings, number):
            if stage.name == "export" and settings.waits_for_people:
                lines.append(f"  (people rank, until {_until(settings)})")
            before = [f"{shlex.quote(word)} " for word in launch_of(settings, stage)]
            lines.append(f"  {''.join(before)}{stage.command}")
    return "\n".join(lines)


def _until(settings: Settings) -> str:
    """The conditions that start the training of a round, in words."""
    count = settings.new_rankings and f"there are {settings.new_rankings} new rankings"
    time = settings.start_at and f"the time comes ({settings.start_at})"
    return " or ".join(condition for condition in (count, time) if condition)
