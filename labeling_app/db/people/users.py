"""Rows of those who may sign in, and of the programs that have a token."""

import time
from typing import Any

from sqlite_utils import Database

from labeling_app.db.connection import Connections

UserRow = tuple[str, str, int, int, str]  # name, role, disabled, epoch, team
_COLUMNS = "name, role, disabled, epoch, team"


def find_user(connections: Connections, name: str) -> UserRow | None:
    """The user of that name, disabled or not."""
    query = f"SELECT {_COLUMNS} FROM users WHERE name = ?"
    row: UserRow | None = connections.db.execute(query, [name]).fetchone()
    return row


def all_users(connections: Connections) -> list[UserRow]:
    """Every user, by name."""
    return list(connections.db.execute(f"SELECT {_COLUMNS} FROM users ORDER BY name"))


def insert_user(db: Database, name: str, role: str, hashed: str) -> None:
    """Add a user, whose annotator is there."""
    query = "INSERT INTO users (name, role, password, created_at) VALUES (?, ?, ?, ?)"
    db.execute(query, [name, role, hashed, time.time()])


def change_user(connections: Connections, name: str, **columns: Any) -> bool:
    """Set columns and raise the epoch, which ends all sessions; False where there is no user."""
    assignments = ", ".join(["epoch = epoch + 1", *(f"{column} = ?" for column in columns)])
    with connections.write() as db:
        query = f"UPDATE users SET {assignments} WHERE name = ?"
        return bool(db.execute(query, [*columns.values(), name]).rowcount)


def password_of(connections: Connections, name: str) -> tuple[str, bool, int] | None:
    """The hash of a user's password, whether the user is disabled, and the epoch of sessions."""
    query = "SELECT password, disabled, epoch FROM users WHERE name = ?"
    row = connections.db.execute(query, [name]).fetchone()
    return (row[0], bool(row[1]), row[2]) if row else None


def renew_password(connections: Connections, name: str, old: str, new: str) -> None:
    """Put one hash in the place of another, unless the password was changed meanwhile."""
    with connections.write() as db:
        query = "UPDATE users SET password = ? WHERE name = ? AND password = ?"
        db.execute(query, [new, name, old])


# ------------------------------------------------------------------------------- programs


def is_program(db: Database, name: str) -> bool:
    """Whether a program of that name has a token, or has given feedback without one."""
    query = """SELECT 1 FROM tokens WHERE name = :name
               UNION ALL SELECT 1 FROM served_verdicts WHERE annotator = :name LIMIT 1"""
    return db.execute(query, {"name": name}).fetchone() is not None


def put_token(db: Database, name: str, hashed: str) -> None:
    """Give a program a token in place of the one it had."""
    db.execute("INSERT OR REPLACE INTO tokens VALUES (?, ?, ?)", [name, hashed, time.time()])


def delete_token(connections: Connections, name: str) -> bool:
    """Take a program's token away; False where it had none."""
    with connections.write() as db:
        return bool(db.execute("DELETE FROM tokens WHERE name = ?", [name]).rowcount)


def programs_with_tokens(connections: Connections) -> list[str]:
    """The programs that have a token, by name."""
    return [row[0] for row in connections.db.execute("SELECT name FROM tokens ORDER BY name")]


def owner_of_token(connections: Connections, hashed: str) -> str | None:
    """The program that has the token of this hash."""
    row = connections.db.execute("SELECT name FROM tokens WHERE hash = ?", [hashed]).fetchone()
    return row[0] if row else None
