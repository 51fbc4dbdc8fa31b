"""Passwords, cookies and origins, with numbers worked out here again."""

import hashlib
import hmac

import pytest

from labeling_app import auth


def test_a_password_is_its_own_and_no_other():
    stored = auth.hash_password("correct horse")
    assert auth.check_password("correct horse", stored)
    assert not auth.check_password("correct hors", stored)
    assert "correct" not in stored
    assert auth.hash_password("correct horse") != stored  # a salt of its own


def test_the_hash_is_scrypt():
    _, n, salt, digest = auth.hash_password("pässword").split("$")
    expected = hashlib.scrypt(
        "pässword".encode(), salt=bytes.fromhex(salt), n=32768, r=8, p=1, maxmem=2**26
    )
    assert (n, digest) == ("32768", expected.hex())


def test_random_passwords():
    made = {auth.new_password() for _ in range(50)}
    assert len(made) == 50
    assert all(len(word) == 19 and word.count("-") == 3 for word in made)


@pytest.mark.parametrize("name", ["ann", "Zoë. O'Neil", "<b>${x}", "a" * 100])
def test_a_cookie_says_who_until_it_expires(name):
    cookie = auth.make_cookie("secret", name, 3, expires_at=1000)
    assert auth.read_cookie("secret", cookie, now=999) == auth.Ticket(name, 3)
    assert auth.read_cookie("secret", cookie, now=1001) is None
    assert auth.read_cookie("other secret", cookie, now=999) is None
    assert cookie.isascii()


def test_forged_cookies():
    cookie = auth.make_cookie("secret", "ann", 3, expires_at=1000)
    name, epoch, expiry, signature = cookie.split(".")
    forged = [
        "", ".", "...", "nonsense", "é" * 30, f"{name}.{epoch}.{expiry}.",
        f"{name}.{epoch}.9999.{signature}", f"{name}.4.{expiry}.{signature}",
        f"Ym9i.{epoch}.{expiry}.{signature}", cookie + "0",
    ]  # fmt: skip
    assert [auth.read_cookie("secret", text, now=0) for text in forged] == [None] * len(forged)
    content = f"{name}.{epoch}.{expiry}"
    assert signature == hmac.new(b"secret", content.encode(), hashlib.sha256).hexdigest()


def test_pseudonyms_stay_and_differ():
    first = auth.pseudonym("secret", "ann")
    assert first == auth.pseudonym("secret", "ann")
    assert first != auth.pseudonym("secret", "bob")
    assert first != auth.pseudonym("another database", "ann")
    assert first.startswith("person-")
    assert "ann" not in first


@pytest.mark.parametrize(
    ("method", "origin", "site", "own"),
    [
        ("GET", "https://evil.example", "cross-site", True),
        ("POST", "http://label:7860", "same-origin", True),
        ("POST", "https://labels.example", "same-origin", True),  # a proxy with its own Host
        ("POST", "http://label:7860", "", True),
        ("POST", "", "", True),  # curl
        ("POST", "https://evil.example", "", False),
        ("POST", "null", "", False),  # a sandboxed frame
        ("POST", "", "cross-site", False),
        ("POST", "http://label:7860", "cross-site", False),
        ("POST", "http://label:9999", "same-site", False),
        ("POST", "http://label:7860", "nonsense", False),
        ("DELETE", "https://evil.example", "", False),
    ],
)
def test_origins(method, origin, site, own):
    assert auth.is_own_origin(method, "label:7860", origin, site) is own
