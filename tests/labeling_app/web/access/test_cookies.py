"""The cookie says who signed in, for two weeks, to whoever has the secret."""

import base64
import hashlib
import hmac

import pytest
from itsdangerous import TimestampSigner

from labeling_app.web.access.cookies import SESSION_SECONDS, Session, make_cookie, read_cookie


def set_clock(monkeypatch: pytest.MonkeyPatch, seconds: int) -> None:
    monkeypatch.setattr(TimestampSigner, "get_timestamp", lambda signer: seconds)


@pytest.mark.parametrize("name", ["ann", "Zoë. O'Neil", "<b>${x}", "a" * 100])
def test_a_cookie_says_who_until_it_expires(name, monkeypatch):
    set_clock(monkeypatch, 1000)
    cookie = make_cookie("secret", name, 3)
    set_clock(monkeypatch, 1000 + SESSION_SECONDS)
    assert read_cookie("secret", cookie) == Session(name, 3)
    assert read_cookie("other secret", cookie) is None
    set_clock(monkeypatch, 1001 + SESSION_SECONDS)
    assert read_cookie("secret", cookie) is None
    assert cookie.isascii()


def encode(content: bytes) -> str:
    return base64.urlsafe_b64encode(content).decode().rstrip("=")


def sign(secret: bytes, content: str) -> str:
    """HMAC-SHA256 under a key derived from the secret, worked out without the library."""
    key = hmac.new(secret, b"rlhf session", hashlib.sha256).digest()
    return encode(hmac.new(key, content.encode(), hashlib.sha256).digest())


def test_forged_cookies(monkeypatch):
    set_clock(monkeypatch, 1000)
    cookie = make_cookie("secret", "ann", 3)
    content, time, signature = cookie.split(".")
    assert (content, time) == (encode(b'["ann",3]'), encode((1000).to_bytes(2, "big")))
    assert signature == sign(b"secret", f"{content}.{time}")
    later = encode((2000).to_bytes(2, "big"))
    other_epoch, other_name = encode(b'["ann",4]'), encode(b'["bob",3]')
    forged = [
        "", ".", "...", "nonsense", "é" * 30, f"{content}.{time}.", f"{content}.{signature}",
        f"{content}.{later}.{signature}", f"{other_epoch}.{time}.{signature}",
        f"{other_name}.{time}.{signature}", cookie + "0",
        "YW5u.0.9999999999." + hmac.new(b"secret", b"YW5u.0.9999999999", "sha256").hexdigest(),
    ]  # fmt: skip
    assert [read_cookie("secret", text) for text in forged] == [None] * len(forged)
