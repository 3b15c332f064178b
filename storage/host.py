"""The host tier: warm pages in one slab of (pinned) host memory.

A slot is a whole page, its layers one after the other, and starts on a 4 KiB boundary, so that disk
reads land in it directly and a copy to the GPU is one piece a layer.
"""

from __future__ import annotations

from collections.abc import Sequence

from tiered_kv.errors import ConfigError, TieredKVError
from tiered_kv.kernels.page_copy.rows import Rows
from tiered_kv.storage.base import (
    CheckReport,
    Page,
    PageBuffer,
    PooledTier,
    check_batch,
)
from tiered_kv.storage.slab import Slab, align_up

_STAGING_BYTES = 8 << 20


class HostTier(PooledTier):
    """Pages in host memory.

    Args:
        page_bytes: bytes of a page.
        capacity_bytes: all the memory the tier may take, staging slots included.
        pin: register it with CUDA.
        with_staging: keep some slots aside, through which pages pass from disk to HBM when the tier
            has no room for them.

    Raises:
        ConfigError: it cannot hold one page (two with staging).
    """

    name = "host"

    def __init__(
        self,
        page_bytes: int,
        capacity_bytes: int,
        *,
        pin: bool = False,
        with_staging: bool = False,
    ) -> None:
        self._stride = align_up(page_bytes)
        slots = capacity_bytes // self._stride
        wanted = max(1, min(_STAGING_BYTES // self._stride, slots // 16))
        self.staging_pages = wanted if with_staging else 0
        if slots - self.staging_pages < 1:
            raise ConfigError(
                f"host={capacity_bytes}: smaller than {1 + self.staging_pages} page(s) of "
                f"{self._stride} bytes; give at least {(1 + self.staging_pages) * self._stride}"
            )
        self._capacity_bytes = capacity_bytes
        super().__init__(page_bytes, slots - self.staging_pages, self._stride)
        self._slab = Slab(slots * self._stride, pin=pin, slot_bytes=self._stride)
        self._views = self._slab.array.reshape(slots, self._stride)[:, :page_bytes]

    @property
    def is_pinned(self) -> bool:
        """Whether copies to and from a GPU can be asynchronous."""
        return self._slab.is_pinned

    @property
    def capacity_bytes(self) -> int:
        return self._capacity_bytes

    def view(self, slot: int) -> PageBuffer:
        """The memory of a slot, zero-copy, for as long as the slot is reserved or pinned."""
        view: PageBuffer = self._views[slot]
        return view

    def views(self, slots: Sequence[int]) -> list[PageBuffer]:
        """The memory of several slots, each as `view`."""
        return list(map(self._views.__getitem__, slots))

    def rows(self, slots: Sequence[int]) -> Rows:
        """The memory of several slots, which a batch copy moves in few calls; else as `view`."""
        return Rows(self._views, slots)

    def staging(self, n: int) -> Rows:
        """The memory of the first n <= staging_pages staging slots; the caller sees to its turn."""
        first = self._slots.capacity
        return Rows(self._views, range(first, first + n))

    def write(self, slots: Sequence[int], pages: Sequence[Page]) -> None:
        check_batch(slots, [page.data for page in pages], self.page_bytes)
        for slot, page in zip(slots, pages, strict=True):
            self._views[slot][:] = page.data

    def read(self, slots: Sequence[int], into: Sequence[PageBuffer]) -> list[TieredKVError | None]:
        check_batch(slots, into, self.page_bytes)
        for slot, buffer in zip(slots, into, strict=True):
            buffer[:] = self._views[slot]
        return [None] * len(slots)

    def check(self, fix: bool = False) -> CheckReport:
        """Counts its slots; host memory carries no checksums."""
        return CheckReport(pages=self._slots.used)

    def close(self) -> None:
        self._views = self._views[:0]
        self._slab.close()
