"""`rlhf status`: reads stage.json, config.yaml, reports and metrics of runs, and shows them."""

import math
import shlex
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from statistics import fmean
from typing import Any

from rlhf.config import default_values, earlier_behavior, flatten, read_settings_file
from rlhf.config.paths import with_new_names
from rlhf.errors import InputError
from rlhf.records.documents import REMEDY, Document
from rlhf.records.jsonl import is_database
from rlhf.records.schema import is_finite_number
from rlhf.run.intervals import in_words
from rlhf.run.loops.estimates import estimate_in_round
from rlhf.run.metrics import read_metrics
from rlhf.run.rundir import ALWAYS_RESUMES, STAGE_COMMANDS, RunDir
from rlhf.run.telemetry.progress_count import duration
from rlhf.run.watchdog import process_has_ended, read_heartbeats, running_heartbeat

StageStatus = dict[str, Any]
Run = dict[str, StageStatus]

FACTS = ("status", "error", "started_at", "finished_at", "git_commit", "steps")
DIFFERENT = "≠"
ABSENT = "-"
NOT_COMPARED = ("out", "resume")
CURVES = ("loss", "accuracy", "reward/mean", "kl/forward_k3_per_token", "entropy", "length")
SHOWN = (
    "accuracy.value",
    "accuracy.low",
    "accuracy.high",
    "win_rate.",
    "reward.first",
    "reward.last",
    "kl.reverse.nats",
    "cost.",
)
UNFINISHED = ("failed", "interrupted", "killed")
CURVE_POINTS = 24
MAX_LIST_CHARACTERS = 60
BARS = "▁▂▃▄▅▆▇█"


def read_run(path: Path, kinds: Mapping[str, type[Any]]) -> Run:
    """Every stage of a run by name; a folder of one stage is a run of that stage.

    The stages of a loop's rounds follow the loop. `kinds` are the settings classes by stage, which
    have the old names of settings.

    Raises:
        InputError: the folder does not exist, or holds no stage.
    """
    if is_database(path):
        raise InputError(
            f"{path} is a label database, not a run",
            "Give the folder of a run, or see what the database holds: "
            f"rlhf status --db {shlex.quote(str(path))}",
        )
    if not path.is_dir():
        raise InputError(f"No such run: {path}", "Check the path; `ls` its folder to see the runs.")
    folders = [path] if RunDir(path).stage_file.is_file() else sorted(path.iterdir())
    folders += path.glob("round-*/*")
    statuses = [
        read_stage(RunDir(folder), kinds) for folder in folders if (folder / "stage.json").is_file()
    ]
    if not statuses:
        raise InputError(
            f"{path} holds no stage of a run (no stage.json)",
            "Give the folder of a run, such as runs/NAME after --out runs/NAME/reward.",
        )
    statuses.sort(key=_position)
    stages = [stage["stage"] for stage in statuses]
    return {
        status["stage"] if stages.count(status["stage"]) == 1 else _with_folder(status): status
        for status in statuses
    }


def run_folders(path: Path) -> list[Path]:
    """The runs that a folder stands for: itself, or those in it where it holds no stage."""
    if not path.is_dir() or _has_stage(path):
        return [path]
    return sorted(
        folder for folder in path.iterdir() if folder.is_dir() and _has_stage(folder)
    ) or [path]


def _has_stage(path: Path) -> bool:
    return RunDir(path).stage_file.is_file() or any(path.glob("*/stage.json"))


def _position(stage: StageStatus) -> tuple[int, int, str]:
    """The round, -1 outside a loop, the position in the pipeline, and the folder."""
    path = Path(stage["path"])
    word, _, number = path.parent.name.partition("-")
    in_round = word == "round" and number.isdecimal()
    return int(number) if in_round else -1, _stage_order(stage["stage"]), path.name


def _with_folder(stage: StageStatus) -> str:
    """The name of a stage of which a run has several: `ppo`, `ppo in two`, `ppo in round-0`."""
    path = Path(stage["path"])
    if _position(stage)[0] >= 0:
        return f"{stage['stage']} in {path.parent.name}"
    folder = path.name
    return str(stage["stage"]) if folder == stage["stage"] else f"{stage['stage']} in {folder}"


