"""Links that let a person set a password: each works once, for a week.

The token in a link is 160 random bits. The database holds its hash, so whoever reads a backup
cannot use the links that are open.
"""

import hashlib
import secrets
import time
from dataclasses import dataclass
from typing import cast

from labeling_app.annotators.users import Role, Users
from labeling_app.db.people.invitations import (
    InvitationRow,
    delete_invitations,
    find_invitation,
    open_invitations,
    put_invitation,
)
from rlhf.errors import InputError

VALID_SECONDS = 7 * 24 * 3600.0


@dataclass(frozen=True, kw_only=True)
class Invitation:
    """Who may set a password with a link, and until when."""

    name: str
    role: Role
    is_reset: bool
    expires_at: float


class Invitations:
    """The open links of one database.

    Args:
        users: who may sign in already.
    """

    def __init__(self, users: Users) -> None:
        self.users = users
        self.connections = users.connections

    def invite(self, name: str, role: Role) -> str:
        """A link's token for somebody new. An earlier link for the name stops working.

        Raises:
            InputError: the name is taken, too long, or not a person's.
        """
        with self.connections.write():
            self.users.require_free(name)
            return self._put(name, role, is_reset=False)

    def invite_to_reset(self, name: str) -> str:
        """A link's token for a user's new password. Until it is used, the old one stays valid.

        Raises:
            InputError: no such user.
        """
        with self.connections.write():
            return self._put(name, self.users.require(name).role, is_reset=True)

    def _put(self, name: str, role: Role, *, is_reset: bool) -> str:
        token = secrets.token_urlsafe(20)
        row = (name, role, int(is_reset), time.time() + VALID_SECONDS)
        with self.connections.write() as db:
            put_invitation(db, _hash(token), row)
        return token

    def find(self, token: str) -> Invitation:
        """Whose link this is.

        Raises:
            InputError: it was used, withdrawn or replaced, has expired, or never was one.
        """
        row = find_invitation(self.connections.db, _hash(token), time.time())
        if row is None:
            raise InputError(
                "This link is not valid: it was used, replaced or is older than seven days",
                "If you have set your password with it, sign in. If not, ask your lead for a new "
                "link.",
            )
        return _invitation(row)

    def accept(self, token: str, password: str) -> Invitation:
        """Set the password of whoever was invited; the link is used up.

        Raises:
            InputError: the link is not valid, the name was taken meanwhile, or the password is too
            short; after that, the link still works.
        """
        self.find(token)  # before the hash of a password, which is slow, is computed for anybody
        hashed = self.users.hash(password)
        with self.connections.write():  # what the link allows is done, and the link removed, once
            invitation = self.find(token)
            if invitation.is_reset:
                self.users.set_hash(invitation.name, hashed)
            else:
                self.users.add_hashed(invitation.name, invitation.role, hashed)
        return invitation

    def withdraw(self, name: str) -> None:
        """Let a person's link no longer work.

        Raises:
            InputError: there is none.
        """
        with self.connections.write() as db:
            if not delete_invitations(db, name):
                raise InputError(f"There is no open link for {name!r}", "Reload the page.")

    def all(self) -> list[Invitation]:
        """The links that still work, by name."""
        return [_invitation(row) for row in open_invitations(self.connections, time.time())]


def _hash(token: str) -> str:
    return hashlib.sha256(token.encode(errors="replace")).hexdigest()


def _invitation(row: InvitationRow) -> Invitation:
    name, role, is_reset, expires_at = row
    return Invitation(
        name=name, role=cast(Role, role), is_reset=bool(is_reset), expires_at=expires_at
    )
