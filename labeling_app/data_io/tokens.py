"""Tokens with which other programs give feedback: 160 random bits, kept as a hash."""

import hashlib
import secrets

from labeling_app.db.people.users import delete_token, find_user, owner_of_token, put_token
from labeling_app.db.store import Store, ensure_annotator
from rlhf.errors import InputError


def make_token(store: Store, name: str) -> str:
    """A new token for a program; its earlier token becomes invalid.

    Raises:
        InputError: the name is a person's, a judge's or a signal's, or cannot be a name.
    """
    if not name.strip() or name != name.strip() or len(name) > 100:
        raise InputError(f"{name!r} cannot be a program's name", "Use 1 to 100 characters.")
    token = secrets.token_urlsafe(20)
    with store.connections.write() as db:
        if find_user(store.connections, name) is not None:
            raise InputError(
                f"{name!r} is a person who signs in", "Give the program a name of its own."
            )
        ensure_annotator(db, name, "human")
        put_token(db, name, _hash(token))
    return token


def revoke_token(store: Store, name: str) -> None:
    """Withdraw a program's token; its feedback stays.

    Raises:
        InputError: no program of that name has a token.
    """
    if not delete_token(store.connections, name):
        raise InputError(
            f"No program {name!r} has a token", "See which have: rlhf users list --db DB"
        )


def owner(store: Store, token: str) -> str | None:
    """The program that a token belongs to."""
    return owner_of_token(store.connections, _hash(token))


def _hash(token: str) -> str:
    return hashlib.sha256(token.encode()).hexdigest()
