"""Rows of `rankings`: appended, and retired when a later one takes their place; never changed.

`task_id` is that of the board's task, or of the one that an imported judgment belongs to, and
`shown` the order on the screen, which imported judgments don't have.
"""

import json
import time
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from sqlite_utils import Database

from labeling_app.db.connection import UNFINISHED, VISIBLE, Connections, dump
from labeling_app.rankings.flags import ADJUDICATED, read_flags
from rlhf.records.schema import AnnotatorKind, Ranking

Row = dict[str, Any]
# A lead has decided on the task `t` of the ranking `r`, or a later lead has.
REPLACED = """EXISTS (
    SELECT 1 FROM tasks d JOIN rankings last ON last.task_id = d.id AND last.live = 1
    WHERE d.decides = t.id OR (d.decides = t.decides AND last.seq > r.seq))"""
# The question of live mode that the ranking `r` is a vote on; NULL if it is none.
TURN = """CASE WHEN r.task_id IS NULL AND r.shown IS NOT NULL THEN (
    SELECT l.id FROM live_turns l WHERE l.prompt_id = r.prompt_id AND l.annotator = r.annotator
    AND EXISTS (SELECT 1 FROM json_each(l.shown) s WHERE INSTR(r.tiers, s.value))) END"""
# Of a column `turn`: what somebody says of one question counts once, be it a pick, thumbs or edits.
TURNS_ONCE = "COUNT(*) - COUNT(turn) + COUNT(DISTINCT turn)"


@dataclass(frozen=True, kw_only=True)
class RankingCounts:
    """The live rankings of a database, counted by what an export does with them.

    Example: two people differ on a task, and a lead decides: 3 are stored, 2 of them replaced, and
    1 is exported.
    """

    stored: int
    replaced: int
    """Those in whose place a lead's decision stands."""
    tests: int
    """Answers to checks, and votes on pairs of an evaluation."""
    by_machines: int = 0
    """Those of functions and AI judges, among the stored ones."""

    @property
    def exported(self) -> int:
        """Those that an export of all kinds and annotators holds."""
        return self.stored - self.replaced - self.tests


def insert_ranking(db: Database, ranking: Ranking, **columns: Any) -> None:
    """Append one ranking; `columns` are those a `Ranking` does not have, such as task_id."""
    row = {
        "id": ranking.id,
        "prompt_id": ranking.prompt_id,
        "annotator": ranking.annotator,
        "tiers": dump(ranking.tiers),
        "strengths": dump(ranking.strengths),
        "scores": dump(ranking.scores),
        "flags": dump(ranking.flags),
        "note": ranking.note,
        "created_at": time.time(),
        **columns,
    }
    names, marks = ", ".join(row), ", ".join("?" * len(row))
    db.execute(f"INSERT INTO rankings ({names}) VALUES ({marks})", list(row.values()))


def ranking_from_row(row: Row) -> Ranking:
    """A ranking from its row joined with its annotator's kind and what its task adjudicates.

    The board lets people leave some strengths open; a `Ranking` has them all or none.
    """
    strengths = json.loads(row["strengths"])
    is_from_board = row["task_id"] is not None and row["shown"] is not None
    flags = read_flags(row["flags"], is_from_board=is_from_board)
    return Ranking(
        id=row["id"],
        prompt_id=row["prompt_id"],
        annotator=row["annotator"],
        kind=row["kind"],
        tiers=tuple(tuple(tier) for tier in json.loads(row["tiers"])),
        strengths=tuple(strengths) if all(strengths) else (),
        scores=tuple(json.loads(row["scores"])),
        flags=(*flags, *([ADJUDICATED] if row["decides"] else [])),
        note=row["note"],
    )


def rankings_of_prompt(db: Database, prompt_id: str, *, without_adjudicated: bool) -> list[Ranking]:
    """The live rankings of a prompt that are judgments, as opposed to answers to checks.

    Args:
        db: the database.
        prompt_id: the prompt.
        without_adjudicated: leave out rankings in whose place a lead's stands, or a later lead's.
    """
    query = f"""
        SELECT r.*, a.kind, t.decides FROM rankings r
        JOIN annotators a ON a.name = r.annotator
        LEFT JOIN tasks t ON t.id = r.task_id
        WHERE r.prompt_id = ? AND r.live = 1 AND r.{VISIBLE}
        AND COALESCE(t.purpose, 'rank') = 'rank'
        AND NOT (? AND {REPLACED}) ORDER BY r.seq"""
    return [ranking_from_row(row) for row in db.query(query, [prompt_id, without_adjudicated])]


