"""The books of whoever moves bytes in another process than the planner: what its slots hold."""

from __future__ import annotations

import errno
from array import array
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial

from tiered_kv.errors import TieredKVError, TierIOError
from tiered_kv.keys import PageKey
from tiered_kv.plan import DISK, HBM, HOST, Move, Plan, target_slots_of
from tiered_kv.storage.base import Page, PageBuffer, Tier

_REMEMBERED = 65_536  # writes that failed


class DiskSlots:
    """A disk tier whose slots another process numbers.

    A tier numbers the pages it finds at start as it likes, every rank differently; the planner has
    one number a page. Four bytes a page. Its owner sees that one thread at a time changes it.
    """

    def __init__(self, tier: Tier) -> None:
        self._tier = tier
        self._local = array("i", [-1]) * tier.capacity_pages

    def adopt(self, pages: Iterable[tuple[int, int]]) -> None:
        """Take over pages found at start: (slot as the planner numbers it, the tier's own)."""
        for slot, local in pages:
            self._local[slot] = local

    def has(self, slot: int) -> bool:
        """Whether a page was written there and not released."""
        return self._local[slot] >= 0

    def release(self, slots: Iterable[int]) -> None:
        """The pages in these slots are gone; a slot that was never written is no error."""
        held = [slot for slot in slots if self._local[slot] >= 0]
        self._tier.free([self._local[slot] for slot in held])
        for slot in held:
            self._local[slot] = -1

    def begin_write(self, slots: Sequence[int], pages: Sequence[Page]) -> Callable[[], None]:
        """As `Tier.begin_write`; both halves are called by one thread only."""
        local = self._tier.reserve(len(slots))
        if local is None:
            raise TierIOError(
                f"no room for {len(slots)} pages on this rank's disk", tier=DISK, errno=errno.ENOSPC
            )
        try:
            end = self._tier.begin_write(local, pages)
        except BaseException:
            self._tier.free(local)
            raise
        return partial(self._end_write, slots, local, end)

    def _end_write(self, slots: Sequence[int], local: list[int], end: Callable[[], None]) -> None:
        try:
            end()
        except BaseException:
            self._tier.free(local)
            raise
        for slot, own in zip(slots, local, strict=True):
            self._local[slot] = own

    def read(self, slots: Sequence[int], into: Sequence[PageBuffer]) -> list[TieredKVError | None]:
        """As `Tier.read`, of slots that `has` said yes to."""
        return self._tier.read([self._local[slot] for slot in slots], into)

    def begin_read(
        self, slots: Sequence[int], into: Sequence[PageBuffer]
    ) -> Callable[[], list[TieredKVError | None]]:
        """As `Tier.begin_read`, of slots that `has` said yes to."""
        return self._tier.begin_read([self._local[slot] for slot in slots], into)


