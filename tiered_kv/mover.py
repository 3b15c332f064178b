"""Mover: carries out plans with bytes, on streams.

Each move waits for what it depends on and for nothing else: a load for the demotion that frees its
slot, a fill for its load, a copy of a page that another transfer is bringing for that transfer.
Work is queued when the last of these has happened, so no stream ever holds up another.

    demote, write   one group commit after another on the write stream
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
from typing import Any, Protocol

import torch

from tiered_kv.arrivals import Arrivals
from tiered_kv.books import Books
from tiered_kv.counters import Counters
from tiered_kv.errors import TieredKVError
from tiered_kv.keys import PageKey
from tiered_kv.plan import Move
from tiered_kv.storage.base import Page, PageBuffer
from tiered_kv.storage.host import HostTier
from tiered_kv.streams import Event, HalvesStream, open_stream
from tiered_kv.transfer import Transfer

_log = logging.getLogger(__name__)
_REPORT_EVERY_S = 10.0

LOAD_BATCH_BYTES = 8 << 20  # a batch's copy to HBM runs while the next is read
LOADS_AHEAD = 4  # more than the disk tier has under way, while one batch ends: 0.78 of raw, 2: 0.67
_LOADERS = 2  # a thread verifies faster than most devices read: the second is for what comes
_LOADER_BATCHES = 8  # while the first has so many before it
WRITE_BATCH_BYTES = 128 << 20  # the device rests between two: 0.94 of raw writes, 64 MiB: 0.86
DEMOTE_BATCH_BYTES = 32 << 20  # loads wait for the room that a whole batch leaves
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

    def write(self, slots: Sequence[int], pages: Sequence[Page]) -> None:
        """Store pages; durable when it returns, raises TierIOError."""

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
        self.write_stream = open_stream("write", cpu)
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

    def loader(self, done: Event) -> HalvesStream:
        """The load stream for a batch that ends with `done`: the first that has not much to do.

        Called under the lock.
        """
        free = (at for at in range(_LOADERS) if self._loads[at] < _LOADER_BATCHES)
        at = next(free, min(range(_LOADERS), key=self._loads.__getitem__))
        self._loads[at] += 1

        def is_through() -> None:
            with self.lock:
                self._loads[at] -= 1

        done.on_fire(is_through)
        return self.load_streams[at]

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
