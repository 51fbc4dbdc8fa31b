"""The cookie of somebody who has signed in: name and epoch, signed with the time of signing.

Nothing is kept per session, so a restart of the server signs nobody out. Raising the epoch of a
user, as signing out does, ends all sessions of that user.
"""

import hashlib
from typing import NamedTuple

from itsdangerous import BadData, URLSafeTimedSerializer

SESSION_SECONDS = 14 * 24 * 3600


class Session(NamedTuple):
    """What a valid cookie says."""

    name: str
    epoch: int


def make_cookie(secret: str, name: str, epoch: int) -> str:
    """A cookie that proves for `SESSION_SECONDS` from now who signed in."""
    return str(_serializer(secret).dumps([name, epoch]))


def read_cookie(secret: str, cookie: str) -> Session | None:
    """Who a cookie belongs to; None when it is forged, malformed or past its time."""
    try:
        name, epoch = _serializer(secret).loads(cookie, max_age=SESSION_SECONDS)
    except BadData:
        return None
    return Session(name, epoch)


def _serializer(secret: str) -> URLSafeTimedSerializer:
    return URLSafeTimedSerializer(
        secret,
        salt="rlhf session",
        signer_kwargs={"key_derivation": "hmac", "digest_method": hashlib.sha256},
    )
