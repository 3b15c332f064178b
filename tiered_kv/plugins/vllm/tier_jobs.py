"""TierJobs: loads and saves between rows of memory and a disk store, on threads of their own."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tiered_kv.disk_store import DiskStore
from tiered_kv.errors import StoreClosedError, TierIOError
from tiered_kv.keys import PageKey

Rows = npt.NDArray[np.uint8]

_READERS = 2  # each brings one request's pages; the store itself reads them `io_threads` at once
_SAVE_BATCH_BYTES = 64 << 20  # of pages made durable by one commit; bounds what close() waits for
_STUCK_S = 60.0
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Ended:
    """A job that is over.

    Attributes:
        job_id: as it was submitted.
        is_load: or a save.
        done: for each of its keys whether the page was brought, or is stored.
        seconds: spent in the store; saves of one commit share theirs.
    """

    job_id: int
    is_load: bool
    done: tuple[bool, ...]
    seconds: float


@dataclass(frozen=True, slots=True)
class _Job:
    job_id: int
    keys: Sequence[PageKey]
    rows: Sequence[int]
    parents: Sequence[PageKey | None] = ()


class TierJobs:
    """Runs jobs in the background: loads at once, saves in order and many in one commit.

    Submitting, `ended` and `touch` take a lock for a moment and do no I/O. Every job submitted ends
    exactly once, whatever happens to it; an error is a job that brought or stored nothing.

    Args:
        store: whose calls block; used from several threads at once.
        rows: memory `[rows, page bytes]`, uint8. A job owns its rows from when it is submitted
            until it has ended.
    """

    def __init__(self, store: DiskStore, rows: Rows) -> None:
        self._store = store
        self._rows: Rows | None = rows
        self._batch_rows = max(1, _SAVE_BATCH_BYTES // rows.shape[1])
        self._changed = threading.Condition()
        self._loads: deque[_Job] = deque()
        self._saves: deque[_Job | list[PageKey]] = deque()  # a list: pages to mark as used
        self._ended: list[Ended] = []
        self._running = 0  # jobs taken from a queue and not ended
        self._is_closed = False
        targets = [*[self._read] * _READERS, self._write]
        self._threads = [
            threading.Thread(target=target, name=f"tiered-kv-tier-{at}", daemon=True)
            for at, target in enumerate(targets)
        ]
        for thread in self._threads:
            thread.start()

    def load(self, job_id: int, keys: Sequence[PageKey], rows: Sequence[int]) -> None:
        """Bring one page a row. What a row holds after a page did not come is undefined."""
        self._submit(self._loads, _Job(job_id, keys, rows))

    def save(
        self,
        job_id: int,
        keys: Sequence[PageKey],
        rows: Sequence[int],
        parents: Sequence[PageKey | None],
    ) -> None:
        """Store one page a row; `parents` as for `DiskStore.put`."""
        self._submit(self._saves, _Job(job_id, keys, rows, parents))

    def touch(self, keys: list[PageKey]) -> None:
        """Mark pages of a prefix as used, once the saves before are done."""
        with self._changed:
            if not self._is_closed:
                self._saves.append(keys)
                self._changed.notify_all()

    def ended(self) -> list[Ended]:
        """The jobs that ended since the last call."""
        with self._changed:
            ended, self._ended = self._ended, []
        return ended

    def drain(self) -> None:
        """Block until every job submitted has ended; none is given up."""
        with self._changed:
            self._changed.wait_for(lambda: not (self._loads or self._saves or self._running))

    def close(self, deadline_s: float) -> None:
        """Save what is queued for up to `deadline_s`, fail the rest, stop. The rows are free after.

        Raises:
            TierIOError: a transfer does not come back from the medium; it may still use its rows.
        """
        with self._changed:
            self._is_closed = True
            self._fail(self._loads)
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self._saves, deadline_s)
            if self._saves:
                _log.warning("closing: %d saves are given up", len(self._saves))
                self._fail(self._saves)
            self._changed.notify_all()
        until = time.monotonic() + _STUCK_S
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))
        if any(thread.is_alive() for thread in self._threads):
            raise TierIOError(f"the disk does not answer for {_STUCK_S:.0f} s", tier="disk")
        self._rows = None

    # -- inside ------------------------------------------------------------------------------------

    def _submit(self, queue: deque[_Job] | deque[_Job | list[PageKey]], job: _Job) -> None:
        with self._changed:
            if self._is_closed:
                raise StoreClosedError("the disk tier is shut down")
            queue.append(job)
            self._changed.notify_all()

    def _fail(self, queue: deque[_Job] | deque[_Job | list[PageKey]]) -> None:
        while queue:
            job = queue.popleft()
            if isinstance(job, _Job):
                is_load = queue is self._loads
                self._ended.append(Ended(job.job_id, is_load, (False,) * len(job.keys), 0.0))

    def _read(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._loads or self._is_closed)
                if not self._loads:
                    return
                job = self._loads.popleft()
                self._running += 1
            self._carry_out([job], is_load=True)

    def _write(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._saves or self._is_closed)
                if not self._saves:
                    return
                used, jobs = self._next_saves()
                self._running += len(jobs)
                self._changed.notify_all()
            if jobs:
                self._carry_out(jobs, is_load=False)
            self._mark_used(used)

    def _next_saves(self) -> tuple[list[list[PageKey]], list[_Job]]:
        """What one commit takes, and the pages to mark as used after it."""
        used: list[list[PageKey]] = []
        jobs: list[_Job] = []
        n_rows = 0
        while self._saves:
            job = self._saves[0]
            if isinstance(job, _Job):
                if jobs and n_rows + len(job.rows) > self._batch_rows:
                    break
                jobs.append(job)
                n_rows += len(job.rows)
            else:
                used.append(job)
            self._saves.popleft()
        return used, jobs

    def _mark_used(self, used: list[list[PageKey]]) -> None:
        try:
            for keys in used:
                self._store.touch(keys)
        except Exception:
            _log.exception("marking pages as used failed")

    def _carry_out(self, jobs: list[_Job], *, is_load: bool) -> None:
        began = time.monotonic()
        n_keys = sum(len(job.keys) for job in jobs)
        done = [False] * n_keys
        try:
            done = self._move(jobs, is_load)
        except Exception:  # whatever it is, the engine goes on without these pages
            _log.exception("%s %d pages failed", "loading" if is_load else "saving", n_keys)
        seconds = (time.monotonic() - began) / len(jobs)
        with self._changed:
            at = 0
            for job in jobs:
                outcome = tuple(done[at : at + len(job.keys)])
                self._ended.append(Ended(job.job_id, is_load, outcome, seconds))
                at += len(job.keys)
            self._running -= len(jobs)
            self._changed.notify_all()

    def _move(self, jobs: list[_Job], is_load: bool) -> list[bool]:
        assert self._rows is not None
        keys = [key for job in jobs for key in job.keys]
        pages = [self._rows[row] for job in jobs for row in job.rows]
        if is_load:
            return self._store.get(keys, pages)
        return self._store.put(keys, pages, [parent for job in jobs for parent in job.parents])
