"""Asking people about a round of a loop: its evaluation's pairs, and their votes in its reports.

Each is what `rlhf evaluate` does with `--to-db` and `--from-db`, for the loop's own database.
"""

from collections.abc import Sequence
from pathlib import Path
from shlex import quote
from typing import Any

from labeling_app.db.store import Store
from labeling_app.db.tasks import default_overlap
from rlhf.commands.loop.report import (
    Round,
    Stop,
    build_report,
    describe_round,
    read_rounds,
    reason_to_stop,
    report_lock,
)
from rlhf.commands.loop.settings import LoopSettings
from rlhf.commands.models import evaluate
from rlhf.config import read_settings_file
from rlhf.errors import InputError
from rlhf.records.jsonl import write_json
from rlhf.run.loops.asking import read_asked
from rlhf.run.loops.promotion import evaluated_rounds
from rlhf.run.rundir import RunDir


def ask_people(out: Path, number: int | None) -> dict[str, Any]:
    """Queue a round's pairs at random places among the open tasks; those that are queued stay.

    As many people vote on each pair as rank a task.

    Args:
        out: folder of the loop.
        number: of the round; None: the newest that is evaluated.

    Returns:
        The round, how many pairs are new on the board, and how many people vote on each of these.

    Raises:
        InputError: there is no such round, no pair of different responses, or no database.
    """
    number, folder = _evaluated(out, number)
    db = _database(out)
    with Store(db, read_only=True) as store:
        people = default_overlap(store.connections.db)
    given = evaluate.run(evaluate.Settings(out=folder, to_db=db, mix=True, people_per_pair=people))
    return {"round": number, "queued": given["queued"], "people_per_pair": people}


def count_votes(out: Path, number: int | None) -> Round:
    """Read people's votes into the reports of a round and of the loop.

    People are the most trustworthy judge: from then on the round gains by their votes, or does not.

    Args:
        out: folder of the loop.
        number: of the round; None: the newest that is evaluated.

    Returns:
        The round's entry in the report of the loop.

    Raises:
        InputError: there is no such round, nobody was asked about it, or nobody has voted.
    """
    from policies.evaluate.votes import NoVotesError

    number, folder = _evaluated(out, number)
    if read_asked(RunDir(folder)) is None:
        raise InputError(
            f"People were not asked about round {number}",
            "Press “Ask people about this round” on the page Runs, or type: "
            f"rlhf runs ask {quote(str(out))} --round {number}",
        )
    try:
        evaluate.run(evaluate.Settings(out=folder, from_db=_database(out)))
    except NoVotesError:
        raise InputError(
            f"Nobody has voted on round {number} yet",
            "People find its pairs among their tasks on the board. Count again later.",
        ) from None
    file = RunDir(out).report_json
    with report_lock(out):
        rounds = read_rounds(out)
        before = RunDir(out).read_report()
        price = before.get("cost", {}).get("price_per_hour")  # older reports have no cost
        stop = _why_stopped(out, rounds) if before.get("stopped") else None
        write_json(file, build_report(rounds, out, stop, price))
    return rounds[number]


def _why_stopped(out: Path, rounds: Sequence[Round]) -> Stop:
    """Why a loop that has stopped would stop today, or that it would not."""
    settings = read_settings_file(RunDir(out).config_file)
    limit = settings.get("rounds", LoopSettings.rounds)
    without_gain = settings.get("stop_without_gain", LoopSettings.stop_without_gain)
    reason = reason_to_stop(rounds, limit, without_gain=without_gain)
    return reason or Stop(f"{describe_round(rounds[-1])} Another round can start.", None)


def _database(out: Path) -> Path:
    """The loop's label database.

    Raises:
        InputError: it is not there; `--to-db` would make another one.
    """
    db = Path(read_settings_file(RunDir(out).config_file).get("db") or out / "labels.db")
    if not db.is_file():
        raise InputError(
            f"There is no label database at {db}",
            "The loop names it from the folder in which it was started. Type the command there."
            if not db.is_absolute()
            else "Put it back where the loop had it.",
        )
    return db


def _evaluated(out: Path, number: int | None) -> tuple[int, Path]:
    evaluated = evaluated_rounds(out)
    if not evaluated or number not in (None, *evaluated):
        which = "No round" if number is None else f"Round {number}"
        raise InputError(
            f"{which} of {out} is not evaluated",
            f"Evaluated are: {', '.join(map(str, evaluated)) or 'no rounds'}. "
            "Let the loop finish the round first.",
        )
    chosen = evaluated[-1] if number is None else number
    return chosen, out / f"round-{chosen}" / "evaluate"
