"""Whose tasks go to whom: a source's tasks go to the people it was given to, or to everybody."""

from collections.abc import Sequence

from sqlite_utils import Database

from labeling_app.db.connection import Connections
from labeling_app.db.tasks import reserve_tasks

LISTED = 200


def give_source(connections: Connections, source: str, people: Sequence[str]) -> None:
    """Let these people alone get the tasks of a source from now on; nobody named: everybody.

    Whoever has a task of it on the screen keeps it.

    Args:
        connections: the database.
        source: of prompts.
        people: names of annotators, which exist.
    """
    with connections.write() as db:
        db.execute("DELETE FROM source_people WHERE source = ?", [source])
        rows = [[name, source] for name in people]
        db.conn.executemany("INSERT OR IGNORE INTO source_people VALUES (?, ?)", rows)
        reserve_tasks(db, source, is_reserved=bool(people))


def is_source(connections: Connections, source: str) -> bool:
    """Whether there is a prompt of this source."""
    query = "SELECT 1 FROM prompts WHERE source = ? LIMIT 1"
    return connections.db.execute(query, [source]).fetchone() is not None


def sources_with_people(connections: Connections) -> dict[str, list[str]]:
    """The people of every source, by name; none where its tasks are for everybody.

    Each source is one step in an index, however many prompts it has.
    """
    query = """
        WITH RECURSIVE found (source) AS (
            SELECT MIN(source) FROM prompts
            UNION ALL SELECT (SELECT MIN(source) FROM prompts p WHERE p.source > found.source)
            FROM found WHERE found.source IS NOT NULL LIMIT ?)
        SELECT found.source, s.annotator FROM found
        LEFT JOIN source_people s ON s.source = found.source
        WHERE found.source IS NOT NULL ORDER BY 1, 2"""
    found: dict[str, list[str]] = {}
    for source, name in connections.db.execute(query, [LISTED]):
        found.setdefault(source, []).extend([name] if name else [])
    return found


def sources_of(db: Database, annotator: str) -> list[str]:
    """The sources whose tasks go to this person."""
    query = "SELECT source FROM source_people WHERE annotator = ? ORDER BY source"
    return [row[0] for row in db.execute(query, [annotator])]