def ranking_of_id(db: Database, id_: str) -> Ranking:
    """The ranking of an id that is in the database, live or retired."""
    query = """SELECT r.*, a.kind, t.decides FROM rankings r
               JOIN annotators a ON a.name = r.annotator
               LEFT JOIN tasks t ON t.id = r.task_id WHERE r.id = ?"""
    [row] = db.query(query, [id_])
    return ranking_from_row(row)


def put_in_task(db: Database, number: int, task_id: int) -> None:
    """Say to which task the ranking of that number belongs; once, and for good."""
    db.execute("UPDATE rankings SET task_id = ? WHERE seq = ?", [task_id, number])


def live_rankings_outside_tasks(db: Database, prompt_id: str, annotator: str) -> list[Ranking]:
    """One annotator's live rankings of a prompt that belong to no task, oldest first."""
    query = f"""SELECT r.*, a.kind, NULL AS decides FROM rankings r
                JOIN annotators a ON a.name = r.annotator
                WHERE r.prompt_id = ? AND r.annotator = ? AND r.live = 1 AND r.task_id IS NULL
                AND r.{VISIBLE} ORDER BY r.seq"""
    return [ranking_from_row(row) for row in db.query(query, [prompt_id, annotator])]


def retire(db: Database, ranking_ids: Iterable[str]) -> None:
    """Take rankings out of every count and export; they stay in the database."""
    db.conn.executemany("UPDATE rankings SET live = 0 WHERE id = ?", [[i] for i in ranking_ids])


def retire_outside_tasks(db: Database, prompt_id: str, annotator: str) -> None:
    """Retire an annotator's rankings of a prompt that belong to no task of the board."""
    db.execute(
        "UPDATE rankings SET live = 0 WHERE prompt_id = ? AND annotator = ?"
        f" AND live = 1 AND task_id IS NULL AND {VISIBLE}",
        [prompt_id, annotator],
    )


def retire_all_but(
    db: Database, prompt_id: str, annotator: str, ranking_ids: Iterable[str]
) -> None:
    """Make these, retired or not, an annotator's only live rankings of a prompt."""
    db.execute(
        "UPDATE rankings SET live = 0 WHERE prompt_id = ? AND annotator = ? AND live = 1"
        f" AND {VISIBLE}",
        [prompt_id, annotator],
    )
    db.conn.executemany("UPDATE rankings SET live = 1 WHERE id = ?", [[i] for i in ranking_ids])


def retire_in_task(db: Database, task_id: int, annotator: str) -> None:
    """Retire the ranking of a task by one annotator, if there is one."""
    db.execute(
        "UPDATE rankings SET live = 0 WHERE task_id = ? AND annotator = ? AND live = 1",
        [task_id, annotator],
    )


def ranking_in_task(db: Database, task_id: int, annotator: str, live: int = 1) -> Row | None:
    """The last ranking of a task by one annotator that is live, or that is not."""
    names = ("id", "tiers", "strengths", "flags", "note", "duration_ms")
    query = f"""SELECT {", ".join(names)} FROM rankings
                WHERE annotator = ? AND live = ? AND task_id = ? ORDER BY seq DESC LIMIT 1"""
    row = db.execute(query, [annotator, live, task_id]).fetchone()
    return dict(zip(names, row, strict=True)) if row else None


def newest_ranking(connections: Connections) -> int:
    """The number of the ranking that was stored last, also of one that is still hidden; 0: none.

    It changes with every ranking, also beside an import; to count from, see `last_visible_ranking`.
    """
    query = "SELECT COALESCE(MAX(seq), 0) FROM rankings"
    return int(connections.db.execute(query).fetchone()[0])


def last_visible_ranking(db: Database) -> int:
    """The highest number among the rankings that are not of an unfinished import; 0: none."""
    query = f"SELECT seq FROM rankings WHERE {VISIBLE} ORDER BY seq DESC LIMIT 1"
    row = db.execute(query).fetchone()
    return int(row[0]) if row else 0


