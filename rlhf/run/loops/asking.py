"""The pairs of an evaluation that people were asked about: asked.json in its folder.

`rlhf evaluate --to-db` writes it. The page Runs says by it whether people were asked, and a loop
that waits for rankings leaves these pairs out: votes are no rankings to train on.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

from rlhf.records.documents import Kinds, read_document
from rlhf.records.jsonl import write_json
from rlhf.run.rundir import RunDir

KINDS: Kinds = {"pairs": int, "at": str, "db": str, "tasks": list}


@dataclass(frozen=True, kw_only=True)
class Asked:
    """Pairs on the board.

    Args:
        pairs: how many.
        at: when they were queued last, in ISO format.
        db: the label database in which they are; empty if an earlier version queued them.
        tasks: their tasks there.
    """

    pairs: int
    at: str
    db: str = ""
    tasks: Sequence[int] = ()


def write_asked(evaluation: RunDir, db: Path, tasks: Sequence[int]) -> None:
    """Keep the tasks of an evaluation's pairs, one each, and that they were queued just now."""
    at = datetime.now(UTC).isoformat(timespec="seconds")
    asked = Asked(pairs=len(tasks), at=at, db=str(db.resolve()), tasks=tasks)
    write_json(evaluation.asked_file, asdict(asked))


def read_asked(evaluation: RunDir) -> Asked | None:
    """The pairs that people were asked about; None if they were not asked.

    Raises:
        InputError: the file is broken.
    """
    if not evaluation.asked_file.is_file():
        return None
    content = read_document(evaluation.asked_file, KINDS)
    more = {name: content[name] for name in ("db", "tasks") if name in content}
    return Asked(pairs=content["pairs"], at=content["at"], **more)


def num_asked(out: Path) -> int:
    """The number of pairs, in all rounds of a loop, that people were asked about.

    Raises:
        InputError: a file is broken.
    """
    records = (read_asked(RunDir(file.parent)) for file in out.glob("round-*/evaluate/asked.json"))
    return sum(asked.pairs for asked in records if asked is not None)
