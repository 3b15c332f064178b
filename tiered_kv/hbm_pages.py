"""HbmPages: the store's HBM pool as a caller sees it."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import torch

from tiered_kv.mover import Mover
from tiered_kv.plan import HBM
from tiered_kv.storage.hbm import HbmTier
from tiered_kv.streams import caller_event


class HbmPages:
    """HBM slots a caller may own, and the tensors to fill and read them through.

    A slot is owned from `allocate` until it is given to `TieredStore.put` or back to `release`.
    """

    def __init__(self, tier: HbmTier, mover: Mover, lock: threading.RLock) -> None:
        self._tier = tier
        self._mover = mover
        self._lock = lock
        self._owned: set[int] = set()

    @property
    def layers(self) -> list[torch.Tensor]:
        """A uint8 tensor ``[capacity_pages, layer bytes of a page]`` a layer: views of the pool."""
        return self._tier.layers

    @property
    def capacity_pages(self) -> int:
        """Pages the pool holds."""
        return self._tier.capacity_pages

    @property
    def device(self) -> torch.device:
        """Where the pool lives."""
        return self._tier.device

    def allocate(self, n: int) -> list[int] | None:
        """Take n slots to fill, evicting cached pages; None, and nothing evicted, if too few.

        Does not block. What the slots hold is undefined.
        """
        with self._lock:
            slots = self._mover.planner.room.exactly(HBM, n)
            self._owned.update(slots or ())
        return slots

    def release(self, slots: Sequence[int], after: Any = None) -> None:
        """Give allocated slots back that were not put.

        Args:
            after: an event of their last user; they are not reused before it fires. Default: on a
                GPU all work queued on the current stream so far.

        Raises:
            ValueError: a slot that is not the caller's.
        """
        self.disown(slots)
        events, device_event = caller_event(self.device, after)

        def free() -> None:
            with self._lock:
                self._mover.planner.room.free(HBM, slots)

        self._mover.after(events, device_event, free)

    def disown(self, slots: Sequence[int]) -> None:
        """The slots are no longer the caller's.

        Raises:
            ValueError: a slot that is not the caller's, or named twice; nothing has changed.
        """
        self.check_owned(slots)
        with self._lock:
            self._owned.difference_update(slots)

    def check_owned(self, slots: Sequence[int]) -> None:
        """Raises ValueError unless every slot is the caller's and named once."""
        wrong = set(slots) - self._owned
        if wrong or len(set(slots)) != len(slots):
            what = f"slot {min(wrong)} was not allocated" if wrong else "a slot is named twice"
            raise ValueError(f"{what}: pages must come from store.hbm.allocate() and be used once")
