"""Passwords, made at random and stored as scrypt hashes."""

import base64
import hashlib
import hmac
import secrets
from typing import NamedTuple


class Cost(NamedTuple):
    """The cost of a scrypt hash: 128 * n * r bytes of memory, and time in proportion to p too."""

    n: int
    r: int
    p: int


# OWASP's Password Storage Cheat Sheet; 128 MB and about half a second.
COST = Cost(2**17, 8, 1)
FIRST_COST = Cost(2**15, 8, 1)  # of hashes stored without their cost: scrypt$n$salt$digest
SCRYPT_MEMORY = 256 * 1024 * 1024


def hash_password(password: str) -> str:
    """Salt and hash a password with scrypt: `scrypt$n$r$p$salt$digest`."""
    salt = secrets.token_bytes(16)
    digest = _scrypt(password, salt, COST)
    return "$".join(["scrypt", *map(str, COST), salt.hex(), digest.hex()])


def dummy_hash() -> str:
    """A hash that no password has and that takes as long to check as any other."""
    return "$".join(["scrypt", *map(str, COST), "00" * 16, "00" * 64])


def check_password(password: str, stored: str) -> bool:
    """Whether a password is the one that `hash_password` stored."""
    cost, salt, digest = _parse(stored)
    password_digest = _scrypt(password, salt, cost)
    if cost == FIRST_COST and COST.n > cost.n:
        # Spend the rest of the usual time: a quick answer would reveal that the name exists.
        _scrypt(password, salt, cost._replace(p=COST.n // cost.n - 1))
    return hmac.compare_digest(password_digest, digest)


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
