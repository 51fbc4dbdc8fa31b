"""Users: who may sign in, and in which role."""

import sqlite3
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Literal, cast, get_args

from labeling_app.annotators.passwords import (
    check_password,
    dummy_hash,
    hash_password,
    is_outdated,
)
from labeling_app.db.people.invitations import delete_invitations
from labeling_app.db.people.teams import put_in_team
from labeling_app.db.people.users import (
    UserRow,
    all_users,
    change_user,
    find_user,
    insert_user,
    is_program,
    password_of,
    renew_password,
)
from labeling_app.db.store import Store, ensure_annotator, require_kind
from rlhf.errors import InputError
from rlhf.records.wording import counted

Role = Literal["annotator", "lead", "admin"]
ROLES: tuple[Role, ...] = get_args(Role)
MIN_PASSWORD = 8
MAX_PASSWORD = 500  # what the forms accept


@dataclass(frozen=True, kw_only=True)
class User:
    """Somebody who may sign in."""

    name: str
    role: Role
    disabled: bool
    epoch: int
    team: str = ""


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
        self.require_name(name)
        self.add_hashed(name, role, self.hash(password))

    def add_hashed(self, name: str, role: Role, hashed: str) -> None:
        """Add a user by the hash of a password. An open link for the name stops working.

        Raises:
            InputError: as `require_free`.
        """
        with self.connections.write() as db:
            self.require_free(name)
            delete_invitations(db, name)
            ensure_annotator(db, name, "human")
            insert_user(db, name, role, hashed)

    def require_name(self, name: str) -> None:
        """Check that somebody can have this name.

        Raises:
            InputError: it is empty or too long.
        """
        _require_name(name, "user")

    def require_free(self, name: str) -> None:
        """Check that somebody new can have this name; call it in the transaction that adds them.

        Raises:
            InputError: the name is taken, too long, or not a person's.
        """
        self.require_name(name)
        known = self.get(name)
        if known is not None:
            raise InputError(
                f"There is a user {name!r} already, with the role {known.role}",
                "Change their password or role in their row of the page People, or by rlhf users "
                "reset and rlhf users role.",
            )
        if is_program(self.connections.db, name):
            raise InputError(
                f"{name!r} is a program that gives feedback", "Give the person another name."
            )
        require_kind(self.connections.db, name, "human")

    def require(self, name: str) -> User:
        """The user of that name.

        Raises:
            InputError: there is none.
        """
        user = self.get(name)
        if user is None:
            raise no_user(name)
        return user

    def get(self, name: str) -> User | None:
        """The user of that name, disabled or not."""
        row = find_user(self.connections, name)
        return _user(row) if row else None

    def all(self) -> list[User]:
        """Every user, by name."""
        return [_user(row) for row in all_users(self.connections)]

    def set_disabled(self, name: str, *, disabled: bool) -> None:
        """Disable a user and sign them out everywhere, or enable them again.

        Raises:
            InputError: no such user, or nobody else is admin.
        """
        with self.connections.write():
            if disabled and not self.require(name).disabled:
                self._require_other_admin(self.require(name))
            self._change(name, disabled=int(disabled))

    def set_role(self, name: str, role: Role) -> None:
        """Give somebody another role and sign them out everywhere.

        An open link stops working: whoever made it may not be allowed to make one for the new role.

        Raises:
            InputError: no such user, the role is the same, or nobody else is admin.
        """
        with self.connections.write() as db:
            user = self.require(name)
            if user.role == role:
                raise InputError(f"{name} has the role {role} already", "Nothing was changed.")
            self._require_other_admin(user)
            self._change(name, role=role)
            delete_invitations(db, name)

    def set_team(self, name: str, team: str) -> None:
        """Put somebody in a team, in place of the one they are in; "": in none.

        Raises:
            InputError: no such user, or the team's name is too long.
        """
        if team:
            _require_name(team, "team")
        if not put_in_team(self.connections, name, team):
            raise no_user(name)

    def _require_other_admin(self, user: User) -> None:
        others = (other for other in self.all() if other.name != user.name and not other.disabled)
        if user.role == "admin" and not any(other.role == "admin" for other in others):
            raise InputError(
                f"{user.name} is the only admin who can sign in", "Make another user admin first."
            )

    def reset_password(self, name: str, password: str) -> None:
        """Give somebody a new password and sign them out everywhere.

        Raises:
            InputError: no such user, or the password is too short.
        """
        self.set_hash(name, self.hash(password))

    def set_hash(self, name: str, hashed: str) -> None:
        """Give somebody a new password by its hash, and sign them out everywhere.

        An open link for another password stops working: whoever found it could take the account.

        Raises:
            InputError: no such user.
        """
        with self.connections.write() as db:
            self._change(name, password=hashed)
            delete_invitations(db, name)

    def change_password(self, name: str, old: str, new: str) -> SignIn:
        """Give somebody who knows the old password a new one, and sign them out everywhere.

        Returns:
            The user as of now, whose next cookie is valid; or what is wrong with the old password.

        Raises:
            InputError: the new password is too short or too long; the old one is not checked.
        """
        require_password(new)
        checked = self.sign_in(name, old).user
        if checked is None:
            return SignIn(problem="The current password is wrong.")
        hashed = hash_password(new)
        with self.connections.write():
            if self.require(name).epoch != checked.epoch:
                return SignIn(problem="Your account was changed meanwhile. Sign in again.")
            self.set_hash(name, hashed)
            return SignIn(user=self.require(name))

    def hash(self, password: str) -> str:
        """The hash of a password, which takes half a second.

        Raises:
            InputError: the password is too short or too long.
        """
        require_password(password)
        return hash_password(password)

    def end_sessions(self, name: str) -> None:
        """Sign somebody out everywhere: all cookies given so far become invalid.

        Raises:
            InputError: no such user.
        """
        self._change(name)

    def _change(self, name: str, **columns: Any) -> None:
        if not change_user(self.connections, name, **columns):
            raise no_user(name)

    def sign_in(self, name: str, password: str) -> SignIn:
        """Check a password, as slowly for a name that nobody has. `sign_in.py` counts attempts."""
        hashed, is_disabled, epoch = password_of(self.connections, name) or (None, False, 0)
        is_right = check_password(password, hashed or dummy_hash())
        if not hashed or not is_right:
            return SignIn(problem="Name or password is wrong.")
        if is_disabled:
            return SignIn(problem="This account is disabled. Ask your lead.")
        if is_outdated(hashed):
            # If an import is writing for long, the next sign-in renews it.
            with suppress(sqlite3.OperationalError):
                renew_password(self.connections, name, hashed, hash_password(password))
        # Checking takes time: if the password is reset meanwhile, this session ends, too.
        user = self.get(name)
        return SignIn(user=user and replace(user, epoch=epoch))

    def of_session(self, name: str, epoch: int) -> User | None:
        """The user that a session belongs to, unless disabled or signed out since."""
        user = self.get(name)
        is_open = user is not None and not user.disabled and user.epoch == epoch
        return user if is_open else None


def no_user(name: str) -> InputError:
    """The error where nobody has that name."""
    return InputError(f"There is no user {name!r}", "See all users: rlhf users list --db DB")


def _require_name(name: str, kind: str) -> None:
    if not name.strip() or name != name.strip() or len(name) > 100:
        raise InputError(f"{name!r} cannot be a {kind}'s name", "Use 1 to 100 characters.")


def require_password(password: str) -> None:
    """Check that a new password has a length that the forms accept.

    Raises:
        InputError: it is too short or too long.
    """
    problem = f"The password has {counted(len(password), 'character')}"
    if len(password) < MIN_PASSWORD:
        raise InputError(problem, f"Use at least {MIN_PASSWORD}.")
    if len(password) > MAX_PASSWORD:
        raise InputError(problem, f"Use at most {MAX_PASSWORD}.")


def _user(row: UserRow) -> User:
    name, role, disabled, epoch, team = row
    return User(name=name, role=cast(Role, role), disabled=bool(disabled), epoch=epoch, team=team)
