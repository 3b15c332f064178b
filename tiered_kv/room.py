"""Making room: what leaves a tier so that something else may enter it.

Room is made from the bottom: a page that host gives up goes to disk first if it is not there, and
disk in turn drops what its policy ranks lowest. Disk is kept prefix-closed by itself: a page is
written only together with those of its ancestors that are not on disk yet, root first. So whatever
a crash leaves on disk can hit, and the pages of one prefix lie side by side there.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from itertools import compress
from operator import not_, or_
from typing import NamedTuple, Protocol

from tiered_kv.columns import Numbers
from tiered_kv.index import Index, TierIndex
from tiered_kv.plan import DISK, HOST, Draft, Moves
from tiered_kv.tier_index import RESIDENT


class Slots(Protocol):
    """Where slots come from: a `Tier`, or a bare `SlotPool` where no bytes are moved."""

    def reserve(self, n: int) -> list[int] | None:
        """Take n slots, or None and none taken."""

    def free(self, slots: Sequence[int]) -> None:
        """Give slots back."""


class Grants(NamedTuple):
    """Slots that may be filled, each once the demotion of a page (-1: none) has been made."""

    slots: list[int]
    after: list[int]

    def add(self, slots: Sequence[int], after: Sequence[int] | None = None) -> None:
        """More slots; without `after` they may be filled at once."""
        self.slots.extend(slots)
        self.after.extend([-1] * len(slots) if after is None else after)


def moves_of(
    index: Index,
    pages: Sequence[int],
    source: str,
    target: str,
    slots: Sequence[int],
    *,
    after: Sequence[int] | None = None,
    leaves: Sequence[bool] | None = None,
) -> Moves:
    """The moves of pages from where a tier has them, or awaits them, to slots of another."""
    tier = index.by_name[source]
    keys, parents = index.links(pages)
    return Moves(
        pages,
        keys,
        parents,
        (source, tier.slots(pages), target, slots),
        waits=[state != RESIDENT for state in tier.states(pages)],
        after=after,
        leaves=leaves,
    )


class Room:
    """The slots of every tier, and the way to get more of them."""

    def __init__(self, index: Index, slots: dict[str, Slots], capacity: dict[str, int]) -> None:
        self._index = index
        self._slots = slots
        self.capacity = dict(capacity)
        self.free_pages = dict(capacity)

    def reserve_free(self, tier: str, n: int) -> list[int]:
        """Up to n slots that nothing has to leave for."""
        n = min(n, self.free_pages[tier])
        if n == 0:
            return []
        taken = self._slots[tier].reserve(n)
        assert taken is not None, "the tier has fewer free slots than were counted"
        self.free_pages[tier] -= n
        return taken

    def free(self, tier: str, slots: Sequence[int]) -> None:
        """Give slots back."""
        if slots:
            self._slots[tier].free(slots)
            self.free_pages[tier] += len(slots)

    def claim(self, tier: str, pages: int) -> None:
        """Slots already taken when the tier was opened."""
        self.free_pages[tier] -= pages

    def on_hbm(self, n: int, tier: TierIndex) -> list[int]:
        """Up to n HBM slots. What leaves is dropped: it has a copy below or found no room there."""
        slots = self.reserve_free(tier.name, n)
        victims = self._index.victims(tier, n - len(slots))
        return slots + self._index.evict(tier, victims)

    def exactly(self, name: str, n: int) -> list[int] | None:
        """Exactly n slots of HBM or disk, or None and nothing changed. What leaves is dropped."""
        return self._exactly(name, n, ())

    def _exactly(self, name: str, n: int, keep: Sequence[int]) -> list[int] | None:
        tier = self._index.by_name[name]
        missing = n - self.free_pages[name]
        victims = self._victims(tier, missing, keep) if missing > 0 else []
        if len(victims) < missing:
            return None
        return self.reserve_free(name, n) + sorted(self._index.evict(tier, victims))

    def on_host(self, n: int, draft: Draft, *, below: int = -1) -> Grants:
        """Up to n host slots; adds to the draft the demotions that free them.

        Args:
            n: how many are wanted.
            draft: the plan being made.
            below: the page they will hang from, or -1. It may go to disk for them, but is not
                dropped: a prefix is worth more than what continues it.
        """
        grants = Grants(Numbers(), [])
        grants.add(self.reserve_free(HOST, n))
        missing = n - len(grants.slots)
        if missing <= 0:
            return grants
        host = self._index.by_name[HOST]
        if DISK in self._index.by_name:
            grants.add(*self._demote(host, missing, draft))
            missing = n - len(grants.slots)
        if missing > 0:
            keep = [below] if below >= 0 and host.state[below] else []
            victims = self._victims(host, missing, keep)
            grants.add(sorted(self._index.evict(host, victims)))  # side by side: copied faster
        return grants

    @contextmanager
    def held(self, tier: TierIndex, pages: Sequence[int]) -> Iterator[None]:
        """Keep pages in a tier while room is made in it."""
        self._index.pin(tier, pages)
        try:
            yield
        finally:
            self._index.unpin(tier, pages)

    def _victims(
        self, tier: TierIndex, n: int, keep: Sequence[int], *, demote: bool = False
    ) -> list[int]:
        """As `Index.victims`, with some pages `held`."""
        self._index.pin(tier, keep)
        victims = self._index.victims(tier, n, demote=demote)
        self._index.unpin(tier, keep)
        return victims

    def _demote(self, host: TierIndex, n: int, draft: Draft) -> Grants:
        """Give up to n host pages that live on on disk, as many as disk can take."""
        index = self._index
        victims = self._demotable(host, n)
        while (slots := self._slots_for(victims)) is None:
            victims = victims[: len(victims) // 2]
        if slots:
            demote = self.write(slots, draft, leaving=set(victims))
            draft.demote = [*draft.demote, *demote] if draft.demote else demote
        freed = index.evict(host, victims)
        after = [page if page in slots else -1 for page in victims]
        return Grants(freed[::-1], after[::-1])  # mostly side by side so: copied faster

    def _demotable(self, host: TierIndex, n: int) -> list[int]:
        """Up to n pages that host would give up if they live on on disk, and that can."""
        stuck: list[int] = []
        while True:
            victims = self._victims(host, n, stuck, demote=True)
            durable = self.durable(victims)
            if len(durable) == len(victims):
                return victims
            stuck += set(victims).difference(durable)

    def _slots_for(self, victims: Sequence[int]) -> dict[int, int] | None:
        states = self._index.by_name[DISK].states(victims)
        if all(states):
            return {}
        clean = list(compress(victims, states))
        return self.write_slots(list(compress(victims, map(not_, states))), keep=clean)

    def durable(self, pages: Sequence[int]) -> Sequence[int]:
        """Those of the pages that are on disk or could be written there now.

        Not one with an ancestor in HBM alone, or a hole, or whose copy on disk was found bad and is
        still being read.
        """
        if self._are_durable(pages):
            return pages
        index, disk, host = self._index, self._index.by_name[DISK], self._index.by_name[HOST]
        known: dict[int, bool] = {-1: True}
        for page in pages:
            path = []
            while page not in known and not disk.state[page]:
                path.append(page)
                if not host.state[page] or page in disk.doomed:
                    known[page] = False
                else:
                    page = index.parent_of[page]
            known.update(dict.fromkeys(path, known.get(page, True)))
        return [page for page in pages if known.get(page, True)]

    def _are_durable(self, pages: Sequence[int]) -> bool:
        """Whether all of them and of their ancestors are on disk, or on host: mostly so."""
        index, disk, host = self._index, self._index.by_name[DISK], self._index.by_name[HOST]
        on_disk = disk.states(pages)
        if all(on_disk):
            return True
        on_host = host.states(pages)
        if disk.doomed or not (all(on_host) or all(map(or_, on_host, on_disk))):
            return False
        parent_of, seen = index.parent_of, set[int]()
        for run in index.runs(pages):
            page = parent_of[run[-1]]
            while page >= 0 and page not in seen and not disk.state[page]:
                if not host.state[page]:
                    return False
                seen.add(page)
                page = parent_of[page]
        return True

    def write_slots(self, pages: Sequence[int], keep: Sequence[int] = ()) -> dict[int, int] | None:
        """Disk slots for pages, all `durable`, and their ancestors that are not there, root first.

        No page of `keep` leaves disk for them. None, and nothing changed, if disk cannot make that
        room without orphaning or unpinning a page.
        """
        order, below = self._paths(pages)
        slots = self._exactly(DISK, len(order), [*keep, *below])
        return None if slots is None else dict(zip(order, slots, strict=True))

    def root_first(self, pages: Sequence[int]) -> list[int]:
        """Pages, all `durable`, and their ancestors that are not on disk: as they are written."""
        return list(self._paths(pages)[0])

    def _paths(self, pages: Sequence[int]) -> tuple[Collection[int], list[int]]:
        """Pages with their ancestors that are not on disk, root first; what is there above them.

        The latter are soon to be parents there, and must not leave meanwhile.
        """
        parent_of, state = self._index.parent_of, self._index.by_name[DISK].state
        order: dict[int, None] = {}
        below: list[int] = []
        for run in self._index.runs(pages):
            page = parent_of[run[-1]]
            path = list(run)
            while page >= 0 and not state[page] and page not in order:
                path.append(page)
                page = parent_of[page]
            order.update(dict.fromkeys(reversed(path)))
            if page >= 0 and state[page]:
                below.append(page)
        return order, below

    def write(self, slots: dict[int, int], draft: Draft, *, leaving: Collection[int] = ()) -> Moves:
        """Copies of host pages to disk, in the order of `slots`: page -> disk slot.

        Those of `leaving` are to be evicted; the others stay, pinned on host until the plan ends.
        """
        index, pages, disk_slots = self._index, Numbers(slots), Numbers(slots.values())
        staying = [page for page in pages if page not in leaving] if leaving else pages
        index.begin(index.by_name[DISK], pages, disk_slots)
        index.pin(index.by_name[HOST], staying)
        draft.pin(HOST, staying)
        leaves = [page in leaving for page in pages] if leaving else None
        return moves_of(index, pages, HOST, DISK, disk_slots, leaves=leaves)
