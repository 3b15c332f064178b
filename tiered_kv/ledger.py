"""Ledger: what has become of plans. The other half of the planner, which makes them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tiered_kv.columns import FEW, array_of, numbers
from tiered_kv.index import Index
from tiered_kv.keys import PageKey
from tiered_kv.plan import (
    DISK,
    HBM,
    HOST,
    Move,
    Moves,
    Plan,
    pages_of,
    target_slots_of,
    where,
)
from tiered_kv.room import Room
from tiered_kv.tier_index import ARRIVING, RESIDENT


class Ledger:
    """The `Books` of one store: publishes pages, takes failed moves back, ends plans.

    Args:
        index: where each page is.
        room: the slots of the tiers.
        restores: a page whose demotion fails goes back to the host slot it was leaving.
    """

    def __init__(self, index: Index, room: Room, *, restores: bool) -> None:
        self.index = index
        self.room = room
        self._hbm = index.by_name.get(HBM)
        self._host = index.by_name[HOST]
        self._disk = index.by_name.get(DISK)
        self._restores = restores
        self._returned: set[Move] = set()  # demotions that failed in plans not ended yet

    def key(self, page: int) -> PageKey:
        """The key of a page."""
        return self.index.key(page)

    def has(self, key: PageKey, tiers: Iterable[str]) -> bool:
        """Whether one of these tiers has a page."""
        page = self.index.find(key)
        named = [self.index.by_name[name] for name in tiers if name in self.index.by_name]
        return page >= 0 and any(tier.is_resident(page) for tier in named)

    def arrived(self, move: Move) -> None:
        """The bytes of a move are in place and verified: the page counts from now on."""
        if self.is_arriving(move):
            self.index.finish(self.index.by_name[move.target], [move.page])

    def arrived_all(self, moves: Sequence[Move]) -> None:
        """As `arrived`, for moves that all go into one tier."""
        if moves and moves[0].target in self.index.by_name:
            pages = pages_of(self.arriving(moves))
            self.index.finish(self.index.by_name[moves[0].target], pages)

    def failed(self, move: Move, reason: str = "failed") -> None:
        """A move was not made: its page does not count in the target, whose slot is free again."""
        if move.leaves and self._restores:
            self._restore(move)
        if move.is_in_place or not self.is_arriving(move):
            return  # in place: the arrival is another plan's, or by now that of a third
        tier = self.index.by_name[move.target]
        slot = self.index.abort(tier, move.page, reason)
        if not self._went_back(move):
            self.room.free(tier.name, [slot])

    def is_arriving(self, move: Move) -> bool:
        """Whether the target slot of a move is promised to its page, not a caller's own."""
        tier = self.index.by_name.get(move.target)
        if tier is None or tier.slot[move.page] != move.target_slot:
            return False
        return tier.state[move.page] == ARRIVING

    def arriving(self, moves: Sequence[Move]) -> Sequence[Move]:
        """Those of the moves, all into one tier, for which `is_arriving` holds."""
        tier = self.index.by_name.get(moves[0].target) if moves else None
        if tier is None:
            return []
        return where(moves, tier.have(ARRIVING, pages_of(moves), target_slots_of(moves)))

    def is_possible(self, move: Move) -> bool:
        """Whether, what it waited for being over, a move has its source and its target slot."""
        if self._went_back(move):
            return False
        tier = self.index.by_name.get(move.source)
        if tier is None:
            return True
        if tier.slot[move.page] == move.source_slot:
            return tier.is_resident(move.page)
        return move.source == HBM and move.target == HOST  # from a slot that was the caller's own

    def possible(self, moves: Sequence[Move]) -> Sequence[Move]:
        """Those of the moves for which `is_possible` holds."""
        return where(moves, self._are_possible(moves))

    def _are_possible(self, moves: Sequence[Move]) -> list[bool]:
        tier = self.index.by_name.get(moves.source) if isinstance(moves, Moves) else None
        if tier is None or not isinstance(moves, Moves):
            return [self.is_possible(move) for move in moves]
        is_there = tier.have(RESIDENT, moves.pages, moves.source_slots)
        if all(is_there) and max(moves.after, default=-1) < 0:  # nearly always
            return is_there
        return [
            (is_sure and move.after < 0) or self.is_possible(move)
            for is_sure, move in zip(is_there, moves, strict=True)
        ]

    def durable(self, moves: Sequence[Move]) -> Sequence[Move]:
        """The writes that leave disk prefix-closed: their parents are there, or go before them."""
        assert self._disk is not None
        if isinstance(moves, Moves) and True not in moves.leaves:
            have_source = self._are_possible(moves)
        else:
            have_source = [move.leaves or self.is_possible(move) for move in moves]
        if len(moves) >= FEW and all(have_source) and self._have_parents(pages_of(moves)):
            return moves
        going: set[int] = {-1}
        parent_of, on_disk = self.index.parent_of, self._disk.state
        good = []
        for page, has_source in zip(pages_of(moves), have_source, strict=True):
            parent = parent_of[page]
            is_good = has_source and (parent in going or on_disk[parent] == RESIDENT)
            if is_good:
                going.add(page)
            good.append(is_good)
        return where(moves, good)

    def _have_parents(self, pages: Sequence[int]) -> bool:
        """Whether the parent of each is on disk, or the page before it: mostly so."""
        assert self._disk is not None
        at, on_disk = numbers(pages), array_of(self._disk.state)
        parents = array_of(self.index.parent_of)[at]
        has_parent = (parents < 0) | (on_disk[parents] == RESIDENT)
        has_parent[1:] |= parents[1:] == at[:-1]
        return bool(has_parent.all())

    def _restore(self, move: Move) -> None:
        """A demotion failed: the page is back in the slot it was leaving.

        Unless another plan is already bringing it to host again, from the copy that has just
        failed.
        """
        if self._host.state[move.page] or move.page in self._host.doomed:
            return
        self.index.begin(self._host, [move.page], [move.source_slot])
        self.index.finish(self._host, [move.page])
        self.index.pin(self._host, [move.page])  # who was promised its slot must find it taken
        self._returned.add(move)

    def _went_back(self, move: Move) -> bool:
        """Whether the slot a move was promised is again that of the page that did not leave."""
        if move.after < 0:
            return False
        return self._host.slot[move.after] == move.target_slot

    def condemn(self, move: Move, reason: str) -> None:
        """The source copy of a move was found bad: it is dropped, and not counted from now on."""
        tier = self.index.by_name[move.source]
        if tier.is_resident(move.page) and tier.slot[move.page] == move.source_slot:
            slot = self.index.condemn(tier, move.page, reason)
            if slot is not None:
                self.room.free(tier.name, [slot])

    def end(self, plan: Plan) -> None:
        """All moves of a plan have arrived or failed: take its pins back, free what was spare."""
        for tier, pages in plan.pins:
            self._unpin(tier, pages)
        for move in self._returned.intersection(plan.demote) if self._returned else ():
            self._returned.remove(move)
            self._unpin(HOST, [move.page])
        if self._hbm is not None:
            self.room.free(HBM, plan.spare_slots)

    def release(self, pages: Sequence[int]) -> None:
        """End the lease of pages that a get() brought into HBM."""
        self._unpin(HBM, pages)

    def _unpin(self, tier: str, pages: Sequence[int]) -> None:
        self.room.free(tier, self.index.unpin(self.index.by_name[tier], pages))

    def carry_out(self, plan: Plan) -> Plan:
        """Make every move of a plan at once, without bytes: how a simulator uses it."""
        for moves in plan.steps():
            self.arrived_all(moves)
        self.end(plan)
        return plan
