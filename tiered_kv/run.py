"""Run: one transfer being carried out by the mover's streams."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from tiered_kv.errors import CorruptPageError, TierIOError
from tiered_kv.kernels.page_copy.rows import Rows
from tiered_kv.keys import PageKey
from tiered_kv.mover import COPY_BATCH_BYTES, LOAD_BATCH_BYTES, WRITE_BATCH_BYTES, Mover, Place
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
        self._position = {page: at for at, page in enumerate(self._plan.pages)}
        steps = self._plan.load + self._plan.fill + self._plan.store + self._plan.write
        self._counting = {move.page: move for move in steps}  # a page's last move is what counts
        self._demoted = {move.page: move.key for move in self._plan.demote}
        self._arrival: dict[Place, Event] = {}  # of the pages this run brings somewhere
        self._known: dict[Place, Event] = {}  # and of those it waits for
        self._joined: set[PageKey] = set()  # pages that others bring
        self._unknown = 0  # fill batches whose sources may still fail
        self._layer_left: list[int] = []
        self._layer_marks: list[list[Any]] = []

    def start(self) -> None:
        """Queue everything; returns at once. Called under the lock that planned it."""
        mover, plan = self._mover, self._plan
        mover.in_flight.add(self.transfer)
        places = {(move.source, move.key) for move in plan.moves() if move.waits}
        joined = places & mover.arrivals.keys()
        self._join({key for _, key in joined})
        parents = {(DISK, move.parent) for move in plan.demote + plan.write if move.parent}
        others = {
            place: mover.arrivals[place] for place in joined | parents & mover.arrivals.keys()
        }
        unmoved = self._settle_unmoved()
        on_hbm = [*self._fill_jobs(), *self._store_jobs()]
        jobs = [
            *self._write_jobs(plan.demote),
            *self._load_jobs(),
            *on_hbm,
            *self._write_jobs(plan.write),
        ]
        bound = Event()
        self._announce(plan.bind, bound)
        for job in jobs:
            self._announce([move for move in job.batch if not move.is_in_place], job.done)
        self._known = {**others, **self._arrival}
        mover.arrivals.update(self._arrival)
        self._bind(bound)
        for job in jobs:
            self._submit(job)
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

    def _announce(self, moves: Sequence[Move], done: Event) -> None:
        """Let other transfers wait for pages on their way, one event for all that come together."""
        is_arriving = self._mover.books.is_arriving
        for move in moves:
            if is_arriving(move):
                self._arrival[move.target, move.key] = done

    def _settle_unmoved(self) -> Event:
        """Pages no move is about: where they should be, or on their way there, or without room."""
        mover = self._mover
        tiers = (HOST, DISK) if self._plan.is_put else (HBM, HOST)
        unmoved = [
            (at, mover.books.key(page))
            for at, page in enumerate(self._plan.pages)
            if page not in self._counting
        ]
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

    def _submit(self, job: Job) -> None:
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
        queued.on_fire(lambda: self._publish(job.batch, made, job.done))

    def _needs(self, job: Job) -> list[Event]:
        """The events of other batches that this one waits for, each once."""
        needs: dict[Event, None] = {}
        for move in job.batch:
            source = self._known.get((move.source, move.key)) if move.waits else None
            if source is not None:
                needs[source] = None
            if move.after >= 0:
                needs[self._arrival[DISK, self._demoted[move.after]]] = None
            above = move.parent if move.target == DISK else None
            parent = self._known.get((DISK, above)) if above else None
            if parent is not None and parent is not job.done:
                needs[parent] = None
        return list(needs)

    def _publish(self, batch: Batch, made: Batch, done: Event) -> None:
        books, arrivals = self._mover.books, self._mover.arrivals
        came = {id(move) for move in made}
        with self._mover.lock:
            for move in batch:
                place = (move.target, move.key)
                if self._arrival.get(place) is not done:
                    continue  # another transfer's to publish, or a slot that is the caller's own
                if id(move) in came:
                    books.arrived(move)
                else:
                    books.failed(move, self._why(move))
                del arrivals[place]
        counted = [
            (self._position[move.page], id(move) in came)
            for move in batch
            if self._counting.get(move.page) is move and move.page in self._position
        ]
        self.transfer.here([at for at, is_here in counted if is_here])
        self._lose({at: "failed" for at, is_here in counted if not is_here})
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
            wanted = [
                move
                for move in batch
                if not is_cancelled or mover.wanted[move.key] > (move.key in self._joined)
            ]
            possible = [move for move in wanted if mover.books.is_possible(move)]
        left_out = {move.page for move in batch} - {move.page for move in wanted}
        self._lose({self._position[page]: "in_flight" for page in left_out})
        return possible

    # -- the moves ---------------------------------------------------------------------------------

    def _bind(self, bound: Event) -> None:
        """Once the caller has written its pages they count; till then spare slots are not free."""
        batch = list(self._plan.bind)
        if batch or self._plan.spare_slots:
            self._mover.after(
                self._ready, self._device_event, lambda: self._publish(batch, batch, bound)
            )
        else:
            bound.fire()

    def _write_jobs(self, moves: Sequence[Move]) -> list[Job]:
        mover = self._mover
        return [
            _job(mover.write_stream, batch, self._write)
            for batch in mover.batches(moves, WRITE_BATCH_BYTES)
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
        return [
            _job(mover.load_stream, batch, self._load)
            for batch in mover.batches(self._plan.load, LOAD_BATCH_BYTES)
        ]

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
        mover.counters.loaded(DISK, len(good), time.perf_counter() - started)
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
        groups: dict[str | int, Batch] = {}
        for move in plan.fill:
            if move.source == DISK:
                kind: str | int = "staged"
            elif move.page in loaded and move.source == HOST:
                kind = loaded[move.page] // per_load
            else:
                kind = "joined" if move.waits else "ready"
            groups.setdefault(kind, []).append(move)
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
            for layer in range(first, last):
                self._layer_through(layer, mark)
        mover.counters.moved(HOST, HBM, len(copied) * mover.hbm.page_bytes)
        mover.counters.loaded(HOST, len(copied), time.perf_counter() - started)
        return moves

    def _batch_known(self) -> None:
        with self._mover.lock:
            self._unknown -= 1
            is_last = self._unknown == 0
        if is_last:
            self.transfer.sources_known()

    def _layer_through(self, layer: int, mark: Any) -> None:
        with self._mover.lock:
            self._layer_marks[layer].append(mark)
            self._layer_left[layer] -= 1
            is_last = self._layer_left[layer] == 0
        if is_last:
            self.transfer.layer_here(layer, self._layer_marks[layer])

    def _store_jobs(self) -> list[Job]:
        mover = self._mover
        return [
            _job(mover.store_stream, batch, self._store, self._ready)
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
