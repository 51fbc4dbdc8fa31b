"""From an export of rankings to the pairs that DPO trains on."""

from collections import Counter
from pathlib import Path
from typing import Any

from rlhf.errors import InputError
from rlhf.records.pairs import preferences, trl_preference
from rlhf.records.ranked import SPLITS, read_manifest, read_ranked

Rows = dict[str, list[dict[str, Any]]]
PairCounts = dict[str, dict[str, int]]


def read_pairs(folder: Path) -> tuple[Rows, PairCounts, str]:
    """Train and test rows with `prompt`, `chosen` and `rejected` as messages.

    Also returns, for each split, how many `pairs` of how many `prompts` there are, how many prompts
    have `no_pairs` (ties or thumbs alone), and in how many pairs the chosen or the rejected answer
    is `unfinished` (cut at the length limit); and the content hash of the export.

    Raises:
        InputError: not a ranked export, or its training prompts imply no pair.
    """
    rows: Rows = {split: [] for split in SPLITS}
    counts: dict[str, Counter[str]] = {split: Counter() for split in SPLITS}
    for record in read_ranked(folder):
        split = record.prompt.split
        pairs = list(preferences(record))
        rows[split] += [trl_preference(record, pair) for pair in pairs]
        counts[split].update(
            pairs=len(pairs),
            prompts=bool(pairs),
            no_pairs=not pairs,
            unfinished=sum(
                False in (pair.chosen.finished, pair.rejected.finished) for pair in pairs
            ),
        )
    if not rows["train"]:
        raise InputError(
            f"The training prompts of {folder} imply no pair: they hold ties or thumbs only",
            "Rank more: rlhf label --db DB, then rlhf export --db DB --out DIR",
        )
    content_hash = str(read_manifest(folder)["content_hash"])
    return rows, {split: dict(of) for split, of in counts.items()}, content_hash
