"""A tier that is a dict: the plain model that real tiers are tested against."""

from __future__ import annotations

from collections.abc import Sequence

from tiered_kv.errors import CorruptPageError, TieredKVError
from tiered_kv.storage.base import (
    CheckReport,
    Page,
    PageBuffer,
    PooledTier,
    check_batch,
)


class MemoryTier(PooledTier):
    """Pages as bytes objects in a dict. Simple enough to be assumed right."""

    name = "memory"

    def __init__(self, page_bytes: int, capacity_pages: int) -> None:
        super().__init__(page_bytes, capacity_pages, page_bytes)
        self._pages: dict[int, bytes] = {}

    @property
    def capacity_bytes(self) -> int:
        return self._slots.capacity * self.page_bytes

    def free(self, slots: Sequence[int]) -> None:
        with self._lock:
            self._slots.free(slots)
            for slot in slots:
                self._pages.pop(slot, None)

    def write(self, slots: Sequence[int], pages: Sequence[Page]) -> None:
        check_batch(slots, [page.data for page in pages], self.page_bytes)
        with self._lock:
            for slot, page in zip(slots, pages, strict=True):
                self._pages[slot] = page.data.tobytes()

    def read(self, slots: Sequence[int], into: Sequence[PageBuffer]) -> list[TieredKVError | None]:
        check_batch(slots, into, self.page_bytes)
        with self._lock:
            return [self._read(slot, buffer) for slot, buffer in zip(slots, into, strict=True)]

    def _read(self, slot: int, buffer: PageBuffer) -> TieredKVError | None:
        data = self._pages.get(slot)
        if data is None:
            return CorruptPageError(f"slot {slot} was never written", tier=self.name)
        buffer[:] = memoryview(data)
        return None

    def check(self, fix: bool = False) -> CheckReport:
        with self._lock:
            return CheckReport(pages=len(self._pages))

    def close(self) -> None:
        with self._lock:
            self._pages.clear()
