"""The statements of every step of the schema. Never edit one that shipped: add the next.

    prompts ─< responses        what is judged
       └─────< tasks            one prompt and the responses to rank together
                 ├─> rounds         the round of labeling that chose it, if one did
                 ├─< assignments    leased, expired, done or skipped by whom; the order shown
                 ├─< tickets        what the task is called in that person's browser
                 └─< drafts, skips
    annotators ─< source_people whose sources' tasks they alone get; `source_teams`: their teams
        └───< rankings          append-only; `live` says whether a later one took its place
    comparisons ─< served       answers to apps, and the thumbs by which two policies are compared

Two things make the next task cheap whatever the size of the database: `tasks.open` (how many
people are still wanted) with its partial index is the queue, and `totals` and `own_work` are kept
by triggers so that nobody counts rows.
"""

from labeling_app.db.files.counts import COUNTS, LIVE_VOTES
from labeling_app.db.files.import_names import IMPORT_NAMES
from labeling_app.db.files.imported_judgments import IMPORTED_JUDGMENTS
from labeling_app.db.files.own_work import INDEXED_PLACES, OWN_WORK
from labeling_app.db.files.schema_people import INVITATIONS, TEAMS, USERS

# "RLHF": what `file` and SQLite find in the header of a database of ours.
APPLICATION_ID = 0x524C4846

