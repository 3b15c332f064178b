"""Planner: a request -> the moves it needs. Everything is decided here, before any byte moves.

Two-phase throughout: a plan reserves and pins; `arrived` publishes each page as its bytes come in,
`failed` takes it back, and `end` takes the pins back. The same planner runs under the store (where
moves are carried out by threads and streams), under a simulator (`carry_out`: at once, without
bytes) and in an engine's scheduler process. Not locked: whoever owns it is.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import compress, repeat
from typing import NamedTuple

import numpy as np

from tiered_kv.columns import Numbers, array_of
from tiered_kv.found import FoundPages
from tiered_kv.index import Index, TierIndex
from tiered_kv.keys import KeyChain, PageKey
from tiered_kv.ledger import Ledger
from tiered_kv.plan import (
    DISK,
    HBM,
    HOST,
    LOAD_ALL,
    TIERS,
    Draft,
    Gate,
    Move,
    Moves,
    Plan,
    pages_of,
    steps_of,
)
from tiered_kv.room import Room, Slots, moves_of
from tiered_kv.tier_index import ABSENT, RESIDENT


class Planner(Ledger):
    """Decides for one store.

    Args:
        slots: where the slots of each tier come from. "host" is required; without "hbm" the engine
            owns its pages and only their slots are named; without "disk" what host gives up is
            gone.
        capacity: pages a tier holds.
        policy: eviction policy of every tier.
        write_through: put every page on disk at once, not only when host gives it up.
        restores: a page whose demotion fails goes back to the host slot it was leaving. Not where
            several ranks carry out the plan: another may have filled the slot already.
    """

    def __init__(
        self,
        slots: Mapping[str, Slots],
        capacity: Mapping[str, int],
        *,
        policy: str = "lru",
        write_through: bool = False,
        restores: bool = True,
    ) -> None:
        index = Index([name for name in TIERS if name in slots], policy)
        super().__init__(index, Room(index, dict(slots), dict(capacity)), restores=restores)
        self._write_through = write_through and self._disk is not None

    # -- get ---------------------------------------------------------------------------------------

    def plan_get(
        self, keys: Sequence[PageKey], *, gate: Gate = LOAD_ALL, into: Sequence[int] | None = None
    ) -> Plan:
        """Bring the longest present prefix of `keys` into HBM.

        Args:
            keys: pages asked for; those after the first that is nowhere are misses.
            gate: what is not worth loading.
            into: HBM slots the caller owns, one a key; without it the plan finds them and leases
                the pages: each stays pinned in HBM until `release`.
        """
        draft = Draft()
        pages, sources = self._hit(keys, gate, draft)
        slots = self._hbm_slots(pages, sources, into)
        if len(slots) < len(pages):
            draft.miss("no_room", len(pages) - len(slots))
            pages, sources = Numbers(pages[: len(slots)]), sources[: len(slots)]
        draft.pins += by_source(pages, sources)
        load = self._loads(pages, sources, draft)
        loaded = set(pages_of(load))
        through = [HOST if p in loaded else s for p, s in zip(pages, sources, strict=True)]
        fill = self._fills(pages, through if loaded else sources, slots)
        if into is None:
            self._lease(pages, slots)
        return Plan(
            pages=tuple(pages),
            sources=tuple(sources),
            slots=tuple(slots),
            demote=steps_of(draft.demote),
            load=steps_of(load),
            fill=steps_of(fill),
            pins=tuple(draft.pins),
            misses=tuple(draft.misses.items()),
        )

    def plan_prefetch(self, keys: Sequence[PageKey], *, gate: Gate = LOAD_ALL) -> Plan:
        """Bring the pages of the longest present prefix that are on disk alone up to host."""
        draft = Draft()
        pages, sources = self._hit(keys, gate, draft)
        draft.pins += by_source(pages, sources)
        load = self._loads(pages, sources, draft)
        return Plan(
            pages=tuple(pages),
            sources=tuple(sources),
            demote=steps_of(draft.demote),
            load=steps_of(load),
            pins=tuple(draft.pins),
            misses=tuple(draft.misses.items()),
        )

    def _hit(
        self, keys: Sequence[PageKey], gate: Gate, draft: Draft
    ) -> tuple[list[int], list[str]]:
        """The pages worth loading and their fastest tiers; pinned there first of all, and used."""
        pages = self.index.match(keys)
        if len(set(pages)) < len(pages):
            raise ValueError("a key is named twice: keys must be those of consecutive pages")
        for reason in self.why_missed(keys[len(pages) :]):
            draft.miss(reason, 1)
        sources = self.index.sources(pages)
        count, reason = gate.cut(sources)
        draft.miss(reason, len(pages) - count)
        pages, sources = Numbers(pages[:count]), sources[:count]
        for source, held in by_source(pages, sources):
            self.index.pin(self.index.by_name[source], held)
        self.index.touch(pages)
        return pages, sources

    def why_missed(self, keys: Sequence[PageKey]) -> Iterator[str]:
        """For each of consecutive pages, the first of which is nowhere, why it cannot hit."""
        for depth, key in enumerate(keys):
            page = self.index.find(key)
            present = page >= 0 and self.index.is_present(page)
            yield "no_parent" if depth and present else self.index.why_missing(key)

    def _hbm_slots(
        self, pages: list[int], sources: list[str], into: Sequence[int] | None
    ) -> list[int]:
        """One slot a page of the hit, as far as HBM has room; new ones are reserved.

        Where there is too little, the deepest pages of the hit are let go of, and if they stand in
        HBM they make room for the first: a hit is a prefix.
        """
        if into is not None:
            return list(into[: len(pages)])
        assert self._hbm is not None, "without an hbm tier, get() needs into="
        fresh = self.room.on_hbm(sum(source != HBM for source in sources), self._hbm)[::-1]
        slots: list[int] = []
        end = len(pages)
        while len(slots) < end:
            at = len(slots)
            if sources[at] == HBM:
                slots.append(self._hbm.slot[pages[at]])
            elif fresh:
                slots.append(fresh.pop())
            else:
                end -= 1
                self._unpin(sources[end], [pages[end]])
                if sources[end] == HBM:
                    fresh += self.room.on_hbm(1, self._hbm)
        self.room.free(HBM, fresh)
        return slots

    def _loads(self, pages: list[int], sources: list[str], draft: Draft) -> Sequence[Move]:
        """Moves disk -> host for the pages on disk alone, as far as host has room for them."""
        if DISK not in sources:
            return []
        doomed = self._host.doomed
        cold = [
            page
            for page, source in zip(pages, sources, strict=True)
            if source == DISK and page not in doomed
        ]
        slots, after = self.room.on_host(len(cold), draft)
        loaded = Numbers(cold[: len(slots)])
        moves = moves_of(self.index, loaded, DISK, HOST, slots, after=after)
        self.index.begin(self._host, loaded, slots)
        self.index.pin(self._host, loaded)
        draft.pin(HOST, loaded)
        return moves

    def _fills(self, pages: list[int], sources: list[str], slots: list[int]) -> Sequence[Move]:
        """The last moves of pages, into HBM; from host if they are loaded there on the way."""
        names = set(sources)
        if len(names) == 1:
            return moves_of(self.index, pages, sources[0], HBM, slots)
        moves: dict[int, Move] = {}
        for name in names:
            at = [position for position, source in enumerate(sources) if source == name]
            some = [pages[position] for position in at]
            made = moves_of(self.index, some, name, HBM, [slots[position] for position in at])
            moves.update(zip(at, made, strict=True))
        return [moves[position] for position in range(len(pages))]

    def _lease(self, pages: list[int], slots: list[int]) -> None:
        assert self._hbm is not None
        state = self._hbm.state
        new = [at for at, page in enumerate(pages) if not state[page]]
        self.index.begin(self._hbm, [pages[at] for at in new], [slots[at] for at in new])
        self.index.pin(self._hbm, pages)

    # -- put ---------------------------------------------------------------------------------------

    def plan_put(self, keys: KeyChain, slots: Sequence[int]) -> Plan:
        """Take over pages that stand in HBM slots, and copy them to host (and disk).

        Args:
            keys: their keys; `keys.parent` says where the first hangs.
            slots: their HBM slots, one a key.

        Raises:
            ValueError: a key is named twice; nothing has changed.
        """
        draft = Draft()
        if len(set(keys)) < len(keys):
            raise ValueError("a key is named twice: keys must be those of consecutive pages")
        parent = -1 if keys.parent is None else self.index.find(keys.parent)
        if keys.parent is not None and parent < 0:
            draft.miss("no_parent", len(keys))
            return Plan(
                spare_slots=tuple(slots) if self._hbm else (),
                misses=tuple(draft.misses.items()),
                not_stored=len(keys),
            )
        given = _Given(Numbers(self.index.add(keys, parent)), Numbers(slots), keys)
        pages = given.pages
        bind, spare = self._bind(given)
        self.index.touch(pages)
        with self._kept_on_disk(pages):  # room is made from the bottom: not by what is put itself
            store = self._stores(given, draft, are_bound=len(bind) == len(pages))
            write = self._writes(pages_of(store), draft) if self._write_through else ()
        on_host = b"" if pages_of(store) is pages else self._host.states(pages)
        not_stored = sum(
            not state and not self.is_below_hbm(page)
            for page, state in zip(pages, on_host if 0 in on_host else b"", strict=False)
        )
        self.index.forget(pages[::-1])
        return Plan(
            pages=tuple(pages),
            slots=tuple(given.slots),
            demote=steps_of(draft.demote),
            bind=steps_of(bind),
            store=steps_of(store),
            write=steps_of(write),
            pins=tuple(draft.pins),
            spare_slots=tuple(spare),
            not_stored=not_stored,
        )

    def _kept_on_disk(self, pages: list[int]) -> AbstractContextManager[None]:
        disk = self._disk
        if disk is None:
            return nullcontext()
        states = disk.states(pages)
        on_disk = [page for page, state in zip(pages, states, strict=True) if state]
        return self.room.held(disk, on_disk)

    def _bind(self, given: _Given) -> tuple[Sequence[Move], list[int]]:
        """Pages enter HBM where the caller has put them; slots of pages already there are spare."""
        if self._hbm is None:
            return [], []
        pages, slots, _ = given
        bound, at_slots, spare = _absent(self._hbm, pages), slots, list[int]()
        if len(bound) < len(pages):
            new = set(bound)
            at_slots = [slot for page, slot in zip(pages, slots, strict=True) if page in new]
            spare = [slot for page, slot in zip(pages, slots, strict=True) if page not in new]
        self.index.begin(self._hbm, bound, at_slots)
        way = HBM, at_slots, HBM, at_slots
        return Moves(bound, *given.links(bound, self.index), way, waits=[True] * len(bound)), spare

    def _stores(self, given: _Given, draft: Draft, *, are_bound: bool) -> Moves:
        """Copies HBM -> host of the pages not there, parents first, as far as host has room.

        Args:
            are_bound: every page given stands in HBM in the slot given with it.
        """
        pages = given.pages
        ancestors = self._unstored_ancestors(pages[0] if pages else -1)
        path = Numbers(ancestors + pages) if ancestors else pages
        wanted = _absent(self._host, path)
        above = self.index.parent_of[wanted[0]] if wanted else -1
        grants = self.room.on_host(len(wanted), draft, below=above)
        stored = wanted if len(grants.slots) == len(wanted) else wanted[: len(grants.slots)]
        self.index.begin(self._host, stored, grants.slots)
        if are_bound and stored is pages:  # mostly
            sources, waits, held = given.slots, [True] * len(pages), pages
        else:
            sources, waits, held = self._store_sources(stored, given)
        if self._hbm is not None:
            self.index.pin(self._hbm, held)
            draft.pin(HBM, held)
        way = HBM, sources, HOST, grants.slots
        links = given.links(stored, self.index)
        return Moves(stored, *links, way, waits=waits, after=grants.after)

    def _store_sources(
        self, pages: list[int], given: _Given
    ) -> tuple[list[int], list[bool], list[int]]:
        """The slots given, or where HBM has a page; which of these await it; what to pin there."""
        sources = list(map(dict(zip(*given[:2], strict=True)).get, pages, repeat(-1)))
        if self._hbm is None:
            return sources, [False] * len(pages), []
        in_hbm = self._hbm.slots(pages)
        held = [page for page, bound in zip(pages, in_hbm, strict=True) if bound >= 0]
        pairs = list(zip(sources, in_hbm, strict=True))
        waits = [slot == bound >= 0 for slot, bound in pairs]  # else bound before, in another slot
        return [bound if slot < 0 else slot for slot, bound in pairs], waits, held

    def _unstored_ancestors(self, page: int) -> list[int]:
        """Pages above one that are in HBM alone: they found no room before and are tried again."""
        path: list[int] = []
        page = self.index.parent_of[page] if page >= 0 else -1
        while page >= 0 and self._hbm is not None and self._hbm.is_resident(page):
            if self.is_below_hbm(page):
                break
            path.append(page)
            page = self.index.parent_of[page]
        return path[::-1]

    def is_below_hbm(self, page: int) -> bool:
        """Whether host or disk has a page, or awaits it."""
        return bool(self._host.state[page] or (self._disk is not None and self._disk.state[page]))

    def _writes(self, pages: Sequence[int], draft: Draft) -> Sequence[Move]:
        """Copies host -> disk of pages and their ancestors, as far as disk has room."""
        assert self._disk is not None
        durable = self.room.durable(pages)
        dirty = _in_state(ABSENT, self._disk, durable)
        slots = self.room.write_slots(dirty)
        while slots is None and len(dirty) > 1:
            dirty = dirty[: len(dirty) // 2]
            slots = self.room.write_slots(dirty)
        if slots is None:
            return []
        return self.room.write(slots, draft)

    def dirty_pages(self) -> Sequence[int]:
        """Host pages that are not on disk and could be written there, coldest first. O(pages).

        No more than disk holds beside the host pages that are on it already: where it is smaller
        than host, flushing would otherwise make pages take each other's place for ever.
        """
        if self._disk is None:
            return []
        on_host = np.flatnonzero(array_of(self._host.state) == RESIDENT)
        on_disk = array_of(self._disk.state)[on_host]
        dirty = on_host[on_disk == ABSENT]
        coldest = np.argsort(array_of(self.index.last_use_of)[dirty])
        durable = self.room.durable(dirty[coldest].tolist())
        clean = int(np.count_nonzero(on_disk == RESIDENT))
        return durable[max(0, len(durable) - (self.room.capacity[DISK] - clean)) :]

    def plan_flush(self, pages: Sequence[int]) -> Plan:
        """Write these of the `dirty_pages`, as far as they still are, and their ancestors."""
        draft = Draft()
        if self._disk is None:
            return Plan()
        write = self._writes(_in_state(RESIDENT, self._host, Numbers(pages)), draft)
        return Plan(write=steps_of(write), pins=tuple(draft.pins))

    # -- what was there before ---------------------------------------------------------------------

    def adopt(self, tier: str, found: FoundPages) -> list[int]:
        """Take over what a tier still holds from an earlier run, before anything else is decided.

        A page that hangs from one that is not there, however far above, cannot hit: its slot is
        freed. Returns the slots that were.
        """
        self.room.claim(tier, len(found))
        rooted, orphans = found.rooted()
        self.index.restore(self.index.by_name[tier], rooted)
        self.room.free(tier, orphans)
        return orphans


class _Given(NamedTuple):
    """What a put gives: pages, and for each its HBM slot and its key."""

    pages: list[int]
    slots: list[int]
    keys: KeyChain

    def links(
        self, pages: list[int], index: Index
    ) -> tuple[Sequence[PageKey], Sequence[PageKey | None]]:
        """As `Index.links`, which need not be asked for all of the pages given."""
        if pages is self.pages:
            keys = list(self.keys)
            return keys, [self.keys.parent, *keys[:-1]]
        return index.links(pages)


def by_source(pages: list[int], sources: list[str]) -> list[tuple[str, list[int]]]:
    """(tier, its pages) for each tier that is a source of some."""
    names = dict.fromkeys(sources)
    if len(names) == 1:
        return [(name, pages) for name in names]
    return [(name, list(compress(pages, map(name.__eq__, sources)))) for name in names]


def _in_state(state: int, tier: TierIndex, pages: Sequence[int]) -> Sequence[int]:
    """Those of the pages that are in a state in a tier: mostly all of them."""
    states = tier.states(pages)
    if states.count(state) == len(states):
        return pages
    return Numbers(compress(pages, map(state.__eq__, states)))


def _absent(tier: TierIndex, pages: list[int]) -> list[int]:
    """Those of the pages that may enter a tier: mostly all of them."""
    if not tier.doomed and not any(tier.states(pages)):
        return pages
    state, doomed = tier.state, tier.doomed
    return [page for page in pages if not state[page] and page not in doomed]
