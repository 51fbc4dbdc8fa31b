"""`rlhf evaluate`: compares a policy with the original, by judges and by people's blind votes."""

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from policies.evaluate.settings import EvaluateSettings
from rlhf.commands.modes import refuse_idle
from rlhf.commands.wording import counted, listed
from rlhf.config import require_range
from rlhf.errors import ConfigError

EXAMPLE = """rlhf evaluate --policy runs/first/ppo --reward runs/first/reward \\
    --reference runs/first/reference --out runs/first/evaluate"""
UNNAMED = Parameter(show_default=False)


@dataclass(frozen=True, kw_only=True)
class Settings(EvaluateSettings):
    """What to compare, and whether people vote, too."""

    policy: Annotated[str, UNNAMED] = ""
    """The --out of `rlhf ppo`, `rlhf dpo` or `rlhf sft`, or a model folder."""
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
    """With --to-db: queue the pairs at random places among the open tasks; default: after them."""

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

    Give --policy, --reference and --reward together, or none of them to queue pairs (--to-db) or
    read votes (--from-db) of a finished --out.
    """
    from policies.evaluate.report import headline
    from rlhf.run.rundir import require_done

    queued: dict[str, Any] = {}

    def ask_people() -> None:
        if settings.to_db:
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
    from policies.evaluate.summaries import describe_evaluation
    from rlhf.run.rundir import RunDir

    run = RunDir(settings.out)
    pairs = counted(result["queued"], "pair") if settings.to_db else ""
    queued = f"Queued {pairs} for people.\n" if pairs else ""
    with run.reading_report():
        return queued + describe_evaluation(settings, run.read_report(), settings.to_db)


def _queue(settings: Settings, db: Path) -> int:
    from labeling_app.annotators.comparisons import queue_pairs
    from labeling_app.db.store import Store
    from policies.evaluate.votes import pairs_to_ask
    from rlhf.run.rundir import RunDir

    pairs = [pair for asked in pairs_to_ask(RunDir(settings.out)).values() for pair in asked]
    with Store(db) as store:
        return queue_pairs(
            store, pairs, overlap=settings.people_per_pair, mix=settings.mix, seed=settings.seed
        )


def _read_votes(settings: Settings, db: Path) -> dict[str, Any]:
    from labeling_app.annotators.comparisons import are_queued, read_votes
    from labeling_app.db.store import Store
    from policies.evaluate.votes import add_votes, pairs_to_ask
    from rlhf.errors import InputError
    from rlhf.run.rundir import RunDir

    run = RunDir(settings.out)
    pairs = pairs_to_ask(run)
    with Store(db, read_only=True) as store:
        if not any(are_queued(store, asked) for asked in pairs.values()):
            raise InputError(
                f"{db} has no tasks for the pairs of {run.path}",
                f"Queue them: rlhf evaluate --out {run.path} --to-db {db}; or give the database "
                "in which they were queued.",
            )
        votes = {
            other: [(vote.prompt_id, vote.second) for vote in read_votes(store, asked)]
            for other, asked in pairs.items()
        }
    return add_votes(run, votes)
