"""Passwords and cookies as pure functions: scrypt, and an HMAC over name, epoch and expiry.

A cookie is `base64(name).epoch.expiry.signature`. Nothing is kept per session, so a restart of the
server signs nobody out; raising the epoch of a user, as signing out does, ends all sessions of
that user.
"""

import base64
import hashlib
import hmac
import secrets
from dataclasses import dataclass
from typing import NamedTuple


class Cost(NamedTuple):
    """What one scrypt hash costs: 128 * n * r bytes of memory, and time in proportion to p too."""

    n: int
    r: int
    p: int


# OWASP's Password Storage Cheat Sheet; 128 MB and about half a second.
COST = Cost(2**17, 8, 1)
FIRST_COST = Cost(2**15, 8, 1)  # of hashes stored without their cost: scrypt$n$salt$digest
SCRYPT_MEMORY = 256 * 1024 * 1024


@dataclass(frozen=True)
class Ticket:
    """What a valid cookie says."""

    name: str
    epoch: int


def hash_password(password: str) -> str:
    """Salt and hash a password with scrypt: `scrypt$n$r$p$salt$digest`."""
    salt = secrets.token_bytes(16)
    digest = _scrypt(password, salt, COST)
    return "$".join(["scrypt", *map(str, COST), salt.hex(), digest.hex()])


def hash_of_nobody() -> str:
    """A hash that no password has and that takes as long to check as any other."""
    return "$".join(["scrypt", *map(str, COST), "00" * 16, "00" * 64])


def check_password(password: str, stored: str) -> bool:
    """Whether a password is the one that `hash_password` stored."""
    cost, salt, digest = _parse(stored)
    found = _scrypt(password, salt, cost)
    if cost == FIRST_COST and COST.n > cost.n:
        # The rest of the usual time, or a quick answer would tell that somebody has this name.
        _scrypt(password, salt, cost._replace(p=COST.n // cost.n - 1))
    return hmac.compare_digest(found, digest)


def is_outdated(stored: str) -> bool:
    """Whether a hash was made at another cost than new ones are."""
    return _parse(stored)[0] != COST


def _parse(stored: str) -> tuple[Cost, bytes, bytes]:
    _, *numbers, salt, digest = stored.split("$")
    cost = Cost(*map(int, numbers)) if len(numbers) > 1 else FIRST_COST
    return cost, bytes.fromhex(salt), bytes.fromhex(digest)


def _scrypt(password: str, salt: bytes, cost: Cost) -> bytes:
    n, r, p = cost
    return hashlib.scrypt(password.encode(), salt=salt, n=n, r=r, p=p, maxmem=SCRYPT_MEMORY)


def new_password() -> str:
    """A password to hand to somebody: 80 random bits in four groups, for example kf3q-…."""
    letters = base64.b32encode(secrets.token_bytes(10)).decode().lower()
    return "-".join(letters[i : i + 4] for i in range(0, 16, 4))


def make_cookie(secret: str, name: str, epoch: int, expires_at: float) -> str:
    """A cookie that proves who signed in, valid until `expires_at` (seconds since 1970)."""
    content = f"{base64.urlsafe_b64encode(name.encode()).decode()}.{epoch}.{int(expires_at)}"
    return f"{content}.{_signature(secret, content)}"


def read_cookie(secret: str, cookie: str, now: float) -> Ticket | None:
    """Who a cookie belongs to; None when it is forged, malformed or past its time."""
    content, dot, signature = cookie.rpartition(".")
    if not dot or not hmac.compare_digest(signature.encode(), _signature(secret, content).encode()):
        return None
    name, epoch, expires_at = content.split(".")
    if int(expires_at) < now:
        return None
    return Ticket(base64.urlsafe_b64decode(name).decode(), int(epoch))


def _signature(secret: str, content: str) -> str:
    return hmac.new(secret.encode(), content.encode(), hashlib.sha256).hexdigest()


def pseudonym(secret: str, name: str) -> str:
    """A name for exports that stays the same and gives nothing away without the database."""
    digest = hmac.new(secret.encode(), f"pseudonym:{name}".encode(), hashlib.sha256)
    return f"person-{digest.hexdigest()[:8]}"


def is_own_origin(method: str, host: str, origin: str, fetch_site: str) -> bool:
    """Whether a request comes from the app's own pages, or changes nothing.

    Browsers send Origin or Sec-Fetch-Site with every request of another site that could change
    something; a program that sends neither cannot be tricked by a web page. Where Sec-Fetch-Site
    is sent (over https, and to localhost) it alone decides: no page can forge it, and behind a
    proxy that sends a Host of its own our own Origin would look like another site's.
    """
    if method in ("GET", "HEAD", "OPTIONS"):
        return True
    if fetch_site:
        return fetch_site in ("same-origin", "none")
    return not origin or host_of(origin) == host


def host_of(origin: str) -> str:
    """The host and port of an Origin; empty for "null"."""
    return origin.partition("://")[2]
