"""Records in flat columns: what a store keeps in memory of each page on disk."""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from tiered_kv.keys import KEY_BYTES, PageKey
from tiered_kv.storage.disk.direct_io import BLOCK_BYTES
from tiered_kv.storage.disk.extent import CHECKSUM_BYTES, HAS_PARENT, Record, rows_from

Column = np.ndarray[Any, Any]


def column(rows: int, dtype: str) -> Column:
    """Zeros in a mapping of their own: rows never written take no memory, all goes back at once."""
    kind = np.dtype(dtype)
    n_bytes = max(1, rows * kind.itemsize)
    mapping = mmap.mmap(-1, n_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return np.frombuffer(mapping, kind, rows)


@dataclass(slots=True)
class Columns:
    """Records by row, 97 bytes each, none of which is an object.

    Codec and stored bytes are not kept: every record of a store has the same (`is_possible`). Keys
    are items of 32 bytes (`V32`): as objects that others share they would take 16 bytes a page, and
    a Python loop over whatever is opened, written and freed.

    Attributes:
        parent: key of the page before, where `hangs`.
        hangs: whether there is one.
        block: offset in the segment, in blocks.
        count: rows up to the highest that was ever set.
    """

    key: Column
    parent: Column
    hangs: Column
    checksum: Column
    sequence: Column
    segment: Column
    block: Column
    page_bytes: int
    count: int = 0

    @classmethod
    def empty(cls, rows: int, page_bytes: int) -> Columns:
        """Room for `rows` records."""
        return cls(
            column(rows, f"V{KEY_BYTES}"),
            column(rows, f"V{KEY_BYTES}"),
            column(rows, "?"),
            column(rows, f"V{CHECKSUM_BYTES}"),
            column(rows, "u8"),
            column(rows, "i4"),
            column(rows, "u4"),
            page_bytes,
        )

    @classmethod
    def of(cls, records: Sequence[Record], rows: int, page_bytes: int) -> Columns:
        """Records in the order given, with room for `rows`."""
        columns = cls.empty(rows, page_bytes)
        columns._note(slice(0, len(records)), rows_from(records))
        columns.segment[: len(records)] = [record.segment for record in records]
        columns.count = len(records)
        return columns

    def __len__(self) -> int:
        return self.count

    def set_all(self, at: Column, records: Column, segment: int) -> None:
        """Note records (`RECORD`) of one segment, each in the row that `at` says."""
        self._note(at, records)
        self.segment[at] = segment
        self.count = max(self.count, int(at.max()) + 1)

    def append(self, listed: Column) -> None:
        """Note entries with their keys (`LISTED`) in the rows that follow."""
        here = slice(self.count, self.count + len(listed))
        self._note(here, listed)
        self.segment[here] = listed["segment"]
        self.count = here.stop

    def _note(self, at: Column | slice, rows: Column) -> None:
        """What a record in a header and an entry both say, and call the same."""
        items = rows.view(_with_items(rows.dtype))
        self.key[at] = items["key"]
        self.parent[at] = items["parent"]
        self.checksum[at] = items["checksum"]
        self.hangs[at] = (rows["flags"] & HAS_PARENT) != 0
        self.sequence[at] = rows["sequence"]
        self.block[at] = rows["offset"] // BLOCK_BYTES

    def place(self, row: int, record: Record) -> None:
        """Note where a record lies."""
        assert record.offset % BLOCK_BYTES == 0 and record.stored_bytes == self.page_bytes
        self.segment[row] = record.segment
        self.block[row] = record.offset // BLOCK_BYTES

    def keys(self, rows: Column | slice) -> list[PageKey]:
        """The keys of records that are there."""
        keys: list[PageKey] = self.key[rows].tolist()  # of bytes; 50 ns a key
        return keys

    def parents(self, rows: Column | slice) -> list[PageKey | None]:
        """Their parents' keys, None where a page has none."""
        found: list[PageKey | None] = self.parent[rows].tolist()
        for at in np.flatnonzero(~self.hangs[rows]).tolist():
            found[at] = None
        return found

    def record(self, row: int) -> Record:
        """A record that is there."""
        return Record(
            PageKey(self.key[row].tobytes()),
            PageKey(self.parent[row].tobytes()) if self.hangs[row] else None,
            self.checksum[row].tobytes(),
            int(self.sequence[row]),
            int(self.segment[row]),
            int(self.block[row]) * BLOCK_BYTES,
            self.page_bytes,
        )


@cache
def _with_items(kind: np.dtype[Any]) -> np.dtype[Any]:
    """Rows of a kind, with keys and checksums as items: copied in half the time of 32 of uint8."""
    fields = {"key": KEY_BYTES, "parent": KEY_BYTES, "checksum": CHECKSUM_BYTES}
    places: Any = kind.fields
    return np.dtype(
        {
            "names": list(fields),
            "formats": [f"V{n_bytes}" for n_bytes in fields.values()],
            "offsets": [places[name][1] for name in fields],
            "itemsize": kind.itemsize,
        }
    )
