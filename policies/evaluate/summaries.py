"""What the stages of a policy found, in sentences for a terminal."""

import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from policies.evaluate.settings import EvaluateSettings
from policies.ppo.settings import PPOSettings
from policies.reference.settings import ReferenceSettings
from policies.sampling.settings import GenerateSettings
from rlhf.run.intervals import in_words
from rlhf.run.rundir import RunDir

TEMPLATE_SHARE = 0.05  # of the answers; more often, a phrase is a template
VERDICTS = {
    "better": "The new model is better.",
    "worse": "The new model is worse.",
    "unproven": "No proven difference.",
}


def describe_generated(settings: GenerateSettings, result: Mapping[str, Any]) -> str:
    """How many responses were added, or why there was nothing to do."""
    if not result["responses"]:
        return (
            f"Nothing to do: all prompts in {settings.db} have {settings.k} responses of "
            f"{settings.model} already. A larger -k samples more."
        )
    return (
        f"Sampled {result['responses']} responses to {result['prompts']} prompts.\n"
        f"Next: {_command('label', db=settings.db)}"
    )


def describe_stored(settings: ReferenceSettings, result: Mapping[str, Any]) -> str:
    """What was stored ahead of time; of a part of the shards, how many there are."""
    if "rows" not in result:
        [[done, number]] = [item for item in result["shards"].items() if item[0] != "of"]
        return f"{number} of {result['shards']['of']} shards are {done}; other jobs do the rest."
    rows, reward = result["rows"], settings.reward
    lines = [
        f"Stored {rows} responses to {result['prompts']} prompts with log-probs in "
        f"{settings.out}: "
        f"{result['mean_length']:.0f} tokens on average, {100 * result['finished'] / rows:.0f} % "
        "ended by themselves."
    ]
    if reward is None:
        return "\n".join([*lines, f"Next: {_command('reference', reward='RM', out=settings.out)}"])
    model, out = result["model"]["path"], settings.out.parent / "ppo"
    following = _command("ppo", model=model, reward=reward, reference=settings.out, out=out)
    return "\n".join([*lines, f"They have the rewards of {reward}.", f"Next: {following}"])


def describe_policy(settings: PPOSettings, report: Mapping[str, Any]) -> str:
    """How far the reward and the policy moved, and how to find out whether it is better."""
    reward, kl = report["reward"], report["kl"]
    out = settings.out.parent / "evaluate"
    judges: dict[str, str | Path] = {"reward": settings.reward[0], "reference": settings.reference}
    return "\n".join(
        [
            f"Mean reward: {reward['first']:z.2f} in the first of {report['steps']} steps, "
            f"{reward['last']:z.2f} in the last, each of {settings.batch.episodes_per_step} "
            "responses.",
            f"Reverse KL from the original model: {_nats(kl['reverse'])}.",
            f"Next: {_command('evaluate', policy=settings.out, **judges, out=out)}",
        ]
    )


def describe_evaluation(
    settings: EvaluateSettings, report: Mapping[str, Any], votes: Path | None = None
) -> str:
    """The verdict, every judge's win rate, what else changed, where the report is, whom to ask.

    Args:
        settings: of the stage.
        report: what report.json holds.
        votes: the label database in which people are to vote, if they are.
    """
    length, kl, out = report["length"], report["kl"]["reverse"], settings.out
    rival = report.get("rival", {"win_rate": {}, "name": ""})
    lines = [
        VERDICTS[report["verdict"]["outcome"]],
        *_win_rates(report, report, "the original"),
        *_win_rates(report, rival, rival["name"]),
        *_student(report.get("student"), report),
        *_unclear(report.get("verdicts", {"asked": 0, "unclear": 0})),
        f"Length {length['reference']:.0f} → {length['policy']:.0f} tokens.",
        f"Reverse KL from the original model: {_nats(kl)}.",
        *_likelihoods(report.get("log_likelihood"), report.get("retained")),
        *_template(report.get("template")),
        f"Report: {RunDir(out).report_html}",
    ]
    if votes:
        lines.append(f"Let people vote: {_command('label', db=votes)}")
        lines.append(f"Then: {_command('evaluate', out=out, from_db=votes)}")
    elif "people" not in report["win_rate"]:
        lines.append(f"To ask people: {_command('evaluate', out=out, to_db='labels.db')}")
    return "\n".join(lines)


