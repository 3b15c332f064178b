"""The HBM tier: hot pages in GPU memory, laid out layer first as attention kernels read it.

Layers of equal size that follow one another form a *run*, one tensor ``[layers, pages, layer
bytes]``. On a machine without CUDA the pool is host memory, and everything else is the same code.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import groupby

import torch

from tiered_kv.errors import ConfigError, TieredKVError
from tiered_kv.kernels.page_copy.api import Run, gather_pages, scatter_pages
from tiered_kv.layout import KVLayout
from tiered_kv.storage.base import (
    CheckReport,
    Page,
    PageBuffer,
    PooledTier,
    check_batch,
)
from tiered_kv.storage.second_thread import SecondThread
from tiered_kv.storage.slab import Slab

_HALF_BYTES = 1 << 20
# Of one page. Pages of 8 MiB: steps of 1 MiB 1.24 of memcpy, of 4 MiB 1.76 (2 cores, 2026-11).
_STEP_BYTES = 4 << 20


class HbmTier(PooledTier):
    """Pages in GPU memory (host memory with device "cpu").

    Args:
        layout: geometry of a page.
        capacity_bytes: all the memory the pool may take.
        device: a torch device.

    Raises:
        ConfigError: it cannot hold one page.
    """

    name = "hbm"

    def __init__(self, layout: KVLayout, capacity_bytes: int, device: str = "cpu") -> None:
        page_bytes = layout.page_bytes
        pages = capacity_bytes // page_bytes
        if pages < 1:
            raise ConfigError(
                f"hbm={capacity_bytes}: smaller than one page of {page_bytes} bytes; "
                f"give at least {page_bytes}"
            )
        super().__init__(page_bytes, pages, page_bytes)
        self.device = torch.device(device)
        self._capacity_bytes = capacity_bytes
        self._slab: Slab | None = None
        pool = self._allocate(pages * self.page_bytes)
        self.runs = _cut_into_runs(pool, layout.layer_page_bytes, pages)
        self.layers: list[torch.Tensor] = [layer for run in self.runs for layer in run.pool]
        self.layer_steps = layer_steps(layout.layer_page_bytes, self.device)
        on_cpu = self.device.type == "cpu"
        self._second = SecondThread() if on_cpu else None
        self._sleeping: Callable[[], int] = lambda: 0

    def _allocate(self, n_bytes: int) -> torch.Tensor:
        if self.device.type == "cpu":
            self._slab = Slab(n_bytes)
            return self._slab.tensor()[:n_bytes]
        return torch.empty(n_bytes, dtype=torch.uint8, device=self.device)

    @property
    def capacity_bytes(self) -> int:
        return self._capacity_bytes

    def leave_cores_to(self, sleeping: Callable[[], int]) -> None:
        """So many threads sleep and will need a core at once: copies by two leave one to each.

        Those that read from disk: 128 MiB of 256 KiB pages from there to HBM 0.86 of raw reads,
        where a copy took both cores 0.79 (2026-11).
        """
        self._sleeping = sleeping

    def write(self, slots: Sequence[int], pages: Sequence[Page]) -> None:
        """Scatter host pages into slots; returns when the bytes are there."""
        rows = [page.data for page in pages]
        check_batch(slots, rows, self.page_bytes)
        self.write_layers(slots, rows, 0, len(self.layers))
        self._synchronize()

    def write_layers(
        self, slots: Sequence[int], pages: Sequence[PageBuffer], first: int, last: int
    ) -> None:
        """Scatter layers [first, last) of host pages into slots.

        On a GPU it only enqueues the copies on the current stream: the pages must stay until it is
        through.
        """

        def scatter(slots: Sequence[int], pages: Sequence[PageBuffer]) -> None:
            scatter_pages(self.runs, slots, pages, first, last)

        self._both_halves(slots, pages, scatter)

    def read(self, slots: Sequence[int], into: Sequence[PageBuffer]) -> list[TieredKVError | None]:
        """Gather slots into host pages; returns when the bytes are there."""
        check_batch(slots, into, self.page_bytes)
        self._both_halves(slots, into, partial(gather_pages, self.runs))
        self._synchronize()
        return [None] * len(slots)

    def copy_slots(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy whole pages from slot to slot; on a GPU enqueued on the current stream."""
        for run in self.runs:
            for source, target in zip(sources, targets, strict=True):
                run.pool[:, target].copy_(run.pool[:, source], non_blocking=True)

    def _both_halves(
        self,
        slots: Sequence[int],
        pages: Sequence[PageBuffer],
        copy: Callable[[Sequence[int], Sequence[PageBuffer]], None],
    ) -> None:
        """Copy pages; on a CPU with two threads if there is enough to copy."""
        if self._second is None or len(slots) // 2 * self.page_bytes < _HALF_BYTES:
            copy(slots, pages)
            return

        def part(low: int, high: int) -> None:
            copy(slots[low:high], pages[low:high])

        self._second.both_halves(len(slots), part, self._sleeping())

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()

    def check(self, fix: bool = False) -> CheckReport:
        """Counts its slots; GPU memory carries no checksums."""
        return CheckReport(pages=self._slots.used)

    def close(self) -> None:
        self.runs = []
        self.layers = []
        if self._second is not None:
            self._second.close()
        if self._slab is not None:
            self._slab.close()


def layer_steps(layer_bytes: Sequence[int], device: torch.device) -> list[tuple[int, int]]:
    """Layer ranges [first, last) to copy in one go: single layers on a GPU.

    On a CPU as many as are worth a call.
    """
    steps: list[tuple[int, int]] = []
    first = n_bytes = 0
    for layer, size in enumerate(layer_bytes):
        n_bytes += size
        if device.type != "cpu" or n_bytes >= _STEP_BYTES:
            steps.append((first, layer + 1))
            first, n_bytes = layer + 1, 0
    if first < len(layer_bytes):
        steps.append((first, len(layer_bytes)))
    return steps


def _cut_into_runs(pool: torch.Tensor, layer_page_bytes: Sequence[int], pages: int) -> list[Run]:
    runs: list[Run] = []
    at = first = page_offset = 0
    for layer_bytes, equal in groupby(layer_page_bytes):
        count = len(list(equal))
        size = count * pages * layer_bytes
        tensor = pool[at : at + size].view(count, pages, layer_bytes)
        runs.append(Run(first, page_offset, tensor))
        at, first, page_offset = at + size, first + count, page_offset + count * layer_bytes
    return runs
