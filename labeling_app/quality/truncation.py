"""Which responses end because their length limit cut them off: people must not blame the model."""

from collections.abc import Sequence

from labeling_app.db.connection import Connections
from labeling_app.db.reports import length_limits


def cut_offs(connections: Connections, ids: Sequence[str]) -> list[str]:
    """For every response what its card says of its end: nothing where it ended by itself.

    Nothing either where nobody knows, as of imported responses.
    """
    limits = length_limits(connections, ids)
    return [_words(limits[one]) if one in limits else "" for one in ids]


def _words(limit: int | None) -> str:
    return f"Cut off at {limit} tokens" if limit else "Cut off at the length limit"
