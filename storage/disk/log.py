"""The append side of the store: which segment is being filled, and the extents written to it."""

from __future__ import annotations

import errno
from concurrent.futures import ThreadPoolExecutor
from itertools import groupby
from operator import itemgetter

import numpy as np

from tiered_kv.storage.base import PageBuffer
from tiered_kv.storage.disk.batch import Batch
from tiered_kv.storage.disk.columns import Column
from tiered_kv.storage.disk.direct_io import BLOCK_BYTES
from tiered_kv.storage.disk.extent import CHECKSUM_BYTES, EPOCH_SHIFT, Place, checksum_of
from tiered_kv.storage.disk.geometry import EXTENT_RECORDS, Geometry
from tiered_kv.storage.disk.parts import parts_of
from tiered_kv.storage.disk.precedence import Precedence
from tiered_kv.storage.disk.records import Records
from tiered_kv.storage.disk.segment import SegmentFiles
from tiered_kv.storage.disk.writes import EXTENT_BYTES, WRITE_THREADS, Job, Writes

_FIRST_BYTES = 1 << 20  # of a write that finds the medium idle: it begins 1 ms earlier, of 35


class SegmentLog:
    """Appends extents to the segment that is being filled. One writer at a time.

    Generations, extent numbers and sequences are made from the epoch, which counts openings, so
    that none is ever used twice, whatever a crash undid.

    Attributes:
        generations: of every segment ever filled; a new one each time a segment is filled again.
        free: segments that hold nothing the catalog names, next to be filled first.
        sealed: full segments, and those found at open.
        next_sequence: of the next page; all that were ever appended have smaller ones.
    """

    def __init__(
        self,
        files: SegmentFiles,
        records: Records,
        geometry: Geometry,
        store_id: bytes,
        epoch: int,
        generations: dict[int, int],
        precedence: Precedence,
    ) -> None:
        self._files = files
        self._records = records
        self._geometry = geometry
        self.generations = generations
        self._next_generation = epoch << 32
        self._next_number = epoch << EPOCH_SHIFT
        self.next_sequence = epoch << EPOCH_SHIFT
        self._durable_below = self._next_number
        self._created = set(files.existing())
        self._may_create = True
        segments = sorted(range(geometry.segments), key=lambda s: (s not in self._created, s))
        self.free = [s for s in segments if not records.live_pages(s)]
        self.sealed = [s for s in segments if records.live_pages(s)]
        self._filling: int | None = None
        self._tail_bytes = 0
        self._jobs: list[Job] = []
        self._writes = Writes(files, geometry, store_id, precedence)
        self._syncing = ThreadPoolExecutor(WRITE_THREADS, thread_name_prefix="tiered-kv-disk-sync")

    def places(self) -> int:
        """Pages that the next extent can take, without filling another segment."""
        if self._filling is None:
            return 0
        stride = self._geometry.stride_bytes
        room = self._geometry.segment_bytes - self._tail_bytes - BLOCK_BYTES
        return max(0, min(EXTENT_RECORDS, room // stride, max(1, EXTENT_BYTES // stride)))

    def places_left(self) -> int:
        """Pages for which there is place without emptying a segment; rather too few than too many.

        As if each lay in an extent of its own. One segment stays empty, for compaction.
        """
        longest = self._geometry.stride_bytes + BLOCK_BYTES
        left = 0
        if self._filling is not None:
            left = (self._geometry.segment_bytes - self._tail_bytes) // longest
        return left + max(0, self.ready - 1) * (self._geometry.segment_bytes // longest)

    @property
    def ready(self) -> int:
        """Segments that can be filled: all that are free, or those with a file if no more is made.

        So it is from when making one fails, for want of space mostly, to the next write.
        """
        if self._may_create:
            return len(self.free)
        return sum(segment in self._created for segment in self.free)

    def retry_creating(self) -> None:
        """Try to make files again, should that have failed."""
        self._may_create = True

    def fill_next(self) -> None:
        """Seal the segment that is being filled and begin one that is ready.

        One that has a file if there is one: space that was written before is faster on a disk that
        is told of what is deleted, and what is not taken is left to others.

        Raises:
            OSError: its file could not be made, or no segment is ready.
        """
        if not self.ready:
            raise OSError(errno.ENOSPC, "no segment is left to fill")
        made = [segment for segment in self.free if segment in self._created]
        following = made[0] if made else self.free[0]  # no generator: closing one eats Ctrl-C
        if following not in self._created:
            self._create(following)
        self.free.remove(following)
        self.seal()
        self._filling, self._tail_bytes = following, 0
        self.generations[following] = self._next_generation
        self._next_generation += 1

    def _create(self, segment: int) -> None:
        self._may_create = False
        self._files.create(segment)
        self._created.add(segment)
        self._may_create = True

    def seal(self) -> None:
        """Fill the present segment no further."""
        filled, self._filling = self._filling, None
        if filled is not None:
            self.sealed.append(filled)

    def claim(self, pages: int) -> tuple[Place, Column]:
        """The place of the next extent, of at most `places()` pages, and each one's offset."""
        assert self._filling is not None and pages <= self.places()
        stride, start = self._geometry.stride_bytes, self._tail_bytes
        n_bytes = BLOCK_BYTES + pages * stride
        generation = self.generations[self._filling]
        number, self._next_number = self._next_number, self._next_number + 1
        self._tail_bytes += n_bytes
        place = Place(self._filling, generation, number, self._durable_below, start, n_bytes, pages)
        return place, start + BLOCK_BYTES + np.arange(pages) * stride

    def append(self, batch: Batch, first: int) -> int:
        """Begin writing pages of a batch, from its `first` on, that fit in one system call.

        There must be a place for one. They are the log's until the batch is synced.

        Returns:
            The first page for which another call is needed.
        """
        rows, stride = batch.rows, self._geometry.stride_bytes
        self._writes.poll()
        self._jobs = [job for job in self._jobs if not job.done()]
        longest = max(1, (EXTENT_BYTES if self._jobs else _FIRST_BYTES) // stride)
        places: list[Place] = []
        upto = first
        while upto < len(batch) and (count := min(self.places(), len(batch) - upto, longest)):
            if places and upto - first + count > longest:
                break
            place, offsets = self.claim(count)
            rows["offset"][upto : upto + count] = offsets
            places.append(place)
            upto += count
        batch.name(slice(first, upto))
        rows["sequence"][first:upto] = np.arange(upto - first) + self.next_sequence
        self.next_sequence += upto - first
        # Hashed here, not where it is written: threads that hash pages of 64 KiB hand the
        # interpreter's lock to and fro, and the first write began 5 ms later (2026-11).
        pages = batch.pages[first:upto]
        digests = b"".join([checksum_of(*parts_of(page)) for page in pages])
        rows["checksum"][first:upto] = np.frombuffer(digests, np.uint8).reshape(-1, CHECKSUM_BYTES)
        self._records.put(batch, slice(first, upto), places[0].segment)
        batch.durable_below = self._next_number
        job = self._writes.begin(pages, rows[first:upto], places)
        batch.chunks.append((places[0].segment, job))
        self._jobs.append(job)
        return upto

    def drain(self) -> None:
        """Block until all that was begun is written.

        Raises:
            OSError: the first failure among them.
        """
        for job in self._jobs:
            job.exception()
        jobs, self._jobs = self._jobs, []
        for job in jobs:
            job.result()

    def sync(self, batch: Batch) -> None:
        """Block until a batch is on the medium; those begun before it are by then.

        Raises:
            OSError: the first failure among its writes.
        """
        syncs = []
        last = batch.chunks[-1][0] if batch.chunks else None
        for segment, chunks in groupby(batch.chunks, key=itemgetter(0)):
            for _, job in chunks:
                job.result()
            if segment == last:
                self._files.sync(segment)
            else:  # while the next segment's are being written
                syncs.append(self._syncing.submit(self._files.sync, segment))
        for job in syncs:
            job.result()
        self._durable_below = batch.durable_below

    def abandon(self) -> None:
        """After a failure: seal, and wait for what was begun, whatever became of it.

        What failed may have left a hole that shows a header of an older generation, whose length
        would hide from a rebuild what is written behind it: so nothing is.
        """
        self.seal()
        known = {*self.free, *self.sealed}  # an interrupt may have come between one and the other
        self.sealed += [s for s in range(self._geometry.segments) if s not in known]
        self._records.mend_counts()
        self._jobs.clear()
        self._writes.abandon()
        self.settle()

    def settle(self) -> None:
        """Block until nothing that has failed is written any more: an interrupt may cut it off."""
        self._writes.settle()

    def write_copy(self, place: Place, rows: Column, buffer: PageBuffer) -> None:
        """Write an extent from an aligned buffer that has its payloads behind room for a header."""
        self._writes.write_copy(place, rows, buffer)

    def close(self) -> None:
        """Stop writing."""
        self._writes.close()
        self._syncing.shutdown(wait=True)
