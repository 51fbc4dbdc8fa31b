"""Rows of Parquet files as sequences, which read them from disk when they are wanted."""

from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, lru_cache
from itertools import accumulate
from pathlib import Path
from typing import Generic, TypeVar, overload

import pyarrow as pa
import pyarrow.parquet as pq

Row = TypeVar("Row")

GROUPS_IN_MEMORY = 128  # row groups of a file, as it was written


class ParquetRows(Sequence[Row], Generic[Row]):
    """The rows of several files, one file after another; only the last ones read stay in memory.

    Args:
        files: how many rows each file has, in the order of the files.
        read: makes rows of a part of a file.
        require_valid: called once with each file, before it is first read; raises where the file
            is not what it should be.
    """

    def __init__(
        self,
        files: Mapping[Path, int],
        read: Callable[[pa.Table], Sequence[Row]],
        require_valid: Callable[[Path], None],
    ) -> None:
        self._files = list(files)
        self._ends = list(accumulate(files.values()))
        self._read = read
        self._require_valid = require_valid
        self._checked: set[Path] = set()
        self._group = lru_cache(maxsize=GROUPS_IN_MEMORY)(self._read_group)
        self._group_ends = cache(self._read_group_ends)

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    @overload
    def __getitem__(self, index: int) -> Row: ...

    @overload
    def __getitem__(self, index: slice) -> tuple[Row, ...]: ...

    def __getitem__(self, index: int | slice) -> Row | tuple[Row, ...]:
        if isinstance(index, slice):
            return tuple(self[position] for position in range(*index.indices(len(self))))
        position = range(len(self))[index]
        number = bisect_right(self._ends, position)
        begin = self._ends[number - 1] if number else 0
        group_ends = self._group_ends(number)
        group = bisect_right(group_ends, position - begin)
        # negative: counted from the group's end
        return self._group(number, group)[position - begin - group_ends[group]]

    def check(self, file: Path) -> None:
        """Check a file, unless it was checked before; raises what `require_valid` raises."""
        if file not in self._checked:
            self._require_valid(file)
            self._checked.add(file)

    def check_all(self) -> None:
        """Check every file that was not checked before."""
        for file in self._files:
            self.check(file)

    def skip_checks(self) -> None:
        """Check no file from now on: another process has checked them."""
        self._checked.update(self._files)

    def tables(self, *columns: str) -> Iterator[pa.Table]:
        """One file after another, or some columns of it."""
        for file in self._files:
            self.check(file)
            yield pq.ParquetFile(file).read(columns=list(columns) or None)

    def _read_group_ends(self, number: int) -> list[int]:
        """Where the row groups of a file end; other programs pack rows otherwise."""
        self.check(self._files[number])
        metadata = pq.ParquetFile(self._files[number]).metadata
        groups = range(metadata.num_row_groups)
        return list(accumulate(metadata.row_group(group).num_rows for group in groups))

    def _read_group(self, number: int, group: int) -> tuple[Row, ...]:
        self.check(self._files[number])
        return tuple(self._read(pq.ParquetFile(self._files[number]).read_row_group(group)))


class RowGroups(Sequence[tuple[Row, ...]], Generic[Row]):
    """Adjacent rows in groups of one size, such as all responses to a prompt.

    Args:
        rows: all there are.
        indices: of the rows that belong to a group.
        size: rows of each group.
    """

    def __init__(self, rows: ParquetRows[Row], indices: range, size: int) -> None:
        self._rows = rows
        self._starts = indices[::size]
        self._size = size

    def __len__(self) -> int:
        return len(self._starts)

    @overload
    def __getitem__(self, index: int) -> tuple[Row, ...]: ...

    @overload
    def __getitem__(self, index: slice) -> list[tuple[Row, ...]]: ...

    def __getitem__(self, index: int | slice) -> tuple[Row, ...] | list[tuple[Row, ...]]:
        if isinstance(index, slice):
            return [self[position] for position in range(*index.indices(len(self)))]
        first = self._starts[index]
        return self._rows[first : first + self._size]
