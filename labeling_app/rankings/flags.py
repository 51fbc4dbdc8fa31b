"""The flags of rankings: which there are, who may set them, and how stored ones are read.

| flag | set by |
| --- | --- |
| `all-bad` | whoever ranks or picks: on the board, in live mode, programs |
| `NAME@RESPONSE_ID` | whoever ranks on the board; NAME is one of those on offer (`--flags`) |
| `thumbs-up`, `thumbs-down` | a thumb in live mode, or of a program |
| `edited` | an edit in live mode |
| `adjudicated` | the database itself, on a lead's decision |

Imported files may hold any of them: they come from whoever has the database, not from an annotator.
"""

import json
from collections.abc import Collection, Sequence

from labeling_app.rankings.verdicts import EDITED
from rlhf.records.thumbs import ALL_BAD, LABELS

ADJUDICATED = "adjudicated"
OF_RANKINGS = (ALL_BAD,)
RESERVED = frozenset({ADJUDICATED, EDITED, *LABELS})


def read_flags(stored: str, *, is_from_board: bool = False) -> tuple[str, ...]:
    """The flags of a stored ranking, whatever an older version has let in.

    Args:
        stored: the column, as JSON.
        is_from_board: whether the ranking was made on the board, where nobody can set a reserved
            flag, nor one of a response: one that is there was forged, and is left out.
    """
    value = json.loads(stored)
    values = value if isinstance(value, list) else [value]
    flags = [flag if isinstance(flag, str) else json.dumps(flag) for flag in values]
    if is_from_board:
        flags = [flag for flag in flags if flag.partition("@")[0] not in RESERVED]
    return tuple(flags)


def split_flags(
    flags: Collection[str], ids: Sequence[str]
) -> tuple[list[str], list[tuple[int, str]]]:
    """Flags of the whole ranking, and (position, name) of those of one response.

    Args:
        flags: as `read_flags` gives them; those of a response that is not there are left out.
        ids: of the responses, in some order.
    """
    positions = {response_id: position for position, response_id in enumerate(ids)}
    parts = [flag.partition("@") for flag in flags]
    of_all = [name for name, at, _ in parts if not at]
    return of_all, [(positions[i], name) for name, at, i in parts if at and i in positions]
