"""Mover: carries out plans with bytes, on streams.

Each move waits for what it depends on and for nothing else: a load for the demotion that frees its
slot, a fill for its load, a copy of a page that another transfer is bringing for that transfer.
Work is queued when the last of these has happened, so no stream ever holds up another.

    demote, write   batches on the write stream, which begins the next few, if they are small,
                    before it ends the first: they share a commit
    load            batches on a load stream, which begins the next few before it ends the first:
                    the device always has reads to do, and one thread alone keeps it busy
    fill            host -> HBM on its own stream, layer by layer within a batch
    store           HBM -> host on its own stream
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any, Protocol

import torch

from tiered_kv.arrivals import Arrivals
from tiered_kv.books import Books
from tiered_kv.counters import Counters
from tiered_kv.errors import TieredKVError, TierIOError
from tiered_kv.keys import PageKey
from tiered_kv.plan import (
    DISK,
    HOST,
    Move,
    keys_of,
    parents_of,
    source_slots_of,
    target_slots_of,
)
from tiered_kv.storage.base import Page, PageBuffer
from tiered_kv.storage.host import HostTier
from tiered_kv.streams import Ahead, Event, HalvesStream, open_stream
from tiered_kv.tasks import Batch, HalvesTask
from tiered_kv.transfer import Transfer

_log = logging.getLogger(__name__)
_REPORT_EVERY_S = 10.0
_NEW_PAGE: Callable[[tuple[Any, ...]], Page] = partial(tuple.__new__, Page)  # half of Page(...)

LOAD_BATCH_BYTES = 8 << 20  # a batch's copy to HBM runs while the next is read
# What the disk tier may have under way, while one batch ends: 4: 0.78 of raw, 2: 0.67.
LOADS_AHEAD = Ahead(4)
# Where no copy to HBM follows the waves may be longer: 0.90 of raw, 0.87 with 4.
PREFETCHES_AHEAD = Ahead(8)
_LOADERS = 2  # a thread verifies faster than most devices read: the second is for what comes
_LOADER_BATCHES = 8  # while the first has so many before it
WRITE_BATCH_BYTES = 128 << 20  # committed at once; the device rests between two
DEMOTE_BATCH_BYTES = 32 << 20  # loads wait for the room that a whole batch leaves
_WRITES_AHEAD = 16  # the first of them waits for its commit till so many have begun
COPY_BATCH_BYTES = 64 << 20


class HbmBytes(Protocol):
    """What a mover needs of HBM: the store's own pool, or an engine's tensors."""

    @property
    def page_bytes(self) -> int:
        """Bytes of a page."""

    @property
    def layers(self) -> Sequence[torch.Tensor]:
        """One tensor a layer."""

    @property
    def layer_steps(self) -> Sequence[tuple[int, int]]:
        """Layer ranges [first, last) that are copied in one go."""

    @property
    def device(self) -> torch.device:
        """Where the bytes are."""

    def write_layers(
        self, slots: Sequence[int], pages: Sequence[PageBuffer], first: int, last: int
    ) -> None:
        """Scatter layers [first, last) of host pages into slots; on a GPU it only enqueues."""

    def read(self, slots: Sequence[int], into: Sequence[PageBuffer]) -> object:
        """Gather slots into host pages; returns when the bytes are there."""

    def copy_slots(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy whole pages from slot to slot; on a GPU it only enqueues."""


class DiskBytes(Protocol):
    """What a mover needs of disk: a `Tier`, or one whose slots another process numbers."""

    def begin_write(self, slots: Sequence[int], pages: Sequence[Page]) -> Callable[[], None]:
        """Begin to store pages; call what is returned to wait till they are durable.

        Both raise TierIOError.
        """

    def begin_read(
        self, slots: Sequence[int], into: Sequence[PageBuffer]
    ) -> Callable[[], list[TieredKVError | None]]:
        """Begin to fill one buffer a slot; call what is returned, in the same thread, to end it.

        It says for each page None or why it could not be had.
        """