def last_finished_import(db: Database) -> int:
    """The number of the import that ended last; 0: none. A later one has a higher number."""
    query = "SELECT COALESCE(MAX(id), 0) FROM imports WHERE finished_at IS NOT NULL"
    return int(db.execute(query).fetchone()[0])


def num_rankings_since(
    connections: Connections,
    number: int,
    *,
    after_import: int | None = None,
    kinds: Collection[AnnotatorKind] = (),
    annotators: Collection[str] = (),
) -> int:
    """How many live judgments can be seen since an earlier moment.

    These are the rankings after that number, and those that an import had stored before it and has
    shown since. Reads only these, however large the database is: NOT INDEXED, INDEXED BY and CROSS
    JOIN keep SQLite from starting with an annotator. Answers to checks and votes on pairs of an
    evaluation do not count: they are not exported. What a person says of one question of live mode
    counts once.

    Args:
        connections: the database.
        number: as `last_visible_ranking` gave it then; 0 counts all.
        after_import: as `last_finished_import` gave it then; None: imports are not looked at.
        kinds: only rankings by these kinds of annotators; empty means all.
        annotators: only rankings by these annotators; empty means all.
    """

    def count(index_hint: str, which: str, *numbers: int) -> int:
        query = f"""
            SELECT {TURNS_ONCE} FROM (SELECT {TURN} AS turn FROM rankings r {index_hint}
            CROSS JOIN annotators a ON a.name = r.annotator
            LEFT JOIN tasks t ON t.id = r.task_id
            WHERE {which} AND r.live = 1 AND r.{VISIBLE} AND COALESCE(t.purpose, 'rank') = 'rank'
            {_is_one_of("a.kind", kinds)} {_is_one_of("a.name", annotators)})"""
        return int(connections.db.execute(query, [*numbers, *kinds, *annotators]).fetchone()[0])

    later = count("NOT INDEXED", "r.seq > ?", number)
    if after_import is None:
        return later
    which = "r.import_id > 0 AND r.import_id > ? AND r.seq <= ?"
    return later + count("INDEXED BY rankings_of_import", which, after_import, number)


def num_rankings_of(
    connections: Connections,
    task_ids: Sequence[int],
    *,
    kinds: Collection[AnnotatorKind] = (),
    annotators: Collection[str] = (),
) -> tuple[int, int]:
    """How many live judgments some tasks have, and how many of these tasks have one.

    Args:
        connections: the database.
        task_ids: the tasks; only their judgments are read.
        kinds: as in `num_rankings_since`.
        annotators: as there.
    """
    query = f"""
        SELECT COUNT(*), COUNT(DISTINCT r.task_id) FROM json_each(?) task
        CROSS JOIN rankings r ON r.task_id = task.value AND r.live = 1 AND r.{VISIBLE}
        CROSS JOIN annotators a ON a.name = r.annotator
        WHERE 1 {_is_one_of("a.kind", kinds)} {_is_one_of("a.name", annotators)}"""
    row = connections.db.execute(query, [dump(task_ids), *kinds, *annotators]).fetchone()
    return int(row[0]), int(row[1])


def ranking_counts(db: Database) -> RankingCounts:
    """Count the live rankings, reading those of decisions, checks and evaluations only.

    Those of functions and AI judges are counted in an index.
    """
    of_tasks = f"""SELECT COUNT(*) FROM tasks t CROSS JOIN rankings r
                   ON r.task_id = t.id AND r.live = 1 AND r.{VISIBLE}"""
    adjudicated = """t.id IN (SELECT decides FROM tasks WHERE decides IS NOT NULL
        UNION ALL SELECT id FROM tasks WHERE decides IS NOT NULL)"""
    hidden = f"""SELECT COUNT(r.import_id) FROM rankings r
                 WHERE r.import_id > 0 AND r.live = 1 AND r.import_id IN {UNFINISHED}"""
    by_machine = "r.annotator IN (SELECT name FROM annotators WHERE kind != 'human')"
    query = f"""SELECT
        (SELECT value FROM totals WHERE name = 'rankings') - ({hidden}),
        ({of_tasks} WHERE t.purpose = 'rank' AND {adjudicated} AND {REPLACED}),
        ({of_tasks} WHERE t.purpose IN ('gold', 'training', 'repeat'))
            + ({of_tasks} WHERE t.purpose = 'compare'),
        (SELECT COUNT(r.annotator) FROM rankings r WHERE r.live = 1 AND {by_machine})
            - ({hidden} AND {by_machine})"""
    stored, replaced, tests, by_machines = db.execute(query).fetchone()
    return RankingCounts(stored=stored, replaced=replaced, tests=tests, by_machines=by_machines)


