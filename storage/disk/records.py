"""What is known of each slot, in memory: where its page lies, who reads it, what must commit."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tiered_kv.errors import StoreClosedError
from tiered_kv.keys import KEY_BYTES, PageKey
from tiered_kv.storage.disk.extent import CHECKSUM_BYTES, Record

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
    """A table of slots in flat arrays, 112 bytes each, and the readers of each segment.

    Every method takes the lock itself, so that a reader, a writer and a compaction see each record
    wholly before or wholly after a move.
    """

    def __init__(self, slots: int, segments: int) -> None:
        self._changed = threading.Condition()
        self._state = np.zeros(slots, np.uint8)
        self._has_parent = np.zeros(slots, np.bool_)
        self._keys = np.zeros((slots, KEY_BYTES), np.uint8)
        self._parents = np.zeros((slots, KEY_BYTES), np.uint8)
        self._checksums = np.zeros((slots, CHECKSUM_BYTES), np.uint8)
        self._sequence = np.zeros(slots, np.uint64)
        self._segment = np.zeros(slots, np.int32)
        self._offset = np.zeros(slots, np.int64)
        self._stored_bytes = np.zeros(slots, np.int64)
        self._codec = np.zeros(slots, np.uint16)
        self._readers = [0] * segments
        self._live_pages = [0] * segments
        self._unsaved = Unsaved([], [])
        self._is_closed = False

    def load(self, records: Sequence[Record]) -> None:
        """Note what a store held when it was opened: record i is stored in slot i."""
        with self._changed:
            assert not self._state.any()
            upto = len(records)
            self._state[:upto] = STORED
            self._keys[:upto] = _rows([r.key for r in records], KEY_BYTES)
            self._parents[:upto] = _rows([r.parent or bytes(KEY_BYTES) for r in records], KEY_BYTES)
            self._has_parent[:upto] = [r.parent is not None for r in records]
            self._checksums[:upto] = _rows([r.checksum for r in records], CHECKSUM_BYTES)
            self._sequence[:upto] = [r.sequence for r in records]
            self._segment[:upto] = [r.segment for r in records]
            self._offset[:upto] = [r.offset for r in records]
            self._stored_bytes[:upto] = [r.stored_bytes for r in records]
            self._codec[:upto] = [r.codec for r in records]
            self._live_pages = self._count_live()

    def put(self, slot: int, record: Record) -> None:
        """Note a record that is being written to an empty slot."""
        with self._changed:
            assert self._state[slot] in (EMPTY, LOST)
            self._state[slot] = WRITING
            self._set(slot, record)
            self._live_pages[record.segment] += 1

    def _set(self, slot: int, record: Record) -> None:
        self._keys[slot] = np.frombuffer(record.key, np.uint8)
        self._has_parent[slot] = record.parent is not None
        if record.parent is not None:
            self._parents[slot] = np.frombuffer(record.parent, np.uint8)
        self._checksums[slot] = np.frombuffer(record.checksum, np.uint8)
        self._sequence[slot] = record.sequence
        self._segment[slot] = record.segment
        self._offset[slot] = record.offset
        self._stored_bytes[slot] = record.stored_bytes
        self._codec[slot] = record.codec

    def seal(self, slot: int, checksum: bytes) -> None:
        """Note the checksum of a record whose place was taken before its bytes were read."""
        with self._changed:
            self._checksums[slot] = np.frombuffer(checksum, np.uint8)

    def written(self, slots: Iterable[int]) -> list[Record]:
        """The records of slots that are being written, as placed now; without those lost since."""
        with self._changed:
            return [self._record(slot) for slot in slots if self._state[slot] == WRITING]

    def publish(self, slots: Iterable[int]) -> None:
        """From now on these can be read."""
        with self._changed:
            for slot in slots:
                self._state[slot] = STORED

    def forget(self, slots: Iterable[int], state: int = EMPTY) -> None:
        """Empty slots (or mark them LOST), to be dropped from the catalog at the next commit."""
        with self._changed:
            for slot in slots:
                if self._state[slot] in (WRITING, STORED):
                    self._live_pages[self._segment[slot]] -= 1
                    if self._state[slot] == STORED:
                        self._unsaved.deleted.append((self._key(slot), int(self._sequence[slot])))
                self._state[slot] = state

    def move(self, slot: int, to: Record) -> None:
        """This record lies elsewhere now; ignored if the slot holds another record by now."""
        with self._changed:
            is_same = int(self._sequence[slot]) == to.sequence
            if not is_same or self._state[slot] not in (WRITING, STORED):
                return
            self._live_pages[self._segment[slot]] -= 1
            self._live_pages[to.segment] += 1
            self._segment[slot] = to.segment
            self._offset[slot] = to.offset
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

    @property
    def has_unsaved(self) -> bool:
        """Whether the catalog lags behind."""
        with self._changed:
            return bool(self._unsaved.moved or self._unsaved.deleted)

    def locate(self, slots: Sequence[int]) -> list[Record | int]:
        """For each slot its record, its segment held until `release`, or else its state."""
        with self._changed:
            if self._is_closed:
                raise StoreClosedError("the disk tier is closed")
            found: list[Record | int] = []
            for slot in slots:
                state = int(self._state[slot])
                found.append(self._record(slot) if state == STORED else state)
                if state == STORED:
                    self._readers[self._segment[slot]] += 1
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
            holds = (self._segment == segment) & (
                (self._state == STORED) | (self._state == WRITING)
            )
            slots = np.flatnonzero(holds)
            return self._listed(slots[np.argsort(self._offset[slots])])

    def stored(self) -> list[tuple[int, Record]]:
        """Every readable slot with its record, oldest first."""
        with self._changed:
            slots = np.flatnonzero(self._state == STORED)
            return self._listed(slots[np.argsort(self._sequence[slots], kind="stable")])

    def record(self, slot: int) -> Record:
        """What is known of one slot."""
        with self._changed:
            return self._record(slot)

    def live_pages(self, segment: int) -> int:
        """Records a segment holds that are still wanted."""
        with self._changed:
            return self._live_pages[segment]

    def recount(self) -> tuple[list[int], list[int]]:
        """Live pages by segment as counted on the way, and as the table says; must be equal."""
        with self._changed:
            return list(self._live_pages), self._count_live()

    def _count_live(self) -> list[int]:
        holds = (self._state == STORED) | (self._state == WRITING)
        counted = np.bincount(self._segment[holds], minlength=len(self._readers))
        return [int(n) for n in counted]

    def _listed(self, slots: np.ndarray[Any, Any]) -> list[tuple[int, Record]]:
        columns = (self._sequence, self._segment, self._offset, self._stored_bytes, self._codec)
        keys, parents = self._keys[slots].tobytes(), self._parents[slots].tobytes()
        sums, has_parent = self._checksums[slots].tobytes(), self._has_parent[slots].tolist()
        listed = []
        rows = zip(slots.tolist(), *(column[slots].tolist() for column in columns), strict=True)
        for at, (slot, *numbers) in enumerate(rows):
            here = slice(at * KEY_BYTES, (at + 1) * KEY_BYTES)
            parent = PageKey(parents[here]) if has_parent[at] else None
            checksum = sums[at * CHECKSUM_BYTES : (at + 1) * CHECKSUM_BYTES]
            listed.append((slot, Record(PageKey(keys[here]), parent, checksum, *numbers)))
        return listed

    def _key(self, slot: int) -> PageKey:
        return PageKey(self._keys[slot].tobytes())

    def _record(self, slot: int) -> Record:
        parent: Any = self._parents[slot].tobytes() if self._has_parent[slot] else None
        return Record(
            key=self._key(slot),
            parent=parent,
            checksum=self._checksums[slot].tobytes(),
            sequence=int(self._sequence[slot]),
            segment=int(self._segment[slot]),
            offset=int(self._offset[slot]),
            stored_bytes=int(self._stored_bytes[slot]),
            codec=int(self._codec[slot]),
        )


def _rows(values: list[bytes] | list[PageKey], width: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    return np.frombuffer(b"".join(values), np.uint8).reshape(-1, width)
