"""The statements of the steps of the schema about who signs in. Never edit one that shipped."""

USERS = (
    """CREATE TABLE users (
        name TEXT PRIMARY KEY REFERENCES annotators (name),
        role TEXT NOT NULL CHECK (role IN ('annotator', 'lead', 'admin')),
        password TEXT NOT NULL,
        disabled INTEGER NOT NULL DEFAULT 0,
        failures INTEGER NOT NULL DEFAULT 0,
        locked_until REAL NOT NULL DEFAULT 0,
        epoch INTEGER NOT NULL DEFAULT 0,
        created_at REAL NOT NULL) WITHOUT ROWID""",
    # Signs cookies and makes pseudonyms; in the database, so that a restart signs nobody out.
    "INSERT INTO settings VALUES ('secret', lower(hex(randomblob(32))))",
)


INVITATIONS = (
    # Links with which a person sets a password; a token is random, so its plain hash tells nothing.
    """CREATE TABLE invitations (
        hash TEXT PRIMARY KEY,
        name TEXT NOT NULL UNIQUE,
        role TEXT NOT NULL CHECK (role IN ('annotator', 'lead', 'admin')),
        is_reset INTEGER NOT NULL,
        expires_at REAL NOT NULL) WITHOUT ROWID""",
)


TEAMS = (
    # '' is no team. What a team was given, whoever is in it gets.
    "ALTER TABLE users ADD COLUMN team TEXT NOT NULL DEFAULT ''",
    """CREATE TABLE source_teams (
        team TEXT NOT NULL,
        source TEXT NOT NULL,
        PRIMARY KEY (team, source)) WITHOUT ROWID""",
    "CREATE INDEX teams_of_source ON source_teams (source)",
    "DROP TRIGGER reserve_new_tasks",
    """CREATE TRIGGER reserve_new_tasks AFTER INSERT ON tasks
        WHEN EXISTS (SELECT 1 FROM source_people) OR EXISTS (SELECT 1 FROM source_teams) BEGIN
        UPDATE tasks SET reserved = (SELECT p.source FROM prompts p WHERE p.id = NEW.prompt_id
            AND (EXISTS (SELECT 1 FROM source_people s WHERE s.source = p.source)
                OR EXISTS (SELECT 1 FROM source_teams s WHERE s.source = p.source)))
        WHERE id = NEW.id; END""",
)
