"""On the page Quality: which of two served policies people like better, by their thumbs."""

from collections.abc import Callable
from typing import Any

from labeling_app.db.answers.served import ThumbCounts, comparisons
from labeling_app.db.store import Store

SHOWN = 3
Compare = Callable[[ThumbCounts], dict[str, Any]]
"""From thumbs up and down of `policy` and `against` to rates, `difference` and `better`."""


def compared_policies(store: Store, compare: Compare | None) -> list[dict[str, Any]]:
    """The newest comparisons that have thumbs, the newest first; none without `compare`."""
    if compare is None:
        return []
    pairs = []
    for row in reversed(comparisons(store.connections)):
        if not any(map(sum, row["thumbs"].values())):
            continue
        pair = compare(row["thumbs"])
        for side in ("policy", "against"):
            pair[side]["name"] = row[side]
        pairs.append(pair)
        if len(pairs) == SHOWN:
            break
    return pairs
