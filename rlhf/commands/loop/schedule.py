"""When a round starts at a time: every day at a time of day, or every so many hours."""

import re
from datetime import datetime, time, timedelta

from rlhf.errors import ConfigError

EVERY = re.compile(r"every (\d{1,4}(?:\.\d{1,3})?) hours?")
TIME_OF_DAY = re.compile(r"(\d{1,2}):(\d{2})")


def next_start(start_at: str, after: datetime) -> datetime:
    """The first time after `after` at which a round starts.

    Args:
        start_at: a time of day on this machine, `02:00`, or `every 6 hours`.
        after: a time with its time zone.

    Raises:
        ConfigError: `start_at` is neither.
    """
    if (match := EVERY.fullmatch(start_at)) and float(match[1]) > 0:
        return after + timedelta(hours=float(match[1]))
    if (match := TIME_OF_DAY.fullmatch(start_at)) and int(match[1]) < 24 and int(match[2]) < 60:
        day, daily = after.astimezone().date(), time(int(match[1]), int(match[2]))
        days = (day + timedelta(days=offset) for offset in range(3))
        # Local time without a zone: each day has the offset of its own, in summer and in winter.
        starts = (datetime.combine(date, daily).astimezone() for date in days)
        return next(start for start in starts if start > after)
    raise ConfigError(
        f"--start-at is {start_at!r}",
        'Give a time of day in quotation marks, such as "02:00", or "every 6 hours".',
    )
