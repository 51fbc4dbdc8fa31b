"""Groups in an Arrow file that is mapped into memory: one row a group, read when it is wanted.

A process holds a few numbers of every group, by which prompts are chosen and counted; token ids and
judgments stay in the file, of which the processes of a machine share one copy in the page cache.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from hashlib import blake2b
from itertools import islice
from pathlib import Path
from typing import Any, final, overload

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from jaxtyping import Int
from numpy import ndarray

from reward.data.groups import Group, Pointwise, TieredRanking
from rlhf.records.fingerprints import text_hash

ROWS_AT_ONCE = 1024  # of a batch of the file
Numbers = Int[ndarray, " N"]

IDS = pa.list_(pa.int32())
NUMBERS: dict[str, Callable[[Group], int]] = {  # columns by which groups are chosen and counted
    "order": lambda group: int(text_hash(group.prompt_id), 16),
    "pairs": lambda group: len(group.pairs),
    "preferences": lambda group: group.num_preferences,
    "labels": lambda group: group.num_labels,
    "rankings": lambda group: len(group.rankings),
    "scored": lambda group: sum(bool(ranking.scores) for ranking in group.rankings),
    "pointwise": lambda group: len(group.pointwise),
}
SCHEMA = pa.schema(
    {
        "use": pa.string(),
        "prompt_id": pa.string(),
        "prompt": IDS,
        "same_prompt": pa.int64(),  # the number of the first row with this prompt
        "responses": pa.list_(IDS),
        "ranked": pa.list_(
            pa.struct(
                {
                    "tiers": pa.list_(IDS),
                    "annotator": pa.string(),
                    "weight": pa.float64(),
                    "scores": pa.list_(pa.float64()),
                    "strengths": IDS,
                }
            )
        ),
        "judged": pa.list_(
            pa.struct(
                {
                    "response": pa.int32(),
                    "is_good": pa.bool_(),
                    "annotator": pa.string(),
                    "kind": pa.string(),
                    "weight": pa.float64(),
                }
            )
        ),
        **dict.fromkeys(NUMBERS, pa.uint64()),
    }
)


@final
class StoredGroups(Sequence[Group]):
    """Some rows of a file of groups, in any order.

    Args:
        file: where all groups are.
        rows: numbers of those in this sequence.
        scale: mean and deviation by which scores are standardized; by default they are as stored.
    """

    def __init__(
        self, file: "GroupFile", rows: Numbers, scale: tuple[float, float] | None = None
    ) -> None:
        self._file = file
        self.rows = rows
        self._scale = scale

    def __len__(self) -> int:
        return len(self.rows)

    @overload
    def __getitem__(self, index: int) -> Group: ...

    @overload
    def __getitem__(self, index: slice) -> "StoredGroups": ...

    def __getitem__(self, index: int | slice) -> "Group | StoredGroups":
        if isinstance(index, slice):
            return self.select(np.arange(len(self))[index])
        return self._file.read(int(self.rows[index]), self._scale)

    def __iter__(self) -> Iterator[Group]:
        return self._file.read_all(self.rows, self._scale)

    def __eq__(self, other: object) -> bool:
        """Whether the other holds the same groups in the same order."""
        return isinstance(other, Sequence) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]  # as of a list

    def select(self, indices: Numbers) -> "StoredGroups":
        """The groups at some indices of this sequence."""
        return StoredGroups(self._file, self.rows[indices], self._scale)

    def numbers(self, column: str) -> Numbers:
        """One of NUMBERS, or `same_prompt`, of every group."""
        numbers: Numbers = self._file.numbers(column)[self.rows]
        return numbers

    def with_pointwise(self) -> "StoredGroups":
        """The groups with pointwise judgments."""
        return self.select(np.flatnonzero(self.numbers("pointwise")))

    def take_part(self, number: int) -> "StoredGroups":
        """So many groups, chosen by a hash of the prompt id: a larger part includes a smaller."""
        return self.select(self.indices_of_part(number))

    def indices_of_part(self, number: int) -> Numbers:
        """The indices of the groups that `take_part` takes, in ascending order."""
        return np.sort(np.argsort(self.numbers("order"), kind="stable")[:number])

    def with_scale(self, mean: float, deviation: float) -> "StoredGroups":
        """The same groups with standardized scores."""
        return StoredGroups(self._file, self.rows, (mean, deviation))

    def scores(self) -> ndarray:
        """Every stored score of every ranking, in order."""
        return self._file.scores(self.rows)


@final
class GroupFile:
    """A file that `write_groups` wrote, or a table of groups in memory."""

    def __init__(self, batches: Sequence[pa.RecordBatch]) -> None:
        self._batches = batches
        self._numbers: dict[str, Numbers] = {}

    @classmethod
    def open(cls, path: Path) -> "GroupFile":
        """Map a file into memory.

        Raises:
            OSError: it cannot be read.
            pa.ArrowInvalid: it is not an Arrow file of groups.
        """
        reader = pa.ipc.open_file(pa.memory_map(str(path)))
        if reader.schema != SCHEMA:
            raise pa.ArrowInvalid(f"{path} has other columns")
        return cls([reader.get_batch(number) for number in range(reader.num_record_batches)])

    def validate(self) -> None:
        """Read everything once, and refuse what Arrow could not read safely.

        Raises:
            pa.ArrowInvalid: a column is not laid out as it should be.
        """
        for batch in self._batches:
            batch.validate(full=True)

    def of_use(self, use: str) -> StoredGroups:
        """All groups that `write_groups` was given with this use, in order."""
        uses = [np.asarray(pc.equal(batch.column("use"), use)) for batch in self._batches]
        return StoredGroups(self, np.flatnonzero(np.concatenate(uses or [np.zeros(0, bool)])))

    def numbers(self, column: str) -> Numbers:
        """A column of numbers of all rows."""
        if column not in self._numbers:
            parts = [batch.column(column).to_numpy() for batch in self._batches]
            self._numbers[column] = np.concatenate(parts or [np.zeros(0, np.int64)])
        return self._numbers[column]

    def read(self, row: int, scale: tuple[float, float] | None) -> Group:
        """The group of a row."""
        batch, offset = divmod(row, ROWS_AT_ONCE)
        (record,) = self._batches[batch].slice(offset, 1).to_pylist()
        return _to_group(record, scale)

    def read_all(self, rows: Numbers, scale: tuple[float, float] | None) -> Iterator[Group]:
        """The groups of some rows; of neighboring ones, a batch of the file is read at a time."""
        for some in np.split(rows, np.flatnonzero(np.diff(rows // ROWS_AT_ONCE)) + 1):
            if len(some):
                batch = self._batches[int(some[0]) // ROWS_AT_ONCE]
                part = batch.take(pa.array(some % ROWS_AT_ONCE))
                yield from (_to_group(row, scale) for row in part.to_pylist())

    def scores(self, rows: Numbers) -> ndarray:
        """Every score of every ranking of some rows, in order."""
        column = pa.chunked_array([batch.column("ranked") for batch in self._batches])
        rankings = pc.list_flatten(column.take(pa.array(rows)))
        return np.asarray(pc.list_flatten(pc.struct_field(rankings, "scores")), dtype=np.float64)


def write_groups(path: Path, groups: Iterable[tuple[str, Group]]) -> None:
    """Write groups, each with its use."""
    with pa.OSFile(str(path), "wb") as stream, pa.ipc.new_file(stream, SCHEMA) as writer:
        for batch in to_batches(groups):
            writer.write_batch(batch)


def to_batches(groups: Iterable[tuple[str, Group]]) -> Iterator[pa.RecordBatch]:
    """Groups, each with its use, as batches of ROWS_AT_ONCE rows."""
    first: dict[bytes, int] = {}
    rest = enumerate(groups)
    while some := list(islice(rest, ROWS_AT_ONCE)):
        rows = []
        for number, (use, group) in some:
            ids = np.array(group.prompt, dtype=np.int32).tobytes()
            key = blake2b(ids, digest_size=16).digest()
            rows.append(_to_row(use, group, first.setdefault(key, number)))
        yield pa.RecordBatch.from_pylist(rows, SCHEMA)


def _to_row(use: str, group: Group, same_prompt: int) -> dict[str, Any]:
    return {
        "use": use,
        "prompt_id": group.prompt_id,
        "prompt": group.prompt,
        "same_prompt": same_prompt,
        "responses": group.responses,
        "ranked": [vars(ranking) for ranking in group.rankings],
        "judged": [vars(judgment) for judgment in group.pointwise],
        **{name: number(group) for name, number in NUMBERS.items()},
    }


def _to_group(row: dict[str, Any], scale: tuple[float, float] | None) -> Group:
    rankings = tuple(_to_ranking(ranking, scale) for ranking in row["ranked"])
    return Group(
        prompt_id=row["prompt_id"],
        prompt=tuple(row["prompt"]),
        responses=tuple(map(tuple, row["responses"])),
        pairs=tuple(pair for ranking in rankings for pair in ranking.to_pairs()),
        rankings=rankings,
        pointwise=tuple(Pointwise(**judgment) for judgment in row["judged"]),
    )


def _to_ranking(row: dict[str, Any], scale: tuple[float, float] | None) -> TieredRanking:
    mean, deviation = scale or (0.0, 1.0)
    return TieredRanking(
        tiers=tuple(map(tuple, row["tiers"])),
        annotator=row["annotator"],
        weight=row["weight"],
        scores=tuple((score - mean) / deviation for score in row["scores"]),
        strengths=tuple(row["strengths"]),
    )
