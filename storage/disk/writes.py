"""Extents on their way to the medium: by io_uring where they are long, else by threads."""

from __future__ import annotations

import errno
import logging
import os
import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import chain
from typing import Protocol

import numpy as np

from tiered_kv.errors import TierIOError
from tiered_kv.storage.base import Page, PageBuffer
from tiered_kv.storage.disk.columns import Column
from tiered_kv.storage.disk.direct_io import (
    BLOCK_BYTES,
    aligned_buffer,
    iovecs,
    is_aligned,
    write_exact,
)
from tiered_kv.storage.disk.extent import Place, encode_header
from tiered_kv.storage.disk.geometry import Geometry
from tiered_kv.storage.disk.parts import PartedPage, gather, parts_of
from tiered_kv.storage.disk.precedence import Precedence
from tiered_kv.storage.disk.requests import MOST_REQUESTS, Request, Requests
from tiered_kv.storage.disk.ring import Ring, RingRequests, is_ring_allowed
from tiered_kv.storage.disk.segment import SegmentFiles

_log = logging.getLogger(__name__)

# A pwritev of 8 MiB: 415 MB/s durable against 264 at 1 MiB, 2 cores, virtio disk, 2026-11.
EXTENT_BYTES = 8 << 20
# Pages of 64 KiB: 1.89 GB/s; with 3 it is 1.66, one being late for want of the interpreter (same).
WRITE_THREADS = 4
RING_BYTES = 1 << 20
"""A shorter chunk is written by a thread if nothing is under way in the ring."""
_MOST_BYTES = WRITE_THREADS * EXTENT_BYTES  # under way in the ring: a read waits for no more


class Job(Protocol):
    """A chunk that is being written: what `Future` says of it."""

    def done(self) -> bool:
        """Whether it has ended, as far as is known."""

    def exception(self) -> BaseException | None:
        """Block until it has ended; what failed."""

    def result(self) -> None:
        """Block until it has ended; raises what failed."""


