"""Runs that one thread has under way on the medium: so many at once, others when they are done."""

from __future__ import annotations

import errno
import os
import time
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from tiered_kv.errors import TierIOError
from tiered_kv.storage.base import PageBuffer
from tiered_kv.storage.disk.columns import Column
from tiered_kv.storage.disk.direct_io import BLOCK_BYTES, aligned_buffer, iovecs, read_exact
from tiered_kv.storage.disk.medium import Medium
from tiered_kv.storage.disk.requests import MOST_REQUESTS, Request, Requests
from tiered_kv.storage.disk.runs import RUN_BYTES, Run
from tiered_kv.storage.disk.segment import SegmentFiles

MOST_SEGMENTS = 16
"""Segments that one thread reads at once: each is a descriptor, of the 1,024 that a process has."""

LEAST_REACH_BYTES = 4 << 20
"""So much may be under way however little is left."""

_SHORTAGES = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)
_SHORTAGE_S, _PAUSE_S = 5.0, 2e-3


class Pace(NamedTuple):
    """How much may be under way at once: no more than a part of what is left.

    A virtual disk tells of what it has done when it has nothing left to do: 0.4 ms pass from there
    to its next request, so it should not come to that often. But what it tells of last is verified,
    and copied, with nothing more to read. 128 MiB as 32, 32, 32, 24, 6, 2 or so.

    Attributes:
        reach_bytes: the bound however much is left.
        part: of what is left.
    """

    reach_bytes: int
    part: float

    def most_bytes(self, left_bytes: int) -> int:
        """So much may be under way while so much is left, that among it."""
        return min(self.reach_bytes, max(LEAST_REACH_BYTES, int(left_bytes * self.part)))


class Errand(Protocol):
    """What runs are read for."""

    pace: Pace

    def vectors(self, run: Run) -> Sequence[PageBuffer]:
        """What a run is read into, if that can be done in place."""

    def landed(self, run: Run, detour: PageBuffer | None, error: OSError | None) -> None:
        """A run has been read, to `detour` if not in place, or it could not be."""

    def broke(self, error: BaseException) -> None:
        """Nothing more of it will land."""