def annotation_hours(
    connections: Connections,
    *,
    kinds: Collection[AnnotatorKind] = (),
    annotators: Collection[str] = (),
) -> float:
    """Hours that people have spent on their live judgments, as the page or the import measured.

    Arguments as of `num_rankings_since`. Imported judgments have a time only if their file has one.
    """
    query = f"""
        SELECT COALESCE(SUM(r.duration_ms), 0) FROM rankings r
        JOIN annotators a ON a.name = r.annotator
        LEFT JOIN tasks t ON t.id = r.task_id
        WHERE a.kind = 'human' AND r.live = 1 AND r.{VISIBLE}
        AND COALESCE(t.purpose, 'rank') = 'rank'
        {_is_one_of("a.kind", kinds)} {_is_one_of("a.name", annotators)}"""
    return int(connections.db.execute(query, [*kinds, *annotators]).fetchone()[0]) / 3_600_000


def _is_one_of(column: str, values: Collection[str]) -> str:
    return f"AND {column} IN ({', '.join('?' * len(values))})" if values else ""


def num_done(connections: Connections, annotator: str) -> int:
    """How many tasks an annotator has ranked."""
    query = "SELECT done FROM own_work WHERE annotator = ?"
    row = connections.db.execute(query, [annotator]).fetchone()
    return int(row[0]) if row else 0


def ranking_annotators(connections: Connections) -> set[str]:
    """The names of those who have live rankings."""
    query = f"SELECT DISTINCT annotator FROM rankings WHERE live = 1 AND {VISIBLE}"
    return {row[0] for row in connections.db.execute(query)}


def find_ranking(connections: Connections, ranking_id: str) -> Row | None:
    """A ranking's row with its annotator's kind, its rubric's text and its task's reason."""
    query = f"""
        SELECT r.*, a.kind, t.reason, b.text AS rubric_text FROM rankings r
        JOIN annotators a ON a.name = r.annotator
        LEFT JOIN tasks t ON t.id = r.task_id LEFT JOIN rubrics b ON b.version = r.rubric
        WHERE r.id = ? AND r.{VISIBLE}"""
    return next(iter(connections.db.query(query, [ranking_id])), None)


def comparison_votes(
    connections: Connections, prompt_id: str, responses: Sequence[str]
) -> list[tuple[str, list[list[str]]]]:
    """(annotator, tiers) of what people said of a comparison, leads' decisions aside."""
    query = """
        SELECT r.annotator, r.tiers, t.responses FROM rankings r
        JOIN annotators a ON a.name = r.annotator AND a.kind = 'human'
        JOIN tasks t ON t.id = r.task_id AND t.purpose = 'compare' AND t.decides IS NULL
        WHERE r.prompt_id = ? AND r.live = 1 ORDER BY r.seq"""
    rows = connections.db.execute(query, [prompt_id])
    wanted = list(responses)
    return [(name, json.loads(tiers)) for name, tiers, ids in rows if json.loads(ids) == wanted]


def rankings_of_people(
    connections: Connections, task_ids: Sequence[int]
) -> list[tuple[str, list[list[str]]]]:
    """(annotator, tiers) of what people have said of some tasks; only these are read."""
    query = """
        SELECT r.annotator, r.tiers FROM json_each(?) task
        CROSS JOIN rankings r ON r.task_id = task.value AND r.live = 1
        CROSS JOIN annotators a ON a.name = r.annotator AND a.kind = 'human'"""
    rows = connections.db.execute(query, [dump(task_ids)])
    return [(name, json.loads(tiers)) for name, tiers in rows]
