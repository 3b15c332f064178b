"""Tiers around a tier, for tests and for asking "what if": late, broken or counted."""

from __future__ import annotations

import errno
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from tiered_kv.errors import CorruptPageError, TieredKVError, TierIOError
from tiered_kv.storage.base import CheckReport, Page, PageBuffer, Tier


class WrappedTier(Tier):
    """Passes everything on to the tier inside; what it has beyond the contract too."""

    def __init__(self, inner: Tier) -> None:
        self.inner = inner
        self.name = inner.name
        self.page_bytes = inner.page_bytes

    def __getattr__(self, attribute: str) -> Any:
        return getattr(self.__dict__["inner"], attribute)

    @property
    def capacity_pages(self) -> int:
        return self.inner.capacity_pages

    @property
    def capacity_bytes(self) -> int:
        return self.inner.capacity_bytes

    @property
    def used_bytes(self) -> int:
        return self.inner.used_bytes

    def reserve(self, n: int) -> list[int] | None:
        return self.inner.reserve(n)

    def free(self, slots: Sequence[int]) -> None:
        self.inner.free(slots)

    def write(self, slots: Sequence[int], pages: Sequence[Page]) -> None:
        self.begin_write(slots, pages)()

    def begin_write(self, slots: Sequence[int], pages: Sequence[Page]) -> Callable[[], None]:
        return self.inner.begin_write(slots, pages)

    def read(self, slots: Sequence[int], into: Sequence[PageBuffer]) -> list[TieredKVError | None]:
        return self.inner.read(slots, into)

    def check(self, fix: bool = False) -> CheckReport:
        return self.inner.check(fix)

    def close(self) -> None:
        self.inner.close()


class LatencyTier(WrappedTier):
    """Every read and write takes longer: by a time, or until an event is set.

    Args:
        inner: the tier inside.
        delay_s: seconds added to a read or write.
        gate: what a read or write waits for first; lets a test hold one in flight without a clock.
    """

    def __init__(
        self, inner: Tier, delay_s: float = 0.0, gate: threading.Event | None = None
    ) -> None:
        super().__init__(inner)
        self.delay_s = delay_s
        self.gate = gate

    def begin_write(self, slots: Sequence[int], pages: Sequence[Page]) -> Callable[[], None]:
        self._pass()
        return self.inner.begin_write(slots, pages)

    def read(self, slots: Sequence[int], into: Sequence[PageBuffer]) -> list[TieredKVError | None]:
        self._pass()
        return self.inner.read(slots, into)

    def _pass(self) -> None:
        if self.gate is not None:
            self.gate.wait()
        if self.delay_s:
            time.sleep(self.delay_s)


class FaultyTier(WrappedTier):
    """Fails on command.

    Attributes:
        fail_write: asked before a batch is written; True makes it fail with ENOSPC, nothing
        written.
        fail_read: asked for each slot; True makes that page a TierIOError.
        flip: asked for each slot; True flips a bit of what was read and reports it as a tier that
            verifies would.
    """

    def __init__(self, inner: Tier) -> None:
        super().__init__(inner)
        self.fail_write: Callable[[Sequence[int]], bool] = lambda slots: False
        self.fail_read: Callable[[int], bool] = lambda slot: False
        self.flip: Callable[[int], bool] = lambda slot: False

    def begin_write(self, slots: Sequence[int], pages: Sequence[Page]) -> Callable[[], None]:
        if self.fail_write(slots):
            raise TierIOError("no space left (injected)", tier=self.name, errno=errno.ENOSPC)
        return self.inner.begin_write(slots, pages)

    def read(self, slots: Sequence[int], into: Sequence[PageBuffer]) -> list[TieredKVError | None]:
        outcome = self.inner.read(slots, into)
        for at, slot in enumerate(slots):
            if self.fail_read(slot):
                outcome[at] = TierIOError("read failed (injected)", tier=self.name, errno=errno.EIO)
            elif self.flip(slot):
                into[at][0] ^= 1
                outcome[at] = CorruptPageError("bit flipped (injected)", tier=self.name)
        return outcome


class CountingTier(WrappedTier):
    """Counts calls and pages: `counts["read"]`, `counts["pages_read"]` and the same for writes."""

    def __init__(self, inner: Tier) -> None:
        super().__init__(inner)
        self.counts: Counter[str] = Counter()
        self._lock = threading.Lock()

    def begin_write(self, slots: Sequence[int], pages: Sequence[Page]) -> Callable[[], None]:
        self._count("write", len(slots))
        return self.inner.begin_write(slots, pages)

    def read(self, slots: Sequence[int], into: Sequence[PageBuffer]) -> list[TieredKVError | None]:
        self._count("read", len(slots))
        return self.inner.read(slots, into)

    def _count(self, verb: str, pages: int) -> None:
        with self._lock:
            self.counts[verb] += 1
            self.counts[f"pages_{verb}"] += pages
