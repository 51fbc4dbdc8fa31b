"""When a round starts at a time."""

import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta

import pytest

from rlhf.commands.loop.schedule import next_start
from rlhf.errors import ConfigError

BERLIN = "CET-1CEST,M3.5.0,M10.5.0/3"


@pytest.fixture(autouse=True)
def _berlin(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TZ", BERLIN)
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


@pytest.mark.parametrize(
    ("start_at", "after", "expected"),
    [
        ("02:00", "2026-01-10T00:30+00:00", "2026-01-10T01:00+00:00"),  # 01:30 in Berlin
        ("02:00", "2026-01-10T01:00+00:00", "2026-01-11T01:00+00:00"),  # not the same time again
        ("2:00", "2026-07-10T00:30+00:00", "2026-07-11T00:00+00:00"),  # in summer
        ("12:30", "2026-03-28T12:00+00:00", "2026-03-29T10:30+00:00"),  # the clocks change
        ("every 6 hours", "2026-03-28T22:00+00:00", "2026-03-29T04:00+00:00"),
        ("every 1.5 hours", "2026-01-10T00:00+00:00", "2026-01-10T01:30+00:00"),
        ("every 1 hour", "2026-01-10T00:00+00:00", "2026-01-10T01:00+00:00"),
    ],
)
def test_the_next_start(start_at: str, after: str, expected: str) -> None:
    assert next_start(start_at, datetime.fromisoformat(after)) == datetime.fromisoformat(expected)


def test_the_day_is_that_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", "EST5")
    time.tzset()
    evening = datetime.fromisoformat("2026-01-11T02:00+00:00")  # 21:00 on the tenth
    assert next_start("22:00", evening) == datetime.fromisoformat("2026-01-11T03:00+00:00")


@pytest.mark.parametrize("wrong", ["", "24:00", "12:60", "750", "every 0 hours", "every day", "2"])
def test_other_words_are_refused(wrong: str) -> None:
    with pytest.raises(ConfigError) as caught:
        next_start(wrong, datetime.now(UTC) - timedelta(1))
    assert str(caught.value) == (
        f"--start-at is {wrong!r}\n"
        '  Give a time of day in quotation marks, such as "02:00", or "every 6 hours".'
    )
