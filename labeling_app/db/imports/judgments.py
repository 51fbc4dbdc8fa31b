"""Judgments that people made elsewhere: each belongs to the task that asks for the same judgment.

It counts as if it had been made on the board: its annotator isn't asked again, and the task wants
one person less. A ranking of only some of the responses, such as one of several pairs, belongs to
no task: the rest is still to be ranked.
"""

import json
from collections import defaultdict

from sqlite_utils import Database

from labeling_app.db.board.leases import finish_unseen
from labeling_app.db.board.overlap import ask_another
from labeling_app.db.connection import VISIBLE
from labeling_app.db.imports.replacing import settle_replaced
from labeling_app.db.rankings import put_in_task, ranking_in_task
from labeling_app.db.tasks import tasks_to_rank
from labeling_app.rankings.flags import read_flags
from labeling_app.rankings.verdicts import EDITED


def link_judgments(db: Database, prompt_id: str) -> None:
    """Link what people said of a prompt elsewhere to the one task with the same responses.

    Of several judgments by one person, the last one is linked, unless they ranked that task before.
    Whose judgment was replaced by none is asked again.
    """
    tasks: dict[frozenset[str], list[int]] = defaultdict(list)
    for task_id, responses in tasks_to_rank(db, prompt_id):
        tasks[frozenset(responses)].append(task_id)
    query = f"""SELECT r.seq, r.annotator, r.tiers, r.flags FROM rankings r
                JOIN annotators a ON a.name = r.annotator AND a.kind = 'human'
                WHERE r.prompt_id = ? AND r.live = 1 AND r.task_id IS NULL AND r.shown IS NULL
                AND r.{VISIBLE} ORDER BY r.seq DESC"""
    for number, annotator, tiers, flags in db.execute(query, [prompt_id]).fetchall():
        same = tasks.get(frozenset(i for tier in json.loads(tiers) for i in tier), [])
        if len(same) != 1 or EDITED in read_flags(flags):
            continue
        [task_id] = same
        if ranking_in_task(db, task_id, annotator) is None:
            put_in_task(db, number, task_id)
            finish_unseen(db, task_id, annotator)
            ask_another(db, task_id)
    settle_replaced(db, prompt_id)