class Mover:
    """The tiers, the streams between them, and what is on its way.

    Args:
        books: told what arrived and what failed, always under `lock`.
        lock: guards the books.
    """

    def __init__(
        self,
        books: Books,
        lock: threading.RLock,
        hbm: HbmBytes,
        host: HostTier,
        disk: DiskBytes | None,
        counters: Counters,
    ) -> None:
        self.books = books
        self.lock = lock
        self.hbm = hbm
        self.host = host
        self.disk = disk
        self.counters = counters
        self.arrivals = Arrivals()  # guarded by lock
        self.in_flight: set[Transfer] = set()  # guarded by lock
        self.wanted: Counter[PageKey] = Counter()  # -> transfers others bring it for; by lock
        self._reported_at = float("-inf")
        cpu = torch.device("cpu")
        self.fill_stream = open_stream("h2d", hbm.device)
        self.store_stream = open_stream("d2h", hbm.device)
        self.load_streams = [HalvesStream(f"load-{at}") for at in range(_LOADERS)]
        self.load_stream = self.load_streams[0]  # and owner of the staging slots
        self._loads = [0] * _LOADERS  # batches that each has yet to end; guarded by lock
        self._loaded_at = 0.0
        self.write_stream = HalvesStream("write")
        self.event_stream = open_stream("events", cpu)  # waits for callers' kernels, moves nothing

    def after(self, ready: Sequence[Event], device_event: Any, then: Callable[[], None]) -> None:
        """Call `then` once the caller's events have fired; at once if there are none."""
        if not ready and device_event is None:
            then()
            return

        def work() -> None:
            if device_event is not None:
                device_event.synchronize()
            then()

        self.event_stream.submit(work, ready)

    def left(self, keys: Collection[PageKey]) -> None:
        """A transfer no longer waits for these pages, which others bring. Called under the lock."""
        self.wanted.subtract(keys)
        for key in keys:
            if not self.wanted[key]:
                del self.wanted[key]

    def report(self, error: BaseException) -> None:
        """Log what a medium did, at most one line every ten seconds: the counters have the rest."""
        now = time.monotonic()
        if now - self._reported_at >= _REPORT_EVERY_S:
            self._reported_at = now
            _log.warning("%s", error)

    def wait_present(self) -> bool:
        """Block until the transfers now in flight have settled; whether there were any."""
        with self.lock:
            transfers = list(self.in_flight)
        for transfer in transfers:
            transfer.settled.wait()
        return bool(transfers)

    def wait_idle(self) -> None:
        """Block until no transfer is in flight."""
        while self.wait_present():
            pass

    def close(self) -> None:
        """Wait for all transfers, then end the streams."""
        self.wait_idle()
        for stream in (
            *self.load_streams,
            self.fill_stream,
            self.store_stream,
            self.write_stream,
            self.event_stream,
        ):
            stream.close()

    def loader(self, ends: Sequence[Event]) -> HalvesStream:
        """The load stream for batches of one transfer, which end so: the first with not much to do.

        One for all of them: two that share a transfer wait for each other, and keep the copies to
        HBM from their core (128 MiB, 256 KiB pages: 0.82 of raw, shared out 0.79). Called under the
        lock.
        """
        free = (at for at in range(_LOADERS) if self._loads[at] < _LOADER_BATCHES)
        at = next(free, min(range(_LOADERS), key=self._loads.__getitem__))
        self._loads[at] += len(ends)

        def is_through() -> None:
            with self.lock:
                self._loads[at] -= 1

        for end in ends:
            end.on_fire(is_through)
        return self.load_streams[at]

    def loading(self) -> int:
        """How many load streams have something to do."""
        return sum(map(bool, self._loads))

    def begin_write(self, moves: Batch) -> Callable[[], Batch] | None:
        """Begin to write host pages to disk, none if it fails: then None is returned.

        What is returned else ends it, and says which are durable: all or none.
        """
        assert self.disk is not None
        views = self.host.views(source_slots_of(moves))
        pages = list(map(_NEW_PAGE, zip(keys_of(moves), parents_of(moves), views, strict=True)))
        try:
            end = self.disk.begin_write(target_slots_of(moves), pages)
        except TierIOError as error:
            self._count_failed(moves, error)
            return None
        return partial(self._end_write, moves, end)

    def _end_write(self, moves: Batch, end: Callable[[], None]) -> Batch:
        try:
            end()
        except TierIOError as error:
            self._count_failed(moves, error)
            return []
        self.counters.moved(HOST, DISK, len(moves) * self.hbm.page_bytes)
        return moves

    def _count_failed(self, moves: Batch, error: TierIOError) -> None:
        self.counters.add("total", "write_failed", len(moves))
        self.report(error)

    def load_tasks(
        self,
        moves: Sequence[Move],
        batch_bytes: int,
        ahead: Ahead,
        begin: Callable[[Batch], Callable[[], Batch]],
    ) -> list[HalvesTask]:
        """Batches of one transfer's loads. Called under the lock."""
        if not moves:
            return []
        batches = self.batches(moves, batch_bytes)
        ends = [Event() for _ in batches]
        stream, tasks = self.loader(ends), []
        for batch, done in zip(batches, ends, strict=True):
            n_bytes = len(batch) * self.hbm.page_bytes
            tasks.append(HalvesTask(stream, batch, begin, ahead, n_bytes, done=done))
        return tasks

    def write_tasks(
        self, moves: Sequence[Move], batch_bytes: int, begin: Callable[[Batch], Callable[[], Batch]]
    ) -> list[HalvesTask]:
        """Batches of writes. Together they count no more than one of demotions: loads wait."""
        tasks = []
        for batch in self.batches(moves, batch_bytes):
            n_bytes = len(batch) * self.hbm.page_bytes
            ahead = Ahead(_WRITES_AHEAD, DEMOTE_BATCH_BYTES - n_bytes)
            tasks.append(HalvesTask(self.write_stream, batch, begin, ahead, n_bytes))
        return tasks

    def load_seconds(self, started: float) -> float:
        """What a load that began at `started` and ends now took of the disk tier's time.

        Of several at once each has what has passed since the one before it ended.
        """
        with self.lock:
            now = time.perf_counter()
            began, self._loaded_at = max(started, self._loaded_at), now
        return now - began

    def batches(self, moves: Sequence[Move], batch_bytes: int) -> list[Sequence[Move]]:
        """Moves cut into batches of about so many bytes, at least one page each."""
        pages = max(1, batch_bytes // self.hbm.page_bytes)
        if 0 < len(moves) <= pages:
            return [moves]
        return [moves[at : at + pages] for at in range(0, len(moves), pages)]
