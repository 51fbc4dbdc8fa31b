"""The steps of the schema by which a submit costs the same however much its annotator has done."""

_IS_DONE = "({0}.live = 1 AND {0}.task_id IS NOT NULL)"
_DONE_NOW, _DONE_BEFORE = _IS_DONE.format("NEW"), _IS_DONE.format("OLD")
_ADD = """INSERT INTO own_work VALUES (NEW.annotator, {0})
          ON CONFLICT DO UPDATE SET done = done + {0}"""
_QUEUED = "NEW.open > 0 AND NEW.only_for IS NULL AND NEW.purpose IN ('rank', 'compare')"
_GO_BACK = """UPDATE passed SET priority = NEW.priority, id = NEW.id
              WHERE (priority, -id) < (NEW.priority, -NEW.id)"""
_ORDER = "({0}.priority, {0}.purpose, {0}.only_for, {0}.reserved)"

OWN_WORK = (
    # How many tasks an annotator has ranked: every screen shows it.
    """CREATE TABLE own_work (
        annotator TEXT PRIMARY KEY REFERENCES annotators (name),
        done INTEGER NOT NULL) WITHOUT ROWID""",
    f"""INSERT INTO own_work SELECT annotator, COUNT(*) FROM rankings r
        WHERE {_IS_DONE.format("r")} GROUP BY annotator""",
    f"""CREATE TRIGGER count_new_work AFTER INSERT ON rankings WHEN {_DONE_NOW}
        BEGIN {_ADD.format(1)}; END""",
    f"""CREATE TRIGGER count_work AFTER UPDATE OF live, task_id ON rankings
        WHEN {_DONE_NOW} <> {_DONE_BEFORE}
        BEGIN {_ADD.format(f"({_DONE_NOW} - {_DONE_BEFORE})")}; END""",
    # How far an annotator has come in a queue (`source` is JSON, null for everybody's): no task
    # before this place is left for them, so nobody looks through what they did and others have
    # yet to do. A task that is opened, added or moved takes them back to it.
    """CREATE TABLE passed (
        annotator TEXT NOT NULL REFERENCES annotators (name),
        source TEXT NOT NULL,
        priority REAL NOT NULL,
        id INTEGER NOT NULL,
        PRIMARY KEY (annotator, source)) WITHOUT ROWID""",
    f"""CREATE TRIGGER go_back_to_opened AFTER UPDATE OF open ON tasks
        WHEN NEW.open > OLD.open AND {_QUEUED} BEGIN {_GO_BACK}; END""",
    f"""CREATE TRIGGER go_back_to_new AFTER INSERT ON tasks WHEN {_QUEUED}
        BEGIN {_GO_BACK}; END""",
    f"""CREATE TRIGGER start_again AFTER UPDATE OF priority, purpose, only_for, reserved ON tasks
        WHEN {_ORDER.format("NEW")} IS NOT {_ORDER.format("OLD")} BEGIN DELETE FROM passed; END""",
)

_WHERE_PASSED = "UPDATE passed SET priority = NEW.priority, id = NEW.id WHERE priority"
_GO_BACK_BY_INDEX = f"""{_WHERE_PASSED} < NEW.priority;
              {_WHERE_PASSED} = NEW.priority AND id > NEW.id"""

# With `_GO_BACK` every opened task was compared with every person's place.
INDEXED_PLACES = (
    "CREATE INDEX passed_by_place ON passed (priority, id)",
    "DROP TRIGGER go_back_to_opened",
    f"""CREATE TRIGGER go_back_to_opened AFTER UPDATE OF open ON tasks
        WHEN NEW.open > OLD.open AND {_QUEUED} BEGIN {_GO_BACK_BY_INDEX}; END""",
    "DROP TRIGGER go_back_to_new",
    f"""CREATE TRIGGER go_back_to_new AFTER INSERT ON tasks WHEN {_QUEUED}
        BEGIN {_GO_BACK_BY_INDEX}; END""",
)