def _nats(kl: Mapping[str, Any]) -> str:
    """A KL with its standard error, and whether it can be told from 0."""
    error = kl["standard_error"]
    words = f"{kl['nats']:z.2f} nats per response"
    if error is None:
        return f"{words}, of {kl['sequences']} responses"
    unclear = ", which cannot be told from 0" * (abs(kl["nats"]) < 2 * error)
    return f"{words} ± {error:.2f} (standard error, {kl['sequences']} responses){unclear}"


def _win_rates(report: Mapping[str, Any], part: Mapping[str, Any], other: str) -> Iterator[str]:
    for judge, rate in part["win_rate"].items():
        described = report["judges"][judge]
        name = f"{described['kind']} {described['name']}".strip()
        yield (
            f"The policy wins {in_words(rate)} against {other} on {rate['n']} prompts, judged by "
            f"{name}."
        )
    needed = part.get("votes", {}).get("still_needed")
    if needed:
        yield f"About {needed} more votes, on other prompts, would prove a difference of this size."


def _student(student: Mapping[str, Any] | None, report: Mapping[str, Any]) -> Iterator[str]:
    """How much of its teacher's gain a distilled policy has kept, by each judge."""
    if student is None:
        return
    ours, theirs = (student["parameters"][name] for name in ("student", "teacher"))
    yield f"The policy has {ours:,} parameters, {100 * ours / theirs:.0f} % of its teacher's."
    for judge, gain in student["gain"].items():
        name = " ".join(report["judges"][judge][part] for part in ("kind", "name")).strip()
        low = gain["teacher"]["low"]
        if low is None or low <= 0:
            yield f"By {name}, the teacher's own gain cannot be told from 0."
        else:
            yield f"It keeps {in_words(gain['kept'])} of its teacher's gain by {name}."


def _likelihoods(
    answers: Mapping[str, Mapping[str, Any]] | None, texts: Mapping[str, Any] | None
) -> Iterator[str]:
    """How likely the answers are under the original model, and what the policy forgot."""
    if answers:
        yield (
            "Log-likelihood of the answers under the original model: "
            f"{answers['reference']['value']:z.2f} → {answers['policy']['value']:z.2f} nats per "
            "token."
        )
    if texts:
        change = texts["difference"]
        between = (
            "" if change["low"] is None else f", {change['low']:+z.3f} to {change['high']:+z.3f}"
        )
        yield (
            "Negative log-likelihood of neutral text: "
            f"{texts['before']:.3f} → {texts['after']:.3f} nats per token "
            f"({change['value']:+z.3f}{between})."
        )


def _template(found: Mapping[str, Mapping[str, Any]] | None) -> Iterator[str]:
    """A warning where a phrase stands in many of the new answers and in few of the original's."""
    if found is None:
        return
    new, original = found["policy"], found["reference"]
    if new["share"] > max(TEMPLATE_SHARE, 2 * original["share"]):
        yield (
            f"A template: {100 * new['share']:.0f} % of the new answers say “{new['words']}” (the "
            f"original's commonest four words stand in {100 * original['share']:.0f} %). Read the "
            "samples before you trust the win rate."
        )


def _unclear(verdicts: Mapping[str, int]) -> Iterator[str]:
    if verdicts["unclear"]:
        yield (
            f"{verdicts['unclear']} of {verdicts['asked']} verdicts of the AI judge could not be "
            "read and count for nothing; its words are in judge.jsonl."
        )


def _command(name: str, **flags: str | Path) -> str:
    words = [
        f"--{flag.replace('_', '-')} {shlex.quote(str(value))}" for flag, value in flags.items()
    ]
    return " ".join(["rlhf", name, *words])
