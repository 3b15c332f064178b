"""Carrier: the store's moving half in a process of its own, such as an engine's worker.

It decides nothing: it carries out the orders of a `Decider` on one rank's share of every page, on
the streams of a `Mover`, and reports how each job ended. HBM is the engine's.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable
from typing import NamedTuple

from tiered_kv.counters import Counters, StoreStats
from tiered_kv.errors import TieredKVError, TierIOError
from tiered_kv.keys import PageKey
from tiered_kv.manifest import DiskSlots, Manifest
from tiered_kv.mover import WRITE_BATCH_BYTES, HbmBytes, Mover
from tiered_kv.orders import Job, JobEnd, Order, RankFacts, Report
from tiered_kv.plan import DISK
from tiered_kv.run import Run
from tiered_kv.storage.base import Page
from tiered_kv.storage.disk import DiskTier
from tiered_kv.storage.host import HostTier
from tiered_kv.streams import caller_event
from tiered_kv.transfer import Transfer

_log = logging.getLogger(__name__)

FENCE_S = 0.2  # the engine waits this long for pages it gives away to be copied, then they are not
CLOSE_S = 60.0
IDLE_S = 0.005  # an engine that has nothing to compute asks again after this time


class Loaded(NamedTuple):
    """A get that is over as far as HBM is concerned.

    Attributes:
        failed_slots: the engine's slots that do not hold their page: one failed, and all after it.
    """

    job: Job
    failed_slots: tuple[int, ...]


class _Flight(NamedTuple):
    job: Job
    transfer: Transfer
    run: Run
    deadline: float


class Carrier:
    """Moves pages of one rank. Its methods are called by one thread, the engine's.

    A load into a request that runs at the same time (`wait_layer`, `finish_running`) may fail when
    the engine has computed with it already. What it then stores is wrong under a right key. So from
    such a failure on, no page is stored until the decider, who tells the engine, has heard of it:
    puts of orders before the one that says so are dropped.

    Args:
        hbm: the engine's tensors.
        host: this rank's host tier; closed by `close`, as is the disk tier.
        disk: this rank's disk tier, or None.
        ranks: how many carriers there are.
        load_deadline_s: after this a load has failed.
        write_back: at `close`, write the host pages that are not on disk there, as far as it has
            room.
    """

    def __init__(
        self,
        hbm: HbmBytes,
        host: HostTier,
        disk: DiskTier | None,
        *,
        ranks: int = 1,
        load_deadline_s: float = 30.0,
        write_back: bool = False,
    ) -> None:
        self._hbm = hbm
        self._host = host
        self._disk = disk
        self._disk_slots = DiskSlots(disk) if disk is not None else None
        self._manifest = Manifest(host.capacity_pages, self._disk_slots, restores=ranks == 1)
        self._lock = threading.RLock()
        self._counters = Counters()
        self._mover = Mover(self._manifest, self._lock, hbm, host, self._disk_slots, self._counters)
        self._load_deadline_s = load_deadline_s
        self._write_back = write_back and disk is not None
        self._queued: dict[int, Job] = {}
        self._flights: dict[int, _Flight] = {}
        self._running: list[_Flight] = []  # loads into requests of this step
        self._waiting: list[_Flight] = []  # loads of requests that wait for them
        self._ended: dict[int, JobEnd] = {}
        self._unheard: set[int] = set()  # running loads that failed, of which the decider must hear
        self._failed: set[int] = set()  # loads that failed, not reported yet
        self._is_closed = False
        self._has_news = threading.Event()  # a job has ended

    def facts(self) -> RankFacts:
        """What this rank has, for the decider to start with."""
        if self._disk is None:
            return RankFacts(self._host.capacity_pages)
        found = [(page.key, page.parent) for page in self._disk.pages()]
        return RankFacts(self._host.capacity_pages, self._disk.capacity_pages, found)

    # -- orders ------------------------------------------------------------------------------------

    def receive(self, order: Order) -> None:
        """Queue an order's jobs. Orders come in turn, each once."""
        if order.adopted is not None:
            self._adopt(order.adopted)
        if self._disk_slots is not None:
            self._disk_slots.release(order.freed)
        self._unheard -= order.heard
        with self._lock:
            for job in order.jobs:
                self._manifest.expect(job.plan)
                self._queued[job.id] = job

    def _adopt(self, adopted: tuple[tuple[PageKey, int], ...]) -> None:
        if self._disk is None or self._disk_slots is None:
            return
        local = {page.key: page.slot for page in self._disk.pages()}
        self._disk_slots.adopt((slot, local.pop(key)) for key, slot in adopted)
        self._disk.free(list(local.values()))

    def start_running(self) -> None:
        """Start loads for requests of this step. The engine's work so far comes before them."""
        for job in [job for job in self._queued.values() if job.kind == "get"]:
            if not job.is_awaited:
                self._start(job)

    def start(self) -> None:
        """Start all that is queued, in order: a load may want a page that a put has just named."""
        for job in list(self._queued.values()):
            self._start(job)

    def _start(self, job: Job) -> None:
        del self._queued[job.id]
        if job.is_void or (job.kind == "put" and self._unheard):
            lost = dict.fromkeys(range(len(job.plan.moves())), "failed")
            with self._lock:
                self._ended[job.id] = JobEnd(lost=lost)
            return
        is_get = job.kind == "get"
        layers, deadline_s = len(self._hbm.layers), self._load_deadline_s
        transfer = Transfer(job.plan, layers=layers if is_get else 0, deadline_s=deadline_s)
        events, device_event = caller_event(self._hbm.device, None)
        with self._lock:
            run = Run(
                self._mover,
                transfer,
                ready=events,
                device_event=device_event,
                on_settled=lambda run: self._settled(job, run),
            )
            flight = _Flight(job, transfer, run, time.monotonic() + deadline_s)
            self._flights[job.id] = flight
            run.start()
        if is_get:
            (self._waiting if job.is_awaited else self._running).append(flight)

    def _settled(self, job: Job, run: Run) -> None:
        """Called under the lock, by a stream."""
        lost, bad = self._manifest.outcome(job.plan)
        arrived = run.transfer.arrived_pages if job.kind == "get" else 0
        self._ended[job.id] = JobEnd(1, arrived, lost, bad)
        del self._flights[job.id]
        self._has_news.set()

    # -- the engine's step -------------------------------------------------------------------------

    def fence(self, jobs: Iterable[int]) -> None:
        """Wait until these jobs are through with HBM; those too slow for `FENCE_S` leave it.

        Puts that were ordered only now are started for it: this is their last chance. So are those
        decided before them, which they may hang from; the engine has computed their pages too.
        """
        jobs = set(jobs)
        last = max(jobs & self._queued.keys(), default=-1)
        for job in [job for job in self._queued.values() if job.kind == "put" and job.id <= last]:
            self._start(job)
        with self._lock:
            runs = [self._flights[number].run for number in jobs & self._flights.keys()]
        until = time.monotonic() + FENCE_S
        for run in runs:
            if not run.hbm_done.wait(max(0.0, until - time.monotonic())):
                run.leave_hbm()

    @property
    def is_loading(self) -> bool:
        """Whether a request of this step waits for a load."""
        return bool(self._running)

    def wait_layer(self, layer: int) -> None:
        """Block until a layer of all pages for the requests of this step is here, or has failed."""
        for flight in self._running:
            try:
                flight.transfer.wait_layer(layer)
            except TieredKVError as error:  # the load has failed; `finish_running` says so
                self._mover.report(error)

    def finish_running(self) -> list[Loaded]:
        """End the loads for requests of this step; blocks until they are here or have failed."""
        loaded = [self._finish(flight) for flight in self._running]
        self._running = []
        self._unheard.update(load.job.id for load in loaded if load.failed_slots)
        return loaded

    def finished_waiting(self) -> list[Loaded]:
        """Loads of waiting requests that are over since the last call; does not block."""
        over = [flight for flight in self._waiting if self._is_over(flight)]
        self._waiting = [flight for flight in self._waiting if flight not in over]
        return [self._finish(flight) for flight in over]

    @staticmethod
    def _is_over(flight: _Flight) -> bool:
        return flight.transfer.settled.is_fired or time.monotonic() > flight.deadline

    def _finish(self, flight: _Flight) -> Loaded:
        try:
            arrived = flight.transfer.wait()
        except TieredKVError as error:
            self._mover.report(error)
            arrived = flight.transfer.arrived_pages
        if not flight.transfer.settled.is_fired:
            flight.run.leave_hbm()
        loaded = Loaded(flight.job, flight.job.slots[arrived:])
        if loaded.failed_slots:
            self._failed.add(flight.job.id)
        return loaded

    def wait_for_news(self) -> None:
        """Block until a job ends, for `IDLE_S` at most; at once if none is under way.

        For an engine that steps though no request can run: going round without a pause, it would
        take the interpreter from the threads that it waits for.
        """
        with self._lock:
            if self._ended or not self._flights:
                return
            self._has_news.clear()
        self._has_news.wait(IDLE_S)

    def report(self) -> Report | None:
        """What has become of jobs since the last call; None if there is nothing to say."""
        with self._lock:
            ended, self._ended = self._ended, {}
        failed, self._failed = self._failed, set()
        if not ended and not failed:
            return None
        return Report(ended, failed, self._counters.load_s_per_page())

    # -- care --------------------------------------------------------------------------------------

    def stats(self) -> StoreStats:
        """Counters of what this rank has moved."""
        return self._counters.snapshot({})

    def usage(self) -> dict[str, tuple[int, int]]:
        """(used, capacity) bytes of the disk tier; of host slots only the decider knows."""
        if self._disk is None:
            return {}
        return {DISK: (self._disk.used_bytes, self._disk.capacity_bytes)}

    def close(self) -> None:
        """Finish what has been started, then give memory, files and locks back. Twice is harmless.

        A medium that hangs is waited for no longer than `CLOSE_S`; then its lock is left to the end
        of the process.
        """
        if self._is_closed:
            return
        self._is_closed = True
        until = time.monotonic() + CLOSE_S
        with self._lock:
            flights = list(self._flights.values())
        ends = [flight.transfer.settled for flight in flights]
        if self._write_back:
            ends.append(self._mover.write_stream.submit(self._flush, ends))
        for end in ends:
            if not end.wait(max(0.0, until - time.monotonic())):
                for flight in flights:
                    flight.run.leave_hbm()
                _log.warning("closing: a transfer has not ended in %.0f s, leaving it", CLOSE_S)
                return
        self._mover.close()
        if self._disk is not None:
            self._disk.close()
        self._host.close()

    def _flush(self) -> None:
        """Write what is on host alone to disk. Runs on the write stream; nothing else moves now."""
        assert self._disk is not None
        dirty = self._manifest.dirty({page.key for page in self._disk.pages()})
        batch = max(1, WRITE_BATCH_BYTES // self._hbm.page_bytes)
        free = self._disk.capacity_pages - self._disk.used_bytes // self._hbm.page_bytes
        dirty = dirty[:free]
        try:
            for at in range(0, len(dirty), batch):
                pages = [
                    Page(key, parent, self._host.view(slot))
                    for slot, key, parent in dirty[at : at + batch]
                ]
                slots = self._disk.reserve(len(pages))
                assert slots is not None, "as many were free"
                self._disk.write(slots, pages)
        except TierIOError as error:
            _log.warning("closing: pages on host alone are lost: %s", error)
