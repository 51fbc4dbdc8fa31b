"""What the label database says of a round, and waiting until people have ranked enough for it."""

import time
from pathlib import Path
from typing import Any

from labeling_app.db.rankings import newest_ranking, num_rankings_since
from labeling_app.db.rounds import rounds
from labeling_app.db.store import Store
from rlhf.commands.loop.children import say
from rlhf.commands.wording import counted, next_command
from rlhf.run.watchdog import beat

POLL_SECONDS = 2.0
SECONDS_BETWEEN_LINES = 60.0


def count_new(db: Path, after: int, export: Any) -> dict[str, int]:
    """The newest ranking of a database, how many are new, and how many tasks are open.

    Args:
        db: the label database.
        after: the newest ranking at the last export; 0 counts all.
        export: settings of `rlhf export`: whose rankings count.
    """
    with Store(db, read_only=True) as store:
        number = newest_ranking(store.connections)
        new = num_rankings_since(
            store.connections, after, kinds=export.kind, annotators=export.annotator
        )
        return {"newest": number, "new": new, "open": store.counts()["open"]}


def has_round(db: Path, policy: Path) -> bool:
    """Whether samples of a policy were queued: `rlhf round` stores them all at once."""
    with Store(db, read_only=True) as store:
        return any(
            one["policy"]["path"] == str(policy) for one in rounds(store.connections).values()
        )


def wait_for_rankings(db: Path, wanted: int, after: int, export: Any, number: int) -> None:
    """Return when there are `wanted` new rankings.

    Prints how many there are and how many are missing: at once, when there are enough, and in
    between when the number has changed, at most once a minute.

    Args:
        db: as in `count_new`.
        wanted: how many rankings to wait for.
        after: as in `count_new`.
        export: as in `count_new`.
        number: of the round.
    """
    said, said_at = -1, 0.0
    while True:
        count = count_new(db, after, export)
        there = count["new"]
        beat(f"waiting for rankings: {there:,} of {wanted:,}", number)
        if said < 0 and there < wanted:
            say(
                f"\nRound {number} trains when there are {counted(wanted, 'new ranking')}.\n"
                f"{next_command('label', db=db).replace('Next', 'People rank with')}"
            )
        due = there != said and time.monotonic() - said_at >= SECONDS_BETWEEN_LINES
        if said < 0 or there >= wanted or due:
            say(_progress(there, wanted, count["open"]))
            said, said_at = there, time.monotonic()
        if there >= wanted:
            return
        time.sleep(POLL_SECONDS)


def _progress(there: int, wanted: int, open_tasks: int) -> str:
    missing = max(0, wanted - there)
    line = f"{there:,} of {counted(wanted, 'new ranking')}, {missing:,} missing; "
    line += f"{counted(open_tasks, 'task')} open."
    if missing and not open_tasks:
        line += " Import more prompts, or start the loop again with a smaller --new-rankings."
    return line
