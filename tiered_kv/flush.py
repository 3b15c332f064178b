"""Flush: host pages on their way to disk, planned in parts while earlier ones are written."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from operator import eq

from tiered_kv.mover import WRITE_BATCH_BYTES, Mover
from tiered_kv.plan import DISK, Move, Plan, keys_of, pages_of, parents_of, target_slots_of, waiting
from tiered_kv.planner import Planner
from tiered_kv.run import Run
from tiered_kv.streams import Event
from tiered_kv.tasks import Batch
from tiered_kv.transfer import Transfer

_FIRST_PAGES = 64  # planned in 1 ms, so that the first write begins: planning takes so long a page
_PART_PAGES = 256


@dataclass(slots=True)
class _Part:
    """Pages planned at once. `end` waits till they are durable; None if they could not begin."""

    plan: Plan
    end: Callable[[], Batch] | None = None
    done: Event = field(default_factory=Event)


class Flush:
    """Writes every host page to disk that is not there yet.

    Pages are planned, hashed and handed to the disk tier in parts, the first a small one: so the
    medium has something to do almost at once. One thread does all of it, that of the write stream:
    two would take the interpreter's lock from each other, 5 ms each time. Parts of up to
    `WRITE_BATCH_BYTES` are committed together.

    Args:
        host_pages: that host has. No more than three quarters of them are being written at any
            time: those cannot leave for others.
    """

    def __init__(self, planner: Planner, mover: Mover, host_pages: int) -> None:
        self._planner = planner
        self._mover = mover
        self._group_pages = max(1, min(self._pages(WRITE_BATCH_BYTES), host_pages * 3 // 4))
        self._parts: list[_Part] = []  # of the group that is being written
        self._others: list[Transfer] = []  # of parts that wait for something
        self._written = 0
        self._has_stopped = False

    def run(self) -> int:
        """Block until all is durable, or a write has failed; how many pages were written.

        An interrupt leaves what has been begun to the write stream, which ends it.
        """
        if self._mover.disk is None:
            return 0
        with self._mover.lock:
            pages = self._planner.room.root_first(self._planner.dirty_pages())
        for at in range(0, len(pages), self._group_pages):
            group = pages[at : at + self._group_pages]
            self._mover.write_stream.submit(partial(self._write, group)).wait()
            self._written += sum(map(self._settled, self._others))
            self._others.clear()
            if self._has_stopped:
                break  # disk is full or failing: what is left stays on host alone
        return self._written

    def _settled(self, transfer: Transfer) -> int:
        transfer.settled.wait()
        write = transfer.plan.write
        with self._mover.lock:
            disk = self._planner.index.by_name[DISK]
            came: int = sum(map(eq, disk.slots(pages_of(write)), target_slots_of(write)))
        self._has_stopped = self._has_stopped or came < len(write)
        return came

    # -- on the write stream -----------------------------------------------------------------------

    def _write(self, pages: Sequence[int]) -> None:
        """Write a group, part by part."""
        mover, group = self._mover, Transfer(Plan())
        with mover.lock:
            mover.in_flight.add(group)
        try:
            at, count = 0, _FIRST_PAGES
            while at < len(pages) and not self._has_stopped:
                self._begin(pages[at : at + count])
                at, count = at + count, _PART_PAGES
        except BaseException as error:  # nobody is above a stream
            self._broke(error)
        try:
            self._end()
        finally:
            with mover.lock:
                mover.in_flight.discard(group)
            group.settle()

    def _begin(self, pages: Sequence[int]) -> None:
        mover = self._mover
        with mover.lock:
            plan = self._planner.plan_flush(pages)
            if not plan.write:
                return
            if self._must_wait(plan.write):
                transfer = Transfer(plan)
                Run(mover, transfer).start()
                self._others.append(transfer)
                return
            part = _Part(plan)
            mover.arrivals.announce(DISK, keys_of(plan.write), part.done)
            self._parts.append(part)
        part.end = mover.begin_write(plan.write)
        self._has_stopped = part.end is None

    def _must_wait(self, moves: Sequence[Move]) -> bool:
        """Whether another transfer brings a page to host, or writes one that these hang from."""
        if waiting(moves):
            return True
        above = self._mover.arrivals.above(DISK, keys_of(moves), parents_of(moves))
        return not above <= {part.done for part in self._parts}

    def _end(self) -> None:
        parts, self._parts = self._parts, []
        made = [self._ended(part) for part in parts]
        with self._mover.lock:
            for part, moves in zip(parts, made, strict=True):
                self._publish(part.plan, moves)
        for part in parts:
            part.done.fire()

    def _ended(self, part: _Part) -> Batch:
        try:
            return part.end() if part.end is not None else ()
        except BaseException as error:  # as above
            self._broke(error)
            return ()

    def _publish(self, plan: Plan, made: Batch) -> None:
        self._planner.arrived_all(made)
        for move in () if made else plan.write:
            self._planner.failed(move)
            self._has_stopped = True
        self._mover.arrivals.end(DISK, keys_of(plan.write))
        self._planner.end(plan)
        self._written += len(made)

    def _broke(self, error: BaseException) -> None:
        self._has_stopped = True
        self._mover.report(error)

    def _pages(self, n_bytes: int) -> int:
        return max(1, n_bytes // self._mover.hbm.page_bytes)
