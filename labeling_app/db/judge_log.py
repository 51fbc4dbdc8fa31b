"""Every call to a judge model, stored so that an interrupted run resumes where it stopped."""

import json
import time
from collections.abc import Iterable, Sequence

from labeling_app.db.connection import VISIBLE
from labeling_app.db.rankings import retire_all_but
from labeling_app.db.store import Store, ensure_annotator
from rlhf.records.schema import content_id

TierLists = list[list[str]]


class JudgeLog:
    """The calls of one judge.

    Args:
        store: the database.
        name: the judge's name as annotator.
        rubric_version: a judge with another rubric is asked anew.
    """

    def __init__(self, store: Store, name: str, rubric_version: str) -> None:
        self.connections = store.connections
        self.name = name
        self.rubric_version = rubric_version
        with self.connections.write() as db:
            ensure_annotator(db, name, "ai")

    def verdict(self, first_id: str, second_id: str) -> str | None:
        """The judge's verdict on this pair in this order; None when it was not asked yet."""
        query = """SELECT verdict FROM judge_calls
                   WHERE annotator = ? AND rubric = ? AND first_id = ? AND second_id = ?"""
        values = [self.name, self.rubric_version, first_id, second_id]
        row = self.connections.db.execute(query, values).fetchone()
        return row[0] if row else None

    def add(self, first_id: str, second_id: str, request: str, answer: str, verdict: str) -> None:
        """Keep one call, word for word."""
        values = [self.name, self.rubric_version, first_id, second_id, request, answer, verdict]
        with self.connections.write() as db:
            db.execute(
                "INSERT OR IGNORE INTO judge_calls VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
                [*values, time.time()],
            )

    def is_finished(self, response_ids: Iterable[str]) -> bool:
        """Whether exactly these responses were judged to the end."""
        query = "SELECT 1 FROM judged WHERE id = ?"
        key = self._key(response_ids, self.rubric_version)
        return self.connections.db.execute(query, [key]).fetchone() is not None

    def finish(
        self, prompt_id: str, response_ids: Sequence[str], ranking_ids: Sequence[str]
    ) -> None:
        """Note that these responses are judged; of the judge's rankings, only these stand now."""
        with self.connections.write() as db:
            # Rankings by another rubric are retired; if that rubric returns, they are restored.
            versions = ["", *(row[0] for row in db.execute("SELECT version FROM rubrics"))]
            keys = [[self._key(response_ids, version)] for version in versions]
            db.conn.executemany("DELETE FROM judged WHERE id = ?", keys)
            key = self._key(response_ids, self.rubric_version)
            db.execute("INSERT INTO judged VALUES (?)", [key])
            retire_all_but(db, prompt_id, self.name, ranking_ids)

    def _key(self, response_ids: Iterable[str], rubric_version: str) -> str:
        return content_id(self.name, rubric_version, sorted(response_ids))

    def against_gold(self) -> list[tuple[TierLists, TierLists]]:
        """(known answer, judge's tiers) for every gold item that was judged."""
        query = f"""
            SELECT t.answer, r.tiers FROM tasks t
            JOIN rankings r ON r.prompt_id = t.prompt_id AND r.annotator = ? AND r.live = 1
                AND r.{VISIBLE}
            WHERE t.purpose = 'gold'"""
        rows = self.connections.db.execute(query, [self.name])
        return [(json.loads(answer), json.loads(tiers)) for answer, tiers in rows]
