"""Who may sign in, and as what."""

import sqlite3
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal, get_args

from labeling_app.annotators.passwords import (
    check_password,
    hash_of_nobody,
    hash_password,
    is_outdated,
)
from labeling_app.db.store import Store, ensure_annotator
from rlhf.errors import InputError

Role = Literal["annotator", "lead", "admin"]
ROLES: tuple[Role, ...] = get_args(Role)
MIN_PASSWORD = 8


@dataclass(frozen=True, kw_only=True)
class User:
    """Somebody who may sign in."""

    name: str
    role: Role
    disabled: bool
    epoch: int


@dataclass(frozen=True, kw_only=True)
class SignIn:
    """The outcome of one attempt: a user, or what to tell whoever tried."""

    user: User | None = None
    problem: str = ""


class Users:
    """The users of one database.

    Args:
        store: the database.
    """

    def __init__(self, store: Store) -> None:
        self.connections = store.connections

    def add(self, name: str, role: Role, password: str) -> None:
        """Add a user.

        Raises:
            InputError: the name is taken, too long, or not a person's; a short password.
        """
        if not name.strip() or name != name.strip() or len(name) > 100:
            raise InputError(f"{name!r} cannot be a user's name", "Use 1 to 100 characters.")
        hashed = _hashed(password)
        with self.connections.write() as db:
            if self.get(name) is not None:
                raise InputError(
                    f"There is a user {name!r} already",
                    "Use `rlhf users reset` for a new password.",
                )
            if db.execute("SELECT 1 FROM tokens WHERE name = ?", [name]).fetchone():
                raise InputError(
                    f"{name!r} is a program that gives feedback", "Give the person another name."
                )
            ensure_annotator(db, name, "human")
            db.execute(
                "INSERT INTO users (name, role, password, created_at) VALUES (?, ?, ?, ?)",
                [name, role, hashed, time.time()],
            )

    def get(self, name: str) -> User | None:
        """The user of that name, disabled or not."""
        query = "SELECT name, role, disabled, epoch FROM users WHERE name = ?"
        row = self.connections.db.execute(query, [name]).fetchone()
        return _user(*row) if row else None

    def all(self) -> list[User]:
        """Every user, by name."""
        query = "SELECT name, role, disabled, epoch FROM users ORDER BY name"
        return [_user(*row) for row in self.connections.db.execute(query)]

    def set_disabled(self, name: str, *, disabled: bool) -> None:
        """Shut somebody out and sign them out everywhere, or let them in again.

        Raises:
            InputError: no such user.
        """
        self._change(name, disabled=int(disabled))

    def reset_password(self, name: str, password: str) -> None:
        """Give somebody a new password and sign them out everywhere.

        Raises:
            InputError: no such user, or the password is too short.
        """
        self._change(name, password=_hashed(password))

    def end_sessions(self, name: str) -> None:
        """Sign somebody out everywhere: no cookie given so far is worth anything from now on.

        Raises:
            InputError: no such user.
        """
        self._change(name)

    def _change(self, name: str, **columns: Any) -> None:
        """Set columns and raise the epoch, which ends all sessions."""
        assignments = ", ".join(["epoch = epoch + 1", *(f"{column} = ?" for column in columns)])
        with self.connections.write() as db:
            cursor = db.execute(
                f"UPDATE users SET {assignments} WHERE name = ?", [*columns.values(), name]
            )
            if not cursor.rowcount:
                raise InputError(
                    f"There is no user {name!r}", "See who there is: rlhf users list --db DB"
                )

    def sign_in(self, name: str, password: str) -> SignIn:
        """Check a password, as slowly for a name that nobody has. `sign_in.py` counts attempts."""
        query = "SELECT password, disabled FROM users WHERE name = ?"
        row = next(iter(self.connections.db.query(query, [name])), None)
        right = check_password(password, row["password"] if row else hash_of_nobody())
        if not row or not right:
            return SignIn(problem="Name or password is wrong.")
        if row["disabled"]:
            return SignIn(problem="This account is disabled. Ask your lead.")
        if is_outdated(row["password"]):
            self._renew_hash(name, password, row["password"])
        return SignIn(user=self.get(name))

    def _renew_hash(self, name: str, password: str, old: str) -> None:
        renewed = hash_password(password)
        # Where an import holds the file for long, the next sign-in renews it.
        with suppress(sqlite3.OperationalError), self.connections.write() as db:
            query = "UPDATE users SET password = ? WHERE name = ? AND password = ?"
            db.execute(query, [renewed, name, old])

    def of_session(self, name: str, epoch: int) -> User | None:
        """The user that a session belongs to, unless disabled or signed out since."""
        user = self.get(name)
        is_open = user is not None and not user.disabled and user.epoch == epoch
        return user if is_open else None


def _hashed(password: str) -> str:
    if len(password) < MIN_PASSWORD:
        raise InputError(
            f"The password has {len(password)} characters",
            f"Use at least {MIN_PASSWORD}, or give none and get a random one.",
        )
    return hash_password(password)


def _user(name: str, role: Role, disabled: int, epoch: int) -> User:
    return User(name=name, role=role, disabled=bool(disabled), epoch=epoch)