class Writes:
    """Writes extents, several at once. For one thread at a time, whichever: the tier has a lock.

    Through a ring whoever hashes pages begins their writing too: a thread that is woken for it
    takes the interpreter's lock from the next pages' hashing, and is late for want of it. Chunks
    go to threads where there is no ring, where memory is not aligned, and while reads are waiting:
    a thread can be held back (`Precedence`).
    """

    def __init__(
        self, files: SegmentFiles, geometry: Geometry, store_id: bytes, precedence: Precedence
    ) -> None:
        self._files = files
        self._geometry = geometry
        self._store_id = store_id
        self._precedence = precedence
        self._own = threading.local()
        self._pool = _threads()
        self._retired: list[ThreadPoolExecutor] = []  # that may still write what has failed
        self._with_threads: list[Future[None]] = []
        self._may_ring = files.direct_io
        self._ring: Requests | None = None
        self._under_way: dict[Request, tuple[int, PageBuffer]] = {}  # in the ring: segment, headers
        self._headers: list[PageBuffer] = []  # that are free
        self._open: dict[int, int] = {}  # segment -> descriptor, of those the ring writes to

    def begin(
        self, pages: Sequence[Page | PartedPage], rows: Column, places: Sequence[Place]
    ) -> Job:
        """Begin to write pages to consecutive extents; they are ours until the job has ended.

        Blocks while as much is under way as may be.
        """
        n_bytes = sum(place.n_bytes for place in places)
        if (n_bytes >= RING_BYTES or self._under_way) and self._may_use_ring():
            job = self._begin_in_ring(pages, rows, places, n_bytes)
            if job is not None:
                return job
        return self._begin_in_thread(pages, rows, places)

    def poll(self) -> None:
        """Note which jobs have ended by now."""
        if self._ring is not None and self._under_way:
            self._land(self._ring.poll())

    def wait(self) -> bool:
        """Block until one of those in the ring has ended; False if there is none."""
        landed = self._ring.wait() if self._ring is not None else []
        self._land(landed)
        return bool(landed)

    def abandon(self) -> None:
        """After a failure: whatever is being written, `settle` waits for it."""
        self._retired.append(self._pool)  # it may have a job that an interrupt has orphaned
        self._pool = _threads()

    def settle(self) -> None:
        """Block until nothing that has failed is written any more: an interrupt may cut it off.

        Raises:
            TierIOError: the kernel does not let us wait for that.
        """
        while self._retired:
            if self._retired[-1] is self._pool:  # an interrupt came before there was another
                self._pool = _threads()
            self._retired[-1].shutdown(wait=True)
            self._retired.pop()
        if self._ring is not None:
            try:
                self._ring.drain()
            except OSError as error:  # not before it ends may its place be written again
                message = f"what is being written cannot be waited for: {error.strerror}"
                raise TierIOError(message, tier="disk", errno=error.errno) from error
            for request in self._under_way:
                if request.error is not None:  # cut off; it may be of a batch that has not failed
                    _write_at_once(request)
            self._land(list(self._under_way))

    def close(self) -> None:
        """Wait for all that is under way and stop."""
        self.settle()
        self._pool.shutdown(wait=True)
        if self._ring is not None:
            self._ring.close()

    def write_copy(self, place: Place, rows: Column, buffer: PageBuffer) -> None:
        """Write an extent from an aligned buffer that has its payloads behind room for a header."""
        encode_header(place, rows, self._store_id, buffer)
        self._files.write(place.segment, [buffer[: place.n_bytes]], place.offset)

    # -- in the ring -------------------------------------------------------------------------------

    def _may_use_ring(self) -> bool:
        self._with_threads = [job for job in self._with_threads if not job.done()]
        if not self._may_ring or self._with_threads or not self._precedence.is_clear:
            return False
        if self._ring is None:
            self._ring = _shared_ring()
            self._may_ring = self._ring is not None
        return self._may_ring

    def _begin_in_ring(
        self,
        pages: Sequence[Page | PartedPage],
        rows: Column,
        places: Sequence[Place],
        n_bytes: int,
    ) -> Job | None:
        """None if the memory is not aligned."""
        assert self._ring is not None
        headers = self._headers.pop() if self._headers else aligned_buffer(0)
        if headers.nbytes < len(places) * BLOCK_BYTES:
            headers = aligned_buffer(len(places) * BLOCK_BYTES)
        vectors = self._vectors(pages, rows, places, headers)
        table = iovecs(vectors)
        if (table % BLOCK_BYTES).any():
            self._headers.append(headers)
            return None
        while not self._has_room(n_bytes) and self.wait():
            pass
        segment, offset = places[0].segment, places[0].offset
        assert offset + n_bytes <= self._geometry.segment_bytes
        if segment not in self._open:
            self._files.open_for_writes(segment, self._open)
        request = Request(self._open[segment], vectors, table, offset)
        self._under_way[request] = segment, headers  # first: `settle` must know of it
        self._ring.begin(request)
        self._ring.submit()
        return _InRing(self, request)

    def _has_room(self, n_bytes: int) -> bool:
        under_way_bytes = sum(request.n_bytes for request in self._under_way)
        return under_way_bytes + n_bytes <= _MOST_BYTES and len(self._under_way) < MOST_REQUESTS

    def _land(self, requests: Sequence[Request]) -> None:
        """Give back what these have held."""
        for request in requests:
            if request.error is None:
                self._files.has_written(request.done)
            if request in self._under_way:
                self._headers.append(self._under_way.pop(request)[1])
        unused = self._open.keys() - {segment for segment, _ in self._under_way.values()}
        if unused:  # forgotten and closed in one call of C
            list(map(os.close, map(self._open.pop, unused)))

    # -- in threads --------------------------------------------------------------------------------

    def _begin_in_thread(
        self, pages: Sequence[Page | PartedPage], rows: Column, places: Sequence[Place]
    ) -> Job:
        begun = threading.Event()
        job = self._pool.submit(self._write_pages, pages, rows, places, begun)
        self._with_threads.append(job)
        if sum(not job.done() for job in self._with_threads) <= WRITE_THREADS:
            begun.wait()  # a thread is free: hashing on, we would keep it waiting for the lock
        return job

    def _write_pages(
        self,
        pages: Sequence[Page | PartedPage],
        rows: Column,
        places: Sequence[Place],
        begun: threading.Event,
    ) -> None:
        try:
            is_fit = not self._files.direct_io or is_aligned(
                *chain.from_iterable(map(parts_of, pages))
            )
            vectors: list[PageBuffer] = []
            if is_fit:
                headers = self._buffer("headers", len(places) * BLOCK_BYTES)
                vectors = self._vectors(pages, rows, places, headers)
            self._precedence.let_reads_pass(sum(place.n_bytes for place in places), begun.set)
            if is_fit:
                self._files.write(places[0].segment, vectors, places[0].offset, begun.set)
            else:
                begun.set()
                self._write_staged(pages, rows, places)
        finally:
            begun.set()

    def _vectors(
        self,
        pages: Sequence[Page | PartedPage],
        rows: Column,
        places: Sequence[Place],
        headers: PageBuffer,
    ) -> list[PageBuffer]:
        """Consecutive extents as they lie on the medium, headers made, pages where they are."""
        padding = np.zeros(self._geometry.stride_bytes - self._geometry.page_bytes, np.uint8)
        vectors: list[PageBuffer] = []
        done = 0
        for number, place in enumerate(places):
            here = slice(done, done + place.pages)
            header = headers[number * BLOCK_BYTES :][:BLOCK_BYTES]
            encode_header(place, rows[here], self._store_id, header)
            vectors.append(header)
            for page in pages[here]:
                vectors.extend(parts_of(page))
                if padding.nbytes:
                    vectors.append(padding)
            done += place.pages
        return vectors

    def _write_staged(
        self, pages: Sequence[Page | PartedPage], rows: Column, places: Sequence[Place]
    ) -> None:
        stride = self._geometry.stride_bytes
        staging = self._buffer("staging", BLOCK_BYTES + max(EXTENT_BYTES, stride))
        done = 0
        for place in places:
            for at, page in enumerate(pages[done : done + place.pages]):
                start = BLOCK_BYTES + at * stride
                n_bytes = gather(parts_of(page), staging[start:])
                staging[start + n_bytes : start + stride] = 0
            self.write_copy(place, rows[done : done + place.pages], staging)
            done += place.pages

    def _buffer(self, name: str, n_bytes: int) -> PageBuffer:
        """Aligned memory of the thread's own, kept for its next write."""
        buffer: PageBuffer | None = getattr(self._own, name, None)
        if buffer is None or buffer.nbytes < n_bytes:
            buffer = aligned_buffer(n_bytes)
            setattr(self._own, name, buffer)
        return buffer


class _InRing:
    """A job in the ring. As `Writes`, for one thread at a time."""

    def __init__(self, writes: Writes, request: Request) -> None:
        self._writes = writes
        self._request = request

    def done(self) -> bool:
        return self._request.has_ended

    def exception(self) -> BaseException | None:
        while not self.done():
            if not self._writes.wait():
                self._request.error = OSError(errno.EIO, "what became of a write is not known")
        return self._request.error

    def result(self) -> None:
        error = self.exception()
        if error is not None:
            raise error


def _write_at_once(request: Request) -> None:
    request.error = None
    try:
        request.done = write_exact(request.fd, request.vectors, request.offset)
    except OSError as error:
        request.error = error


def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(WRITE_THREADS, thread_name_prefix="tiered-kv-disk-write")


def _shared_ring() -> Requests | None:
    if not is_ring_allowed():
        return None
    try:
        return RingRequests(Ring(MOST_REQUESTS, is_shared=True), is_write=True)
    except OSError as error:
        _log.info("no io_uring for writing (%s): the disk tier writes with threads", error)
        return None
