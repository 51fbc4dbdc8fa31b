"""Rows of links that let a person set a password, by the hash of their token."""

from sqlite_utils import Database

from labeling_app.db.connection import Connections

InvitationRow = tuple[str, str, int, float]  # name, role, is_reset, expires_at
_COLUMNS = "name, role, is_reset, expires_at"


def put_invitation(db: Database, hashed: str, row: InvitationRow) -> None:
    """Store a link in place of those that the person had."""
    delete_invitations(db, row[0])
    db.execute(f"INSERT INTO invitations (hash, {_COLUMNS}) VALUES (?, ?, ?, ?, ?)", [hashed, *row])


def find_invitation(db: Database, hashed: str, now: float) -> InvitationRow | None:
    """The link of this hash, unless it has expired."""
    query = f"SELECT {_COLUMNS} FROM invitations WHERE hash = ? AND expires_at > ?"
    row: InvitationRow | None = db.execute(query, [hashed, now]).fetchone()
    return row


def delete_invitations(db: Database, name: str) -> bool:
    """Remove a person's links; False where there was none."""
    return bool(db.execute("DELETE FROM invitations WHERE name = ?", [name]).rowcount)


def open_invitations(connections: Connections, now: float) -> list[InvitationRow]:
    """The links that still work, by name."""
    query = f"SELECT {_COLUMNS} FROM invitations WHERE expires_at > ? ORDER BY name"
    return list(connections.db.execute(query, [now]))
