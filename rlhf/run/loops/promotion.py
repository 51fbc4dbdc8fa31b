"""The promoted policy of a loop: the one that live mode and serving use.

OUT/promoted.json lists every promotion and every rollback, the newest last. A rollback returns to
the policy that was promoted before; before the first one that is the model the loop began with.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

from filelock import FileLock, Timeout

from rlhf.config import read_settings_file
from rlhf.errors import InputError
from rlhf.records.documents import REMEDY, Kinds, read_document, require_kinds
from rlhf.records.jsonl import write_json
from rlhf.run.rundir import STAGE_COMMANDS, RunDir

KINDS: Kinds = {"round": int | None, "by": str, "at": str, "rolled_back": bool}
POLICY_STAGES = ("sft", "ppo", "dpo", "distill", "quantize")
LOCK_SECONDS = 10.0


@dataclass(frozen=True, kw_only=True)
class Promotion:
    """One entry of the history.

    Args:
        round: whose policy is promoted from then on; None: the model the loop began with.
        by: the name of the person.
        at: the time, in ISO format.
        rolled_back: this returned to an earlier policy.
    """

    round: int | None
    by: str
    at: str
    rolled_back: bool = False


def is_loop(out: Path) -> bool:
    """Whether a loop was started in a folder."""
    return RunDir(out).read_stage().get("stage") == "loop"


def require_loop(out: Path) -> RunDir:
    """The folder of a loop.

    Raises:
        InputError: no loop was started in it.
    """
    if not is_loop(out):
        raise InputError(f"{out} is not the folder of a loop", "Give the --out of rlhf loop.")
    return RunDir(out)


def policy_stage(run: RunDir, flag: str) -> str | None:
    """The stage that trained the policy in a folder; None where the folder is no run.

    Raises:
        InputError: it is a run of something else; names the flag.
    """
    stage = run.read_stage().get("stage")
    if stage is None:
        return None
    is_reward = stage in ("distill", "quantize") and run.model.is_dir()
    if stage in POLICY_STAGES and not is_reward:
        return str(stage)
    command = STAGE_COMMANDS.get(stage, f"another stage ({stage})")
    of = " of a reward model" if is_reward else ""
    raise InputError(
        f"{flag} {run.path} is a run of {command}{of}, not of a policy".lstrip(),
        "Give the --out folder of rlhf sft, ppo, dpo, distill, quantize or loop, or a model "
        "folder.",
    )


def read_promotions(out: Path) -> list[Promotion]:
    """The history, oldest first; empty when nothing was promoted.

    Raises:
        InputError: the file is broken.
    """
    file = RunDir(out).promoted_file
    if not file.is_file():
        return []
    entries = read_document(file, {"history": list})["history"]
    promotions = []
    for entry in entries:
        if not isinstance(entry, dict):
            raise InputError(f"{file} has {str(entry)[:80]!r} in its history", REMEDY)
        require_kinds(entry, KINDS, str(file))
        promotions.append(Promotion(**{name: entry[name] for name in KINDS}))
    return promotions


def promoted_round(history: Sequence[Promotion]) -> int | None:
    """The round whose policy is promoted; None: the model the loop began with."""
    return history[-1].round if history else None


def round_before(history: Sequence[Promotion]) -> int | None:
    """The round that a rollback returns to; None: the model the loop began with."""
    stack = _standing(history)
    return stack[-2] if len(stack) > 1 else None


def _standing(history: Sequence[Promotion]) -> list[int]:
    """The promoted rounds that were not rolled back, the newest last."""
    stack: list[int] = []
    for promotion in history:
        if promotion.rolled_back:
            stack.pop()
        elif promotion.round is not None:
            stack.append(promotion.round)
    return stack


def evaluated_rounds(out: Path) -> list[int]:
    """The rounds whose policy may be promoted: trained and evaluated, the first one first."""
    folders = (folder for folder in out.glob("round-*") if folder.name[6:].isdecimal())
    return sorted(int(folder.name[6:]) for folder in folders if _missing(folder) is None)


def _missing(folder: Path) -> str | None:
    """The stage that the policy of a round lacks before it may be promoted."""
    stages = ("ppo", "evaluate")
    return next((name for name in stages if not RunDir(folder / name).is_done), None)


def promote(out: Path, number: int | None, by: str) -> Promotion:
    """Promote the policy of a round.

    Args:
        out: folder of the loop.
        number: of the round; None: the newest one that is evaluated.
        by: who promotes it.

    Raises:
        InputError: there is no loop or no such round, its evaluation is missing, or it is promoted
            already.
    """
    require_loop(out)
    evaluated = evaluated_rounds(out)
    if number is None and not evaluated:
        raise InputError(
            f"No round of {out} is evaluated yet",
            "Promote its policy when `rlhf evaluate` is done; `rlhf status` shows the stages.",
        )
    chosen = evaluated[-1] if number is None else number
    if missing := _missing(folder := out / f"round-{chosen}"):
        raise InputError(
            f"The policy of round {chosen} cannot be promoted: {folder / missing} is not done",
            f"Evaluated are: {', '.join(map(str, evaluated)) or 'no rounds'}. "
            "Let the loop finish the round first.",
        )
    with _history(out) as history:
        if promoted_round(history) == chosen:
            raise InputError(
                f"The policy of round {chosen} is promoted already", "Choose another --round."
            )
        return _append(history, chosen, by)


def roll_back(out: Path, by: str) -> Promotion:
    """Return to the policy that was promoted before.

    Raises:
        InputError: there is no loop, or nothing is promoted.
    """
    require_loop(out)
    with _history(out) as history:
        if promoted_round(history) is None:
            raise InputError(
                f"No policy of {out} is promoted", "Promote one: rlhf runs promote OUT --round N"
            )
        return _append(history, round_before(history), by, rolled_back=True)


@contextmanager
def _history(out: Path) -> Iterator[list[Promotion]]:
    """The history, to be changed: one process at a time, and written when the block succeeds."""
    lock = FileLock(out / ".promoted.lock", timeout=LOCK_SECONDS)
    try:
        with lock:
            history = read_promotions(out)
            yield history
            number = promoted_round(history)
            policy = None if number is None else f"round-{number}/ppo/policy"
            content = {"round": number, "policy": policy, "history": [asdict(e) for e in history]}
            write_json(RunDir(out).promoted_file, content)
    except Timeout:
        raise InputError(f"Somebody else promotes a policy of {out} now", "Try again.") from None


def _append(
    history: list[Promotion], number: int | None, by: str, *, rolled_back: bool = False
) -> Promotion:
    at = datetime.now(UTC).isoformat(timespec="seconds")
    history.append(Promotion(round=number, by=by, at=at, rolled_back=rolled_back))
    return history[-1]


def promoted_policy(out: Path, original: str | None = None) -> str:
    """The model folder of the promoted policy; before that the model that the loop began with.

    Args:
        out: folder of the loop.
        original: the model that a loop which was not started yet will begin with.

    Raises:
        InputError: there is no loop, or one of its files is broken.
    """
    number = promoted_round(read_promotions(out))
    if number is not None:
        return str(RunDir(out / f"round-{number}" / "ppo").policy)
    if original is not None:
        return original
    return str(read_settings_file(require_loop(out).config_file).get("model", ""))
