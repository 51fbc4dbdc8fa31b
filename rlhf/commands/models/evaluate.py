"""`rlhf evaluate`: compares a policy with the original, by judges and by people's blind votes."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from policies.evaluate.settings import EvaluateSettings
from rlhf.commands.idle_settings import refuse_idle
from rlhf.commands.wording import command_line, described_kl, judge_name, listed
from rlhf.config import require_range
from rlhf.errors import ConfigError
from rlhf.records.wording import OWN_JUDGE, PEOPLE, counted, judge_in_words
from rlhf.run.intervals import in_words
from rlhf.run.rundir import RunDir, require_done

EXAMPLE = """rlhf evaluate --policy runs/first/ppo --reward runs/first/reward \\
    --reference runs/first/reference --out runs/first/evaluate"""
UNNAMED = Parameter(show_default=False)
MAX_FEWER_ENDS = 0.05  # of a student's responses than of its teacher's
TEMPLATE_SHARE = 0.05  # of the responses; more often, a phrase is a template
VERDICTS = {
    "better": "The new model is better.",
    "worse": "The new model is worse.",
    "unproven": "No proven difference.",
}

PREFERRED = {"better": "the new model", "worse": "the original"}


@dataclass(frozen=True, kw_only=True)
class Settings(EvaluateSettings):
    """What to compare, and whether people vote, too."""

    policy: Annotated[str, UNNAMED] = ""
    """The --out of rlhf ppo, dpo, sft, distill, quantize or loop (its promoted policy), or a model
    folder."""
    reference: Annotated[Path, UNNAMED] = Path()
    """The --out of `rlhf reference`."""
    reward: Annotated[str, UNNAMED] = ""
    """A judge: reward model, signal:package.module:function or http(s):// address."""
    to_db: Path | None = None
    """Label database in which to queue pairs for people to compare blind: the policy's first
    response beside the original's, and beside that of --against."""
    from_db: Path | None = None
    """Label database from which to read people's votes into the report; replaces votes read
    before."""
    people_per_pair: int = 1
    """With --to-db: how many people compare each pair."""
    mix: bool = False
    """With --to-db: queue the pairs at random positions among the open tasks; default: after
    them."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_range("people_per_pair", self.people_per_pair, 1, 100)
        if self.to_db and self.from_db:
            raise ConfigError(
                "--to-db and --from-db exclude each other", "Queue first, read the votes later."
            )
        if not self.to_db:
            refuse_idle(self, ["people_per_pair", "mix"], "without --to-db")
        given = {
            "--policy": bool(self.policy),
            "--reference": self.reference != Path(),
            "--reward": bool(self.reward),
        }
        finished = (self.to_db or self.from_db) and not any(given.values())
        missing = [name for name, is_given in given.items() if not is_given]
        if missing and not finished:
            raise ConfigError(
                f"{listed(missing)} {'is' if len(missing) == 1 else 'are'} missing",
                "Say what to compare: rlhf evaluate --policy P --reference REF --reward RM --out R",
            )


def run(settings: Settings) -> dict[str, Any]:
    """Compare a policy with the original model: win rates by judges and people, with intervals.

    Give --policy, --reference and --reward together. For a finished --out, give none of them: then
    --to-db queues its pairs for people, and --from-db reads their votes.
    """
    from policies.evaluate.report import headline

    queued: dict[str, Any] = {}

    def ask_people() -> None:
        if settings.to_db:
            queued["is_new_db"] = not settings.to_db.exists()
            queued["queued"] = _queue(settings, settings.to_db)

    if settings.policy:
        from policies.evaluate.compare import evaluate_policy

        names = [field.name for field in fields(EvaluateSettings)]
        of_stage = EvaluateSettings(**{n: getattr(settings, n) for n in names})
        result = evaluate_policy(of_stage, ask_people)
    else:
        result = headline(require_done(settings.out, "evaluate", "answers.jsonl").read_report())
        ask_people()
    if queued:
        return {**result, **queued}
    return _read_votes(settings, settings.from_db) if settings.from_db else result


def describe(settings: Settings, result: dict[str, Any]) -> str:
    """The verdict in sentences, from report.json."""
    run = RunDir(settings.out)
    pairs = counted(result["queued"], "pair") if settings.to_db else ""
    where = f", in a new database: {settings.to_db}" if result.get("is_new_db") else ""
    queued = f"Queued {pairs} for people{where}.\n" if pairs else ""
    with run.reading_report():
        return queued + describe_report(settings, run.read_report(), settings.to_db)


def describe_report(
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
        _verdict(report),
        *_win_rates(report, report, "the original"),
        *_win_rates(report, rival, rival["name"]),
        *_student(report.get("student"), report),
        *_unclear(report.get("verdicts", {"asked": 0, "unclear": 0})),
        f"Length {length['reference']:.0f} → {length['policy']:.0f} tokens.",
        f"Reverse KL from the original model: {described_kl(kl)}.",
        *_likelihoods(report.get("log_likelihood"), report.get("retained")),
        *_template(report.get("template")),
        f"Report: {RunDir(out).report_html}",
    ]
    if votes:
        lines.append(f"Let people vote: {command_line('label', db=votes)}")
        lines.append(f"Then: {command_line('evaluate', out=out, from_db=votes)}")
    elif "people" not in report["win_rate"]:
        command = command_line("evaluate", out=out, to_db="DB")
        lines.append(f"To ask people, with DB the database of their board: {command}")
    return "\n".join(lines)


def _verdict(report: Mapping[str, Any]) -> str:
    """Whether the new model is better; a judge that is not people only prefers one of the two."""
    judge, outcome = report["verdict"]["judge"], report["verdict"]["outcome"]
    if judge == PEOPLE or outcome == "unproven":
        return VERDICTS[outcome]
    described = report["judges"][judge]
    own = f", {OWN_JUDGE}" if described.get("is_objective") else ""
    who, preferred = judge_in_words(judge_name(described) + own), PREFERRED[outcome]
    return f"{who} prefers {preferred}. No people have voted."


def _win_rates(report: Mapping[str, Any], part: Mapping[str, Any], opponent: str) -> Iterator[str]:
    for judge, rate in part["win_rate"].items():
        yield (
            f"The policy wins {in_words(rate)} against {opponent} on {rate['n']} prompts, judged "
            f"by {judge_name(report['judges'][judge])}."
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
        name = judge_name(report["judges"][judge])
        low = gain["teacher"]["low"]
        if low is None or low <= 0:
            yield f"By {name}, the teacher's own gain cannot be told from 0."
        else:
            yield f"It keeps {in_words(gain['kept'])} of its teacher's gain by {name}."
    rates = report["eos_rate"]
    if rates["policy"] < rates["rival"] - MAX_FEWER_ENDS:
        yield (
            f"{100 * rates['policy']:.0f} % of its responses end, {100 * rates['rival']:.0f} % "
            "of its teacher's do: scores of text that is cut off say little. Read some samples."
        )


def _likelihoods(
    responses: Mapping[str, Mapping[str, Any]] | None, texts: Mapping[str, Any] | None
) -> Iterator[str]:
    """How likely the responses are under the original model, and what the policy forgot."""
    if responses:
        before, after = responses["reference"]["value"], responses["policy"]["value"]
        yield (
            "Log-likelihood of the responses under the original model: "
            f"{before:z.2f} → {after:z.2f} nats per token."
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


def _template(phrases: Mapping[str, Mapping[str, Any]] | None) -> Iterator[str]:
    """A warning where a phrase stands in many of the new responses and in few of the original's."""
    if phrases is None:
        return
    new, original = phrases["policy"], phrases["reference"]
    if new["share"] > max(TEMPLATE_SHARE, 2 * original["share"]):
        yield (
            f"A template: {100 * new['share']:.0f} % of the new responses say “{new['words']}” "
            f"(the original's most frequent 4-gram is in {100 * original['share']:.0f} %). Read "
            "the samples before you trust the win rate."
        )


