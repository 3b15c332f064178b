"""Run: one transfer being carried out by the mover's streams."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from typing import Any

from tiered_kv.errors import CorruptPageError
from tiered_kv.kernels.page_copy.rows import Rows
from tiered_kv.keys import PageKey
from tiered_kv.mover import (
    COPY_BATCH_BYTES,
    DEMOTE_BATCH_BYTES,
    LOAD_BATCH_BYTES,
    LOADS_AHEAD,
    PREFETCHES_AHEAD,
    WRITE_BATCH_BYTES,
    Mover,
)
from tiered_kv.plan import (
    DISK,
    HBM,
    HOST,
    Move,
    Moves,
    Steps,
    afters_of,
    in_motion,
    keys_of,
    pages_of,
    parents_of,
    source_slots_of,
    target_slots_of,
    waiting,
    where,
)
from tiered_kv.streams import Event, Stream, when_all
from tiered_kv.tasks import Batch, HalvesTask, Task
from tiered_kv.transfer import Transfer


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
        self._last = next((step for step in self._steps()[::-1] if step), ())
        # Nearly always every page counts where the last step brings it.
        self._is_whole = pages_of(self._last) == list(self._plan.pages)
        demote = self._plan.demote
        self._demoted = dict(zip(pages_of(demote), keys_of(demote), strict=True))
        self._joined: set[PageKey] = set()  # pages that others bring
        self._unknown = 0  # fill batches whose sources may still fail
        self._layer_left: list[int] = []
        self._layer_marks: list[list[Any]] = []

    def _steps(self) -> tuple[Steps, ...]:
        """The moves that bring pages of the plan where they count: each page the last that does."""
        return self._plan.load, self._plan.fill, self._plan.store, self._plan.write

    @cached_property
    def _position(self) -> dict[int, int]:
        """Page -> where it stands in the plan."""
        return {page: at for at, page in enumerate(self._plan.pages)}

    @cached_property
    def _counting(self) -> dict[int, str]:
        """Page -> the tier it counts in: that of its last move."""
        counting: dict[int, str] = {}
        for step in filter(None, self._steps()):
            counting.update(dict.fromkeys(pages_of(step), step[0].target))
        return counting

    def start(self) -> None:
        """Queue everything; returns at once. Called under the lock that planned it."""
        mover, plan = self._mover, self._plan
        mover.in_flight.add(self.transfer)
        # A store waits for the page that its own plan binds, if at all, and a demotion for none.
        for step in (plan.load, plan.fill, plan.write):
            self._join(mover.arrivals.awaited(step))
        bound = Event()
        on_hbm = [*self._fill_tasks(), *self._store_tasks(bound)]
        ahead = LOADS_AHEAD if plan.fill else PREFETCHES_AHEAD
        tasks: list[Task | HalvesTask] = [
            *mover.write_tasks(plan.demote, DEMOTE_BATCH_BYTES, self._begin_write),
            *mover.load_tasks(plan.load, LOAD_BATCH_BYTES, ahead, self._begin_load),
            *on_hbm,
            *mover.write_tasks(plan.write, WRITE_BATCH_BYTES, self._begin_write),
        ]
        announced = [self._announce(in_motion(task.batch), task.done) for task in tasks]
        unmoved = self._settle_unmoved()  # of which some may be demoted by this very plan
        self._bind(bound)
        for task, arriving in zip(tasks, announced, strict=True):
            self._submit(task, arriving)
        when_all([task.done for task in on_hbm], self.hbm_done.fire)
        when_all([bound, unmoved, *(task.done for task in tasks)], self._end)

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
        is_promised = moves and moves[0].target != HBM  # where no slot is a caller's own
        arriving = moves if is_promised else self._mover.books.arriving(moves)
        if arriving:
            self._mover.arrivals.announce(arriving[0].target, keys_of(arriving), done)
        return arriving

    def _settle_unmoved(self) -> Event:
        """Pages no move is about: where they should be, or on their way there, or without room."""
        settled = Event()
        mover, pages = self._mover, self._plan.pages
        if self._is_whole or self._position.keys() <= self._counting.keys():
            settled.fire()
            return settled
        tiers = (HOST, DISK) if self._plan.is_put else (HBM, HOST)
        left_out = [at for at, page in enumerate(pages) if page not in self._counting]
        unmoved = [(at, mover.books.key(pages[at])) for at in left_out]
        coming = [
            (key, event)
            for tier in tiers
            for _, key in unmoved
            if (event := mover.arrivals.event(tier, key))
        ]
        self._join({key for key, _ in coming})

        def judge() -> None:
            with mover.lock:  # a page may have gone, and its number be another's by now
                here = {at for at, key in unmoved if mover.books.has(key, tiers)}
            self.transfer.here(list(here))
            self._lose({at: "no_room" for at, _ in unmoved if at not in here})
            settled.fire()

        when_all([event for _, event in coming], judge)
        return settled

    # -- queueing ----------------------------------------------------------------------------------

    def _submit(self, task: Task | HalvesTask, arriving: Sequence[Move]) -> None:
        """Queue a batch; it is published when the device is through with it.

        Whatever happens, every move of the batch ends as arrived or failed, and `task.done` fires.
        """
        made: Batch = ()

        def guarded(work: Callable[[], Batch]) -> None:
            nonlocal made
            try:
                through = work()
                task.stream.drain()
                made = through
            except BaseException as error:  # surfaces at wait(); nobody is above a worker thread
                self.transfer.broke(error)

        def begin(task: HalvesTask) -> Callable[[], None]:
            try:
                return partial(guarded, task.begin(task.batch))
            except BaseException as error:
                return partial(self.transfer.broke, error)

        needs = [*task.ready, *self._needs(task)]
        if isinstance(task, HalvesTask):
            queued = task.stream.submit_halves(
                partial(begin, task), task.ahead, needs, n_bytes=task.n_bytes
            )
        else:
            queued = task.stream.submit(partial(guarded, partial(task.work, task.batch)), needs)
        queued.on_fire(lambda: self._publish(task.batch, arriving, made, task.done))

    def _needs(self, task: Task | HalvesTask) -> list[Event]:
        """The events of other batches that this one waits for, each once."""
        arrivals, batch = self._mover.arrivals, task.batch
        needs: dict[Event | None, None] = {}
        if task.stream is not self._mover.store_stream:  # whose pages come with `task.ready`
            needs.update((arrivals.event(m.source, m.key), None) for m in waiting(batch))
        if self._demoted:
            gone = [self._demoted[page] for page in afters_of(batch) if page >= 0]
            needs.update((arrivals.event(DISK, key), None) for key in gone)
        if batch[0].target == DISK:
            needs.update(dict.fromkeys(arrivals.above(DISK, keys_of(batch), parents_of(batch))))
        return [event for event in needs if event is not None and event is not task.done]

    def _publish(
        self, batch: Sequence[Move], arriving: Sequence[Move], made: Sequence[Move], done: Event
    ) -> None:
        """Tell the books and the transfer; `arriving` are those that this run has announced."""
        mover, is_whole = self._mover, len(made) == len(batch)
        came = set() if is_whole else set(pages_of(made))
        through = arriving if is_whole else [move for move in arriving if move.page in came]
        with mover.lock:
            mover.books.arrived_all(through)
            for move in () if is_whole else arriving:
                if move.page not in came:
                    mover.books.failed(move, self._why(move))
            if arriving:
                mover.arrivals.end(arriving[0].target, keys_of(arriving))
        if is_whole and self._is_whole and batch is self._last:
            self.transfer.here(range(len(batch)))
        else:
            counted = self._counted(batch)
            came = set(pages_of(made))
            self.transfer.here([at for page, at in counted.items() if page in came])
            self._lose({at: "failed" for page, at in counted.items() if page not in came})
        done.fire()

    def _counted(self, batch: Batch) -> dict[int, int]:
        """The pages of a batch that count in the tier that it brings them to; their positions."""
        position, counting = self._position, self._counting
        target = batch[0].target if batch else ""
        pages = [page for page in pages_of(batch) if counting.get(page) == target]
        return {page: position[page] for page in pages if page in position}

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
            mover.books.arrived_all(batch)
            bound.fire()

    def _begin_write(self, batch: Batch) -> Callable[[], Batch]:
        """Begin to write pages from host to disk; what is returned ends it."""
        with self._mover.lock:
            moves = self._mover.books.durable(batch)
        return (self._mover.begin_write(moves) if moves else None) or list

    def _begin_load(self, batch: Batch) -> Callable[[], Batch]:
        """Begin to read pages from disk to host; what is returned ends it."""
        moves = self._possible(batch)
        return self._begin_read(moves, self._mover.host.views(target_slots_of(moves)))

    def _begin_read(self, moves: Batch, into: Sequence[Any]) -> Callable[[], Batch]:
        """Begin to read pages from disk; see `_end_read`."""
        mover = self._mover
        assert mover.disk is not None
        if not moves:
            return list
        started = time.perf_counter()
        end = mover.disk.begin_read(source_slots_of(moves), into)
        return lambda: self._end_read(moves, started, end())

    def _end_read(self, moves: Batch, started: float, outcome: Sequence[Exception | None]) -> Batch:
        """Those that came, verified; drop from the index what is bad."""
        mover = self._mover
        good = where(moves, [error is None for error in outcome])
        mover.counters.loaded(DISK, len(good), mover.load_seconds(started))
        mover.counters.moved(DISK, HOST, len(good) * mover.hbm.page_bytes)
        mover.counters.add("total", "verified", len(good))
        if len(good) < len(moves):
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

    def _fill_tasks(self) -> list[Task]:
        """Batches by what they wait for."""
        if not self._plan.fill:
            self.transfer.sources_known()
            return []
        mover, groups = self._mover, self._fill_groups()
        staged = groups.pop("staged", ())
        staging = mover.host.staging_pages
        passes = [staged[at : at + staging] for at in range(0, len(staged), staging or 1)]
        layers = len(mover.hbm.layers)
        self._unknown = len(groups) + len(passes)
        self._layer_left = [self._unknown] * layers
        self._layer_marks = [[] for _ in range(layers)]
        return [
            Task(mover.fill_stream, batch, self._fill, self._ready) for batch in groups.values()
        ] + [Task(mover.load_stream, batch, self._fill_staged, self._ready) for batch in passes]

    def _fill_groups(self) -> dict[str | int, Batch]:
        """Moves by what they wait for: nothing, a load batch, others' transfers, staging."""
        mover, plan, fill = self._mover, self._plan, self._plan.fill
        first = len(fill) - len(plan.load)
        if isinstance(fill, Moves) and fill.source != DISK and not waiting(fill[:first]):
            if not plan.load:
                return {"ready": fill}
            if fill.source == HOST and fill.pages[first:] == pages_of(plan.load):  # mostly
                batches = [fill[:first], *mover.batches(fill[first:], LOAD_BATCH_BYTES)]
                return {at: batch for at, batch in enumerate(batches) if batch}
        loads = enumerate(mover.batches(plan.load, LOAD_BATCH_BYTES))
        loaded = {page: at for at, batch in loads for page in pages_of(batch)}
        groups: defaultdict[str | int, list[Move]] = defaultdict(list)
        for move in fill:
            if move.source == DISK:
                kind: str | int = "staged"
            elif move.page in loaded and move.source == HOST:
                kind = loaded[move.page]
            else:
                kind = "joined" if move.waits else "ready"
            groups[kind].append(move)
        return dict(groups)

    def _fill(self, batch: Batch) -> Batch:
        """Runs on the fill stream."""
        moves = self._possible(batch)
        return self._scatter(batch, moves, self._mover.fill_stream)

    def _fill_staged(self, batch: Batch) -> Batch:
        """Runs on the load stream, which waits for the copy: the staging slots are its own."""
        mover = self._mover
        moves = self._possible(batch)
        buffers = mover.host.staging(len(moves))
        good = self._begin_read(moves, list(buffers))()
        read = set(pages_of(good))
        rows = buffers.select([at for at, page in enumerate(pages_of(moves)) if page in read])
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
        inside: Batch = ()
        copied = moves
        if not (isinstance(moves, Moves) and moves.source != HBM):
            inside = [move for move in moves if move.source == HBM and not move.is_in_place]
            copied = [move for move in moves if move.source != HBM]
        mover.hbm.copy_slots(source_slots_of(inside), target_slots_of(inside))
        slots = target_slots_of(copied)
        rows = staged or mover.host.rows(source_slots_of(copied))
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

    def _store_tasks(self, bound: Event) -> list[Task]:
        mover = self._mover
        ready = [*self._ready, bound] if self._plan.bind else self._ready
        return [
            Task(mover.store_stream, batch, self._store, ready)
            for batch in mover.batches(self._plan.store, COPY_BATCH_BYTES)
        ]

    def _store(self, batch: Batch) -> Batch:
        """Runs on the store stream."""
        mover = self._mover
        if self._device_event is not None:
            self._device_event.wait()
        with self._hbm:
            moves = [] if self._has_left_hbm else self._possible(batch)
            mover.hbm.read(source_slots_of(moves), mover.host.rows(target_slots_of(moves)))
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
