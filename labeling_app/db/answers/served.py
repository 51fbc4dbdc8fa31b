"""Answers to apps (`rlhf serve`), the thumbs by which two policies are compared, and feedback.

An answer is kept apart from prompts and responses until there is feedback on it: what nobody judged
is no work for annotators, and can be deleted after some days. Feedback copies it there, as a prompt
and a response like all others, and adds a ranking.
"""

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from sqlite_utils import Database

from labeling_app.db.connection import Connections, dump
from labeling_app.db.rankings import insert_ranking, retire
from labeling_app.db.store import Store, ensure_annotator
from rlhf.records.schema import Ranking, content_id
from rlhf.records.served import ServedResponse, Variant
from rlhf.run.intervals import share_of

ThumbCounts = dict[str, tuple[int, int]]


def insert_served(db: Database, served: ServedResponse) -> None:
    """Keep an answer under its id.

    Raises:
        sqlite3.IntegrityError: the id is taken.
    """
    db.execute(
        "INSERT INTO served (id, conversation, comparison_id, variant, content, created_at)"
        " VALUES (?, ?, ?, ?, ?, ?)",
        [
            served.id,
            served.conversation,
            served.comparison,
            served.variant,
            dump(served.content),
            time.time(),
        ],
    )


def find_served(db: Database, served_id: str) -> ServedResponse | None:
    """An answer by its id; None if it was not kept, or has been deleted."""
    query = """SELECT conversation, comparison_id, variant, content FROM served
               WHERE id = ? AND content IS NOT NULL"""
    row = db.execute(query, [served_id]).fetchone()
    if row is None:
        return None
    conversation, comparison, variant, content = row
    return ServedResponse.from_content(
        json.loads(content),
        id=served_id,
        conversation=conversation,
        comparison=comparison,
        variant=variant,
    )


def forget_served(connections: Connections, before: float) -> int:
    """Delete the answers from before a time, and return how many.

    Those with a thumb keep their row without its content, for the comparison. Copies that feedback
    has made stay.
    """
    with connections.write() as db:
        old = "content IS NOT NULL AND created_at < ?"
        query = f"DELETE FROM served WHERE {old} AND thumb IS NULL"
        deleted = db.execute(query, [before]).rowcount
        query = f"UPDATE served SET content = NULL WHERE {old}"
        return int(deleted + db.execute(query, [before]).rowcount)


# ------------------------------------------------------------------------------------- comparisons


def start_comparison(connections: Connections, sides: Mapping[Variant, str], share: float) -> int:
    """The number of the comparison of two policies at a split; a new one if there was none."""
    values = [sides["policy"], sides["against"], share]
    with connections.write() as db:
        query = "SELECT id FROM comparisons WHERE policy = ? AND against = ? AND share = ?"
        row = db.execute(query, values).fetchone()
        if row is not None:
            return int(row[0])
        query = "INSERT INTO comparisons (policy, against, share, started_at) VALUES (?, ?, ?, ?)"
        return int(db.execute(query, [*values, time.time()]).lastrowid or 0)


def comparisons(connections: Connections) -> list[dict[str, Any]]:
    """Every comparison with the thumbs of both policies, the newest last."""
    query = "SELECT id, policy, against, share, started_at FROM comparisons ORDER BY id"
    rows = list(connections.db.query(query))
    return [{**row, "thumbs": count_thumbs(connections, row["id"])} for row in rows]


def count_thumbs(connections: Connections, comparison: int) -> ThumbCounts:
    """Thumbs up and down of both policies: of each conversation the first."""
    query = """SELECT variant, SUM(thumb), SUM(1 - thumb) FROM served
               WHERE comparison_id = ? AND thumb IS NOT NULL GROUP BY variant"""
    counts = {row[0]: (row[1], row[2]) for row in connections.db.execute(query, [comparison])}
    return {"policy": (0, 0), "against": (0, 0)} | counts


def count_thumb(db: Database, served: ServedResponse, *, is_up: bool) -> None:
    """Count a thumb in the comparison, if it is the first of its conversation.

    Thumbs of one conversation resemble each other, and a test takes each for independent evidence.
    """
    query = """UPDATE served SET thumb = ? WHERE id = ? AND NOT EXISTS (
                   SELECT 1 FROM served o
                   WHERE o.conversation = served.conversation AND o.thumb IS NOT NULL)"""
    db.execute(query, [int(is_up), served.id])


def served_alone(connections: Connections) -> list[dict[str, Any]]:
    """Counts of each `model` outside comparisons: `responses`, thumbs `up`, `down`, `share`.

    Responses are those that were kept, also if they have been deleted since; of the thumbs of a
    conversation the first counts, as in comparisons. `share` is that of `up`, as of `share_of`.
    """
    query = "SELECT model, responses, up, down FROM served_counts ORDER BY responses DESC, model"
    rows = connections.db.query(query)
    return [{**row, "share": share_of(row["up"], row["up"] + row["down"])} for row in rows]


# ---------------------------------------------------------------------------------------- feedback


def put_verdict(
    store: Store, program: str, subject: str, ranking: Ranking, judged: Sequence[ServedResponse]
) -> bool:
    """Store feedback in place of what this program said before of the same subject.

    Args:
        store: the database, inside a transaction.
        program: who sends it.
        subject: what is judged, such as the thumb of one response.
        ranking: the feedback; its id is replaced.
        judged: the answers that it judges.

    Returns:
        False if it said the same before.
    """
    with store.connections.write() as db:
        ensure_annotator(db, program, "human")
        query = """SELECT r.id, r.tiers, r.flags, r.note FROM served_verdicts v
                   JOIN rankings r ON r.id = v.ranking_id
                   WHERE v.annotator = ? AND v.subject = ?"""
        before = db.execute(query, [program, subject]).fetchone()
        verdict = (dump(ranking.tiers), dump(ranking.flags), ranking.note)
        if before is not None and before[1:] == verdict:
            return False
        old = before[0] if before else None
        store.add_prompts([judged[0].prompt])
        store.add_responses([served.response for served in judged], queue=False)
        new = content_id("served", program, subject, old, *verdict)
        if old is not None:
            retire(db, [old])
        shown_order = dump([served.response.id for served in judged])
        insert_ranking(db, replace(ranking, id=new), shown=shown_order, supersedes=old)
        query = "INSERT OR REPLACE INTO served_verdicts VALUES (?, ?, ?)"
        db.execute(query, [program, subject, new])
    return True
