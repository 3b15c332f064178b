"""Run: one transfer being carried out by the mover's streams."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from tiered_kv.errors import CorruptPageError, TierIOError
from tiered_kv.mover import COPY_BATCH_BYTES, LOAD_BATCH_BYTES, WRITE_BATCH_BYTES, Mover, Place
from tiered_kv.plan import DISK, HBM, HOST, Move
from tiered_kv.storage.base import Page
from tiered_kv.streams import Event, Stream, when_all
from tiered_kv.transfer import Transfer

Batch = list[Move]


class Run:
    """Takes a transfer's plan from its first move to `settle`.

    Args:
        ready: the caller's events: its pages are neither read nor overwritten before they fire.
        device_event: the same as a CUDA event, or None.
        on_settled: called once when nothing moves any more, under the lock, before `settled` fires.
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
        self._mover = mover
        self._plan = transfer.plan
        self._ready = list(ready)
        self._device_event = device_event
        self._on_settled = on_settled
        self._position = {page: at for at, page in enumerate(self._plan.pages)}
        steps = self._plan.load + self._plan.fill + self._plan.store + self._plan.write
        self._counting = {move.page: move for move in steps}  # a page's last move is what counts
        self._arrival: dict[Place, Event] = {}
        self._finished: list[Event] = []  # one a batch
        self._fill_batches = 0
        self._unknown = 0  # fill batches whose sources may still fail
        self._layer_left: list[int] = []
        self._layer_marks: list[list[Any]] = []

    def start(self) -> None:
        """Queue everything; returns at once. Called under the lock that planned it."""
        mover, plan = self._mover, self._plan
        mover.in_flight.add(self.transfer)
        joined = {
            (move.source, move.page): mover.arrivals[move.source, move.page]
            for move in plan.moves()
            if move.waits and (move.source, move.page) in mover.arrivals
        }
        for move in plan.moves():
            if mover.planner.is_arriving(move) and not (move.is_in_place and move in plan.fill):
                self._arrival[move.target, move.page] = Event()
        self._known = {**joined, **self._arrival}
        mover.arrivals.update(self._arrival)
        self._settle_unmoved()
        self._bind()
        self._writes(plan.demote)
        self._loads()
        self._fills()
        for batch in mover.batches(plan.store, COPY_BATCH_BYTES):
            self._submit(mover.store_stream, batch, self._store, self._ready)
        self._writes(plan.write)
        when_all(self._finished, self._end)

    def _settle_unmoved(self) -> None:
        """Pages that no move is about are where they should be, or (put) found no room."""
        for at, page in enumerate(self._plan.pages):
            if page in self._counting:
                continue
            if self._plan.is_put and not self._mover.planner.is_below_hbm(page):
                self._lose({at: "no_room"})
            else:
                self.transfer.here([at])

    # -- queueing ----------------------------------------------------------------------------------

    def _submit(
        self,
        stream: Stream,
        batch: Batch,
        work: Callable[[Batch], Batch],
        ready: Sequence[Event] = (),
    ) -> None:
        """Queue a batch. `work` returns the moves whose bytes are, or will be, in place.

        They are published when the device is through with them; whatever happens, every move of the
        batch ends as arrived or failed, and every event others wait for fires.
        """
        made: Batch = []

        def guarded() -> None:
            try:
                made.extend(work(batch))
            except BaseException as error:  # surfaces at wait(); nobody is above a worker thread
                made.clear()
                self.transfer.broke(error)

        finished = Event()

        def publish() -> None:
            self._publish(batch, made)
            finished.fire()

        self._finished.append(finished)
        stream.submit(guarded, [*ready, *self._needs(batch)]).on_fire(publish)

    def _needs(self, batch: Batch) -> list[Event]:
        needs = [
            self._known[move.source, move.page]
            for move in batch
            if move.waits and (move.source, move.page) in self._known
        ]
        return needs + [self._arrival[DISK, move.after] for move in batch if move.after >= 0]

    def _publish(self, batch: Batch, made: Batch) -> None:
        planner = self._mover.planner
        came = {id(move) for move in made}
        with self._mover.lock:
            for move in batch:
                if id(move) in came:
                    planner.arrived(move)
                else:
                    planner.failed(move, self._why(move))
            events = [self._announced(move) for move in batch]
        counted = [
            (self._position[move.page], id(move) in came)
            for move in batch
            if self._counting.get(move.page) is move and move.page in self._position
        ]
        self.transfer.here([at for at, is_here in counted if is_here])
        self._lose({at: "failed" for at, is_here in counted if not is_here})
        for event in events:
            if event is not None:
                event.fire()

    def _announced(self, move: Move) -> Event | None:
        """The event others wait for, taken off the list: the index says what became of it."""
        place = (move.target, move.page)
        event = self._arrival.get(place)
        if event is not None and self._mover.arrivals.get(place) is event:
            del self._mover.arrivals[place]
        return event

    def _why(self, move: Move) -> str:
        return self.why_lost.get(self._position.get(move.page, -1), "failed")

    def _lose(self, reasons: dict[int, str]) -> None:
        for at, reason in reasons.items():
            self.why_lost.setdefault(at, reason)
        self.transfer.lost(list(reasons))

    def _possible(self, batch: Batch) -> Batch:
        """The moves of a batch whose source has come and whose target slot is free."""
        if self.transfer.is_cancelled and not self._plan.is_put:
            self._lose({self._position[move.page]: "in_flight" for move in batch})
            return []
        with self._mover.lock:
            return [move for move in batch if self._mover.planner.is_possible(move)]

    # -- the moves ---------------------------------------------------------------------------------

    def _bind(self) -> None:
        if self._plan.bind:
            finished = Event()
            self._finished.append(finished)
            batch = list(self._plan.bind)

            def bound() -> None:
                self._publish(batch, batch)
                finished.fire()

            self._mover.after(self._ready, self._device_event, bound)

    def _writes(self, moves: Sequence[Move]) -> None:
        for batch in self._mover.batches(moves, WRITE_BATCH_BYTES):
            self._submit(self._mover.write_stream, batch, self._write)

    def _write(self, batch: Batch) -> Batch:
        mover = self._mover
        assert mover.disk is not None
        with mover.lock:
            moves: Batch = mover.planner.durable(batch)
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

    def _loads(self) -> None:
        for batch in self._mover.batches(self._plan.load, LOAD_BATCH_BYTES):
            self._submit(self._mover.load_stream, batch, self._load)

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
            self._mover.planner.condemn(move, reason)
        if move.page in self._position:
            self.why_lost.setdefault(self._position[move.page], reason)

    def _fills(self) -> None:
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
        self._unknown = self._fill_batches = len(groups) + len(passes)
        self._layer_left = [self._fill_batches] * layers
        self._layer_marks = [[] for _ in range(layers)]
        if not self._fill_batches:
            self.transfer.sources_known()
            return
        for batch in groups.values():
            self._submit(mover.fill_stream, batch, self._fill, self._ready)
        for batch in passes:
            self._submit(mover.load_stream, batch, self._fill_staged, self._ready)

    def _fill(self, batch: Batch) -> Batch:
        """Runs on the fill stream."""
        moves = self._possible(batch)
        return self._scatter(batch, moves, self._mover.fill_stream)

    def _fill_staged(self, batch: Batch) -> Batch:
        """Runs on the load stream, which waits for the copy: the staging slots are its own."""
        mover = self._mover
        moves = self._possible(batch)
        buffers = [mover.host.staging(i) for i in range(len(moves))]
        good = self._read(moves, buffers)
        by_page = {move.page: buffer for move, buffer in zip(moves, buffers, strict=True)}
        error: list[BaseException] = []

        def copy() -> None:
            try:
                self._scatter(batch, good, mover.fill_stream, by_page)
            except BaseException as raised:  # handed to the load stream, which is waiting
                error.append(raised)

        mover.fill_stream.submit(copy).wait()
        if error:
            raise error[0]
        return good

    def _scatter(
        self,
        batch: Batch,
        moves: Batch,
        stream: Stream,
        staged: dict[int, Any] | None = None,
    ) -> Batch:
        """Copy pages into their HBM slots layer by layer, and say when each is through."""
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
        views = [
            staged[move.page] if staged else mover.host.view(move.source_slot) for move in copied
        ]
        started = time.perf_counter()
        for first, last in mover.hbm.layer_steps:
            if copied:
                mover.hbm.write_layers(slots, views, first, last)
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

    def _store(self, batch: Batch) -> Batch:
        """Runs on the store stream."""
        mover = self._mover
        if self._device_event is not None:
            self._device_event.wait()
        moves = self._possible(batch)
        mover.hbm.read(
            [move.source_slot for move in moves],
            [mover.host.view(move.target_slot) for move in moves],
        )
        mover.counters.moved(HBM, HOST, len(moves) * mover.hbm.page_bytes)
        return moves

    def _end(self) -> None:
        mover = self._mover
        with mover.lock:
            mover.planner.end(self._plan)
            mover.in_flight.discard(self.transfer)
            self._on_settled(self)
        self.transfer.settle()
