"""A later file of the same source takes the place of the earlier ones: `rlhf import --replace`.

What earlier imports of that source gave and the new file lacks is retired, as a ranking is that its
annotator changes: it stays in the database and is no longer counted or exported. What the new file
also has stays as it is. A ranking that an import replaced counts again when any file gives it once
more. What people ranked on the board is never touched.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from sqlite_utils import Database

from labeling_app.db.board.leases import finish_unseen, set_state, state_of
from labeling_app.db.rankings import ranking_in_task


@dataclass(frozen=True, kw_only=True)
class Replaced:
    """How many rankings of earlier imports of a source were retired, and how many kept."""

    retired: int
    kept: int
    prompts: frozenset[str]
    """Those of which a ranking was retired or is live again."""


def replace_earlier(db: Database, import_id: int, given: set[str]) -> Replaced:
    """Retire what earlier imports of the same source gave, except for `given`, by id."""
    query = """SELECT r.seq, r.id, r.prompt_id, r.live FROM imports i
               CROSS JOIN rankings r INDEXED BY rankings_of_import
               ON r.import_id > 0 AND r.import_id = i.id
               WHERE i.name = (SELECT name FROM imports WHERE id = ?) AND i.id <> ?
               AND (r.live = 1 OR r.replaced_by IS NOT NULL)"""
    earlier = db.execute(query, [import_id, import_id]).fetchall()
    retired = [(seq, prompt) for seq, id_, prompt, live in earlier if live and id_ not in given]
    again = {id_ for _, id_, _, live in earlier if not live and id_ in given}
    db.conn.executemany(
        "UPDATE rankings SET live = 0, replaced_by = ? WHERE seq = ?",
        [[import_id, seq] for seq, _ in retired],
    )
    return Replaced(
        retired=len(retired),
        kept=sum(live for *_, live in earlier) - len(retired),
        prompts=frozenset([*(prompt for _, prompt in retired), *count_again(db, again)]),
    )


def replaced_among(db: Database, ids: Iterable[str]) -> set[str]:
    """Those of some rankings that a later file of their source lacked."""
    query = "SELECT 1 FROM rankings WHERE id = ? AND live = 0 AND replaced_by IS NOT NULL"
    return {id_ for id_ in ids if db.execute(query, [id_]).fetchone()}


def count_again(db: Database, ids: Iterable[str]) -> list[str]:
    """Let replaced rankings count again that a file gives once more. Returns the prompt of each.

    Where the annotator has ranked the same task since, that ranking stands.
    """
    query = """UPDATE rankings SET live = 1, replaced_by = NULL
               WHERE id = ? AND live = 0 AND replaced_by IS NOT NULL AND NOT EXISTS (
                   SELECT 1 FROM rankings o WHERE o.task_id = rankings.task_id
                   AND o.annotator = rankings.annotator AND o.live = 1) RETURNING prompt_id"""
    return [prompt for id_ in sorted(ids) for (prompt,) in db.execute(query, [id_]).fetchall()]


def names_of_imports(db: Database) -> list[str]:
    """The sources of all finished imports."""
    query = "SELECT DISTINCT name FROM imports WHERE finished_at IS NOT NULL ORDER BY name"
    return [row[0] for row in db.execute(query)]


def last_name(db: Database, names: tuple[str, str]) -> str | None:
    """The source of the last finished import under one of two names; None if there is none."""
    query = """SELECT name FROM imports WHERE finished_at IS NOT NULL AND name IN (?, ?)
               ORDER BY id DESC LIMIT 1"""
    row = db.execute(query, list(names)).fetchone()
    return None if row is None else str(row[0])


def settle_replaced(db: Database, prompt_id: str) -> None:
    """Free the places in tasks of those whose judgment was replaced by none, and the reverse."""
    query = """SELECT DISTINCT task_id, annotator FROM rankings
               WHERE prompt_id = ? AND replaced_by IS NOT NULL AND task_id IS NOT NULL"""
    for task_id, annotator in db.execute(query, [prompt_id]).fetchall():
        is_judged = ranking_in_task(db, task_id, annotator) is not None
        if not is_judged and state_of(db, task_id, annotator) == "done":
            set_state(db, task_id, annotator, "expired")
    query = """SELECT task_id, annotator FROM rankings
               WHERE prompt_id = ? AND live = 1 AND import_id > 0 AND task_id IS NOT NULL"""
    for task_id, annotator in db.execute(query, [prompt_id]).fetchall():
        if state_of(db, task_id, annotator) == "expired":
            finish_unseen(db, task_id, annotator)
