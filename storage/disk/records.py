"""What is known of each slot, in memory: where its page lies, who reads it, what must commit."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from tiered_kv.errors import StoreClosedError
from tiered_kv.keys import PageKey
from tiered_kv.storage.disk.columns import Column, Columns, column
from tiered_kv.storage.disk.extent import Record

_CHUNK_SLOTS = 1024
_COUNTED_SLOTS = 1 << 16
EMPTY, WRITING, STORED, LOST = range(4)
"""States of a slot: holds nothing; being written; can be read; its page came back wrong."""


@dataclass(frozen=True, slots=True)
class StoredPage:
    """A page the tier found when it was opened, or holds now.

    Attributes:
        sequence: order of first writing; larger is newer, over restarts too.
    """

    key: PageKey
    parent: PageKey | None
    slot: int
    sequence: int


@dataclass(frozen=True, slots=True)
class Unsaved:
    """Changes that are true in memory and not yet in the catalog."""

    moved: list[Record]
    deleted: list[tuple[PageKey, int]]


class Records:
    """A table of slots in flat columns, 49 bytes each, and the readers of each segment.

    Every method takes the lock itself, so that a reader, a writer and a compaction see each record
    wholly before or wholly after a move.
    """

    def __init__(self, found: Columns, segments: int) -> None:
        """Take over what a store held when it was opened: row i is stored in slot i."""
        self._changed = threading.Condition()
        self._rows = found
        self._state = column(len(found.sequence), "u1")
        self._state[: len(found)] = STORED
        self._readers = [0] * segments
        self._live_pages = [0] * segments
        self._live_pages = self._count_live()
        self._unsaved = Unsaved([], [])
        self._is_closed = False

    def put(self, slot: int, record: Record) -> None:
        """Note a record that is being written to an empty slot."""
        with self._changed:
            assert self._state[slot] in (EMPTY, LOST)
            self._state[slot] = WRITING
            self._rows.set(slot, record)
            self._live_pages[record.segment] += 1

    def seal(self, slot: int, checksum: bytes) -> None:
        """Note the checksum of a record whose place was taken before its bytes were read."""
        with self._changed:
            self._rows.checksum[slot] = np.frombuffer(checksum, np.uint8)

    def written(self, slots: Iterable[int]) -> list[Record]:
        """The records of slots that are being written, as placed now; without those lost since."""
        with self._changed:
            return [self._rows.record(slot) for slot in slots if self._state[slot] == WRITING]

    def publish(self, slots: Iterable[int]) -> None:
        """From now on these can be read."""
        with self._changed:
            for slot in slots:
                self._state[slot] = STORED

    def forget(self, slots: Iterable[int], state: int = EMPTY) -> None:
        """Empty slots (or mark them LOST), to be dropped from the catalog at the next commit."""
        with self._changed:
            rows = self._rows
            for slot in slots:
                if self._state[slot] in (WRITING, STORED):
                    self._live_pages[rows.segment[slot]] -= 1
                    if self._state[slot] == STORED:
                        self._unsaved.deleted.append((rows.key(slot), int(rows.sequence[slot])))
                    rows.clear(slot)
                self._state[slot] = state

    def move(self, slot: int, to: Record) -> None:
        """This record lies elsewhere now; ignored if the slot holds another record by now."""
        with self._changed:
            is_same = int(self._rows.sequence[slot]) == to.sequence
            if not is_same or self._state[slot] not in (WRITING, STORED):
                return
            self._live_pages[self._rows.segment[slot]] -= 1
            self._live_pages[to.segment] += 1
            self._rows.place(slot, to)
            if self._state[slot] == STORED:
                self._unsaved.moved.append(to)

    def take_unsaved(self) -> Unsaved:
        """The changes to commit; give them back with `return_unsaved` if that fails."""
        with self._changed:
            taken, self._unsaved = self._unsaved, Unsaved([], [])
            return taken

    def return_unsaved(self, taken: Unsaved) -> None:
        """A commit failed: keep its changes for the next."""
        with self._changed:
            self._unsaved.moved[:0] = taken.moved
            self._unsaved.deleted[:0] = taken.deleted

    def locate(self, slots: Sequence[int]) -> list[Record | int]:
        """For each slot its record, its segment held until `release`, or else its state."""
        with self._changed:
            if self._is_closed:
                raise StoreClosedError("the disk tier is closed")
            found: list[Record | int] = []
            for slot in slots:
                state = int(self._state[slot])
                found.append(self._rows.record(slot) if state == STORED else state)
                if state == STORED:
                    self._readers[self._rows.segment[slot]] += 1
            return found

    def release(self, segment: int, count: int) -> None:
        """Readers of `count` records in a segment are done."""
        with self._changed:
            self._readers[segment] -= count
            if not self._readers[segment]:
                self._changed.notify_all()

    def wait_unread(self, segment: int) -> None:
        """Block until nobody reads a segment; once its records have moved, no one new does."""
        with self._changed:
            self._changed.wait_for(lambda: not self._readers[segment])

    def close(self) -> None:
        """Let no new reader in and block until all are gone."""
        with self._changed:
            self._is_closed = True
            self._changed.wait_for(lambda: not any(self._readers))

    def in_segment(self, segment: int) -> list[tuple[int, Record]]:
        """Slots whose records lie in a segment, in order of place."""
        with self._changed:
            upto, rows = len(self._rows), self._rows
            state = self._state[:upto]
            is_live = (state == STORED) | (state == WRITING)
            slots = np.flatnonzero((rows.segment[:upto] == segment) & is_live)
            ordered = slots[np.argsort(rows.block[slots])].tolist()
            return [(slot, rows.record(slot)) for slot in ordered]

    def pages(self) -> Iterator[StoredPage]:
        """Every readable slot, oldest first; without those emptied before their turn.

        What is written after the first was asked for does not come. Keeps 4 bytes a page.
        """
        with self._changed:
            count = len(self._rows)
            newest = int(self._rows.sequence[:count].max(initial=0))
            order = column(count, "i4")
            order[:] = np.argsort(self._rows.sequence[:count])
        for start in range(0, count, _CHUNK_SLOTS):
            yield from self._stored_pages(order[start : start + _CHUNK_SLOTS].tolist(), newest)

    def _stored_pages(self, slots: Iterable[int], newest: int) -> list[StoredPage]:
        with self._changed:
            rows = self._rows
            found = [
                StoredPage(rows.key(slot), rows.parents[slot], slot, int(rows.sequence[slot]))
                for slot in slots
                if self._state[slot] == STORED
            ]
        return [page for page in found if page.sequence <= newest]

    def by_place(self) -> Iterator[int]:
        """Every readable slot, in the order in which their pages lie on the medium."""
        with self._changed:
            slots = self._stored_slots()
            order = slots[np.lexsort((self._rows.block[slots], self._rows.segment[slots]))]
        for start in range(0, len(order), _CHUNK_SLOTS):
            yield from order[start : start + _CHUNK_SLOTS].tolist()

    def record(self, slot: int) -> Record | None:
        """What is stored in one slot."""
        with self._changed:
            return self._rows.record(slot) if self._state[slot] == STORED else None

    def live_pages(self, segment: int) -> int:
        """Records a segment holds that are still wanted."""
        with self._changed:
            return self._live_pages[segment]

    def recount(self) -> tuple[list[int], list[int]]:
        """Live pages by segment as counted on the way, and as the table says; must be equal."""
        with self._changed:
            return list(self._live_pages), self._count_live()

    def _stored_slots(self) -> Column:
        return np.flatnonzero(self._state[: len(self._rows)] == STORED).astype(np.int32)

    def _count_live(self) -> list[int]:
        counted = np.zeros(len(self._readers), np.int64)
        for start in range(0, len(self._rows), _COUNTED_SLOTS):  # bincount copies: 9 B a page
            here = slice(start, min(len(self._rows), start + _COUNTED_SLOTS))
            is_live = (self._state[here] == STORED) | (self._state[here] == WRITING)
            counted += np.bincount(self._rows.segment[here][is_live], minlength=len(counted))
        return [int(n) for n in counted]
