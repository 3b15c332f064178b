"""Pages that a tier still holds from an earlier run, in columns: no object a page but its key."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

import numpy as np

from tiered_kv.columns import Array
from tiered_kv.keys import KEY_BYTES, PageKey

FIRST, LOST = -1, -2
"""Instead of the row of a parent: the first page of a prompt; a page whose parent is not there."""
_CHUNK_ROWS = 1 << 16
_NEAR = 1 << 30


class Stored(Protocol):
    """A page that a tier still holds from an earlier run."""

    @property
    def key(self) -> PageKey:
        """Its key."""

    @property
    def parent(self) -> PageKey | None:
        """The key of the page that it hangs from."""

    @property
    def slot(self) -> int:
        """Where it is."""


class StoredPage(NamedTuple):
    """A `Stored` page, named."""

    key: PageKey
    parent: PageKey | None
    slot: int


@dataclass(frozen=True, slots=True)
class KeyOrder:
    """Which keys there are, in order of their first 8 bytes.

    Attributes:
        beginnings: uint64, those bytes as big-endian numbers, none smaller than the one before.
        rows: int32, the row of each key.
    """

    beginnings: Array
    rows: Array

    @classmethod
    def of(cls, keys: Array) -> KeyOrder:
        """Of items of 32 bytes, in rows. 30 ns a key; `np.argsort` and a copy take 45."""
        beginnings = beginnings_of(keys)
        rows = _roughly_sorted(beginnings).astype(np.int32)
        ordered = beginnings[rows]
        if (ordered[1:] < ordered[:-1]).any():  # two that differ in the lowest bits alone
            rows = np.argsort(beginnings, kind="stable").astype(np.int32)
            ordered = beginnings[rows]
        return cls(ordered, rows)

    def of_kept(self, is_kept: Array, row: Array) -> KeyOrder:
        """The same for the rows that are kept, each of which moves to another."""
        stays = is_kept[self.rows]
        return KeyOrder(self.beginnings[stays], row[self.rows[stays]])

    def alike(self) -> Array:
        """Places of those that begin as the one before does: hardly ever any."""
        return np.flatnonzero(self.beginnings[1:] == self.beginnings[:-1]) + 1


@dataclass(frozen=True, slots=True)
class FoundPages:
    """Pages in rows, in any order; a parent may come after its children.

    Attributes:
        keys: of the pages, each once; whoever takes the pages over may keep the list.
        parent: int32, the row of the page that each hangs from, or FIRST, or LOST.
        slot: int32, where each is.
        rank: int64, from 0 for the least recently used, below 2^30; no two have the same.
        order: of the keys; without it an index puts all of them in its dict at once.
    """

    keys: list[PageKey]
    parent: Array
    slot: Array
    rank: Array
    order: KeyOrder | None

    def __len__(self) -> int:
        return len(self.keys)

    @classmethod
    def of(cls, pages: Iterable[Stored]) -> FoundPages:
        """Pages given one by one, the least recently used first."""
        given = [(page.key, page.parent, page.slot) for page in pages]
        keys = [key for key, _, _ in given]
        parents = [parent or PageKey(bytes(KEY_BYTES)) for _, parent, _ in given]
        hangs = np.array([parent is not None for _, parent, _ in given], np.bool_)
        raw, above = _items(keys), _items(parents)
        order = KeyOrder.of(raw)
        return cls(
            keys,
            parent_rows(raw, order, above, hangs),
            np.array([slot for _, _, slot in given], np.int32),
            np.arange(len(given), dtype=np.int64),
            order,
        )

    def rooted(self) -> tuple[FoundPages, list[int]]:
        """Those whose every ancestor is there, and the slots of the others."""
        if not (self.parent == LOST).any():
            return self, []
        top = np.where(self.parent < 0, np.arange(len(self), dtype=np.int32), self.parent)
        for _ in range(len(self).bit_length()):  # each step is twice as long as the one before
            above, top = top, top[top]
            if np.array_equal(above, top):
                break
        is_rooted = self.parent[top] == FIRST
        kept = np.flatnonzero(is_rooted)
        row = np.cumsum(is_rooted, dtype=np.int32) - 1
        above = self.parent[kept]
        found = FoundPages(
            [self.keys[at] for at in kept.tolist()],
            np.where(above < 0, above, row[above]),
            self.slot[kept],
            self.rank[kept],
            None if self.order is None else self.order.of_kept(is_rooted, row),
        )
        return found, self.slot[~is_rooted].tolist()

    def uprooted(self) -> FoundPages:
        """The same pages; one whose parent is not there hangs from nothing."""
        return replace(self, parent=np.maximum(self.parent, FIRST))


def _items(keys: list[PageKey]) -> Array:
    return np.frombuffer(b"".join(keys), f"V{KEY_BYTES}")


def beginnings_of(keys: Array) -> Array:
    """The first 8 bytes of each key, of items of 32, as numbers that order as the bytes do."""
    beginnings: Array = keys.view(np.uint64).reshape(-1, KEY_BYTES // 8)[:, 0].byteswap()
    return beginnings


def ranks(numbers: Array) -> Array:
    """Different numbers as others of the same order, from 0 on and not far apart.

    How many are smaller, which takes 45 ns a number, where their differences will not do.
    """
    if not len(numbers):
        return np.empty(0, np.int64)
    if (numbers[1:] > numbers[:-1]).all():
        return np.arange(len(numbers), dtype=np.int64)
    found: Array = numbers - numbers.min()
    if found.max() < _NEAR:
        return found.astype(np.int64)
    found = np.empty(len(numbers), np.int64)
    found[np.argsort(numbers)] = np.arange(len(numbers))
    return found


def _roughly_sorted(numbers: Array) -> Array:
    """The places of numbers, in order of all but their lowest bits, in which the places are sorted.

    15 ns a number; `np.argsort` takes 35.
    """
    places = np.uint64((1 << len(numbers).bit_length()) - 1)
    marked = np.sort(numbers & ~places | np.arange(len(numbers), dtype=np.uint64))
    return (marked & places).view(np.int64)


def parent_rows(keys: Array, order: KeyOrder, parents: Array, hangs: Array) -> Array:
    """In which row the parent of each page is.

    Mostly in the one before. The others are searched for all at once by the first 8 bytes of their
    keys, then all 32 are compared: 0.1 us a page, by a dict of the keys 1.7 (1 M random keys, Xeon
    2.8 GHz, 2026-11).

    Args:
        keys: [pages] items of 32 bytes, each once.
        order: of the keys.
        parents: [pages] items too, the key of the parent of each; any where there is none.
        hangs: bool [pages], whether there is one.

    Returns:
        int32 [pages]: the row of the parent, or FIRST, or LOST.
    """
    rows = np.arange(-1, len(keys) - 1, dtype=np.int32)
    rows[~hangs] = FIRST
    is_next = np.zeros(len(keys), np.bool_)
    is_next[1:] = _are_same(keys[:-1], parents[1:])
    sought = np.flatnonzero(hangs & ~is_next)
    rows[sought] = _rows_of(parents[sought], keys, order)
    return rows


def _rows_of(sought: Array, keys: Array, order: KeyOrder) -> Array:
    """In which row each of the sought keys is, or LOST."""
    rows = np.full(len(sought), LOST, np.int32)
    if not len(keys):
        return rows
    beginnings = beginnings_of(sought)
    turn = _roughly_sorted(beginnings)  # searched in order: 10 x faster
    at = np.minimum(np.searchsorted(order.beginnings, beginnings[turn]), len(keys) - 1)
    rows[turn] = order.rows[at]
    rows[~_are_same(keys[rows], sought)] = LOST
    alike = order.rows[order.alike()].tolist()  # of keys that begin alike the first was found
    row_of = {keys[row].tobytes(): row for row in alike}
    for lost in np.flatnonzero(rows == LOST).tolist() if row_of else []:
        rows[lost] = row_of.get(sought[lost].tobytes(), LOST)
    return rows


def _are_same(some: Array, others: Array) -> Array:
    """Which of the items of 32 bytes are the same as others in their place."""
    words, wanted = (items.view(np.uint64).reshape(-1, 4) for items in (some, others))
    same = np.empty(len(words), np.bool_)
    for first in range(0, len(words), _CHUNK_ROWS):
        here = slice(first, first + _CHUNK_ROWS)
        equal = words[here] == wanted[here]
        same[here] = equal.view(np.uint32).ravel() == 0x01010101  # all 4 words
    return same
