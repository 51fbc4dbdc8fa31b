"""The files of a stage; no other module knows their names.

OUT/config.yaml     the resolved settings
OUT/stage.json      stage, status, inputs and their hashes, versions, git commit, seed, hardware
OUT/packages.txt    every installed package with its version
OUT/code.diff       the difference of the code from its commit, if there is one
OUT/metrics.jsonl   one object per step; speed.json: how fast the device multiplies matrices
OUT/heartbeat/      rank-00000.json: phase, step, count; .stack after a stall; clock.json of a job
OUT/profile/        with --profile: a trace of every rank, and phases.json
OUT/checkpoints/    step-000100/ ... and `latest`, which names the newest complete one
OUT/model, policy   the trained reward model or fine-tuned language model; the trained policy
OUT/outputs         the reference outputs
OUT/report.json  report.html    the results of the stage, for programs and for people
OUT/answers.jsonl   evaluate, quantize: the answers that were compared, one `RankedPrompt` per line
OUT/judge.jsonl     evaluate: the requests to a judge model and its answers
OUT/commands.json   loop: every command it ran, when, and its exit code
OUT/round-0/        loop: the stages of a round, each in a folder with the files above
OUT/pause.json      loop: the request to pause, while there is one
OUT/promoted.json   loop: the policy that is promoted, and the history of it
OUT/waiting.json    loop: the rankings it waits for; train_now.json: the request not to wait
OUT/lead.yaml       loop: settings changed on the Runs page; loop.log: what it said since
"""

import sys
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rlhf.config import (
    earlier_behavior,
    read_settings_file,
    require_same_settings,
    to_yaml,
    without_secrets,
)
from rlhf.config.paths import read_setting, with_new_names
from rlhf.diagnose import as_input_error
from rlhf.errors import InputError, InterruptedRunError
from rlhf.parallel.settings import ClusterSettings
from rlhf.ranks import is_main_process, is_restart, without_signals
from rlhf.records.documents import REMEDY, read_document, read_stage_document
from rlhf.records.jsonl import write_json, write_text_atomically
from rlhf.run.locks import lock, locked
from rlhf.run.provenance import all_packages, code_diff, describe_environment
from rlhf.run.telemetry.job_clock import seconds_of_jobs, seconds_until_last_heartbeat
from rlhf.run.telemetry.notify import notify
from rlhf.run.watchdog import watching

# What may change when a run is resumed: its folder, how it is parallelized, saved and watched, and
# how much is in memory at once. Batch sizes and processes do change which samples are drawn.
FREE_TO_CHANGE = (
    "out",
    "resume",
    "shard",
    "keep_checkpoints",
    "save_every",
    "checkpoint",
    "gradient_checkpointing",
    "micro_batch_size",
    "batch.gradient_checkpointing",
    "batch.micro_batch_size",
    "batch.micro_tokens",
    "price_per_hour",
    "sampling.batch_size",
    "judge_endpoint",
    "judge_parallel",
    *(setting.name for setting in fields(ClusterSettings)),
)
# Rounds of a loop may differ; those that are done stay as they are.
FREE_IN_LOOP = (
    *("rounds", "new_rankings", "start_at", "stop_without_gain"),
    *("stages", "notify", "launch", "lead_may"),
)
STAGE_COMMANDS = {
    "loop": "rlhf loop",
    "sft": "rlhf sft",
    "reward": "rlhf train-reward",
    "reference": "rlhf reference",
    "ppo": "rlhf ppo",
    "dpo": "rlhf dpo",
    "distill": "rlhf distill",
    "evaluate": "rlhf evaluate",
    "quantize": "rlhf quantize",
    "benchmark": "rlhf benchmark",
}
ALWAYS_RESUMES = ("loop",)  # stages whose command goes on without --resume

StageInputs = dict[str, dict[str, str]]  # `path` and `hash` of what a stage was given, by name
_began: dict[Path, float] = {}  # when this process began to work on a stage, monotonic


