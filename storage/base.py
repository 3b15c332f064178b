"""The contract of a tier, in words: a place with slots for pages.

A tier moves bytes and decides nothing. Which page lives where, what is pinned and who gives way is
the index's business (`tiered_kv.index`); the tier is told slots and does as it is told.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from tiered_kv.errors import TieredKVError
from tiered_kv.kernels.page_copy.rows import shapes_of
from tiered_kv.keys import PageKey
from tiered_kv.slots import SlotPool

PageBuffer = np.ndarray[Any, np.dtype[np.uint8]]
"""One page in host memory: uint8, one dimension, contiguous, `page_bytes` long."""


class Page(NamedTuple):
    """A page to be written: what it is called, what it hangs from, and its bytes.

    A tuple, for that is made in 0.4 us and a frozen dataclass in 1.3. The bytes belong to the
    caller and must not change until the write has returned.
    """

    key: PageKey
    parent: PageKey | None
    data: PageBuffer


@dataclass(slots=True)
class CheckReport:
    """What `check` found. `problems` holds one line a fault; `fixed` counts those put right."""

    pages: int = 0
    problems: list[str] = field(default_factory=list)
    fixed: int = 0

    @property
    def is_clean(self) -> bool:
        """Whether nothing was wrong, or all that was wrong has been put right."""
        return len(self.problems) == self.fixed


class Tier(ABC):
    """A place with slots for pages. Safe to call from several threads.

    A slot is reserved before it is written and freed by whoever reserved it. No slot may be freed
    or written while a read of it is under way: the index pins it.
    """

    name: str
    page_bytes: int

    @property
    @abstractmethod
    def capacity_pages(self) -> int:
        """How many pages fit; a hard bound."""

    @property
    @abstractmethod
    def capacity_bytes(self) -> int:
        """The configured size; nothing the tier keeps, metadata included, ever exceeds it."""

    @property
    @abstractmethod
    def used_bytes(self) -> int:
        """Bytes held by reserved slots."""

    @abstractmethod
    def reserve(self, n: int) -> list[int] | None:
        """Take n slots, lowest first, or None and none taken if fewer are free; does not block."""

    @abstractmethod
    def free(self, slots: Sequence[int]) -> None:
        """Give slots back. Their bytes may be overwritten at once.

        Raises:
            ValueError: a slot that is not reserved, or named twice.
        """

    @abstractmethod
    def write(self, slots: Sequence[int], pages: Sequence[Page]) -> None:
        """Store pages in reserved slots; blocks until they can be read back (on disk: are durable).

        All or nothing: when it raises, no slot of the batch counts as written.

        Raises:
            TierIOError: the medium failed or is full.
        """

    def begin_write(self, slots: Sequence[int], pages: Sequence[Page]) -> Callable[[], None]:
        """Begin a write; does not wait for the medium. All or nothing, as `write` is.

        What is returned must be called once: it blocks, and raises as `write` does. Till then the
        slots and the bytes of the pages are the tier's. Writes that have begun become durable
        together, with the first that is ended, or fail together. A tier that cannot begin writes
        then.
        """
        return partial(self.write, slots, pages)

    @abstractmethod
    def read(self, slots: Sequence[int], into: Sequence[PageBuffer]) -> list[TieredKVError | None]:
        """Fill one buffer a slot; blocks. Returns, for each page, None or why it could not be had.

        A page that cannot be read or verified spoils only itself; what its buffer then holds is
        undefined.
        """

    def begin_read(
        self, slots: Sequence[int], into: Sequence[PageBuffer]
    ) -> Callable[[], list[TieredKVError | None]]:
        """Begin a read that this thread goes on with later; does not block.

        What is returned must be called once, by the same thread: it blocks, and returns as `read`
        does. Till then the buffers are the tier's. A tier that cannot begin reads then.
        """
        return partial(self.read, slots, into)

    @abstractmethod
    def check(self, fix: bool = False) -> CheckReport:
        """Verify all that can be; with `fix`, drop what is wrong. Slow: reads every page."""

    @abstractmethod
    def close(self) -> None:
        """Give back memory, files and locks. Twice is harmless."""


def check_batch(slots: Sequence[int], rows: Sequence[PageBuffer], page_bytes: int) -> None:
    """Refuse a batch that numpy would broadcast or cut to fit.

    Raises:
        ValueError: not one row a slot, or a row that is not exactly one page.
    """
    if len(slots) != len(rows):
        raise ValueError(f"{len(rows)} pages for {len(slots)} slots: one slot a page")
    for shape in shapes_of(rows):
        if shape != (page_bytes,):
            raise ValueError(f"a page is one row of {page_bytes} bytes, not shape {shape}")


class PooledTier(Tier):
    """A tier whose every slot is a fixed place of equal size.

    Args:
        page_bytes: bytes of a page.
        slots: how many there are.
        slot_bytes: memory that one slot takes.
    """

    def __init__(self, page_bytes: int, slots: int, slot_bytes: int) -> None:
        self.page_bytes = page_bytes
        self._slots = SlotPool(slots)
        self._slot_bytes = slot_bytes
        self._lock = threading.Lock()

    @property
    def capacity_pages(self) -> int:
        return self._slots.capacity

    @property
    def used_bytes(self) -> int:
        return self._slots.used * self._slot_bytes

    def reserve(self, n: int) -> list[int] | None:
        with self._lock:
            return self._slots.reserve(n)

    def free(self, slots: Sequence[int]) -> None:
        with self._lock:
            self._slots.free(slots)