def _stage_order(name: str) -> int:
    """The position of a stage in the pipeline."""
    order, (stage, *_) = list(STAGE_COMMANDS), name.split(" in ")
    return order.index(stage) if stage in order else len(order)


def read_stage(run: RunDir, kinds: Mapping[str, type[Any]]) -> StageStatus:
    """One stage: the facts of stage.json, its settings, its last metrics and its report.

    Parts whose file does not exist yet are empty.
    """
    content = run.read_stage()
    steps = read_metrics(run.metrics_file)
    return {
        "stage": content["stage"],
        "path": str(run.path),
        **{name: content.get(name) for name in FACTS if name != "steps"},
        "status": content["status"],
        **_doing(run, content),
        **_killed(run, content),
        "steps": len(steps),
        "settings": _settings(run, content["stage"], kinds.get(content["stage"])),
        "origin": _origin(content),
        "curves": _curves(steps),
        "last_metrics": steps[-1] if steps else {},
        "report": _report(run),
    }


def _settings(run: RunDir, stage: str, kind: type[Any] | None) -> dict[str, Any]:
    """The settings by today's names; those that the run predates have the values it ran with."""
    if not run.config_file.is_file():
        return {}
    recorded = with_new_names(read_settings_file(run.config_file), kind)
    usual = default_values(kind) | earlier_behavior(stage, recorded) if kind else {}
    return usual | flatten(recorded)


def _report(run: RunDir) -> Document:
    """The report with dotted names; values that are shown as numbers must be numbers."""
    report = flatten(run.read_report()) if run.report_json.is_file() else {}
    for name, value in report.items():
        if name.startswith(SHOWN) and value is not None and not is_number(value):
            raise InputError(
                f"{run.report_json} has {name!r} as {str(value)[:80]!r}, not as a number", REMEDY
            )
    return Document.of(report, str(run.report_json))


def is_number(value: Any) -> bool:
    """Whether a JSON value can be shown as a float, which may be infinite or NaN."""
    return isinstance(value, float) or is_finite_number(value)


def _doing(run: RunDir, content: dict[str, Any]) -> StageStatus:
    """What a running stage does now, with the time left; and that a loop waits for people."""
    heartbeat = running_heartbeat(run.heartbeat) if content["status"] == "running" else None
    if heartbeat is None:
        return {}
    estimate = estimate_in_round(run)
    left = estimate.left_seconds
    left_in_words = "" if left is None else f", about {duration(left)} left"
    waits = content["stage"] == "loop" and heartbeat.phase.startswith("waiting")
    return {
        "phase": (estimate.doing or heartbeat.doing) + left_in_words,
        "status": "waiting" if waits else "running",
    }


def _killed(run: RunDir, content: dict[str, Any]) -> StageStatus:
    """That a process was killed, which it could not record itself, and when it last wrote."""
    heartbeats = read_heartbeats(run.heartbeat)
    jobs = any(run.heartbeat.glob("job-*"))  # with heartbeats of their own, maybe elsewhere
    if (
        content.get("status") != "running"
        or not heartbeats
        or jobs
        or not all(map(process_has_ended, heartbeats))
    ):
        return {}
    if run.read_stage().get("status") != "running":  # it ended meanwhile
        return {}
    written = max(file.stat().st_mtime for file in run.path.rglob("*") if file.is_file())
    return {"status": "killed", "finished_at": datetime.fromtimestamp(written, UTC).isoformat()}


def _origin(content: dict[str, Any]) -> dict[str, Any]:
    """Versions, hashes of inputs, code and hardware: differences besides settings."""
    hashes = {name: value.get("hash") for name, value in content.get("inputs", {}).items()}
    recorded = {name: content.get(name) for name in ("versions", "hardware", "code_diff")}
    return flatten({"inputs": hashes, **{k: v for k, v in recorded.items() if v is not None}})