FIRST_SCHEMA = (
    "CREATE TABLE settings (name TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID",
    """CREATE TABLE prompts (
        seq INTEGER PRIMARY KEY,
        id TEXT NOT NULL UNIQUE,
        messages TEXT NOT NULL,
        split TEXT NOT NULL CHECK (split IN ('train', 'test')),
        source TEXT NOT NULL,
        created_at REAL NOT NULL)""",
    """CREATE TABLE responses (
        seq INTEGER PRIMARY KEY,
        id TEXT NOT NULL UNIQUE,
        prompt_id TEXT NOT NULL REFERENCES prompts (id),
        text TEXT NOT NULL,
        model TEXT NOT NULL,
        model_fingerprint TEXT,
        tokenizer_fingerprint TEXT,
        sampling TEXT,
        sample_index INTEGER NOT NULL,
        token_ids TEXT,
        finished INTEGER,
        created_at REAL NOT NULL)""",
    "CREATE INDEX responses_of_prompt ON responses (prompt_id, model, sample_index)",
    "CREATE INDEX responses_of_model ON responses (model_fingerprint, prompt_id)",
    """CREATE TABLE annotators (
        name TEXT PRIMARY KEY,
        kind TEXT NOT NULL CHECK (kind IN ('human', 'ai', 'signal')),
        created_at REAL NOT NULL) WITHOUT ROWID""",
    """CREATE TABLE tasks (
        id INTEGER PRIMARY KEY,
        prompt_id TEXT NOT NULL REFERENCES prompts (id),
        responses TEXT NOT NULL,
        purpose TEXT NOT NULL DEFAULT 'rank'
            CHECK (purpose IN ('rank', 'compare', 'gold', 'repeat', 'training')),
        overlap INTEGER NOT NULL DEFAULT 1,
        open INTEGER NOT NULL,
        priority REAL NOT NULL DEFAULT 0,
        reason TEXT NOT NULL DEFAULT '',
        answer TEXT,
        only_for TEXT,
        created_at REAL NOT NULL)""",
    """CREATE INDEX tasks_open ON tasks (priority DESC, id)
        WHERE open > 0 AND only_for IS NULL""",
    """CREATE INDEX tasks_open_for_one ON tasks (only_for, id)
        WHERE open > 0 AND only_for IS NOT NULL""",
    "CREATE INDEX tasks_of_prompt ON tasks (prompt_id)",
    """CREATE TABLE assignments (
        task_id INTEGER NOT NULL REFERENCES tasks (id),
        annotator TEXT NOT NULL REFERENCES annotators (name),
        state TEXT NOT NULL CHECK (state IN ('leased', 'expired', 'done', 'skipped')),
        shown TEXT NOT NULL,
        expires_at REAL NOT NULL,
        updated_at REAL NOT NULL,
        PRIMARY KEY (task_id, annotator)) WITHOUT ROWID""",
    "CREATE INDEX leases ON assignments (expires_at) WHERE state = 'leased'",
    "CREATE INDEX leases_of_annotator ON assignments (annotator, updated_at)"
    " WHERE state = 'leased'",
    """CREATE TABLE drafts (
        task_id INTEGER NOT NULL REFERENCES tasks (id),
        annotator TEXT NOT NULL REFERENCES annotators (name),
        state TEXT NOT NULL,
        updated_at REAL NOT NULL,
        PRIMARY KEY (task_id, annotator)) WITHOUT ROWID""",
    """CREATE TABLE rankings (
        seq INTEGER PRIMARY KEY,
        id TEXT NOT NULL UNIQUE,
        prompt_id TEXT NOT NULL REFERENCES prompts (id),
        task_id INTEGER REFERENCES tasks (id),
        annotator TEXT NOT NULL REFERENCES annotators (name),
        tiers TEXT NOT NULL,
        strengths TEXT NOT NULL DEFAULT '[]',
        flags TEXT NOT NULL DEFAULT '[]',
        note TEXT NOT NULL DEFAULT '',
        shown TEXT,
        duration_ms INTEGER,
        rubric TEXT NOT NULL DEFAULT '',
        created_at REAL NOT NULL,
        supersedes TEXT REFERENCES rankings (id),
        live INTEGER NOT NULL DEFAULT 1)""",
    "CREATE INDEX rankings_of_prompt ON rankings (prompt_id, annotator) WHERE live = 1",
    "CREATE INDEX rankings_of_annotator ON rankings (annotator, created_at) WHERE live = 1",
    """CREATE UNIQUE INDEX one_live_ranking ON rankings (task_id, annotator)
        WHERE live = 1 AND task_id IS NOT NULL""",
    """CREATE TRIGGER rankings_are_kept BEFORE DELETE ON rankings
        BEGIN SELECT RAISE (ABORT, 'rankings are append-only'); END""",
    """CREATE TRIGGER rankings_do_not_change BEFORE UPDATE OF
            id, prompt_id, task_id, annotator, tiers, strengths, flags, note, shown, created_at ON
            rankings
        BEGIN SELECT RAISE (ABORT, 'rankings are append-only'); END""",
    """CREATE TABLE skips (
        id TEXT PRIMARY KEY,
        task_id INTEGER NOT NULL REFERENCES tasks (id),
        annotator TEXT NOT NULL REFERENCES annotators (name),
        reason TEXT NOT NULL,
        note TEXT NOT NULL DEFAULT '',
        created_at REAL NOT NULL) WITHOUT ROWID""",
    "CREATE INDEX skips_of_annotator ON skips (annotator, created_at)",
    "CREATE TABLE totals (name TEXT PRIMARY KEY, value INTEGER NOT NULL) WITHOUT ROWID",
    "INSERT INTO totals VALUES ('prompts', 0), ('responses', 0), ('rankings', 0),"
    " ('tasks', 0), ('open', 0)",
    """CREATE TRIGGER count_prompts AFTER INSERT ON prompts
        BEGIN UPDATE totals SET value = value + 1 WHERE name = 'prompts'; END""",
    """CREATE TRIGGER count_responses AFTER INSERT ON responses
        BEGIN UPDATE totals SET value = value + 1 WHERE name = 'responses'; END""",
    """CREATE TRIGGER count_new_rankings AFTER INSERT ON rankings
        BEGIN UPDATE totals SET value = value + NEW.live WHERE name = 'rankings'; END""",
    """CREATE TRIGGER count_rankings AFTER UPDATE OF live ON rankings
        BEGIN UPDATE totals SET value = value + NEW.live - OLD.live WHERE name = 'rankings'; END""",
    """CREATE TRIGGER count_new_tasks AFTER INSERT ON tasks BEGIN
        UPDATE totals SET value = value + 1 WHERE name = 'tasks';
        UPDATE totals SET value = value + (NEW.open > 0) WHERE name = 'open'; END""",
    """CREATE TRIGGER count_tasks AFTER UPDATE OF open ON tasks
        WHEN (NEW.open > 0) <> (OLD.open > 0) BEGIN
        UPDATE totals SET value = value + (NEW.open > 0) - (OLD.open > 0)
            WHERE name = 'open'; END""",
)

