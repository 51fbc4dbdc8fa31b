"""`rlhf train-reward`."""

import json
import shlex
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from reward.report.annotators import describe_annotators
from reward.settings import RewardSettings as Settings
from rlhf.commands.wording import accuracy_of_longer, advice_on_speed, doubt
from rlhf.config import flag_of
from rlhf.records.schema import RankedPrompt, Sampling
from rlhf.records.wording import counted
from rlhf.run.intervals import in_words
from rlhf.run.rundir import RunDir

EXAMPLE = """rlhf train-reward --rankings rankings --model models/SmolLM2-135M-Instruct \\
    --out runs/first/reward"""
LANGUAGE_MODEL = "LANGUAGE_MODEL"  # a placeholder: no report names it


def run(settings: Settings) -> dict[str, Any]:
    """Train a reward model on rankings and measure it on held-out prompts."""
    from rlhf.records.ranked import read_manifest

    read_manifest(settings.rankings)  # a missing export is refused before torch is loaded
    from rlhf.parallel.distributed import launch

    launch(settings.processes, settings.parallel.max_restarts)
    if settings.seeds:
        from reward.training.ensemble import train_ensemble

        return train_ensemble(settings)
    if settings.learning_curve:
        from reward.training.learning_curve import train_learning_curve

        return train_learning_curve(settings)
    from reward.training.train import train_reward

    return train_reward(settings)


def describe(settings: Settings, result: dict[str, Any]) -> str:
    """How far to trust the model, from its report.json."""
    run = RunDir(settings.out)
    with run.reading_report():
        return describe_report(settings, run.read_report())


def describe_report(settings: Settings, report: Mapping[str, Any]) -> str:
    """Its accuracy, what it was trained on, where the report is, and the next command.

    Args:
        settings: of the stage.
        report: what report.json holds; that of an ensemble has no counts.
    """
    from reward.report.learning_curve import describe_curve  # imports NumPy

    run = RunDir(settings.out)
    has_thumbs = "judgements" in report or "accuracy_on_thumbs" in report
    accuracy = _accuracy(report["accuracy"], report["held_out"]["from"], has_thumbs=has_thumbs)
    longer = report.get("health", {}).get("longer_wins")
    lines = [accuracy, *accuracy_of_longer(report["accuracy"], longer), *_origin(report)]
    lines += _thumbs(report)
    if "counts" in report:
        lines.append(_rankings(report["counts"]))
    else:
        lines.append(f"An ensemble of {len(report['members'])}, whose reports are in {run.path}.")
    if "learning_curve" in report:
        lines.append(describe_curve(report["learning_curve"]))
    lines += describe_annotators(report.get("annotators", {}))
    lines += advice_on_speed(report)
    if run.report_html.is_file():
        lines.append(f"Report: {run.report_html}")
    behind = report.get("started_from", {"language_model": {"path": settings.model}})
    model = (behind["language_model"] or {"path": LANGUAGE_MODEL})["path"]
    command = ["rlhf", "reference", "--prompts", settings.rankings, "--model", model]
    command += ["--reward", run.path, "--out", run.path.parent / "reference"]
    command += _sampling(settings.rankings)
    return "\n".join([*lines, f"Next: {shlex.join(map(str, command))}"])


def memory_plan(settings: Settings) -> str:
    """The memory plan of the run; no weights are loaded."""
    from reward.memory import plan_sharded
    from reward.training.origin import resolve_model
    from rlhf.records.ranked import read_manifest

    if settings.rankings.exists():
        read_manifest(settings.rankings)
    return plan_sharded(resolve_model(settings)).text


def _origin(report: Mapping[str, Any]) -> list[str]:
    """Which reward model it goes on from, and how good that was."""
    start = report.get("started_from", {})
    if start.get("kind") != "reward model":
        return []
    members = list(report.get("members", {}).values())  # which all start alike
    accuracy = (members[0] if members else report)["accuracy_before_training"]
    measured = f", whose accuracy was {in_words(accuracy)}" if accuracy else ""
    return [f"It started from the reward model {start['path']}{measured}."]


def _sampling(rankings: Path) -> list[str]:
    """Flags with which `rlhf reference` stores the ranked responses instead of sampling others."""
    file = rankings / "train.jsonl"
    if not file.is_file():
        return []
    with file.open(encoding="utf-8") as stream:
        record = RankedPrompt.from_json(json.loads(stream.readline()))
    given, usual = record.responses[0].sampling or Sampling(), Sampling()
    names = ("temperature", "max_new_tokens")
    changed = [name for name in names if getattr(given, name) != getattr(usual, name)]
    pairs = [(flag_of(f"sampling.{name}"), str(getattr(given, name))) for name in changed]
    return [word for pair in pairs for word in pair]


def _accuracy(accuracy: Mapping[str, Any] | None, source: str, *, has_thumbs: bool) -> str:
    if accuracy is None and has_thumbs:
        return "No preference between two responses is held out: there is no accuracy on pairs."
    if accuracy is None:
        return "Every held-out judgment is a tie: there is no accuracy to report."
    return (
        f"Accuracy: {in_words(accuracy)}, on {counted(accuracy['pairs'], 'held-out pair')} of "
        f"{counted(accuracy['prompts'], 'prompt')} ({source}).{doubt(accuracy)}"
    )


def _thumbs(report: Mapping[str, Any]) -> Iterator[str]:
    """How it does on thumbs and on "all bad", where some are held out."""
    kinds = report.get("judgements", {})
    named = {
        "thumbs": report.get("accuracy_on_thumbs") or kinds.get("thumbs", {}).get("accuracy"),
        "responses that were all bad": kinds.get("all_bad", {}).get("accuracy"),
    }
    for name, accuracy in named.items():
        if accuracy:
            yield (
                f"Of {accuracy['judgements']} held-out {name} it puts {in_words(accuracy)} on the "
                "right side of the annotator's threshold; always giving the majority verdict would "
                f"be right for {100 * accuracy['commoner']:.0f} %."
            )


def _judgments(total: Mapping[str, int]) -> str:
    """The number of judgments of each kind in the rankings, and of their prompts."""
    up, down = total.get("thumbs_up", 0), total.get("thumbs_down", 0)
    all_bad = total.get("responses_of_all_bad", 0)
    if not up + down + all_bad:
        return f"{counted(total['pairs'], 'pair')} of {counted(total['prompts'], 'prompt')}"
    parts = [counted(total["pairs"], "pair")] if total["pairs"] else []
    parts += [f"{up} thumbs up and {down} down"] if up + down else []
    parts += [f"{all_bad} responses that were all bad"] if all_bad else []
    return f"{', '.join(parts)}, of {counted(total['prompts'], 'prompt')}"


def _rankings(counts: Mapping[str, Mapping[str, int]]) -> str:
    """How many rankings were read, and how many prompts were skipped."""
    total: Counter[str] = Counter()
    for split in counts.values():
        total.update(split)
    skipped = [
        f"{number} {name.replace('_', ' ')}"
        for name, number in total.items()
        if name.startswith("prompts_") and number
    ]
    return (
        f"It read {total['rankings']} rankings: {_judgments(total)}. "
        f"Skipped: {', '.join(skipped) or 'nothing'}."
    )
