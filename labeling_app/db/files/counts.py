"""The steps of the schema by which pages count what a policy has served, and people's votes.

Answers to apps are deleted after some days: those outside comparisons are counted as they are
stored, as in `totals`.
"""

_MODEL = "json_extract({0}.content, '$.response.model')"

COUNTS = (
    """CREATE TABLE served_counts (
        model TEXT PRIMARY KEY,
        responses INTEGER NOT NULL DEFAULT 0,
        up INTEGER NOT NULL DEFAULT 0,
        down INTEGER NOT NULL DEFAULT 0) WITHOUT ROWID""",
    # What older versions have deleted has no model any more, and is not counted.
    f"""INSERT INTO served_counts
        SELECT {_MODEL.format("s")}, COUNT(*), COALESCE(SUM(thumb), 0), COALESCE(SUM(1 - thumb), 0)
        FROM served s WHERE comparison_id IS NULL AND content IS NOT NULL GROUP BY 1""",
    f"""CREATE TRIGGER count_served AFTER INSERT ON served WHEN NEW.comparison_id IS NULL BEGIN
        INSERT INTO served_counts (model, responses) VALUES ({_MODEL.format("NEW")}, 1)
            ON CONFLICT DO UPDATE SET responses = responses + 1; END""",
    # A thumb is set once, while the content is there.
    f"""CREATE TRIGGER count_served_thumbs AFTER UPDATE OF thumb ON served
        WHEN NEW.comparison_id IS NULL AND OLD.thumb IS NULL AND NEW.thumb IS NOT NULL BEGIN
        UPDATE served_counts SET up = up + NEW.thumb, down = down + 1 - NEW.thumb
            WHERE model = {_MODEL.format("NEW")}; END""",
    "CREATE INDEX tasks_compared ON tasks (purpose) WHERE purpose = 'compare'",
)

# By which a vote finds the question of live mode that it is on.
LIVE_VOTES = ("CREATE INDEX live_turns_of_prompt ON live_turns (prompt_id, annotator)",)
