"""Who may sign in, as what, and when too many wrong passwords shut the door for a while."""

import threading
import time
from dataclasses import dataclass
from typing import Any, Literal, get_args

from labeling_app.auth import Ticket, check_password, hash_password
from labeling_app.store import Store, ensure_annotator
from rlhf.errors import InputError

Role = Literal["annotator", "lead", "admin"]
ROLES: tuple[Role, ...] = get_args(Role)
FREE_FAILURES = 5
MAX_LOCK_SECONDS = 15 * 60.0
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
        # Each check takes 32 MB: a crowd of attempts must not take all memory.
        self._scrypt_slots = threading.Semaphore(4)
        # Checked when there is no such user, so that the time taken does not tell who exists.
        self._nobody = hash_password("nobody")

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
        self._change(name, "disabled = ?", [int(disabled)])

    def reset_password(self, name: str, password: str) -> None:
        """Give somebody a new password, sign them out everywhere and lift a lock.

        Raises:
            InputError: no such user, or the password is too short.
        """
        self._change(name, "password = ?, failures = 0, locked_until = 0", [_hashed(password)])

    def _change(self, name: str, assignments: str, values: list[Any]) -> None:
        with self.connections.write() as db:
            cursor = db.execute(
                f"UPDATE users SET {assignments}, epoch = epoch + 1 WHERE name = ?", [*values, name]
            )
            if not cursor.rowcount:
                raise InputError(
                    f"There is no user {name!r}", "See who there is: rlhf users list --db DB"
                )

    def sign_in(self, name: str, password: str) -> SignIn:
        """Check a password. After five wrong ones the door shuts: 1 minute, then 2, up to 15."""
        query = "SELECT password, disabled, failures, locked_until FROM users WHERE name = ?"
        row = next(iter(self.connections.db.query(query, [name])), None)
        now = time.time()
        if row and row["locked_until"] > now:
            minutes = max(1, round((row["locked_until"] - now) / 60))
            return SignIn(problem=f"Too many wrong passwords. Try again in {minutes} min.")
        with self._scrypt_slots:
            right = check_password(password, row["password"] if row else self._nobody)
        if not row:
            return SignIn(problem="Name or password is wrong.")
        if not right:
            self._note_failure(name)
            return SignIn(problem="Name or password is wrong.")
        if row["disabled"]:
            return SignIn(problem="This account is disabled. Ask your lead.")
        with self.connections.write() as db:
            db.execute("UPDATE users SET failures = 0, locked_until = 0 WHERE name = ?", [name])
        return SignIn(user=self.get(name))

    def _note_failure(self, name: str) -> None:
        with self.connections.write() as db:
            db.execute("UPDATE users SET failures = failures + 1 WHERE name = ?", [name])
            query = "SELECT failures FROM users WHERE name = ?"
            extra = db.execute(query, [name]).fetchone()[0] - FREE_FAILURES
            if extra >= 0:
                until = time.time() + min(MAX_LOCK_SECONDS, 60.0 * 2**extra)
                db.execute("UPDATE users SET locked_until = ? WHERE name = ?", [until, name])

    def of_ticket(self, ticket: Ticket | None) -> User | None:
        """The user a cookie belongs to, unless disabled or signed out since."""
        user = self.get(ticket.name) if ticket else None
        if user is None or ticket is None or user.disabled or user.epoch != ticket.epoch:
            return None
        return user


def _hashed(password: str) -> str:
    if len(password) < MIN_PASSWORD:
        raise InputError(
            f"The password has {len(password)} characters",
            f"Use at least {MIN_PASSWORD}, or give none and get a random one.",
        )
    return hash_password(password)


def _user(name: str, role: Role, disabled: int, epoch: int) -> User:
    return User(name=name, role=role, disabled=bool(disabled), epoch=epoch)
