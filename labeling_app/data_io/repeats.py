"""Judgments that unnamed people state several times in one file: each counts."""

from collections import Counter
from dataclasses import replace

from labeling_app.data_io.formats import Entry
from rlhf.records.schema import content_id


class Repeats:
    """Numbers the repeated judgments of one source, so that none is taken for another.

    A judgment's id is made from what it says. Of one person, the same judgment twice is one; but
    lines that name nobody are taken for different people's votes. The first keeps the usual id and
    the others get one with their number, so that a file that is imported again changes nothing.
    """

    def __init__(self) -> None:
        self._seen: set[int] = set()
        self._repeated: Counter[int] = Counter()

    def numbered(self, entry: Entry) -> Entry:
        """The entry with ids of its own for judgments that earlier entries have stated."""
        if not entry.is_unnamed:
            return entry
        rankings = tuple(
            replace(ranking, id=self._own_id(ranking.id)) for ranking in entry.rankings
        )
        return replace(entry, rankings=rankings)

    def _own_id(self, id_: str) -> str:
        key = int(id_, 16)  # a third of the memory of its text
        if key not in self._seen:
            self._seen.add(key)
            return id_
        self._repeated[key] += 1
        return content_id(id_, "repeat", self._repeated[key])
