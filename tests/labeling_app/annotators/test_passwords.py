"""Passwords, with hashes worked out here again."""

import hashlib
import subprocess
import sys
from typing import Any

from labeling_app.annotators import passwords as auth


def test_a_password_is_its_own_and_no_other():
    stored = auth.hash_password("correct horse")
    assert auth.check_password("correct horse", stored)
    assert not auth.check_password("correct hors", stored)
    assert "correct" not in stored
    assert auth.hash_password("correct horse") != stored  # a salt of its own


OWASP = auth.Cost(2**17, 8, 1)
FROM_BEFORE = (  # made when the cost was not stored: n = 2**15, r = 8, p = 1
    "scrypt$32768$" + "ab" * 16 + "$"
    + hashlib.scrypt(b"from before", salt=b"\xab" * 16, n=2**15, r=8, p=1, maxmem=2**26).hex()
)  # fmt: skip


def test_the_hash_is_scrypt_at_the_cost_that_owasp_recommends(monkeypatch):
    monkeypatch.setattr(auth, "COST", OWASP)
    stored = auth.hash_password("pässword")
    _, n, r, p, salt, digest = stored.split("$")
    expected = hashlib.scrypt(
        "pässword".encode(), salt=bytes.fromhex(salt), n=131072, r=8, p=1, maxmem=2**28
    )
    assert (n, r, p, digest) == ("131072", "8", "1", expected.hex())
    assert not auth.is_outdated(stored)


def test_that_cost_is_the_one_in_use():
    code = "from labeling_app.annotators import passwords as auth; print(*auth.COST)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.split() == ["131072", "8", "1"]


def test_hashes_from_before_are_still_accepted():
    assert auth.check_password("from before", FROM_BEFORE)
    assert not auth.check_password("From before", FROM_BEFORE)
    assert auth.is_outdated(FROM_BEFORE)


def test_nobody_has_a_password_and_checking_it_costs_the_same(monkeypatch):
    made: list[tuple[int, ...]] = []
    real = hashlib.scrypt

    def noting(password: bytes, **cost: Any) -> bytes:
        made.append((cost["n"], cost["r"], cost["p"]))
        return real(password, **{**cost, "n": 2, "p": 1})

    monkeypatch.setattr(auth, "COST", OWASP)
    monkeypatch.setattr(hashlib, "scrypt", noting)
    assert not auth.check_password("nobody", auth.dummy_hash())
    assert made == [OWASP]
    made.clear()
    auth.check_password("from before", FROM_BEFORE)
    # n * r * p is what takes the time: 2**15 * 8 * (1 + 3) = 2**17 * 8.
    assert sum(n * r * p for n, r, p in made) == 2**17 * 8


def test_random_passwords():
    made = {auth.new_password() for _ in range(50)}
    assert len(made) == 50
    assert all(len(word) == 19 and word.count("-") == 3 for word in made)
