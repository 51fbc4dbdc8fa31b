"""What the label database says of a round: new rankings, open tasks, and its own samples."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from labeling_app.db.board.overlap import num_open
from labeling_app.db.rankings import num_rankings_of, num_rankings_since
from labeling_app.db.rounds import rounds, tasks_of_round
from labeling_app.db.store import Store
from rlhf.records.documents import Kinds, require_kinds
from rlhf.records.ranked import MANIFEST, read_manifest


@dataclass(frozen=True, kw_only=True)
class Exported:
    """What the last export could see: of the rankings, and of the imports if it recorded that."""

    ranking: int = 0
    finished_import: int | None = None


def last_exported(folder: Path, recorded: int) -> Exported:
    """What an export could see, by its manifest.

    Args:
        folder: the export.
        recorded: the newest ranking before it began, for exports of earlier versions.

    Raises:
        InputError: the manifest is broken.
    """
    manifest = read_manifest(folder)
    if "newest_ranking" not in manifest:
        return Exported(ranking=recorded)
    kinds: Kinds = {"newest_ranking": int, "newest_import": int}
    require_kinds(manifest, kinds, str(folder / MANIFEST))
    return Exported(ranking=manifest["newest_ranking"], finished_import=manifest["newest_import"])


def count_new(db: Path, after: Exported, export: Any) -> dict[str, int]:
    """How many rankings of a database are new, and how many tasks are open, as Quality counts them.

    Args:
        db: the label database.
        after: what the last export could see.
        export: settings of `rlhf export`: whose rankings count.
    """
    with Store(db, read_only=True) as store:
        new = num_rankings_since(
            store.connections,
            after.ranking,
            after_import=after.finished_import,
            kinds=export.kind,
            annotators=export.annotator,
        )
        return {"new": new, "open": num_open(store.connections)}


def count_of_tasks(db: Path, task_ids: Sequence[int], export: Any) -> dict[str, int]:
    """How many rankings some tasks have, and how many of these tasks are ranked.

    Args:
        db: the label database.
        task_ids: the tasks, such as those of a round's own samples.
        export: as in `count_new`.
    """
    if not task_ids:
        return {"rankings": 0, "ranked": 0}
    with Store(db, read_only=True) as store:
        rankings, ranked = num_rankings_of(
            store.connections, task_ids, kinds=export.kind, annotators=export.annotator
        )
    return {"rankings": rankings, "ranked": ranked}


def has_round(db: Path, policy: Path) -> bool:
    """Whether samples of a policy were queued: `rlhf round` stores them all at once.

    The folder may have been named in another way then.
    """
    with Store(db, read_only=True) as store:
        return _round_of(store, policy) is not None


def own_tasks(db: Path, policy: Path) -> list[int]:
    """The tasks by which samples of a policy were put on the board; reads all tasks."""
    with Store(db, read_only=True) as store:
        number = _round_of(store, policy)
        return [] if number is None else tasks_of_round(store.connections, number)


def _round_of(store: Store, policy: Path) -> int | None:
    """The number that the database gave the round in which a policy was sampled."""
    queued = rounds(store.connections).items()
    paths = {Path(content["policy"]["path"]).resolve(): number for number, content in queued}
    return paths.get(policy.resolve())
