"""All entries of an LMDB database at once, out of its pages, as rows of bytes.

A cursor makes three objects of every entry. Where all keys and all values have one length each, the
entries of a page are rows of an array: a million are copied in 0.1 s, where a cursor goes over them
in 0.25 to 0.4 and keeps none (Xeon 2.8 GHz, LMDB 0.9.36, 2026-11).

What is read is the file of LMDB 0.9 on a 64-bit little-endian machine (data version 1): two meta
pages; branch pages, which name the pages below them; leaf pages, which entries (*nodes*) fill from
the end. Nothing in it is trusted: what does not fit is an error.
"""

from __future__ import annotations

import mmap
import os
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

Rows = np.ndarray[Any, Any]

_MAGIC, _DATA_VERSION = 0xBEEFC0DE, 1
# own number, unused, kind, where the pointers to its nodes end, where the nodes begin
_HEAD = struct.Struct("<QHHHH")
# magic, version, database of free pages, database of databases, last page, transaction
_META = struct.Struct("<II16x48s48sQQ")
_DATABASE = struct.Struct("<IHHQQQQQ")  # the fields of `_Database`
_NODE = struct.Struct("<HHHH")  # low and high half of the value's length, flags, the key's length
_BRANCH, _LEAF, _DIRTY = 0x01, 0x02, 0x10
_IS_DATABASE = 0x02
_POPULATE = getattr(mmap, "MAP_POPULATE", 0)  # 8 ms a 200 MB; without it 90, a fault at a time
_PAGE_BYTES = [1 << power for power in range(9, 16)]
_NOTHING = 0xFFFFFFFFFFFFFFFF
_PAGES_AT_ONCE = 256


class BrokenLeavesError(ValueError):
    """The file is an LMDB that cannot be right, or whose entries have other lengths."""


class _Database(NamedTuple):
    page_bytes: int
    flags: int
    depth: int
    branches: int
    leaves: int
    overflow: int
    entries: int
    root: int


def read_rows(path: Path, name: bytes, key_bytes: int, value_bytes: int) -> Iterator[Rows] | None:
    """Every entry of a named database, in key order, as LMDB committed it last.

    Nobody may write to it meanwhile. The file's pages are mapped until the last rows are taken.

    Args:
        path: the file, `data.mdb`.
        name: of the database, one of a few.
        key_bytes: the length of every key.
        value_bytes: the length of every value.

    Returns:
        Arrays [entries, key_bytes + value_bytes] of uint8, a few thousand entries each, the
        caller's own; None if the file is of another LMDB or machine: use a cursor.

    Raises:
        BrokenLeavesError: here, or when rows are taken.
        OSError: the file cannot be read.
    """
    if sys.byteorder != "little" or sys.maxsize < 1 << 32:
        return None
    with path.open("rb") as file:
        found = _newest_meta(file.fileno())
        if found is None:
            return None
        databases, last = found
        n_bytes = (last + 1) * databases.page_bytes
        if n_bytes > os.fstat(file.fileno()).st_size:
            raise BrokenLeavesError(f"it has {last + 1} pages, and is shorter than they are")
        flags = mmap.MAP_SHARED | _POPULATE
        mapping = mmap.mmap(file.fileno(), n_bytes, flags, mmap.PROT_READ)
    tree = _Tree(mapping, databases.page_bytes)
    return tree.rows(tree.database(databases, name), key_bytes, value_bytes)


def _newest_meta(fd: int) -> tuple[_Database, int] | None:
    """The database of databases and the last page, of the transaction that was committed last."""
    metas = []
    page_bytes = 0
    for number in range(2):
        head = os.pread(fd, _HEAD.size + _META.size, number * page_bytes)
        if len(head) < _HEAD.size + _META.size:
            return None
        magic, version, free, databases, last, transaction = _META.unpack_from(head, _HEAD.size)
        page_bytes = _DATABASE.unpack(free)[0]
        if (magic, version) != (_MAGIC, _DATA_VERSION) or page_bytes not in _PAGE_BYTES:
            return None
        metas.append((transaction, last, _Database(*_DATABASE.unpack(databases))))
    _, last, newest = max(metas)
    return newest._replace(page_bytes=page_bytes), last


