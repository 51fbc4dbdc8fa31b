"""The loop: rounds of commands, until one does not gain or all are done.

What is done is read from the disk alone: the stage.json of a stage, the folder of an export, the
rounds of the database, and commands.json for import, generate, annotate and round, which do
nothing when they are repeated. So a loop that was stopped at any moment goes on with the first
command that is not done.
"""

import shutil
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from rlhf.commands.loop.children import run_stage, say, wait_for_earlier_child
from rlhf.commands.loop.new_prompts import NewPrompts
from rlhf.commands.loop.new_rankings import (
    Exported,
    count_new,
    count_of_tasks,
    has_round,
    last_exported,
    own_tasks,
)
from rlhf.commands.loop.report import (
    build_report,
    describe_round,
    read_rounds,
    reason_to_stop,
    report_lock,
)
from rlhf.commands.loop.settings import LoopSettings, launch_command
from rlhf.commands.loop.splits import require_splits
from rlhf.commands.loop.stages import Stage, launch_of, stages_of_round
from rlhf.commands.loop.waiting import RankingCheck, wait_for_rankings, wait_while_paused
from rlhf.errors import ConfigError
from rlhf.ranks import world_size
from rlhf.records.jsonl import write_json
from rlhf.run.loops.commands import read_commands
from rlhf.run.rundir import RunDir, open_stage, stage_status, watching_stage
from rlhf.run.telemetry.notify import notify

BEFORE_TRAINING = ("generate", "annotate", "export")  # after `import`; they read the database


def run_rounds(settings: LoopSettings) -> dict[str, Any]:
    """Run the rounds that are not done, and return the content of report.json.

    Raises:
        ConfigError: torchrun or accelerate has started several processes, or the program of
            --launch is missing or does not wait for the command.
        InputError: another loop works in the folder, or it was started with other settings.
        StageFailedError: a command failed.
        InterruptedRunError: a command was interrupted.
    """
    if world_size() > 1:
        raise ConfigError(
            f"{world_size()} processes were started for a command that runs in one process",
            "Start it by itself, and set processes in the section of a stage.",
        )
    _require_program(settings)
    limit, rule = settings.rounds, {"without_gain": settings.stop_without_gain}
    again = reason_to_stop(read_rounds(settings.out), limit, **rule) is None
    beside = _made_by_the_app(settings)
    run = open_stage(settings.out, "loop", settings, {}, resume=True, again=again, beside=beside)
    if run.is_done:
        return run.read_report()
    with stage_status(run, settings.notify), watching_stage(run, None):
        wait_for_earlier_child(run)
        while True:
            with report_lock(settings.out):
                rounds = read_rounds(settings.out)
                stop = reason_to_stop(rounds, limit, **rule)
                report = build_report(rounds, settings.out, stop, settings.price_per_hour)
                write_json(run.report_json, report)
            if rounds:
                say(f"\n{describe_round(rounds[-1])}")
            if stop:
                return report
            _run_round(run, settings, len(rounds))


def _made_by_the_app(settings: LoopSettings) -> set[str]:
    """Names of files that `rlhf label --loop` makes in the folder before the loop starts."""
    run, db = RunDir(settings.out), settings.database
    database = {db.name + ending for ending in ("", "-wal", "-shm", "-journal")}
    return {run.lead_file.name, run.log_file.name} | (database if db.parent == run.path else set())


def _require_program(settings: LoopSettings) -> None:
    launcher = launch_command(settings.launch)
    if launcher and shutil.which(launcher[0]) is None:
        raise ConfigError(
            f"--launch starts {launcher[0]!r}, and there is no such program here",
            "Check the word, or give the path of the program.",
        )


def _run_round(run: RunDir, settings: LoopSettings, number: int) -> None:
    for stage in stages_of_round(settings, number):
        while not _is_done(run, stage):
            wait_while_paused(run, number)
            if not number and stage.name in BEFORE_TRAINING:
                require_splits(settings)
            facts = _before_export(run, settings, stage) if stage.name == "export" else {}
            launch = launch_of(settings, stage)
            if run_stage(run, stage, launch, **facts) and not _is_done(run, stage):
                raise _not_waited_for(stage)


def _not_waited_for(stage: Stage) -> ConfigError:
    """The launcher has put the command into a queue and does not wait for it."""
    return ConfigError(
        f"{stage.name} of round {stage.number} is not done, though what started it ended with "
        "exit code 0",
        "--launch must wait for the command and end with its exit code, as sbatch --wait and srun "
        "do. If the job is queued now, let it end or cancel it, then start the loop again.",
    )


def _before_export(run: RunDir, settings: LoopSettings, export: Stage) -> dict[str, Any]:
    """Wait for people, if they rank; what commands.json keeps of the rankings."""
    entries = read_commands(run)
    after = _last_exported(run, entries, export.number)
    export_settings = export.settings()
    own = _own_tasks(settings, export.number)
    if settings.waits_for_people:
        notify(settings.notify, str(run.path), "waiting", f"Round {export.number}: people rank.")
        began = _round_began(entries, export.number)
        new_prompts = NewPrompts(run, settings, export.number)
        check = RankingCheck(run, settings, export_settings, export.number, after, began, own)
        wait_for_rankings(check, new_prompts.sample_responses)
    of_samples = count_of_tasks(settings.database, own, export_settings)["rankings"]
    new = count_new(settings.database, after, export_settings)["new"]
    return {"new_rankings": new, **({"rankings_of_samples": of_samples} if own else {})}


def _own_tasks(settings: LoopSettings, number: int) -> list[int]:
    """The tasks of a later round's samples, where people rank: others rank without a task."""
    if not number or not settings.waits_for_people:
        return []
    [round_stage] = [stage for stage in stages_of_round(settings, number) if stage.name == "round"]
    return own_tasks(settings.database, round_stage.given["policy"] / "policy")


def _last_exported(run: RunDir, entries: Sequence[Mapping[str, Any]], number: int) -> Exported:
    """What the export of the round before could see; of the first round, nothing."""
    if not number:
        return Exported()
    earlier = [entry for entry in entries if entry["round"] < number and entry["stage"] == "export"]
    recorded = max((entry.get("newest", 0) for entry in earlier), default=0)
    return last_exported(run.path / f"round-{number - 1}" / "rankings", recorded)


def _round_began(entries: Sequence[Mapping[str, Any]], number: int) -> datetime:
    """When the first command of a round was started; now, if none was."""
    times = (entry["started_at"] for entry in entries if entry["round"] == number)
    return next(map(datetime.fromisoformat, times), datetime.now(UTC))


def _is_done(run: RunDir, stage: Stage) -> bool:
    if stage.name == "export":
        return bool(stage.out and stage.out.is_dir())
    if stage.out is not None:
        return RunDir(stage.out).is_done
    if stage.name == "round":  # not by its exit code: the database may be an earlier copy
        return has_round(stage.given["db"], stage.given["policy"] / "policy")
    return any(
        (entry["round"], entry["stage"], entry["exit_code"]) == (stage.number, stage.name, 0)
        for entry in read_commands(run)
    )
