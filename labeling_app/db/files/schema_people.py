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
