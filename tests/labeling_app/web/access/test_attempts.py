"""Attempts are counted within a window and within a bounded memory."""

import pytest

from labeling_app.web.access import attempts
from labeling_app.web.access.attempts import Attempts, network_of


def test_attempts_count_for_as_long_as_the_window_is():
    counted = Attempts(60.0)
    assert [counted.add("a", now) for now in (0.0, 10.0, 20.0)] == [0, 1, 2]
    assert counted.count("a", 59.9) == 3
    assert counted.count("a", 60.0) == 2
    assert counted.count("b", 60.0) == 0
    counted.take_back("a")
    counted.take_back("never tried")
    assert counted.count("a", 60.0) == 1
    counted.forget("a")
    assert counted.count("a", 60.0) == 0


def test_memory_is_bounded(monkeypatch):
    monkeypatch.setattr(attempts, "MAX_KEYS", 3)
    counted = Attempts(60.0)
    for now in range(1000):
        counted.add("guessed", now / 1000)
    assert counted.count("guessed", 1.0) == 200
    for name in ("b", "c", "guessed", "d"):  # one more than three: "b" was tried longest ago
        counted.add(name, 1.0)
    assert [counted.count(name, 1.0) for name in ("guessed", "b", "c", "d")] == [200, 0, 1, 1]


@pytest.mark.parametrize(
    ("address", "network"),
    [
        ("192.0.2.7", "192.0.2.7"),
        ("::ffff:192.0.2.7", "192.0.2.7"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"),
        ("2001:db8:1:2::9", "2001:db8:1:2::/64"),
        ("fe80::1%eth0", "fe80::/64"),
        ("", ""),
        ("testclient", "testclient"),
    ],
)
def test_what_counts_as_one_sender(address, network):
    assert network_of(address) == network