# By which a browser keeps the drafts of two databases apart.
BOARD_ID = "INSERT INTO settings VALUES ('board', lower(hex(randomblob(8))))"


RUBRICS = (
    """CREATE TABLE rubrics (
        version TEXT PRIMARY KEY, text TEXT NOT NULL, created_at REAL NOT NULL) WITHOUT ROWID""",
)


CHECKS = (
    # The general queue holds no checks; they are mixed in by chance.
    "DROP INDEX tasks_open",
    """CREATE INDEX tasks_open ON tasks (priority DESC, id)
        WHERE open > 0 AND only_for IS NULL AND purpose IN ('rank', 'compare')""",
    """CREATE INDEX tasks_checks ON tasks (purpose, id)
        WHERE purpose IN ('gold', 'training', 'repeat')""",
)


JUDGES = (
    """CREATE TABLE judge_calls (
        annotator TEXT NOT NULL REFERENCES annotators (name),
        rubric TEXT NOT NULL,
        first_id TEXT NOT NULL REFERENCES responses (id),
        second_id TEXT NOT NULL REFERENCES responses (id),
        request TEXT NOT NULL,
        answer TEXT NOT NULL,
        verdict TEXT NOT NULL,
        created_at REAL NOT NULL,
        PRIMARY KEY (annotator, rubric, first_id, second_id)) WITHOUT ROWID""",
    "CREATE TABLE judged (id TEXT PRIMARY KEY) WITHOUT ROWID",
)


DECISIONS = (
    # Wanted on top of the overlap, because those who ranked the task differ.
    "ALTER TABLE tasks ADD COLUMN extra INTEGER NOT NULL DEFAULT 0",
    # The task that this one adjudicates; its ranking stands instead of those.
    "ALTER TABLE tasks ADD COLUMN decides INTEGER REFERENCES tasks (id)",
    "CREATE INDEX tasks_deciding ON tasks (decides) WHERE decides IS NOT NULL",
)


LIVE = (
    """CREATE TABLE live_turns (
        id TEXT PRIMARY KEY,
        annotator TEXT NOT NULL REFERENCES annotators (name),
        prompt_id TEXT NOT NULL REFERENCES prompts (id),
        shown TEXT NOT NULL,
        created_at REAL NOT NULL) WITHOUT ROWID""",
    "CREATE INDEX live_turns_of_annotator ON live_turns (annotator, created_at)",
    # Programs that give feedback; a token is random, so its plain hash tells nothing.
    """CREATE TABLE tokens (
        name TEXT PRIMARY KEY REFERENCES annotators (name),
        hash TEXT NOT NULL UNIQUE,
        created_at REAL NOT NULL) WITHOUT ROWID""",
)


DRAFTS = (
    # Without it, looking for one's own expired draft reads every assignment.
    "CREATE INDEX drafts_of_annotator ON drafts (annotator, updated_at)",
)


DONE = (
    # Covers the count of one's own work, which every screen shows.
    "CREATE INDEX rankings_done ON rankings (annotator, live, task_id)",
)


SCORES = (
    "ALTER TABLE rankings ADD COLUMN scores TEXT NOT NULL DEFAULT '[]'",
    "DROP TRIGGER rankings_do_not_change",
    """CREATE TRIGGER rankings_do_not_change BEFORE UPDATE OF
            id, prompt_id, task_id, annotator, tiers, strengths, scores, flags, note, shown,
            created_at ON rankings
        BEGIN SELECT RAISE (ABORT, 'rankings are append-only'); END""",
)


# A check is open to whoever has not done it, and a decision or a repeat to one person alone: they
# are nobody else's work, and would never be done.
_OPEN = "({0}.open > 0 AND {0}.purpose IN ('rank', 'compare') AND {0}.only_for IS NULL)"
_IS_OPEN, _WAS_OPEN = _OPEN.format("NEW"), _OPEN.format("OLD")
OPEN_TO_EVERYBODY = (
    "DROP TRIGGER count_new_tasks",
    "DROP TRIGGER count_tasks",
    f"""CREATE TRIGGER count_new_tasks AFTER INSERT ON tasks BEGIN
        UPDATE totals SET value = value + 1 WHERE name = 'tasks';
        UPDATE totals SET value = value + {_IS_OPEN} WHERE name = 'open'; END""",
    f"""CREATE TRIGGER count_tasks AFTER UPDATE OF open, purpose, only_for ON tasks
        WHEN {_IS_OPEN} <> {_WAS_OPEN} BEGIN
        UPDATE totals SET value = value + {_IS_OPEN} - {_WAS_OPEN} WHERE name = 'open'; END""",
    f"""UPDATE totals SET value = (SELECT COUNT(*) FROM tasks WHERE {_OPEN.format("tasks")})
        WHERE name = 'open'""",
)