def _curves(steps: list[dict[str, Any]]) -> dict[str, list[float]]:
    """The curves of the main metrics: means over at most CURVE_POINTS parts of a run."""
    size = -(-len(steps) // CURVE_POINTS) or 1
    parts = [steps[first : first + size] for first in range(0, len(steps), size)]
    return {
        name: [fmean(row[name] for row in part) for part in parts]
        for name in CURVES
        if steps and all(is_number(row.get(name)) for row in steps)
    }


def sparklines(curves: list[list[float]]) -> list[str]:
    """Curves as bars, all on one scale."""
    values = [value for curve in curves for value in curve if math.isfinite(value)]
    low, high = min(values, default=0.0), max(values, default=0.0)
    span = high / 2 - low / 2 or 1.0  # halves: the whole may be more than a float holds

    def bar(value: float) -> str:
        if not math.isfinite(value):
            return "!"
        return BARS[round((len(BARS) - 1) * ((value / 2 - low / 2) / span))]

    return ["".join(map(bar, curve)) for curve in curves]


def differing_settings(runs: dict[str, Run]) -> dict[str, list[str]]:
    """For every stage, the settings that differ between the runs that have this stage."""
    differing: dict[str, list[str]] = {}
    for stage in _stages(runs):
        settings = [run[stage]["settings"] for run in runs.values() if stage in run]
        names = {name: None for values in settings for name in values if name not in NOT_COMPARED}
        differing[stage] = [
            name
            for name in names
            if any(values.get(name) != settings[0].get(name) for values in settings)
        ]
    return differing


def _stages(runs: dict[str, Run]) -> list[str]:
    return sorted(
        {name for run in runs.values() for name in run}, key=lambda n: (_stage_order(n), n)
    )


def overview(runs: dict[str, Run], differing: dict[str, list[str]]) -> str:
    """A line for each stage of every run; for several runs also differences and curves."""
    blocks = [
        "\n".join([name, align([_line(*item) for item in run.items()])])
        for name, run in runs.items()
    ]
    rows = [row for stage in _stages(runs) for row in _differences(stage, runs, differing[stage])]
    if rows:
        blocks.append(align([["differences", *runs], *rows]))
    curves = [row for stage in _stages(runs) for row in _compared_curves(stage, runs)]
    if curves and len(runs) > 1:
        blocks.append(align([["curves", *runs], *curves]))
    return "\n\n".join(blocks)


def _line(name: str, stage: StageStatus) -> list[str]:
    """Name, status, duration, main number, and for an unfinished stage the command to resume it."""
    works = stage["status"] in ("running", "waiting")
    number = stage["phase"] if works and "phase" in stage else _main_number(stage)
    cells = [f"  {name}", stage["status"], _duration(stage), number]
    if stage["status"] in UNFINISHED and stage["stage"] in STAGE_COMMANDS:
        config = RunDir(Path(stage["path"])).config_file
        command = f"{STAGE_COMMANDS[stage['stage']]} --config {shlex.quote(str(config))}"
        cells.append(f"→ {command}{'' if stage['stage'] in ALWAYS_RESUMES else ' --resume'}")
    return cells


def _duration(stage: StageStatus) -> str:
    if stage["started_at"] is None:
        return ABSENT
    begun = datetime.fromisoformat(stage["started_at"])
    ended = stage["finished_at"] and stage["status"] != "running"
    until = datetime.fromisoformat(stage["finished_at"]) if ended else datetime.now(UTC)
    minutes, seconds = divmod(round((until - begun).total_seconds()), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02} min" if hours else f"{minutes} min {seconds:02} s"


def _main_number(stage: StageStatus) -> str:
    """The main result of a finished stage, the error of a failed one, else its progress."""
    report = stage["report"] if stage["status"] == "done" else {}
    judge = report.get("verdict.judge")
    if message := stage["error"] or report.get("stopped"):
        return str(message).splitlines()[0]
    if judge and report[f"win_rate.{judge}.value"] is not None:
        return f"wins {in_words(_rate(report, f'win_rate.{judge}'))} by {judge}"
    if report.get("accuracy.value") is not None:
        return f"accuracy {in_words(_rate(report, 'accuracy'))}"
    if report.get("reward.first") is not None and report["reward.last"] is not None:
        change = f"reward {report['reward.first']:.2f} → {report['reward.last']:.2f}"
        return f"{change} in {stage['steps']} steps"
    if "rows" in report:
        return f"{report['rows']} responses to {report['prompts']} prompts"
    return f"{stage['steps']} steps"


def _rate(report: dict[str, Any], name: str) -> dict[str, Any]:
    rate = {key: report[f"{name}.{key}"] for key in ("value", "low", "high")}
    return rate if rate["high"] is not None else {**rate, "low": None}


def _differences(stage: str, runs: dict[str, Run], differing: list[str]) -> list[list[str]]:
    columns = [run.get(stage, {}) for run in runs.values()]
    settings = [
        [name, *(_show(column.get("settings", {}).get(name)) for column in columns)]
        for name in differing
    ]
    rows = [*settings, *_origin_rows(columns)[1:]]
    return [[f"  {stage} {row[0].removeprefix(DIFFERENT).strip()}", *row[1:]] for row in rows]


def _compared_curves(stage: str, runs: dict[str, Run]) -> list[list[str]]:
    rows = _curve_rows([run.get(stage, {}) for run in runs.values()])
    return [[f"  {stage} {row[0].strip()}", *row[1:]] for row in rows]


def tables(runs: dict[str, Run], differing: dict[str, list[str]]) -> str:
    """A table for each stage: facts, settings (≠ marks differences), last step and report."""
    return "\n\n".join(_table(stage, runs, differing[stage]) for stage in _stages(runs))


def _table(stage: str, runs: dict[str, Run], differing: list[str]) -> str:
    columns = [run.get(stage, {}) for run in runs.values()]
    rows = [[stage, *runs]]
    rows += [[name, *(_show(column.get(name)) for column in columns)] for name in FACTS]
    rows += _origin_rows(columns)
    for title, part in (
        ("settings", "settings"),
        ("last step", "last_metrics"),
        ("report", "report"),
    ):
        groups = [column.get(part, {}) for column in columns]
        names = list({name: None for group in groups for name in group})
        rows.append([title] if names else [])
        rows += _curve_rows(columns) if part == "last_metrics" else []
        for name in names:
            mark = DIFFERENT if part == "settings" and name in differing else " "
            rows.append([f"{mark} {name}", *(_show(group.get(name)) for group in groups)])
    rows = [
        row for row in rows if any(cell not in ("", ABSENT) for cell in row[1:]) or len(row) == 1
    ]
    return align(rows)


def _origin_rows(columns: list[StageStatus]) -> list[list[str]]:
    """The inputs, versions, code and hardware in which the runs differ."""
    groups = [column.get("origin", {}) for column in columns]
    names = list({name: None for group in groups for name in group})
    there = [group for group in groups if group]
    differing = [name for name in names if len({str(group.get(name)) for group in there}) > 1]
    rows = [[f"{DIFFERENT} {n}", *(_show(group.get(n)) for group in groups)] for n in differing]
    return [["origin"], *rows] if rows else []


def _curve_rows(columns: list[StageStatus]) -> list[list[str]]:
    groups = [column.get("curves", {}) for column in columns]
    names = list({name: None for group in groups for name in group})
    return [[f"  {name} ▁…█", *sparklines([g.get(name, []) for g in groups])] for name in names]


def _show(value: Any) -> str:
    if value is None:
        return ABSENT
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, list) and len(str(value)) > MAX_LIST_CHARACTERS:
        return f"{len(value)} values"
    return str(value)


def align(rows: list[list[str]]) -> str:
    """Rows of cells as text, the columns below each other; rows may have fewer cells."""
    count = max(len(row) for row in rows)
    full = [[*row, *[""] * (count - len(row))] for row in rows]
    widths = [max(len(row[column]) for row in full) for column in range(count)]
    lines = ["  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)) for row in full]
    return "\n".join(line.rstrip() for line in lines)
