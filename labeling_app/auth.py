"""Passwords and cookies as pure functions: scrypt, and an HMAC over name, epoch and expiry.

A cookie is `base64(name).epoch.expiry.signature`. Nothing is kept per session, so a restart of the
server signs nobody out; raising a user's epoch signs that user out everywhere.
"""

import base64
import hashlib
import hmac
import secrets
from dataclasses import dataclass

SCRYPT_N, SCRYPT_R, SCRYPT_P = 2**15, 8, 1
SCRYPT_MEMORY = 64 * 1024 * 1024


@dataclass(frozen=True)
class Ticket:
    """What a valid cookie says."""

    name: str
    epoch: int


def hash_password(password: str) -> str:
    """Salt and hash a password with scrypt; takes about a tenth of a second and 32 MB."""
    salt = secrets.token_bytes(16)
    return f"scrypt${SCRYPT_N}${salt.hex()}${_scrypt(password, salt, SCRYPT_N).hex()}"


def check_password(password: str, stored: str) -> bool:
    """Whether a password is the one that `hash_password` stored."""
    _, n, salt, digest = stored.split("$")
    found = _scrypt(password, bytes.fromhex(salt), int(n))
    return hmac.compare_digest(found, bytes.fromhex(digest))


def _scrypt(password: str, salt: bytes, n: int) -> bytes:
    text = password.encode()
    return hashlib.scrypt(text, salt=salt, n=n, r=SCRYPT_R, p=SCRYPT_P, maxmem=SCRYPT_MEMORY)


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
