"""Tokens with which other programs give feedback: 160 random bits, kept as a hash."""

import hashlib
import secrets
import time

from labeling_app.db.store import Store, ensure_annotator
from rlhf.errors import InputError


def make_token(store: Store, name: str) -> str:
    """A new token for a program; one it had before is worth nothing from now on.

    Raises:
        InputError: the name is a person's, a judge's or a signal's, or cannot be a name.
    """
    if not name.strip() or name != name.strip() or len(name) > 100:
        raise InputError(f"{name!r} cannot be a program's name", "Use 1 to 100 characters.")
    token = secrets.token_urlsafe(20)
    with store.connections.write() as db:
        if db.execute("SELECT 1 FROM users WHERE name = ?", [name]).fetchone():
            raise InputError(
                f"{name!r} is a person who signs in", "Give the program a name of its own."
            )
        ensure_annotator(db, name, "human")
        row = [name, _hash(token), time.time()]
        db.execute("INSERT OR REPLACE INTO tokens VALUES (?, ?, ?)", row)
    return token


def revoke_token(store: Store, name: str) -> None:
    """Shut a program out; its feedback stays.

    Raises:
        InputError: no program of that name has a token.
    """
    with store.connections.write() as db:
        if not db.execute("DELETE FROM tokens WHERE name = ?", [name]).rowcount:
            raise InputError(
                f"No program {name!r} has a token", "See who has: rlhf users list --db DB"
            )


def programs(store: Store) -> list[str]:
    """The programs that have a token, by name."""
    rows = store.connections.db.execute("SELECT name FROM tokens ORDER BY name")
    return [row[0] for row in rows]


def owner(store: Store, token: str) -> str | None:
    """The program that a token belongs to."""
    query = "SELECT name FROM tokens WHERE hash = ?"
    row = store.connections.db.execute(query, [_hash(token)]).fetchone()
    return row[0] if row else None


def _hash(token: str) -> str:
    return hashlib.sha256(token.encode()).hexdigest()
