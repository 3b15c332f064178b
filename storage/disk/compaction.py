"""Making room: the emptiest segment's live pages are copied forward, its space is written again."""

from __future__ import annotations

import errno
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from tiered_kv.storage.base import PageBuffer
from tiered_kv.storage.disk.direct_io import BLOCK_BYTES, aligned_buffer
from tiered_kv.storage.disk.extent import Record, checksum_of, rows_from
from tiered_kv.storage.disk.geometry import Geometry
from tiered_kv.storage.disk.log import SegmentLog
from tiered_kv.storage.disk.precedence import Precedence
from tiered_kv.storage.disk.records import LOST, Records
from tiered_kv.storage.disk.runs import plan_runs
from tiered_kv.storage.disk.segment import SegmentFiles
from tiered_kv.storage.disk.writes import EXTENT_BYTES

_log = logging.getLogger(__name__)


class Compaction:
    """Reclaims segments. Runs under the tier's write lock, beside readers.

    Invariant, at every commit: at least one segment holds nothing that the catalog names.
    Compaction fills it with what is live in the emptiest segment, commits, and that one becomes the
    empty one. It always gains a page's place, because the tier never holds more than
    `Geometry.capacity_pages`. If it fails, what it was filling is sealed: no page of a user's goes
    there before a segment is empty again.
    """

    def __init__(
        self,
        log: SegmentLog,
        files: SegmentFiles,
        records: Records,
        geometry: Geometry,
        commit: Callable[[], None],
        precedence: Precedence,
    ) -> None:
        """`commit` makes every change that is true in memory durable in the catalog."""
        self._log = log
        self._files = files
        self._records = records
        self._stride = geometry.stride_bytes
        self._page_bytes = geometry.page_bytes
        self._most_live = geometry.segment_live_pages
        self._commit = commit
        self._precedence = precedence
        self._buffer: PageBuffer | None = None

    def make_ready(self, pages: int) -> None:
        """Before a write: make segments that were emptied free, if it may not do without them.

        That is a commit: 1 to 2 ms when the medium is idle. In mid-write it is 14, behind the data
        that are queued, and nothing more is queued meanwhile (virtio disk, 2026-11).
        """
        if self._log.places_left() < pages and self._emptied():
            self._commit()

    def make_room(self) -> None:
        """Block until the log has a place for a page, compacting as often as that takes.

        Where no file can be made for a segment that never had one, it makes do with those there
        are: the medium may be full while most of what the store has taken of it holds nothing.

        Raises:
            OSError: the medium failed or has no space for a segment file, or no segment is empty.
            TierIOError: the catalog could not be written.
        """
        log, failure = self._log, OSError(errno.ENOSPC, "no segment is left to fill")
        while not log.places():
            if log.ready < 2:
                self._recycle_empty()
            if log.ready >= 2:
                try:
                    log.fill_next()
                except OSError as error:
                    failure = error
            elif log.sealed and log.ready and self._emptiest_gains():
                self.compact(self._emptiest())
            else:
                raise failure

    def compact(self, victim: int) -> None:
        """Copy what is live in a sealed segment forward, commit, and free the segment.

        A record that no longer agrees with its checksum is dropped and logged. Readers of the
        segment are waited for before it may be filled again.

        Whatever it raises, a segment is left that the catalog does not name, or will not after the
        next commit: the one begun here, or the victim once its records have moved in memory.
        """
        before = list(self._log.free)
        try:
            self._move(self._copied(victim))
            self._commit()
        except BaseException:
            self._log.abandon()
            begun = [segment for segment in before if segment not in self._log.free]
            self._free([segment for segment in begun if not self._records.live_pages(segment)])
            raise
        self._free([victim])

    def _copied(self, victim: int) -> list[tuple[int, Record]]:
        """What is live in a segment as it lies now elsewhere too, durable."""
        self._log.drain()
        live = self._records.in_segment(victim)
        copied: list[tuple[int, Record]] = []
        while live:
            if not self._log.places():
                self._log.fill_next()
            count = min(self._log.places(), len(live))
            copied += self._copy(live[:count])
            live = live[count:]
        for segment in {record.segment for _, record in copied}:
            self._files.sync(segment)
        return copied

    def _move(self, copied: Sequence[tuple[int, Record]]) -> None:
        try:
            for slot, record in copied:
                self._records.move(slot, record)
        except BaseException:  # interrupted: with some here and some there no segment is empty
            for slot, record in copied:
                self._records.move(slot, record)
            raise

    def reuse(self, empty: Sequence[int]) -> None:
        """The catalog names nothing in these segments: they are free, but those that are read.

        So a write seldom waits for a commit of its own to have room: the one before has made it.
        """
        named = set(empty)
        self._free(self._records.unread([s for s in self._log.sealed if s in named]))

    def _recycle_empty(self) -> None:
        empty = self._emptied()
        if empty:
            self._commit()  # until then the catalog may still name what lay there
        self._free(empty)

    def _emptiest(self) -> int:
        return min(self._log.sealed, key=self._records.live_pages)

    def _emptiest_gains(self) -> bool:
        """Whether to copy what it holds leaves room: always, but where files are missing."""
        return self._records.live_pages(self._emptiest()) <= self._most_live

    def _emptied(self) -> list[int]:
        return [s for s in self._log.sealed if not self._records.live_pages(s)]

    def _free(self, segments: Sequence[int]) -> None:
        """Let segments be filled again, unless they may already; waits for who reads them."""
        sealed = self._log.sealed
        for segment in [segment for segment in segments if segment in sealed]:
            self._records.wait_unread(segment)
            at = sealed.index(segment)
            self._log.free.extend(map(sealed.pop, (at,)))  # one call of C: no signal loses it

    def _copy(self, live: Sequence[tuple[int, Record]]) -> list[tuple[int, Record]]:
        if self._buffer is None:
            self._buffer = aligned_buffer(BLOCK_BYTES + max(EXTENT_BYTES, self._stride))
        self._precedence.let_reads_pass(len(live) * self._stride)
        self._fetch(live, self._buffer)
        sound = []
        for at, (slot, record) in enumerate(live):
            start = BLOCK_BYTES + at * self._stride
            if checksum_of(self._buffer[start : start + self._page_bytes]) == record.checksum:
                sound.append(at)
            else:
                self._drop(slot, record)
        if not sound:
            return []
        place, offsets = self._log.claim(len(live))
        copies = [
            (live[at][0], replace(live[at][1], segment=place.segment, offset=int(offsets[at])))
            for at in sound
        ]
        self._log.write_copy(place, rows_from([record for _, record in copies]), self._buffer)
        return copies

    def _fetch(self, live: Sequence[tuple[int, Record]], buffer: PageBuffer) -> None:
        places = [
            buffer[BLOCK_BYTES + at * self._stride :][: self._stride] for at in range(len(live))
        ]
        skipped = aligned_buffer(BLOCK_BYTES)
        segment = np.array([record.segment for _, record in live])
        block = np.array([record.offset // BLOCK_BYTES for _, record in live])
        for run in plan_runs(segment, block, self._stride):
            vectors: list[PageBuffer] = []
            end = run.offset
            for at, start in zip(run.wanted, run.starts, strict=True):
                if start > end:
                    vectors.append(skipped)
                vectors.append(places[at])
                end = start + self._stride
            try:
                self._files.read(run.segment, vectors, run.offset)
            except OSError:
                for at in run.wanted:
                    self._fetch_one(live[at][1], places[at])

    def _fetch_one(self, record: Record, place: PageBuffer) -> None:
        try:
            self._files.read(record.segment, [place], record.offset)
        except OSError as error:
            _log.warning("reading page %s for compaction: %s", record.key.hex()[:8], error)
            place[:] = 0  # it will not agree with its checksum and is dropped

    def _drop(self, slot: int, record: Record) -> None:
        self._records.forget([slot], LOST)
        _log.warning(
            "page %s in %s at %d does not agree with its checksum and is dropped",
            record.key.hex()[:8],
            self._files.path(record.segment),
            record.offset,
        )
