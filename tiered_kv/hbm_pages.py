"""HbmPages: the store's HBM pool as a caller sees it."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import torch

from tiered_kv.errors import StoreClosedError
from tiered_kv.mover import Mover
from tiered_kv.plan import HBM
from tiered_kv.room import Room
from tiered_kv.storage.hbm import HbmTier
from tiered_kv.streams import Event, caller_event


class HbmPages:
    """HBM slots a caller may own, and the tensors to fill and read them through.

    A slot is owned from `allocate` until it is given to `TieredStore.put` or back to `release`.
    While a get() may still write to it, it is lent: who has it next waits for that to end.
    """

    def __init__(self, tier: HbmTier, room: Room, mover: Mover, lock: threading.RLock) -> None:
        self._tier = tier
        self._room = room
        self._mover = mover
        self._lock = lock
        self._owned: set[int] = set()
        self._lent: dict[int, Event] = {}  # slot -> when the get() it was lent to has settled
        self._is_closed = False

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

        Raises:
            ValueError: fewer than none are asked for.
            StoreClosedError: the store was closed.
        """
        if n < 0:
            raise ValueError(f"allocate({n}): the number of pages must not be negative")
        slots: list[int] | None = None
        try:
            with self._lock:
                if self._is_closed:
                    raise StoreClosedError("the store is closed: it has no pages to allocate")
                slots = self._room.exactly(HBM, n)
                self._owned.update(slots or ())
            return slots
        except BaseException:  # a signal's: nobody else will give them back
            self.release(slots or ())
            raise

    def release(self, slots: Sequence[int], after: Any = None) -> None:
        """Give allocated slots back that were not put.

        Args:
            after: an event of their last user; they are not reused before it fires. Default: on a
                GPU all work queued on the current stream so far.

        Raises:
            ValueError: a slot that is not the caller's.
        """
        events, device_event = caller_event(self.device, after)

        def free() -> None:
            with self._lock:
                self._room.free(HBM, slots)

        with self._lock:
            lent = self.disown(slots)
            self._mover.after(events + lent, device_event, free)

    def disown(self, slots: Sequence[int]) -> list[Event]:
        """The slots are no longer the caller's; returns what their next user must wait for.

        Raises:
            ValueError: a slot that is not the caller's, or named twice; nothing has changed.
        """
        with self._lock:
            self.check_owned(slots)
            self._owned.difference_update(slots)
            return self._lent_until(slots)

    def lend(self, slots: Sequence[int], until: Event) -> list[Event]:
        """A get() writes to these slots until the event fires; returns what it must wait for."""
        slots = list(slots)
        with self._lock:
            before = self._lent_until(slots)
            self._lent.update(dict.fromkeys(slots, until))

        def end() -> None:
            with self._lock:
                lent = self._lent
                for slot in slots:
                    if lent.get(slot) is until:
                        del lent[slot]

        until.on_fire(end)
        return before

    def _lent_until(self, slots: Sequence[int]) -> list[Event]:
        lent = self._lent
        return list({lent[slot]: None for slot in slots if slot in lent}) if lent else []

    def close(self) -> None:
        """Allocate nothing from now on."""
        self._is_closed = True

    def check_owned(self, slots: Sequence[int]) -> None:
        """Raises ValueError unless every slot is the caller's and named once."""
        named = set(slots)
        if not named <= self._owned or len(named) != len(slots):
            wrong = named - self._owned
            what = f"slot {min(wrong)} was not allocated" if wrong else "a slot is named twice"
            raise ValueError(f"{what}: pages must come from store.hbm.allocate() and be used once")
