"""Run: one transfer being carried out by the mover's streams."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from tiered_kv.errors import CorruptPageError, TierIOError
from tiered_kv.kernels.page_copy.rows import Rows
from tiered_kv.keys import PageKey
from tiered_kv.mover import (
    COPY_BATCH_BYTES,
    DEMOTE_BATCH_BYTES,
    LOAD_BATCH_BYTES,
    WRITE_BATCH_BYTES,
    Mover,
    Place,
)
from tiered_kv.plan import DISK, HBM, HOST, Move
from tiered_kv.storage.base import Page
from tiered_kv.streams import Event, Stream, when_all
from tiered_kv.transfer import Transfer

Batch = list[Move]


class Job(NamedTuple):
    """A batch for one stream.

    Attributes:
        work: makes the moves; returns those whose bytes are in place, or queued on the device.
        ready: events of the caller's that come first.
        done: fires when every move of the batch has arrived or failed.
    """

    stream: Stream
    batch: Batch
    work: Callable[[Batch], Batch]
    ready: Sequence[Event]
    done: Event


def _job(
    stream: Stream, batch: Batch, work: Callable[[Batch], Batch], ready: Sequence[Event] = ()
) -> Job:
    return Job(stream, batch, work, ready, Event())


def _places(moves: Sequence[Move]) -> list[Place]:
    """Where moves, all into one tier, bring their pages."""
    target = moves[0].target if moves else ""
    return [(target, move.key) for move in moves]


def _in_motion(batch: Batch) -> Batch:
    """The moves of a batch that do move something, not a page that is in its slot already."""
    if batch[0].target != HBM:
        return batch
    return [move for move in batch if move.source != HBM or not move.is_in_place]


class Run:
    """Takes a transfer's plan from its first move to `settle`.

    Args:
        ready: the caller's events: its pages are neither read nor overwritten before they fire.
        device_event: the same as a CUDA event, or None.
        on_settled: called once when nothing moves any more, under the lock, before `settled` fires.

    Attributes:
        hbm_done: fires when it has read and written HBM for the last time.
    """

    def __init__(
        self,
        mover: Mover,
        transfer: Transfer,
        *,
        ready: Sequence[Event] = (),
        device_event: Any = None,
        on_settled: Callable[[Run], None] = lambda run: None,
    ) -> None:
        self.transfer = transfer
        self.why_lost: dict[int, str] = {}  # position -> reason
        self.hbm_done = Event()
        self._hbm = threading.Lock()  # held while HBM is read or written
        self._has_left_hbm = False
        self._mover = mover
        self._plan = transfer.plan
        self._ready = list(ready)
        self._device_event = device_event
        self._on_settled = on_settled
        self._position = dict(zip(self._plan.pages, range(len(self._plan.pages)), strict=True))
        steps = self._plan.load + self._plan.fill + self._plan.store + self._plan.write
        self._counting = {move.page: move for move in steps}  # a page's last move is what counts
        self._demoted = {move.page: move.key for move in self._plan.demote}
        self._joined: set[PageKey] = set()  # pages that others bring
        self._unknown = 0  # fill batches whose sources may still fail
        self._layer_left: list[int] = []
        self._layer_marks: list[list[Any]] = []

    def start(self) -> None:
        """Queue everything; returns at once. Called under the lock that planned it."""
        mover, plan = self._mover, self._plan
        mover.in_flight.add(self.transfer)
        # A store waits for the page that its own plan binds, if at all, and a demotion for none.
        waiting = [move for move in plan.load + plan.fill + plan.write if move.waits]
        joined = {(move.source, move.key) for move in waiting} & mover.arrivals.keys()
        self._join({key for _, key in joined})
        unmoved = self._settle_unmoved()
        bound = Event()
        on_hbm = [*self._fill_jobs(), *self._store_jobs(bound)]
        jobs = [
            *self._write_jobs(plan.demote, DEMOTE_BATCH_BYTES),
            *self._load_jobs(),
            *on_hbm,
            *self._write_jobs(plan.write, WRITE_BATCH_BYTES),
        ]
        announced = [self._announce(_in_motion(job.batch), job.done) for job in jobs]
        self._bind(bound)
        for job, arriving in zip(jobs, announced, strict=True):
            self._submit(job, arriving)
        when_all([job.done for job in on_hbm], self.hbm_done.fire)
        when_all([bound, unmoved, *(job.done for job in jobs)], self._end)

    def leave_hbm(self) -> None:
        """Let HBM be: what is being copied is finished, what has not begun never begins.

        Blocks for that long. Afterwards the slots of the plan may be used for something else,
        though the transfer has not settled; its pages that were not through are lost.
        """
        self._has_left_hbm = True
        with self._hbm:
            pass

    def _join(self, keys: set[PageKey]) -> None:
        """Until this transfer ends, those who bring these pages do so though they be cancelled."""
        new = keys - self._joined
        self._joined |= new
        self._mover.wanted.update(new)

    def _announce(self, moves: Sequence[Move], done: Event) -> Sequence[Move]:
        """Let other transfers wait for pages on their way, one event for all that come together.

        Returns the moves that bring such a page, not one to a slot that is the caller's own.
        """
        arriving = self._mover.books.arriving(moves)
        self._mover.arrivals.update(dict.fromkeys(_places(arriving), done))
        return arriving

    def _settle_unmoved(self) -> Event:
        """Pages no move is about: where they should be, or on their way there, or without room."""
        mover, pages, counting = self._mover, self._plan.pages, self._counting
        tiers = (HOST, DISK) if self._plan.is_put else (HBM, HOST)
        left_out = [at for at, page in enumerate(pages) if page not in counting]
        unmoved = [(at, mover.books.key(pages[at])) for at in left_out]
        places = {(tier, key) for _, key in unmoved for tier in tiers}
        coming = places & mover.arrivals.keys()
        self._join({key for _, key in coming})
        settled = Event()

        def judge() -> None:
            with mover.lock:  # a page may have gone, and its number be another's by now
                here = {at for at, key in unmoved if mover.books.has(key, tiers)}
            self.transfer.here(list(here))
            self._lose({at: "no_room" for at, _ in unmoved if at not in here})
            settled.fire()

        when_all([mover.arrivals[place] for place in coming], judge)
        return settled

    # -- queueing ----------------------------------------------------------------------------------

    def _submit(self, job: Job, arriving: Sequence[Move]) -> None:
        """Queue a batch; it is published when the device is through with it.

        Whatever happens, every move of the batch ends as arrived or failed, and `job.done` fires.
        """
        made: Batch = []

        def guarded() -> None:
            try:
                made.extend(job.work(job.batch))
                job.stream.drain()
            except BaseException as error:  # surfaces at wait(); nobody is above a worker thread
                made.clear()
                self.transfer.broke(error)

        queued = job.stream.submit(guarded, [*job.ready, *self._needs(job)])
        queued.on_fire(lambda: self._publish(job.batch, arriving, made, job.done))

    def _needs(self, job: Job) -> list[Event]:
        """The events of other batches that this one waits for, each once."""
        arrivals, batch = self._mover.arrivals, job.batch
        needs: dict[Event | None, None] = {}
        if job.stream is not self._mover.store_stream:  # whose pages come with `job.ready`
            places = [(move.source, move.key) for move in batch if move.waits]
            needs.update(dict.fromkeys(map(arrivals.get, places)))
        if self._demoted:
            gone = [self._demoted[move.after] for move in batch if move.after >= 0]
            needs.update(dict.fromkeys(arrivals[DISK, key] for key in gone))
        if batch[0].target == DISK:
            above = [(DISK, move.parent) for move in batch if move.parent]
            needs.update(dict.fromkeys(map(arrivals.get, above)))
        return [event for event in needs if event is not None and event is not job.done]

    def _publish(
        self, batch: Sequence[Move], arriving: Sequence[Move], made: Sequence[Move], done: Event
    ) -> None:
        """Tell the books and the transfer; `arriving` are those that this run has announced."""
        mover, is_whole = self._mover, len(made) == len(batch)
        came = set() if is_whole else {id(move) for move in made}
        with mover.lock:
            mover.books.arrived_all(
                arriving if is_whole else [move for move in arriving if id(move) in came]
            )
            for move in () if is_whole else arriving:
                if id(move) not in came:
                    mover.books.failed(move, self._why(move))
            for place in _places(arriving):
                del mover.arrivals[place]
        counting, position = self._counting, self._position
        counted = [
            move for move in batch if counting.get(move.page) is move and move.page in position
        ]
        if is_whole:
            self.transfer.here([position[move.page] for move in counted])
        else:
            self.transfer.here([position[move.page] for move in counted if id(move) in came])
            self._lose({position[m.page]: "failed" for m in counted if id(m) not in came})
        done.fire()

    def _why(self, move: Move) -> str:
        return self.why_lost.get(self._position.get(move.page, -1), "failed")

    def _lose(self, reasons: dict[int, str]) -> None:
        for at, reason in reasons.items():
            self.why_lost.setdefault(at, reason)
        self.transfer.lost(list(reasons))

    def _possible(self, batch: Batch) -> Batch:
        """The moves of a batch whose source has come and whose target slot is free.

        Of a cancelled transfer those alone whose pages others have joined.
        """
        mover = self._mover
        is_cancelled = self.transfer.is_cancelled and not self._plan.is_put
        with mover.lock:
            wanted = batch
            if is_cancelled:
                joined = self._joined
                wanted = [m for m in batch if mover.wanted[m.key] > (m.key in joined)]
            possible = mover.books.possible(wanted)
        if len(wanted) < len(batch):
            left_out = {move.page for move in batch} - {move.page for move in wanted}
            self._lose({self._position[page]: "in_flight" for page in left_out})
        return possible

    # -- the moves ---------------------------------------------------------------------------------

    def _bind(self, bound: Event) -> None:
        """Once the caller has written its pages they count; till then spare slots are not free."""
        mover, batch = self._mover, self._plan.bind
        if self._ready or self._device_event is not None:
            arriving = self._announce(batch, bound)
            mover.after(
                self._ready,
                self._device_event,
                lambda: self._publish(batch, arriving, batch, bound),
            )
        else:  # now, and nobody can have begun to wait: 1 us a page less
            mover.books.arrived_all(mover.books.arriving(batch))
            bound.fire()

    def _write_jobs(self, moves: Sequence[Move], batch_bytes: int) -> list[Job]:
        mover = self._mover
        return [
            _job(mover.write_stream, batch, self._write)
            for batch in mover.batches(moves, batch_bytes)
        ]

    def _write(self, batch: Batch) -> Batch:
        mover = self._mover
        assert mover.disk is not None
        with mover.lock:
            moves: Batch = mover.books.durable(batch)
        if not moves:
            return []
        pages = [Page(move.key, move.parent, mover.host.view(move.source_slot)) for move in moves]
        try:
            mover.disk.write([move.target_slot for move in moves], pages)
        except TierIOError as error:
            mover.counters.add("total", "write_failed", len(moves))
            mover.report(error)
            return []
        mover.counters.moved(HOST, DISK, len(moves) * mover.hbm.page_bytes)
        return moves

    def _load_jobs(self) -> list[Job]:
        mover = self._mover
        jobs = []
        for batch in mover.batches(self._plan.load, LOAD_BATCH_BYTES):
            done = Event()
            jobs.append(Job(mover.loader(done), batch, self._load, (), done))
        return jobs

    def _load(self, batch: Batch) -> Batch:
        moves = self._possible(batch)
        return self._read(moves, [self._mover.host.view(move.target_slot) for move in moves])

    def _read(self, moves: Batch, into: Sequence[Any]) -> Batch:
        """Read pages from disk, verified; drop from the index what is bad."""
        mover = self._mover
        assert mover.disk is not None
        started = time.perf_counter()
        outcome = mover.disk.read([move.source_slot for move in moves], into) if moves else []
        good = [move for move, error in zip(moves, outcome, strict=True) if error is None]
        mover.counters.loaded(DISK, len(good), mover.load_seconds(started))
        mover.counters.moved(DISK, HOST, len(good) * mover.hbm.page_bytes)
        mover.counters.add("total", "verified", len(good))
        for move, error in zip(moves, outcome, strict=True):
            if error is not None:
                self._spoiled(move, error)
        return good

    def _spoiled(self, move: Move, error: Exception) -> None:
        reason = "corrupt" if isinstance(error, CorruptPageError) else "failed"
        self._mover.counters.add("total", reason, 1)
        self._mover.report(error)
        with self._mover.lock:
            self._mover.books.condemn(move, reason)
        if move.page in self._position:
            self.why_lost.setdefault(self._position[move.page], reason)

    def _fill_jobs(self) -> list[Job]:
        """Batches by what they wait for: nothing, a load batch, others' transfers, staging."""
        mover, plan = self._mover, self._plan
        loaded = {move.page: at for at, move in enumerate(plan.load)}
        per_load = max(1, LOAD_BATCH_BYTES // mover.hbm.page_bytes)
        groups: defaultdict[str | int, Batch] = defaultdict(list)
        for move in plan.fill:
            if move.source == DISK:
                kind: str | int = "staged"
            elif move.page in loaded and move.source == HOST:
                kind = loaded[move.page] // per_load
            else:
                kind = "joined" if move.waits else "ready"
            groups[kind].append(move)
        staged = groups.pop("staged", [])
        staging = mover.host.staging_pages
        passes = [staged[at : at + staging] for at in range(0, len(staged), staging or 1)]
        layers = len(mover.hbm.layers)
        self._unknown = len(groups) + len(passes)
        self._layer_left = [self._unknown] * layers
        self._layer_marks = [[] for _ in range(layers)]
        if not self._unknown:
            self.transfer.sources_known()
        return [
            _job(mover.fill_stream, batch, self._fill, self._ready) for batch in groups.values()
        ] + [_job(mover.load_stream, batch, self._fill_staged, self._ready) for batch in passes]

    def _fill(self, batch: Batch) -> Batch:
        """Runs on the fill stream."""
        moves = self._possible(batch)
        return self._scatter(batch, moves, self._mover.fill_stream)

    def _fill_staged(self, batch: Batch) -> Batch:
        """Runs on the load stream, which waits for the copy: the staging slots are its own."""
        mover = self._mover
        moves = self._possible(batch)
        buffers = mover.host.staging(len(moves))
        good = self._read(moves, list(buffers))
        read = {move.page for move in good}
        rows = buffers.select([at for at, move in enumerate(moves) if move.page in read])
        error: list[BaseException] = []

        def copy() -> None:
            try:
                self._scatter(batch, good, mover.fill_stream, rows)
            except BaseException as raised:  # handed to the load stream, which is waiting
                error.append(raised)

        mover.fill_stream.submit(copy).wait()
        if error:
            raise error[0]
        return [] if self._has_left_hbm else good

    def _scatter(
        self,
        batch: Batch,
        moves: Batch,
        stream: Stream,
        staged: Rows | None = None,
    ) -> Batch:
        """Copy pages into their HBM slots layer by layer, and say when each is through."""
        with self._hbm:
            made = self._scatter_held(batch, [] if self._has_left_hbm else moves, stream, staged)
            stream.drain()
        return made

    def _scatter_held(
        self, batch: Batch, moves: Batch, stream: Stream, staged: Rows | None
    ) -> Batch:
        mover = self._mover
        if self._device_event is not None:
            self._device_event.wait()
        if len(moves) < len(batch):
            came = {move.page for move in moves}
            self._lose({self._position[m.page]: "failed" for m in batch if m.page not in came})
        self._batch_known()
        inside = [move for move in moves if move.source == HBM and not move.is_in_place]
        mover.hbm.copy_slots(
            [move.source_slot for move in inside], [move.target_slot for move in inside]
        )
        copied = [move for move in moves if move.source != HBM]
        slots = [move.target_slot for move in copied]
        rows = staged or mover.host.rows([move.source_slot for move in copied])
        started = time.perf_counter()
        for first, last in mover.hbm.layer_steps:
            if copied:
                mover.hbm.write_layers(slots, rows, first, last)
            mark = stream.mark()
            self._layers_through(first, last, mark)
        mover.counters.moved(HOST, HBM, len(copied) * mover.hbm.page_bytes)
        mover.counters.loaded(HOST, len(copied), time.perf_counter() - started)
        return moves

    def _batch_known(self) -> None:
        with self._mover.lock:
            self._unknown -= 1
            is_last = self._unknown == 0
        if is_last:
            self.transfer.sources_known()

    def _layers_through(self, first: int, last: int, mark: Any) -> None:
        with self._mover.lock:
            whole = []
            for layer in range(first, last):
                self._layer_marks[layer].append(mark)
                self._layer_left[layer] -= 1
                if self._layer_left[layer] == 0:
                    whole.append(layer)
        for layer in whole:
            self.transfer.layer_here(layer, self._layer_marks[layer])

    def _store_jobs(self, bound: Event) -> list[Job]:
        mover = self._mover
        ready = [*self._ready, bound] if self._plan.bind else self._ready
        return [
            _job(mover.store_stream, batch, self._store, ready)
            for batch in mover.batches(self._plan.store, COPY_BATCH_BYTES)
        ]

    def _store(self, batch: Batch) -> Batch:
        """Runs on the store stream."""
        mover = self._mover
        if self._device_event is not None:
            self._device_event.wait()
        with self._hbm:
            moves = [] if self._has_left_hbm else self._possible(batch)
            mover.hbm.read(
                [move.source_slot for move in moves],
                mover.host.rows([move.target_slot for move in moves]),
            )
        mover.counters.moved(HBM, HOST, len(moves) * mover.hbm.page_bytes)
        return moves

    def _end(self) -> None:
        mover = self._mover
        with mover.lock:
            mover.books.end(self._plan)
            mover.in_flight.discard(self.transfer)
            mover.left(self._joined)
            self._on_settled(self)
        self.transfer.settle()