class Manifest:
    """What the host slots of one rank hold, and which moves it could not make; see `Books`.

    Args:
        host_pages: slots of the host tier.
        disk: the disk tier's, or None.
        restores: as the planner's.
    """

    def __init__(self, host_pages: int, disk: DiskSlots | None, *, restores: bool) -> None:
        self._host: list[PageKey | None] = [None] * host_pages
        self._parent: list[PageKey | None] = [None] * host_pages  # of those
        self._disk = disk
        self._restores = restores
        self._lost: dict[Move, str] = {}
        self._bad: dict[Move, str] = {}
        self._unwritten: set[PageKey] = set()

    def expect(self, plan: Plan) -> None:
        """A plan has been received: slots it will fill hold nothing from now on.

        Host slots that a demotion leaves do so till then. A disk slot may be that of a page the
        planner has given up for this one: of that it says nothing else.
        """
        for move in plan.load + plan.store:
            if move.target == HOST and move.after < 0:
                self._host[move.target_slot] = None
        if self._disk is not None:
            self._disk.release([*target_slots_of(plan.demote), *target_slots_of(plan.write)])

    def outcome(self, plan: Plan) -> tuple[dict[int, str], dict[int, str]]:
        """(lost, bad) of an ended plan by position in its moves; forgotten here by that."""
        if not (self._lost or self._bad):
            return {}, {}
        moves = plan.moves()
        lost = {at: self._lost.pop(move) for at, move in enumerate(moves) if move in self._lost}
        bad = {at: self._bad.pop(move) for at, move in enumerate(moves) if move in self._bad}
        return lost, bad

    def dirty(self, on_disk: Collection[PageKey]) -> list[tuple[int, PageKey, PageKey | None]]:
        """(slot, key, parent) of host pages not on disk, each after its parent.

        Not of one whose prefix is neither here nor there.
        """
        slots = {key: slot for slot, key in enumerate(self._host) if key and key not in on_disk}
        order: dict[PageKey, None] = {}
        for key in slots:
            path: list[PageKey] = []
            above: PageKey | None = key
            while above is not None and above in slots and above not in order:
                path.append(above)
                above = self._parent[slots[above]]
            if above is None or above in order or above in on_disk:
                order.update(dict.fromkeys(reversed(path)))
        return [(slots[key], key, self._parent[slots[key]]) for key in order]

    # -- Books -------------------------------------------------------------------------------------

    def key(self, page: int) -> PageKey:
        """Never asked: a plan sent to another process names no page that has no move."""
        raise KeyError(page)

    def has(self, key: PageKey, tiers: Iterable[str]) -> bool:
        """Never asked, see `key`."""
        raise KeyError(key)

    def arriving(self, moves: Sequence[Move]) -> Sequence[Move]:
        """Those that others may wait for: not for pages in HBM, which is the engine's."""
        return moves if moves and moves[0].target != HBM else ()

    def possible(self, moves: Sequence[Move]) -> list[Move]:
        """Those of the moves for which `is_possible` holds."""
        return [move for move in moves if self.is_possible(move)]

    def is_possible(self, move: Move) -> bool:
        """Whether this rank has the source, and the demotion that frees the target was made."""
        if move.source == HOST and self._host[move.source_slot] != move.key:
            return False
        if move.source == DISK and not (self._disk and self._disk.has(move.source_slot)):
            return False
        is_taken = move.after >= 0 and self._host[move.target_slot] is not None
        return not (is_taken and self._restores)

    def durable(self, moves: Sequence[Move]) -> list[Move]:
        """The writes whose parents go with them, or this rank did not fail to write."""
        good: list[Move] = []
        going: set[PageKey | None] = set()
        for move in moves:
            has_parent = move.parent in going or move.parent not in self._unwritten
            if has_parent and self.is_possible(move):
                good.append(move)
                going.add(move.key)
            else:
                self._not_written(move)
        return good

    def arrived_all(self, moves: Sequence[Move]) -> None:
        """The bytes of moves into one tier are in place."""
        for move in moves:
            self.arrived(move)

    def arrived(self, move: Move) -> None:
        """The bytes of a move are in place."""
        if move.target == HOST:
            self._host[move.target_slot] = move.key
            self._parent[move.target_slot] = move.parent
        elif move.target == DISK:
            self._unwritten.discard(move.key)
        if move.leaves and self._host[move.source_slot] == move.key:
            self._host[move.source_slot] = None

    def failed(self, move: Move, reason: str = "failed") -> None:
        """A move was not made."""
        self._lost[move] = reason
        if move.target == DISK:
            self._not_written(move)
        elif move.target == HOST and self._host[move.target_slot] == move.key:
            self._host[move.target_slot] = None

    def condemn(self, move: Move, reason: str) -> None:
        """The source copy of a move was found bad."""
        self._bad[move] = reason

    def end(self, plan: Plan) -> None:
        """Nothing is pinned here."""

    def _not_written(self, move: Move) -> None:
        if len(self._unwritten) >= _REMEMBERED:
            self._unwritten.clear()  # at worst a page is written whose parent is not: it cannot hit
        self._unwritten.add(move.key)