class _Tree:
    """The pages of a file, by number."""

    def __init__(self, mapping: mmap.mmap, page_bytes: int) -> None:
        self._mapping, self._page_bytes = mapping, page_bytes
        self._words = np.frombuffer(mapping, np.uint16).reshape(-1, page_bytes // 2)

    def database(self, databases: _Database, name: bytes) -> _Database:
        """The one of that name, out of a database of few."""
        leaves = self._leaves(databases)
        if len(leaves) != 1:
            raise BrokenLeavesError(f"it has {len(leaves)} pages of databases, not 1")
        _, starts = self._nodes(leaves, _LEAF)
        page = self._words[leaves[0]].tobytes()
        for start in starts.tolist():
            low, high, flags, key_bytes = _NODE.unpack_from(page, start)
            key_at = start + _NODE.size
            value_at = key_at + key_bytes
            if page[key_at:value_at] == name:
                if flags != _IS_DATABASE or low | high << 16 != _DATABASE.size:
                    raise BrokenLeavesError(f"{name!r} is no database")
                if value_at + _DATABASE.size > self._page_bytes:
                    raise BrokenLeavesError(f"{name!r} is cut off")
                return _Database(*_DATABASE.unpack_from(page, value_at))
        raise BrokenLeavesError(f"it has no database {name!r}")

    def rows(self, database: _Database, key_bytes: int, value_bytes: int) -> Iterator[Rows]:
        """The entries of a database whose nodes are of one length: those of a page side by side."""
        node_bytes = _NODE.size + key_bytes + value_bytes
        node_bytes += node_bytes % 2
        a_page = (self._page_bytes - _HEAD.size) // node_bytes
        first = self._page_bytes - a_page * node_bytes
        shape, strides = (len(self._words), a_page), (self._page_bytes, node_bytes)
        heads = np.ndarray(shape, np.uint64, self._mapping, first, strides)
        width = key_bytes + value_bytes
        nodes = np.ndarray(shape, f"V{width}", self._mapping, first + _NODE.size, strides)
        place_at = np.full(self._page_bytes, -1, np.int16)  # a division takes 10 ns more an entry
        place_at[first::node_bytes] = np.arange(a_page)
        expected = np.frombuffer(_NODE.pack(value_bytes, 0, 0, key_bytes), np.uint64)[0]
        entries = 0
        leaves = self._leaves(database)
        for at in range(0, len(leaves), _PAGES_AT_ONCE):
            pages, starts = self._nodes(leaves[at : at + _PAGES_AT_ONCE], _LEAF)
            places = place_at[starts]
            if (places < 0).any():
                raise BrokenLeavesError("an entry lies where none of its length can")
            if (heads[pages, places] != expected).any():
                raise BrokenLeavesError("an entry has a wrong length")
            entries += len(pages)
            yield nodes[pages, places].view(np.uint8).reshape(-1, width)
        if entries != database.entries:
            raise BrokenLeavesError(f"{entries} entries were found of {database.entries}")

    def _leaves(self, database: _Database) -> Rows:
        """The numbers of the leaf pages, in key order."""
        if database.root == _NOTHING and not database.entries:
            return np.empty(0, np.int64)
        if database.root >= len(self._words):
            raise BrokenLeavesError("its tree begins at a page that it does not have")
        level = np.array([database.root], np.int64)
        branches = 0
        for _ in range(database.depth - 1):
            branches += len(level)
            pages, starts = self._nodes(level, _BRANCH)
            word = starts // 2
            low, middle, high = (self._words[pages, word + n].astype(np.int64) for n in range(3))
            level = low | middle << 16 | high << 32
        if branches != database.branches or len(level) != database.leaves:
            raise BrokenLeavesError("its tree has not the pages that it should have")
        in_order = np.sort(level)
        if (in_order[1:] == in_order[:-1]).any():
            raise BrokenLeavesError("a page stands twice in its tree")
        return level

    def _nodes(self, numbers: Rows, kind: int) -> tuple[Rows, Rows]:
        """Of some pages of a kind all nodes, in order: the page of each, and where it starts."""
        if ((numbers < 0) | (numbers >= len(self._words))).any():
            raise BrokenLeavesError("it names a page that it does not have")
        heads = self._words[numbers, : _HEAD.size // 2]
        own = np.ascontiguousarray(heads[:, :4]).view(np.uint64).ravel()
        is_kind = (heads[:, 5] & ~np.uint16(_DIRTY)) == kind
        counts = (heads[:, 6].astype(np.int64) - _HEAD.size) // 2
        most = (self._page_bytes - _HEAD.size) // (2 + _NODE.size)
        if (own != numbers).any() or not is_kind.all() or ((counts < 1) | (counts > most)).any():
            raise BrokenLeavesError("a page is not what it should be")
        first = _HEAD.size // 2
        pointers = self._words[numbers, first : first + int(counts.max())].astype(np.int64)
        starts = pointers[np.arange(pointers.shape[1]) < counts[:, None]]
        if ((starts % 2 != 0) | (starts > self._page_bytes - _NODE.size)).any():
            raise BrokenLeavesError("an entry lies outside its page")
        return np.repeat(numbers, counts), starts
