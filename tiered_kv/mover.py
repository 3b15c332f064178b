"""Mover: carries out plans with bytes, on streams.

Each move waits for what it depends on and for nothing else: a load for the demotion that frees its
slot, a fill for its load, a copy of a page that another transfer is bringing for that transfer.
Work is queued when the last of these has happened, so no stream ever holds up another.

    demote, write   one group commit after another on the write stream
    load            batches on the load stream; the disk tier reads each with its own threads
    fill            host -> HBM on its own stream, layer by layer within a batch
    store           HBM -> host on its own stream
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch

from tiered_kv.counters import Counters
from tiered_kv.plan import Move
from tiered_kv.planner import Planner
from tiered_kv.storage.base import Tier
from tiered_kv.storage.hbm import HbmTier
from tiered_kv.storage.host import HostTier
from tiered_kv.streams import Event, open_stream
from tiered_kv.transfer import Transfer

_log = logging.getLogger(__name__)
_REPORT_EVERY_S = 10.0

LOAD_BATCH_BYTES = 8 << 20  # a batch's copy to HBM runs while the next is read
WRITE_BATCH_BYTES = 32 << 20  # 415-474 MB/s durable from 8 MiB a commit on (virtual SSD, 2026-11)
COPY_BATCH_BYTES = 64 << 20

Place = tuple[str, int]
"""A page in a tier: (tier, page)."""


class Mover:
    """The tiers, the streams between them, and what is on its way.

    Args:
        planner: told what arrived and what failed, always under `lock`.
        lock: guards the planner.
    """

    def __init__(
        self,
        planner: Planner,
        lock: threading.RLock,
        hbm: HbmTier,
        host: HostTier,
        disk: Tier | None,
        counters: Counters,
    ) -> None:
        self.planner = planner
        self.lock = lock
        self.hbm = hbm
        self.host = host
        self.disk = disk
        self.counters = counters
        self.arrivals: dict[Place, Event] = {}  # of pages that are arriving; guarded by lock
        self.in_flight: set[Transfer] = set()  # guarded by lock
        self.wanted: Counter[int] = Counter()  # page -> transfers others bring it for; by lock
        self._reported_at = float("-inf")
        cpu = torch.device("cpu")
        self.fill_stream = open_stream("h2d", hbm.device)
        self.store_stream = open_stream("d2h", hbm.device)
        self.load_stream = open_stream("load", cpu)
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

    def left(self, pages: Collection[int]) -> None:
        """A transfer no longer waits for these pages, which others bring. Called under the lock."""
        self.wanted.subtract(pages)
        for page in pages:
            if not self.wanted[page]:
                del self.wanted[page]

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
            self.load_stream,
            self.fill_stream,
            self.store_stream,
            self.write_stream,
            self.event_stream,
        ):
            stream.close()

    def batches(self, moves: Sequence[Move], batch_bytes: int) -> list[list[Move]]:
        """Moves cut into batches of about so many bytes, at least one page each."""
        pages = max(1, batch_bytes // self.hbm.page_bytes)
        return [list(moves[at : at + pages]) for at in range(0, len(moves), pages)]