class Lane:
    """The runs of one thread, which alone may call.

    What has come is verified while the medium is busy with what has not; before that the next runs
    are begun.

    Memory of its own: a buffer of a run for each that is under way at once, kept for the next, and
    only where buffers of callers are not aligned or pages are no multiple of a block.

    A signal's exception may come after any call. Whoever gets one must `abandon`, which only a
    second one cuts short. So what there is to give back is noted in the same call of C as it is
    taken.

    Args:
        longest_bytes: of a run.
    """

    def __init__(self, files: SegmentFiles, medium: Medium, longest_bytes: int) -> None:
        self._files = files
        self._medium = medium
        self._longest_bytes = max(RUN_BYTES, longest_bytes)
        self._requests: Requests | None = None
        self._waiting: deque[tuple[Errand, Run]] = deque()
        self._under_way: dict[Request, tuple[Errand, Run, PageBuffer | None]] = {}
        self._under_way_bytes = 0
        self._waiting_bytes = 0
        self._arrived: deque[Request] = deque()
        self._open: dict[int, int] = {}  # segment -> descriptor, of those with runs under way
        self._detours: list[PageBuffer] = []  # that are free

    def add(self, errand: Errand, runs: Sequence[Run]) -> None:
        """Begin as many as may be under way, and the others in their turn; does not block."""
        self._waiting.extend([(errand, run) for run in runs])
        self._waiting_bytes = sum(run.n_bytes for _, run in self._waiting)
        self._begin()

    def advance(self) -> None:
        """Block until a run has landed, of whatever errand."""
        self._take(self._on_medium().wait())
        self._take(self._on_medium().poll())  # what it tells of at once comes one by one
        while self._arrived:
            request = self._arrived[0]
            errand, run, detour = self._under_way[request]
            self._files.has_read(request.fd, request.offset, request.done)
            errand.landed(run, detour, request.error)
            self._arrived.popleft()
            del self._under_way[request]
            self._close_unused()
            if detour is not None:  # the next takes it; so there are no more than are under way
                self._under_way_bytes -= request.n_bytes
                self._detours.append(detour)
            # A virtual disk may tell of all it has done at once, and then has nothing to do.
            self._take(self._on_medium().poll())

    def abandon(self, error: BaseException) -> None:
        """Give up all errands: returns when nothing is written to their buffers any more.

        Raises:
            OSError: the kernel did not let us wait for that; it has been told to cancel all, but
                what the medium has begun may still be written.
        """
        try:
            if self._requests is not None:
                self._requests.drain()
        except OSError:
            broken, self._requests = self._requests, None
            if broken is not None:
                broken.close()
            raise
        finally:
            errands = {id(errand): errand for errand, _ in self._waiting}
            errands |= {id(errand): errand for errand, _, _ in self._under_way.values()}
            self._waiting.clear()
            self._waiting_bytes = 0
            self._under_way.clear()
            self._arrived.clear()
            self._under_way_bytes = 0
            self._close_unused()
            for errand in errands.values():
                errand.broke(error)

    def read_alone(self, errand: Errand, run: Run) -> PageBuffer | None:
        """Read one run with a plain system call; returns the detour it took, to be given back.

        Raises:
            OSError: it cannot be read.
            TierIOError: the process has been out of descriptors or memory for seconds; that says
                nothing about the page.
        """
        vectors, _, detour = self._place(errand, run)
        try:
            fd = self._opened_with_patience(run.segment)
            self._files.has_read(fd, run.offset, read_exact(fd, vectors, run.offset))
        except OSError:
            self.give_back(detour)
            raise
        finally:
            self._close_unused()
        return detour

    def give_back(self, detour: PageBuffer | None) -> None:
        """A detour is free again."""
        if detour is not None:
            self._detours.append(detour)

    def _take(self, done: Sequence[Request]) -> None:
        """Note what has come, and begin others in its place before it is verified."""
        for request in done:
            self._arrived.append(request)
            if self._under_way[request][2] is None:
                self._under_way_bytes -= request.n_bytes
        self._begin()

    def _begin(self) -> None:
        requests, begun = self._on_medium(), 0
        while self._waiting and self._has_room(*self._waiting[0]):
            errand, run = self._waiting[0]
            try:
                if self._under_way:
                    fd = self._opened(run.segment)
                else:
                    fd = self._opened_with_patience(run.segment)
            except TierIOError:  # a lasting shortage: of the whole read, and no page's
                raise
            except OSError as error:
                if self._under_way and error.errno in _SHORTAGES:
                    break  # the next that lands gives a descriptor back
                errand.landed(run, None, error)
                self._waiting.popleft()
                self._waiting_bytes -= run.n_bytes
                continue
            vectors, table, detour = self._place(errand, run)
            request = Request(fd, vectors, table, run.offset)
            self._under_way[request] = (errand, run, detour)  # noted before it leaves `_waiting`
            self._under_way_bytes += request.n_bytes
            self._waiting.popleft()
            self._waiting_bytes -= run.n_bytes
            requests.begin(request)
            begun += 1
            if begun == 1:
                requests.submit()  # the medium may have nothing to do
        if begun > 1:
            requests.submit()

    def _has_room(self, errand: Errand, run: Run) -> bool:
        if not self._under_way:
            return True
        if run.segment not in self._open and len(self._open) >= MOST_SEGMENTS:
            return False
        left_bytes = self._waiting_bytes + self._under_way_bytes
        is_within = self._under_way_bytes + run.n_bytes <= errand.pace.most_bytes(left_bytes)
        return is_within and len(self._under_way) < MOST_REQUESTS

    def _opened(self, segment: int) -> int:
        """A descriptor of a segment, the one there is if there is one."""
        if segment not in self._open:
            self._files.open_for_reads(segment, self._open)
        return self._open[segment]

    def _opened_with_patience(self, segment: int) -> int:
        """The same, where no run of ours need land for it: others' may."""
        deadline = time.monotonic() + _SHORTAGE_S
        while True:
            try:
                return self._opened(segment)
            except OSError as error:
                if error.errno not in _SHORTAGES:
                    raise
                if time.monotonic() > deadline:
                    message = f"{self._files.path(segment)} cannot be opened: {error.strerror}"
                    raise TierIOError(message, tier="disk", errno=error.errno) from error
            time.sleep(_PAUSE_S)

    def _close_unused(self) -> None:
        """Close what no run under way needs: each is forgotten and closed in one call of C."""
        used = {run.segment for _, run, _ in self._under_way.values()}
        unused = self._open.keys() - used
        if unused:
            list(map(os.close, map(self._open.pop, unused)))

    def _place(
        self, errand: Errand, run: Run
    ) -> tuple[Sequence[PageBuffer], Column, PageBuffer | None]:
        """What a run is read into, the same as `iovecs`, and the detour if it is one."""
        vectors = errand.vectors(run)
        table = iovecs(vectors)
        if not self._files.direct_io or not (table % BLOCK_BYTES).any():
            return vectors, table, None
        detour = self._detours.pop() if self._detours else aligned_buffer(self._longest_bytes)
        whole = [detour[: run.n_bytes]]
        return whole, iovecs(whole), detour

    def _on_medium(self) -> Requests:
        if self._requests is None:
            self._requests = self._medium.requests()
        return self._requests
