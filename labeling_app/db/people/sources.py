"""Whose tasks go to whom: a source's tasks go to those it was given to, or to everybody.

It may be given to people and to teams. Whoever is in a team when the next task is looked for gets
what the team was given.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sqlite_utils import Database

from labeling_app.db.connection import Connections
from labeling_app.db.tasks import reserve_tasks

LISTED = 200
SOURCES_OF_ME = """
    SELECT source FROM source_people WHERE annotator = :me
    UNION ALL SELECT s.source FROM users u JOIN source_teams s ON s.team = u.team
    WHERE u.name = :me"""


@dataclass(frozen=True, kw_only=True)
class Receivers:
    """Who alone gets the tasks of a source, by name: everybody where nobody is named."""

    people: tuple[str, ...] = ()
    teams: tuple[str, ...] = ()

    def in_words(self, members: Mapping[str, Sequence[str]]) -> str:
        """The receivers as a phrase, a team with its members: "team red (ann) and bob alone".

        Args:
            members: the names of those who are in each team.
        """
        named = [
            f"team {team} ({', '.join(members.get(team, ())) or 'nobody'})" for team in self.teams
        ]
        if not named and not self.people:
            return "everybody"
        *others, last = *named, *self.people
        return f"{', '.join(others)} and {last} alone" if others else f"{last} alone"


def give_source(
    connections: Connections, source: str, people: Sequence[str], teams: Sequence[str] = ()
) -> None:
    """Let these alone get the tasks of a source from now on; nobody named: everybody.

    Whoever has a task of it on the screen keeps it.

    Args:
        connections: the database.
        source: of prompts.
        people: names of annotators, which exist.
        teams: names of teams, as in `users`.
    """
    with connections.write() as db:
        for table, names in (("source_people", people), ("source_teams", teams)):
            db.execute(f"DELETE FROM {table} WHERE source = ?", [source])
            rows = [[name, source] for name in names]
            db.conn.executemany(f"INSERT OR IGNORE INTO {table} VALUES (?, ?)", rows)
        reserve_tasks(db, source, is_reserved=bool(people or teams))


def is_source(connections: Connections, source: str) -> bool:
    """Whether there is a prompt of this source."""
    query = "SELECT 1 FROM prompts WHERE source = ? LIMIT 1"
    return connections.db.execute(query, [source]).fetchone() is not None


def find_sources(connections: Connections, part: str = "", most: int = LISTED) -> list[str]:
    """The first sources whose name contains a text, in any case of the letters A to Z.

    Each source is one step in an index, however many prompts it has.
    """
    query = """
        WITH RECURSIVE found (source) AS (
            SELECT MIN(source) FROM prompts
            UNION ALL SELECT (SELECT MIN(source) FROM prompts p WHERE p.source > found.source)
            FROM found WHERE found.source IS NOT NULL)
        SELECT source FROM found
        WHERE source IS NOT NULL AND instr(lower(source), lower(?)) LIMIT ?"""
    return [row[0] for row in connections.db.execute(query, [part, most])]


def receivers_of(connections: Connections, sources: Sequence[str]) -> dict[str, Receivers]:
    """Who gets the tasks of each of these sources."""

    def names(column: str, table: str, source: str) -> tuple[str, ...]:
        query = f"SELECT {column} FROM {table} WHERE source = ? ORDER BY 1"
        return tuple(row[0] for row in connections.db.execute(query, [source]))

    return {
        source: Receivers(
            people=names("annotator", "source_people", source),
            teams=names("team", "source_teams", source),
        )
        for source in sources
    }


def sources_of(db: Database, annotator: str) -> set[str]:
    """The sources whose tasks go to this person, or to their team."""
    return {row[0] for row in db.execute(SOURCES_OF_ME, {"me": annotator})}