class _File:
    """A file or folder of a run, by its name there."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, run: "RunDir", _: type["RunDir"]) -> Path:
        return run.path / self._name


@dataclass(frozen=True)
class RunDir:
    """The folder of one stage of one run."""

    path: Path

    config_file = _File("config.yaml")
    stage_file = _File("stage.json")
    packages_file = _File("packages.txt")
    diff_file = _File("code.diff")
    metrics_file = _File("metrics.jsonl")
    speed_file = _File("speed.json")
    heartbeat = _File("heartbeat")
    profile = _File("profile")
    checkpoints = _File("checkpoints")
    best_checkpoint = _File("checkpoints/best")  # the state with the best evaluation so far
    model = _File("model")
    policy = _File("policy")
    outputs = _File("outputs")
    report_json = _File("report.json")
    report_html = _File("report.html")
    answers = _File("answers.jsonl")
    judge_log = _File("judge.jsonl")
    asked_file = _File("asked.json")
    commands_file = _File("commands.json")
    pause_file = _File("pause.json")
    waiting_file = _File("waiting.json")
    train_now_file = _File("train_now.json")
    promoted_file = _File("promoted.json")
    lead_file = _File("lead.yaml")
    log_file = _File("loop.log")

    def read_stage(self) -> dict[str, Any]:
        """The content of stage.json; empty when there is none.

        Raises:
            InputError: it is broken.
        """
        return read_stage_document(self.stage_file) if self.stage_file.is_file() else {}

    @property
    def inputs(self) -> StageInputs:
        """`path` and `hash` of the inputs, from stage.json."""
        return dict(self.read_stage().get("inputs", {}))

    def read_report(self) -> dict[str, Any]:
        """The content of report.json: the results of a finished stage.

        Raises:
            InputError: it is broken.
        """
        return read_document(self.report_json)

    def reading_report(self) -> AbstractContextManager[None]:
        """Around code that reads the report: reports its errors as errors of report.json."""
        return as_input_error(f"{self.report_json} is not what its stage writes", REMEDY)

    @property
    def is_done(self) -> bool:
        """True when the stage finished."""
        return self.read_stage().get("status") == "done"


def open_stage(
    out: Path,
    stage: str,
    settings: Any,
    inputs: StageInputs,
    *,
    resume: bool,
    again: bool = False,
    beside: Collection[str] = (),
) -> RunDir:
    """Create the folder of a stage, or reopen it to resume; only the main process does this.

    Args:
        out: the folder.
        stage: a key of STAGE_COMMANDS.
        settings: the dataclass of resolved settings; written to config.yaml.
        inputs: for every input its `path` and `hash`; written to stage.json.
        resume: continue in an existing folder; one that does not exist is created.
        again: also work on a finished stage again, which else is only opened.
        beside: names of files that may be there before the stage starts.

    Raises:
        InputError: the folder exists and `resume` is off, its settings or inputs differ, or another
            process works in it.
    """
    run = RunDir(out)
    if not is_main_process():
        return run
    # another job that starts now may have hidden files there
    if any(path.name not in beside for path in out.glob("[!.]*")):
        if not resume and not is_restart():
            content = run.read_stage()
            status = content.get("status", "not a run folder")
            is_ours = content.get("stage") == stage
            kind = status if is_ours or not content else f"{content['stage']}, {status}"
            purpose = "show its result again" if status == "done" else "go on with it"
            resume_too = f", or add --resume to {purpose}" if is_ours else ""
            raise InputError(f"{out} already exists ({kind})", f"Choose another --out{resume_too}.")
        _require_same(run, stage, settings, inputs)
    out.mkdir(parents=True, exist_ok=True)
    if again or not run.is_done:
        if getattr(settings, "shard", None) is None:  # jobs of --shard fill one stage together
            lock(out, _how_to_go_on(run))
        config = to_yaml(without_secrets(settings))
        write_text_atomically(run.config_file, lambda stream: stream.write(config))
        _write_stage(run, stage, inputs, settings)
    return run


@contextmanager
def stage_status(
    run: RunDir,
    url: str | None = None,
    is_complete: Callable[[], bool] = lambda: True,
    *,
    alone: bool = True,
) -> Iterator[None]:
    """Record in stage.json how the block ended (done, failed or interrupted), and notify a URL.

    Args:
        run: the stage.
        url: address to notify.
        is_complete: called at the end; a stage that other jobs must still complete stays running.
        alone: no other process may work in the folder.

    Raises:
        InputError: another process does; stage.json is not changed.
    """

    def end(status: str, **extra: str) -> None:
        if is_main_process():
            _set_status(run, status, **extra)
            notify(url, str(run.path), status, extra.get("error", ""))

    only = locked(run.path, _how_to_go_on(run)) if alone and is_main_process() else nullcontext()
    with only:
        try:
            try:
                yield
            except BaseException as error:  # SIGTERM, which ended another rank, may arrive here
                if not isinstance(error, KeyboardInterrupt | InterruptedRunError):
                    end("failed", error=f"{type(error).__name__}: {error}")
                raise
        except (KeyboardInterrupt, InterruptedRunError):
            with without_signals():  # a second one, as from a launcher, would leave it running
                is_news = run.read_stage().get("status") != "failed"  # the signal came after it was
                if is_news and is_main_process():
                    _set_status(run, "interrupted")
            if is_news and is_main_process():
                notify(url, str(run.path), "interrupted", "")
            raise
        if is_complete():
            end("done")
        elif alone and is_main_process():
            write_json(run.stage_file, _stop_clock(run))


def _how_to_go_on(run: RunDir) -> str:
    stage = run.read_stage().get("stage")
    return "type the same again" if stage in ALWAYS_RESUMES else "add --resume"


@contextmanager
def watching_stage(
    run: RunDir,
    timeout_seconds: float | None,
    url: str | None = None,
    heartbeat: Path | None = None,
    *,
    ranks_synchronize: bool = True,
) -> Iterator[None]:
    """Watch for a stall of any rank: record it in stage.json, print it, notify, exit with code 75.

    No progress for `timeout_seconds` is a stall; None: never. Jobs that write one stage have a
    `heartbeat` folder each. `ranks_synchronize`: ranks wait for each other.
    """

    def report(error: InterruptedRunError) -> None:
        taken = {**run.read_stage(), "device_seconds": _until_last_heartbeat(run)}
        write_json(run.stage_file, {**taken, "status": "interrupted", "error": str(error)})
        sys.stderr.write(f"error {error}\n")
        sys.stderr.flush()
        notify(url, str(run.path), "stalled", str(error))

    folder = heartbeat or run.heartbeat
    with watching(folder, timeout_seconds, report, ranks_synchronize=ranks_synchronize):
        yield


def require_done(path: Path, stage: str, result: str) -> RunDir:
    """The finished stage in `path`, whose folder `result` the caller will read.

    Raises:
        InputError: the stage is missing, another one or unfinished, or its `result` is missing.
    """
    run = RunDir(path)
    content, command = run.read_stage(), STAGE_COMMANDS[stage]
    if path.is_file():
        raise InputError(f"{path} is a file", f"Give the --out folder of {command}.")
    if not content:
        raise InputError(
            f"{path} does not hold a finished {stage} stage (no stage.json)",
            f"Make it first: {command} --out {path} …",
        )
    if (actual := content["stage"]) != stage:
        problem = f"{path} is a run of {STAGE_COMMANDS.get(actual, actual)}, not of {command}"
        raise InputError(problem, f"Give the --out folder of {command}.")
    if content["status"] != "done":
        raise InputError(
            f"The {stage} stage in {path} is {content['status']}, not done",
            f"Finish it first: {command} --config {run.config_file} --resume",
        )
    if not (path / result).exists():
        raise InputError(f"{path} has no {result} folder", f"Make it again with {command}.")
    return run


def _require_same(run: RunDir, stage: str, settings: Any, inputs: StageInputs) -> None:
    if not run.config_file.is_file():
        raise InputError(
            f"{run.path} exists but is not a run folder (no config.yaml)",
            "Choose another --out; nothing was written.",
        )
    # for these, batch_size is the batch of an optimizer step
    free = FREE_TO_CHANGE if stage in ("sft", "dpo", "distill") else (*FREE_TO_CHANGE, "batch_size")
    free = (*free, *FREE_IN_LOOP) if stage == "loop" else free
    recorded = with_new_names(read_settings_file(run.config_file), type(settings))
    earlier = earlier_behavior(stage, recorded)
    if run.is_done:  # they have no effect any more
        earlier = {name: read_setting(settings, name) for name in earlier}
    require_same_settings(run.path, settings, recorded, earlier, free)
    before = run.read_stage().get("inputs", inputs)  # absent where two jobs start at once
    for name, value in inputs.items():
        if before.get(name, {}).get("hash") != value["hash"]:
            raise InputError(
                f"The input {name} ({value['path']}) has changed since {run.path} was started",
                "Choose another --out and start again.",
            )


def _write_stage(run: RunDir, stage: str, inputs: StageInputs, settings: Any) -> None:
    earlier = _until_last_heartbeat(run)
    if getattr(settings, "shard", None) is None:  # jobs have clocks of their own
        _began[run.path] = time.monotonic()
    described = {
        "stage": stage,
        "status": "running",
        "inputs": inputs,
        "seed": getattr(settings, "seed", None),
        **describe_environment(),
        "started_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "device_seconds": earlier,
    }
    write_json(run.stage_file, described)
    write_text_atomically(run.packages_file, lambda stream: stream.write(all_packages()))
    run.diff_file.unlink(missing_ok=True)
    if diff := code_diff():
        write_text_atomically(run.diff_file, lambda stream: stream.write(diff + "\n"))


def device_seconds(run: RunDir) -> float:
    """Seconds of all processes in all attempts; of other processes until their last heartbeat."""
    return _own_seconds(run) + seconds_of_jobs(run.heartbeat)


def _own_seconds(run: RunDir) -> float:
    """`device_seconds` without those of jobs, which have clocks of their own."""
    if run.path not in _began:
        return _until_last_heartbeat(run)
    content = run.read_stage()
    taken = time.monotonic() - _began[run.path]
    return float(content.get("device_seconds") or 0.0) + taken * int(content.get("processes", 1))


def _until_last_heartbeat(run: RunDir) -> float:
    beats = () if any(run.heartbeat.glob("job-*")) else run.path.rglob("rank-*.json")
    return seconds_until_last_heartbeat(run.read_stage(), run.stage_file, beats)


def _set_status(run: RunDir, status: str, **extra: str) -> None:
    content = {name: value for name, value in _stop_clock(run).items() if name != "error"}
    finished_at = datetime.now(UTC).isoformat(timespec="seconds")
    write_json(run.stage_file, {**content, "status": status, "finished_at": finished_at, **extra})


def _stop_clock(run: RunDir) -> dict[str, Any]:
    """The content of stage.json, with the seconds until now."""
    content = {**run.read_stage(), "device_seconds": round(_own_seconds(run), 3)}
    _began.pop(run.path, None)
    return content
