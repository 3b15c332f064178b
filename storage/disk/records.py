"""What is known of each slot, in memory: where its page lies, who reads it, what must commit."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import repeat
from typing import Any, NamedTuple

import numpy as np

from tiered_kv.errors import StoreClosedError
from tiered_kv.found import FoundPages, KeyOrder, parent_rows, ranks
from tiered_kv.keys import PageKey
from tiered_kv.storage.disk.batch import Batch
from tiered_kv.storage.disk.columns import Column, Columns, column
from tiered_kv.storage.disk.entries import rows_of
from tiered_kv.storage.disk.extent import Record

_CHUNK_SLOTS = 1024
_COUNTED_SLOTS = 1 << 16
EMPTY, WRITING, STORED, LOST = range(4)
"""States of a slot: holds nothing; being written; can be read; its page came back wrong."""


_NEW: Callable[[type[Any], tuple[Any, ...]], Any] = tuple.__new__


class StoredPage(NamedTuple):
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
    """Changes that are true in memory and not yet in the catalog.

    Attributes:
        deleted: sequences of what is no longer stored.
        empty: segments of which the catalog names nothing once these changes are in it.
    """

    moved: list[Record]
    deleted: list[int]
    empty: list[int] = field(default_factory=list)


NO_CHANGES = Unsaved([], [])


@dataclass(frozen=True, slots=True)
class Located:
    """Where pages that were asked for lie, in columns.

    Attributes:
        positions: of each in the list of slots asked for.
        block: where it starts in its segment.
        absent: the position of what cannot be read -> the state of its slot.
    """

    positions: list[int]
    keys: list[PageKey]
    segment: Column
    block: Column
    checksum: Column
    absent: dict[int, int]


class Records:
    """A table of slots in flat columns, 98 bytes each, and the readers of each segment.

    Every method takes the lock itself, so that a reader, a writer and a compaction see each record
    wholly before or wholly after a move.
    """

    def __init__(self, found: Columns, segments: int) -> None:
        """Take over what a store held when it was opened: row i is stored in slot i."""
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._rows = found
        self._state = column(len(found.sequence), "u1")
        self._state[: len(found)] = STORED
        self._readers = [0] * segments
        self._live_pages = column(segments, "i8")
        self._live_pages[:] = self._count_live()
        self._unsaved = Unsaved([], [])
        self._is_closed = False

    def put(self, batch: Batch, here: slice, segment: int) -> None:
        """Note pages of a batch that are being written to a segment, in slots that are empty."""
        slots, rows = batch.slots[here], batch.rows[here]
        count = len(slots)
        with self._lock:
            states = self._state[slots]
            assert ((states == EMPTY) | (states == LOST)).all()
            self._rows.set_all(slots, rows, segment)
            self._state[slots] = WRITING  # with the next line one step: no signal between
            self._live_pages[segment] += count

    def written(self, batch: Batch) -> Column | None:
        """What to list of a batch that is being written, as it lies now; None if some were lost."""
        with self._changed:
            if not self.holds(batch):
                return None
            segments, blocks = self._rows.segment[batch.slots], self._rows.block[batch.slots]
        return rows_of(batch.rows, segments, blocks)

    def holds(self, batch: Batch) -> bool:
        """Whether the slots of a batch that is being written hold its pages, and no others."""
        with self._lock:
            is_written = self._state[batch.slots] == WRITING
            return bool(is_written.all()) and len(self.held_by(batch)) == len(batch)

    def held_by(self, batch: Batch) -> Column:
        """Those of a batch's slots that hold its pages, written or being written."""
        with self._lock:
            states = self._state[batch.slots]
            is_held = (states == WRITING) | (states == STORED)
            is_its = self._rows.sequence[batch.slots] == batch.rows["sequence"]
            slots: Column = batch.slots[is_held & is_its]
            return slots

    def publish(self, slots: Column) -> None:
        """From now on these can be read."""
        with self._changed:
            self._state[slots] = STORED

    def forget(self, slots: Sequence[int] | set[int] | Column, state: int = EMPTY) -> None:
        """Empty slots (or mark them LOST), to be dropped from the catalog at the next commit.

        Those that were being written too: the catalog may list them, not yet to count.
        """
        wanted = np.fromiter(slots, np.int64, len(slots))
        with self._changed:
            rows = self._rows
            states = self._state[wanted]
            held = wanted[(states == WRITING) | (states == STORED)]
            if len(held):  # noted first: a signal leaves no entry that nobody would drop
                self._unsaved.deleted.extend(rows.sequence[held].tolist())
            gone = np.bincount(rows.segment[held], minlength=len(self._live_pages))
            self._state[wanted] = state  # with the next line one step: no signal between
            self._live_pages -= gone

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

    def unsaved(self) -> Unsaved:
        """The changes to commit; `saved` is to be told once they are. Twice is harmless."""
        with self._changed:
            moved, deleted = self._unsaved.moved, self._unsaved.deleted
            empty: list[int] = np.flatnonzero(self._live_pages == 0).tolist()
            return Unsaved(list(moved), list(deleted), empty)

    def saved(self, changes: Unsaved) -> None:
        """These are in the catalog. What came since then, at the ends of the lists, is not."""
        with self._changed:
            del self._unsaved.moved[: len(changes.moved)]
            del self._unsaved.deleted[: len(changes.deleted)]

    def locate(self, slots: Sequence[int], held: dict[int, int]) -> Located:
        """Where these slots' pages lie; their segments are held until `release`.

        A signal may end it at any step (its handler runs after calls and jumps, and nowhere else):
        `held`, which is empty at first, is true all the time.

        Args:
            held: segment -> pages of it that this reader holds.
        """
        wanted = np.fromiter(slots, np.int64, len(slots))
        with self._lock:  # in C, unlike `_changed`, which a signal may leave locked
            if self._is_closed:
                raise StoreClosedError("the disk tier is closed")
            rows = self._rows
            states = self._state[wanted]
            positions = np.flatnonzero(states == STORED)
            found = wanted[positions]
            segment = rows.segment[found]
            for number, count in _counted(segment):
                self._readers[number] += count
                held[number] = count
            keys = rows.keys(found)
            absent = {at: int(states[at]) for at in np.flatnonzero(states != STORED).tolist()}
            return Located(
                positions.tolist(), keys, segment, rows.block[found], rows.checksum[found], absent
            )

    def release(self, segment: int, count: int, held: dict[int, int]) -> None:
        """A reader of `count` records in a segment is done, and holds as many less of it.

        Of none: to do again what a signal may have cut off.
        """
        with self._lock:
            self._readers[segment] -= count
            held[segment] -= count
            if not self._readers[segment]:
                self._changed.notify_all()

    def unread(self, segments: Sequence[int]) -> list[int]:
        """Those of the segments that nobody reads."""
        with self._changed:
            return [segment for segment in segments if not self._readers[segment]]

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
            yield from self._stored_pages(order[start : start + _CHUNK_SLOTS], newest)

    def _stored_pages(self, slots: Column, newest: int) -> Iterator[StoredPage]:
        with self._changed:
            rows = self._rows
            found = slots[(self._state[slots] == STORED) & (rows.sequence[slots] <= newest)]
            at, sequences = found.tolist(), rows.sequence[found].tolist()
            keys, parents = rows.keys(found), rows.parents(found)
        found_rows = zip(keys, parents, at, sequences, strict=True)
        return map(_NEW, repeat(StoredPage), found_rows)  # half the time of StoredPage(...)

    def found(self) -> FoundPages:
        """Every readable slot, in columns: what `pages` says, but 1,000 times as fast."""
        with self._changed:
            rows, slots = self._rows, self._stored_slots()
            here = slots if len(slots) < len(rows) else slice(len(rows))  # of all rows no copy
            key = rows.key[here]
            order = KeyOrder.of(key)
            parent = parent_rows(key, order, rows.parent[here], rows.hangs[here])
            rank = ranks(rows.sequence[here])
            return FoundPages(rows.keys(here), parent, slots, rank, order)

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
            return int(self._live_pages[segment])

    def mend_counts(self) -> None:
        """Count anew what a segment holds: a signal may have cut a move in two."""
        with self._changed:
            self._live_pages[:] = self._count_live()

    def recount(self) -> tuple[list[int], list[int]]:
        """Live pages by segment as counted on the way, and as the table says; must be equal."""
        with self._changed:
            return self._live_pages.tolist(), self._count_live()

    def _stored_slots(self) -> Column:
        return np.flatnonzero(self._state[: len(self._rows)] == STORED).astype(np.int32)

    def _count_live(self) -> list[int]:
        counted = np.zeros(len(self._readers), np.int64)
        for start in range(0, len(self._rows), _COUNTED_SLOTS):  # bincount copies: 9 B a page
            here = slice(start, min(len(self._rows), start + _COUNTED_SLOTS))
            is_live = (self._state[here] == STORED) | (self._state[here] == WRITING)
            counted += np.bincount(self._rows.segment[here][is_live], minlength=len(counted))
        return [int(n) for n in counted]


def _counted(segments: Column) -> Iterator[tuple[int, int]]:
    numbers, counts = np.unique(segments, return_counts=True)
    return zip(numbers.tolist(), counts.tolist(), strict=True)