def _unclear(verdicts: Mapping[str, int]) -> Iterator[str]:
    if verdicts["unclear"]:
        yield (
            f"{verdicts['unclear']} of {verdicts['asked']} verdicts of the AI judge could not be "
            "read and are not counted; its replies are in judge.jsonl."
        )


def _queue(settings: Settings, db: Path) -> int:
    from labeling_app.annotators.comparisons import queue_pairs, tasks_of_pairs
    from labeling_app.db.store import Store
    from policies.evaluate.votes import pairs_to_ask
    from rlhf.run.loops.asking import write_asked

    run = RunDir(settings.out)
    pairs = [pair for opponent_pairs in pairs_to_ask(run).values() for pair in opponent_pairs]
    with Store(db) as store:
        queued = queue_pairs(
            store, pairs, overlap=settings.people_per_pair, mix=settings.mix, seed=settings.seed
        )
        write_asked(run, db, tasks_of_pairs(store, pairs))
    return queued


def _read_votes(settings: Settings, db: Path) -> dict[str, Any]:
    from labeling_app.annotators.comparisons import are_queued, read_votes
    from labeling_app.db.store import Store
    from policies.evaluate.votes import PolicyVote, add_votes, pairs_to_ask
    from rlhf.errors import InputError

    run = RunDir(settings.out)
    pairs = pairs_to_ask(run)
    with Store(db, read_only=True) as store:
        if not any(are_queued(store, opponent_pairs) for opponent_pairs in pairs.values()):
            raise InputError(
                f"{db} has no tasks for the pairs of {run.path}",
                f"Queue them: rlhf evaluate --out {run.path} --to-db {db}; or give the database "
                "in which they were queued.",
            )
        votes = {
            opponent: [
                PolicyVote(vote.prompt_id, vote.second, vote.annotator)
                for vote in read_votes(store, opponent_pairs)
            ]
            for opponent, opponent_pairs in pairs.items()
        }
    return add_votes(run, votes)
