"""Labels for responses that were cut off at their length limit, which is not the model's fault."""

from collections.abc import Sequence

from labeling_app.db.connection import Connections
from labeling_app.db.reports import length_limits


def cut_offs(
    connections: Connections,
    ids: Sequence[str],
    *,
    without_limit: str = "Cut off at the length limit",
) -> list[str]:
    """For every response the label of its card: "" unless it was cut off.

    Where that is unknown, as for imported responses, the label is "" too.

    Args:
        connections: the database.
        ids: of the responses.
        without_limit: the label of one that was cut off at no known number of tokens.
    """
    limits = length_limits(connections, ids)
    return [
        _words(limits[response_id], without_limit) if response_id in limits else ""
        for response_id in ids
    ]


def _words(limit: int | None, without_limit: str) -> str:
    return f"Cut off at {limit} tokens" if limit else without_limit