# One import at a time, stored in small transactions; `unfinished.py` says how.
IMPORTS = (
    """CREATE TABLE imports (
        id INTEGER PRIMARY KEY AUTOINCREMENT,
        source TEXT NOT NULL,
        started_at REAL NOT NULL,
        finished_at REAL)""",
    "CREATE INDEX imports_by_end ON imports (finished_at)",
    *(
        statement
        for table in ("prompts", "responses", "rankings")
        for statement in (
            f"ALTER TABLE {table} ADD COLUMN import_id INTEGER NOT NULL DEFAULT 0",
            f"CREATE INDEX {table}_of_import ON {table} (import_id) WHERE import_id > 0",
        )
    ),
    # Names that an unfinished import has brought, and nobody else uses.
    "CREATE TABLE import_annotators (name TEXT PRIMARY KEY) WITHOUT ROWID",
    # Tasks to make when the import is whole; `content` is that of a check.
    """CREATE TABLE import_tasks (
        seq INTEGER PRIMARY KEY,
        import_id INTEGER NOT NULL,
        prompt_id TEXT NOT NULL,
        content TEXT)""",
    "DROP TRIGGER rankings_are_kept",
    """CREATE TRIGGER rankings_are_kept BEFORE DELETE ON rankings
        WHEN OLD.import_id NOT IN (SELECT id FROM imports WHERE finished_at IS NULL)
        BEGIN SELECT RAISE (ABORT, 'rankings are append-only'); END""",
    """CREATE TRIGGER discount_prompts AFTER DELETE ON prompts
        BEGIN UPDATE totals SET value = value - 1 WHERE name = 'prompts'; END""",
    """CREATE TRIGGER discount_responses AFTER DELETE ON responses
        BEGIN UPDATE totals SET value = value - 1 WHERE name = 'responses'; END""",
    """CREATE TRIGGER discount_rankings AFTER DELETE ON rankings
        BEGIN UPDATE totals SET value = value - OLD.live WHERE name = 'rankings'; END""",
)


TICKETS = (
    """CREATE TABLE tickets (
        task_id INTEGER NOT NULL REFERENCES tasks (id),
        annotator TEXT NOT NULL REFERENCES annotators (name),
        ticket TEXT NOT NULL,
        PRIMARY KEY (task_id, annotator)) WITHOUT ROWID""",
    "CREATE UNIQUE INDEX tickets_of_annotator ON tickets (annotator, ticket)",
    # Open pages, and work that they have not sent yet, refer to these tasks by number.
    "INSERT INTO tickets SELECT task_id, annotator, task_id FROM assignments",
    f"PRAGMA application_id = {APPLICATION_ID}",
)


_ROUND_OF_SETTING = "CAST(SUBSTR(name, 7) AS INTEGER)"
_ROUND_OF_REASON = "CAST(SUBSTR(reason, 7) AS INTEGER)"
ROUNDS = (
    """CREATE TABLE rounds (
        id INTEGER PRIMARY KEY,
        policy TEXT NOT NULL UNIQUE,
        content TEXT NOT NULL)""",
    # Rounds were kept in `settings`, and their tasks were recognized by the reason shown.
    f"""INSERT INTO rounds SELECT {_ROUND_OF_SETTING}, json_extract(value, '$.policy.hash'), value
        FROM settings WHERE name GLOB 'round [0-9]*'""",
    "DELETE FROM settings WHERE name GLOB 'round [0-9]*'",
    "ALTER TABLE tasks ADD COLUMN round_id INTEGER REFERENCES rounds (id)",
    f"""UPDATE tasks SET round_id = {_ROUND_OF_REASON}
        WHERE purpose = 'rank' AND reason GLOB 'round [0-9]*: *'
        AND {_ROUND_OF_REASON} IN (SELECT id FROM rounds)""",
)


