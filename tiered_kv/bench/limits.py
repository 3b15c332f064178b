"""What this machine's memory can do, with no store in the way: one-thread memcpy, pinned copies.

Imports only what a machine with torch and numpy has.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from tiered_kv.storage.base import PageBuffer
from tiered_kv.storage.slab import Slab
from tiered_kv.streams import Stream, open_stream

_SEED = 4


class CopyLimit(Protocol):
    """The fastest that bytes go between host memory and HBM here, with no store in the way.

    Attributes:
        name: what it is, for a report: "memcpy" or "pinned-copy".
    """

    name: str

    def put(self, n_bytes: int) -> None:
        """Copy so many bytes from HBM to host; blocks."""

    def get(self, n_bytes: int) -> None:
        """Copy so many bytes from host to HBM; blocks."""

    def both(self, n_bytes: int) -> None:
        """Half of so many bytes each way, at once; blocks."""

    def close(self) -> None:
        """Give the memory back."""


def copy_limit(device: torch.device, n_bytes: int, page_bytes: int) -> CopyLimit:
    """The limit of a device, for copies of up to so many bytes."""
    if device.type == "cuda":
        return PinnedLimit(device, n_bytes)
    return Memcpy(n_bytes, page_bytes)


class Memcpy:
    """One thread copies whole pages between two touched slabs, in shuffled order.

    A copy is contiguous and as long as a page, whose layers ours finds scattered. One call of
    numpy's `take` does all: as fast as memcpy in a loop in C, with nothing of Python between pages.

    Args:
        n_bytes: of each slab, cut down to whole pages.
    """

    name = "memcpy"

    def __init__(self, n_bytes: int, page_bytes: int) -> None:
        pages = n_bytes // page_bytes
        self._page_bytes = page_bytes
        self._slabs = Slab(n_bytes), Slab(n_bytes)
        self._slabs[0].array[:] = 1
        self._from, self._to = (self._as_pages(slab.array, pages) for slab in self._slabs)
        self._order = np.random.default_rng(_SEED).permutation(pages)

    def _as_pages(self, memory: PageBuffer, pages: int) -> PageBuffer:
        return memory[: pages * self._page_bytes].reshape(pages, self._page_bytes)

    def put(self, n_bytes: int) -> None:
        """Copy so many bytes."""
        pages = n_bytes // self._page_bytes
        # mode: any other makes numpy copy twice
        np.take(self._from, self._order[:pages], axis=0, out=self._to[:pages], mode="clip")

    get = both = put

    def large(self) -> int:
        """Copy all of a slab in one call; returns its bytes.

        A copy this long goes past the caches in glibc, which no page does.
        """
        source, target = self._slabs
        np.copyto(target.array, source.array)
        return target.n_bytes

    def close(self) -> None:
        """Give the memory back."""
        self._from = self._to = np.empty((0, self._page_bytes), dtype=np.uint8)
        for slab in self._slabs:
            slab.close()


class PinnedLimit:
    """One contiguous copy, pinned, on streams like the store's."""

    name = "pinned-copy"

    def __init__(self, device: torch.device, n_bytes: int) -> None:
        self._copies = ContiguousCopies.make(device, n_bytes)

    def put(self, n_bytes: int) -> None:
        """HBM to host."""
        self._copies.put(n_bytes)

    def get(self, n_bytes: int) -> None:
        """Host to HBM."""
        self._copies.get(n_bytes)

    def both(self, n_bytes: int) -> None:
        """Half of it each way, at once."""
        self._copies.both(n_bytes // 2)

    def close(self) -> None:
        """End the streams."""
        self._copies.close()


@dataclass(slots=True)
class ContiguousCopies:
    """One contiguous copy, pinned if there is a GPU, on streams like the store's."""

    down: Stream
    up: Stream
    device: tuple[torch.Tensor, torch.Tensor]
    host: tuple[torch.Tensor, torch.Tensor]

    @classmethod
    def make(cls, device: torch.device, n_bytes: int) -> ContiguousCopies:
        """Two buffers of so many bytes on each side, touched."""

        def pair(**where: Any) -> tuple[torch.Tensor, torch.Tensor]:
            first, second = (torch.zeros(n_bytes, dtype=torch.uint8, **where) for _ in range(2))
            return first, second

        return cls(
            open_stream("baseline-d2h", device),
            open_stream("baseline-h2d", device),
            pair(device=device),
            pair(pin_memory=device.type == "cuda"),
        )

    def put(self, n_bytes: int | None = None) -> None:
        """HBM to host; None copies all."""
        self.down.submit(lambda: self._copy(self.host[0], self.device[0], n_bytes)).wait()

    def get(self, n_bytes: int | None = None) -> None:
        """Host to HBM; None copies all."""
        self.up.submit(lambda: self._copy(self.device[1], self.host[1], n_bytes)).wait()

    def both(self, n_bytes: int | None = None) -> None:
        """So many bytes each way, at once; None copies all."""
        down = self.down.submit(lambda: self._copy(self.host[0], self.device[0], n_bytes))
        self.up.submit(lambda: self._copy(self.device[1], self.host[1], n_bytes)).wait()
        down.wait()

    @staticmethod
    def _copy(target: torch.Tensor, source: torch.Tensor, n_bytes: int | None) -> None:
        target[:n_bytes].copy_(source[:n_bytes], non_blocking=True)

    def close(self) -> None:
        """End the streams."""
        self.down.close()
        self.up.close()
