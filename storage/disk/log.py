"""The append side of the store: which segment is being filled, and the extents written to it."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import replace

import numpy as np

from tiered_kv.storage.base import Page, PageBuffer
from tiered_kv.storage.disk.direct_io import BLOCK_BYTES, aligned_buffer, is_aligned
from tiered_kv.storage.disk.extent import (
    CHECKSUM_BYTES,
    Extent,
    Record,
    checksum_of,
    encode_header,
)
from tiered_kv.storage.disk.geometry import EXTENT_RECORDS, Geometry
from tiered_kv.storage.disk.parts import PartedPage, gather, parts_of
from tiered_kv.storage.disk.records import Records
from tiered_kv.storage.disk.segment import SegmentFiles

# A pwritev of 8 MiB: 415 MB/s durable against 264 at 1 MiB, 2 cores, virtio disk, 2026-11.
EXTENT_BYTES = 8 << 20
_WRITE_THREADS = 2
_UNSEALED = bytes(CHECKSUM_BYTES)


class SegmentLog:
    """Appends extents to the segment that is being filled. One writer at a time.

    Generations, extent numbers and sequences are made from the epoch, which counts openings, so
    that none is ever used twice, whatever a crash undid.

    Attributes:
        generations: of every segment ever filled; a new one each time a segment is filled again.
        free: segments that hold nothing the catalog names, next to be filled first.
        sealed: full segments, and those found at open.
    """

    def __init__(
        self,
        files: SegmentFiles,
        records: Records,
        geometry: Geometry,
        store_id: bytes,
        epoch: int,
        generations: dict[int, int],
    ) -> None:
        self._files = files
        self._records = records
        self._geometry = geometry
        self._store_id = store_id
        self.generations = generations
        self._next_generation = epoch << 32
        self._next_number = epoch << 40
        self._next_sequence = epoch << 40
        self._durable_below = self._next_number
        self._created = set(files.existing())
        segments = sorted(range(geometry.segments), key=lambda s: (s not in self._created, s))
        self.free = [s for s in segments if not records.live_pages(s)]
        self.sealed = [s for s in segments if records.live_pages(s)]
        self._filling: int | None = None
        self._tail_bytes = 0
        self._touched: set[int] = set()
        self._jobs: list[Future[None]] = []
        self._own = threading.local()
        self._pool = ThreadPoolExecutor(_WRITE_THREADS, thread_name_prefix="tiered-kv-disk-write")

    def places(self) -> int:
        """Pages that the next extent can take, without filling another segment."""
        if self._filling is None:
            return 0
        stride = self._geometry.stride_bytes
        room = self._geometry.segment_bytes - self._tail_bytes - BLOCK_BYTES
        return max(0, min(EXTENT_RECORDS, room // stride, max(1, EXTENT_BYTES // stride)))

    def fill_next(self) -> None:
        """Seal the segment that is being filled and begin the next free one.

        Raises:
            OSError: its file could not be made.
        """
        following = self.free[0]
        if following not in self._created:
            self._files.create(following)
            self._created.add(following)
        self.free.pop(0)
        self.seal()
        self._filling, self._tail_bytes = following, 0
        self.generations[following] = self._next_generation
        self._next_generation += 1

    def seal(self) -> None:
        """Fill the present segment no further."""
        if self._filling is not None:
            self.sealed.append(self._filling)
            self._filling = None

    def claim(self, records: Sequence[Record]) -> Extent:
        """Give records, whose place is not yet known, the next places: at most `places()`."""
        assert self._filling is not None and len(records) <= self.places()
        stride, start = self._geometry.stride_bytes, self._tail_bytes
        placed = tuple(
            replace(record, segment=self._filling, offset=start + BLOCK_BYTES + at * stride)
            for at, record in enumerate(records)
        )
        n_bytes = BLOCK_BYTES + len(placed) * stride
        generation = self.generations[self._filling]
        number, self._next_number = self._next_number, self._next_number + 1
        self._tail_bytes += n_bytes
        return Extent(
            self._filling, generation, number, self._durable_below, start, n_bytes, placed
        )

    def append(self, slots: Sequence[int], pages: Sequence[Page | PartedPage]) -> None:
        """Begin writing one extent; at most `places()` pages. They can change until `drain`."""
        n_bytes = self._geometry.page_bytes
        new = [
            Record(page.key, page.parent, _UNSEALED, self._next_sequence + at, 0, 0, n_bytes)
            for at, page in enumerate(pages)
        ]
        self._next_sequence += len(new)
        extent = self.claim(new)
        for slot, record in zip(slots, extent.records, strict=True):
            self._records.put(slot, record)
        self._touched.add(extent.segment)
        self._jobs.append(self._pool.submit(self._write_pages, extent, tuple(slots), tuple(pages)))

    def drain(self) -> None:
        """Block until all that was begun is written.

        Raises:
            OSError: the first failure among them.
        """
        wait(self._jobs)
        jobs, self._jobs = self._jobs, []
        for job in jobs:
            job.result()

    def sync(self) -> None:
        """Block until all that was begun is on the medium; raises OSError as `drain`."""
        self.drain()
        for segment in sorted(self._touched):
            self._files.sync(segment)
        self._touched.clear()
        self._durable_below = self._next_number

    def abandon(self) -> None:
        """After a failure: wait for what was begun, whatever became of it."""
        wait(self._jobs)
        self._jobs.clear()
        self._touched.clear()

    def write_copy(self, extent: Extent, buffer: PageBuffer) -> None:
        """Write an extent from an aligned buffer that has its payloads behind room for a header."""
        encode_header(extent, self._store_id, buffer)
        self._files.write(extent.segment, [buffer[: extent.n_bytes]], extent.offset)

    def close(self) -> None:
        """Stop the writing threads."""
        self._pool.shutdown(wait=True)

    def _write_pages(
        self, extent: Extent, slots: Sequence[int], pages: Sequence[Page | PartedPage]
    ) -> None:
        sealed = []
        for slot, record, page in zip(slots, extent.records, pages, strict=True):
            checksum = checksum_of(*parts_of(page))
            self._records.seal(slot, checksum)
            sealed.append(replace(record, checksum=checksum))
        extent = replace(extent, records=tuple(sealed))
        if self._files.direct_io and not all(is_aligned(*parts_of(page)) for page in pages):
            self._write_staged(extent, pages)
            return
        vectors = [encode_header(extent, self._store_id)]
        padding = np.zeros(self._geometry.stride_bytes - self._geometry.page_bytes, np.uint8)
        for page in pages:
            vectors.extend(parts_of(page))
            if padding.nbytes:
                vectors.append(padding)
        self._files.write(extent.segment, vectors, extent.offset)

    def _write_staged(self, extent: Extent, pages: Sequence[Page | PartedPage]) -> None:
        stride = self._geometry.stride_bytes
        staging: PageBuffer | None = getattr(self._own, "staging", None)
        if staging is None:
            staging = aligned_buffer(BLOCK_BYTES + max(EXTENT_BYTES, stride))
            self._own.staging = staging
        for at, page in enumerate(pages):
            start = BLOCK_BYTES + at * stride
            n_bytes = gather(parts_of(page), staging[start:])
            staging[start + n_bytes : start + stride] = 0
        self.write_copy(extent, staging)