# Answers to apps; `content` (prompt and response) is deleted after some days.
SERVED = (
    """CREATE TABLE comparisons (
        id INTEGER PRIMARY KEY,
        policy TEXT NOT NULL,
        against TEXT NOT NULL,
        share REAL NOT NULL,
        started_at REAL NOT NULL)""",
    """CREATE TABLE served (
        id TEXT PRIMARY KEY,
        conversation TEXT NOT NULL,
        comparison_id INTEGER REFERENCES comparisons (id),
        variant TEXT NOT NULL CHECK (variant IN ('policy', 'against')),
        content TEXT,
        thumb INTEGER,
        created_at REAL NOT NULL) WITHOUT ROWID""",
    "CREATE INDEX served_by_age ON served (created_at) WHERE content IS NOT NULL",
    """CREATE INDEX served_thumbs ON served (comparison_id, variant, thumb)
        WHERE thumb IS NOT NULL""",
    "CREATE INDEX served_conversations ON served (conversation) WHERE thumb IS NOT NULL",
    # What a program said last of a subject, such as the thumb of one answer.
    """CREATE TABLE served_verdicts (
        annotator TEXT NOT NULL REFERENCES annotators (name),
        subject TEXT NOT NULL,
        ranking_id TEXT NOT NULL REFERENCES rankings (id),
        PRIMARY KEY (annotator, subject)) WITHOUT ROWID""",
)


BOARD_RUBRICS = (
    # What the board has shown, in order; `rubrics` also holds those of judges.
    """CREATE TABLE board_rubrics (
        seq INTEGER PRIMARY KEY,
        version TEXT NOT NULL REFERENCES rubrics (version),
        saved_at REAL NOT NULL,
        saved_by TEXT NOT NULL)""",
)


_QUEUE = "open > 0 AND only_for IS NULL AND purpose IN ('rank', 'compare')"
SOURCES = (
    # Where a source has people, its tasks are for them alone; `reserved` is then its name.
    """CREATE TABLE source_people (
        annotator TEXT NOT NULL REFERENCES annotators (name),
        source TEXT NOT NULL,
        PRIMARY KEY (annotator, source)) WITHOUT ROWID""",
    "CREATE INDEX people_of_source ON source_people (source)",
    "CREATE INDEX prompts_of_source ON prompts (source)",
    "ALTER TABLE tasks ADD COLUMN reserved TEXT",
    """CREATE TRIGGER reserve_new_tasks AFTER INSERT ON tasks
        WHEN EXISTS (SELECT 1 FROM source_people) BEGIN
        UPDATE tasks SET reserved = (SELECT p.source FROM prompts p WHERE p.id = NEW.prompt_id
            AND EXISTS (SELECT 1 FROM source_people s WHERE s.source = p.source))
        WHERE id = NEW.id; END""",
    "DROP INDEX tasks_open",
    f"CREATE INDEX tasks_open ON tasks (priority DESC, id) WHERE {_QUEUE} AND reserved IS NULL",
    f"""CREATE INDEX tasks_reserved ON tasks (reserved, priority DESC, id)
        WHERE {_QUEUE} AND reserved IS NOT NULL""",
)


STEPS: dict[str, tuple[str, ...]] = {
    "001_first_schema": (*FIRST_SCHEMA, BOARD_ID),
    "002_users": USERS,
    "003_rubrics": RUBRICS,
    "004_checks": CHECKS,
    "005_judges": JUDGES,
    "006_decisions": DECISIONS,
    "007_live": LIVE,
    "008_drafts": DRAFTS,
    "009_done": DONE,
    "010_scores": SCORES,
    "011_open_to_everybody": OPEN_TO_EVERYBODY,
    "012_imports": IMPORTS,
    "013_tickets": TICKETS,
    "014_rounds": ROUNDS,
    "015_served": SERVED,
    "016_invitations": INVITATIONS,
    "017_board_rubrics": BOARD_RUBRICS,
    "018_sources": SOURCES,
    "019_imported_judgments": IMPORTED_JUDGMENTS,
    "020_import_names": IMPORT_NAMES,
    "021_teams": TEAMS,
    "022_own_work": OWN_WORK,
    "023_indexed_places": INDEXED_PLACES,
    "024_counts": COUNTS,
    "025_live_votes": LIVE_VOTES,
}
