"""Numbers of the places in a tier: which are taken, and the lowest free."""

from __future__ import annotations

import heapq
from collections.abc import Sequence


class SlotPool:
    """Slots 0..n-1 of a tier, lowest free first. Not locked: its owner is."""

    __slots__ = ("_fresh", "_returned", "_taken", "capacity")

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._fresh = 0  # slots >= this were never taken
        self._returned: list[int] = []  # a heap
        self._taken = bytearray(capacity)

    @property
    def used(self) -> int:
        """Slots taken."""
        return self._fresh - len(self._returned)

    def reserve(self, n: int) -> list[int] | None:
        """The n lowest free slots, or None and nothing taken."""
        if n < 0 or self.capacity - self.used < n:
            return None
        returned, taken = self._returned, self._taken
        if n < len(returned):
            slots = [heapq.heappop(returned) for _ in range(n)]
        else:
            slots = sorted(returned)
            returned.clear()
            missing = n - len(slots)
            slots += range(self._fresh, self._fresh + missing)
            self._fresh += missing
        for slot in slots:
            taken[slot] = 1
        return slots

    def take_first(self, n: int) -> None:
        """Take slots 0..n-1 of a pool of which none is taken yet, without naming them.

        Raises:
            ValueError: it has fewer, or some were taken before.
        """
        if n > self.capacity or self._fresh:
            raise ValueError(f"the first {n} of {self.capacity} slots are not all free")
        self._fresh = n
        self._taken[:n] = b"\1" * n

    def reserve_exact(self, slot: int) -> None:
        """Take one named slot: how a tier found again after a restart claims what is already there.

        Raises:
            ValueError: it is taken, or out of range.
        """
        if not 0 <= slot < self.capacity or self._taken[slot]:
            raise ValueError(f"slot {slot} is taken or outside 0..{self.capacity - 1}")
        if slot >= self._fresh:
            for between in range(self._fresh, slot):
                heapq.heappush(self._returned, between)
            self._fresh = slot + 1
        else:
            self._returned.remove(slot)
            heapq.heapify(self._returned)
        self._taken[slot] = 1

    def free(self, slots: Sequence[int]) -> None:
        """Give slots back; ValueError, and none freed, if one is not taken or named twice."""
        if len(set(slots)) != len(slots):
            raise ValueError("a slot is named twice in one free()")
        if not self.are_taken(slots):
            slot = next(slot for slot in slots if not self.is_taken(slot))
            raise ValueError(f"slot {slot} is not reserved")
        taken, returned = self._taken, self._returned
        for slot in slots:
            taken[slot] = 0
        if len(slots) * 4 > len(returned):  # to push costs 0.15 us a slot, this 0.03 for each
            returned += slots
            heapq.heapify(returned)
        else:
            for slot in slots:
                heapq.heappush(returned, slot)

    def are_taken(self, slots: Sequence[int]) -> bool:
        """Whether all of these slots are reserved."""
        if not slots:
            return True
        is_inside = min(slots) >= 0 and max(slots) < self.capacity
        return is_inside and all(map(self._taken.__getitem__, slots))

    def is_taken(self, slot: int) -> bool:
        """Whether a slot is reserved."""
        return 0 <= slot < self.capacity and bool(self._taken[slot])
