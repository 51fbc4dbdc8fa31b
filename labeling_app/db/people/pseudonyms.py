"""The names under which people stand in exports."""

import hashlib
import hmac
import re

PSEUDONYM = re.compile(r"person-[0-9a-f]{8}")


def pseudonym(secret: str, name: str) -> str:
    """A name for exports that stays the same and reveals nothing without the database."""
    digest = hmac.new(secret.encode(), f"pseudonym:{name}".encode(), hashlib.sha256)
    return f"person-{digest.hexdigest()[:8]}"


def is_pseudonym(name: str) -> bool:
    """Whether a name looks like one that `pseudonym` made."""
    return PSEUDONYM.fullmatch(name) is not None
