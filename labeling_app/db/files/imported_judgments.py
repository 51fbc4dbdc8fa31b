"""The step of the schema with which imported judgments belong to their tasks.

Until it ran they referred to no task: people were asked again what they had judged, and the Quality
page left their judgments out. A judgment is linked where nothing is in doubt: it ranks all
responses of exactly one ranking task, and its annotator has no other ranking of that task.
"""

_SET = "(SELECT json_group_array(value) FROM (SELECT value FROM {} ORDER BY value))"
_SAME_RESPONSES = (
    _SET.format("json_each(t.responses)")
    + " = (SELECT json_group_array(value) FROM (SELECT i.value AS value"
    " FROM json_each(r.tiers) tier, json_each(tier.value) i ORDER BY i.value))"
)
_HOLDS_A_PLACE = """EXISTS (SELECT 1 FROM assignments a WHERE a.task_id = j.task_id
                    AND a.annotator = j.annotator AND a.state IN ('leased', 'done'))"""
_SHUFFLED = _SET.format("json_each(t.responses)").replace("BY value", "BY random()")

IMPORTED_JUDGMENTS = (
    "DROP TRIGGER rankings_do_not_change",
    """CREATE TRIGGER rankings_do_not_change BEFORE UPDATE OF
            id, prompt_id, annotator, tiers, strengths, scores, flags, note, shown, created_at
            ON rankings
        BEGIN SELECT RAISE (ABORT, 'rankings are append-only'); END""",
    """CREATE TRIGGER rankings_keep_their_task BEFORE UPDATE OF task_id ON rankings
        WHEN OLD.task_id IS NOT NULL
        BEGIN SELECT RAISE (ABORT, 'rankings are append-only'); END""",
    """CREATE TABLE judged_before (
        ranking INTEGER PRIMARY KEY, task_id INTEGER NOT NULL, annotator TEXT NOT NULL)""",
    "CREATE INDEX tasks_judged_before ON judged_before (task_id)",
    # Votes of live mode and of apps have an order shown, and programs have a token.
    f"""INSERT INTO judged_before SELECT ranking, task_id, annotator FROM (
            SELECT r.seq AS ranking, MIN(t.id) AS task_id, r.annotator AS annotator
            FROM rankings r JOIN annotators a ON a.name = r.annotator AND a.kind = 'human'
            JOIN tasks t ON t.prompt_id = r.prompt_id AND t.purpose = 'rank' AND t.only_for IS NULL
            WHERE r.live = 1 AND r.task_id IS NULL AND r.shown IS NULL
            AND r.flags NOT LIKE '%"edited"%'
            AND r.annotator NOT IN (SELECT name FROM tokens)
            AND r.import_id NOT IN (SELECT id FROM imports WHERE finished_at IS NULL)
            AND {_SAME_RESPONSES}
            GROUP BY r.seq HAVING COUNT(*) = 1) found
        WHERE NOT EXISTS (SELECT 1 FROM rankings o WHERE o.task_id = found.task_id
            AND o.annotator = found.annotator AND o.live = 1)
        GROUP BY task_id, annotator HAVING COUNT(*) = 1""",
    f"""UPDATE tasks SET open = open - (SELECT COUNT(*) FROM judged_before j
            WHERE j.task_id = tasks.id AND NOT {_HOLDS_A_PLACE})
        WHERE id IN (SELECT task_id FROM judged_before)""",
    f"""INSERT INTO assignments
        SELECT j.task_id, j.annotator, 'done', {_SHUFFLED}, 0, r.created_at
        FROM judged_before j JOIN tasks t ON t.id = j.task_id JOIN rankings r ON r.seq = j.ranking
        WHERE true ON CONFLICT DO UPDATE SET state = 'done', expires_at = 0""",
    """UPDATE rankings SET task_id = (SELECT task_id FROM judged_before WHERE ranking = seq)
        WHERE seq IN (SELECT ranking FROM judged_before)""",
    "DROP TABLE judged_before",
)
