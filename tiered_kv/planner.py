"""Planner: a request -> the moves it needs. Everything is decided here, before any byte moves.

Two-phase throughout: a plan reserves and pins; `arrived` publishes each page as its bytes come in,
`failed` takes it back, and `end` takes the pins back. The same planner runs under the store (where
moves are carried out by threads and streams), under a simulator (`carry_out`: at once, without
bytes) and in an engine's scheduler process. Not locked: whoever owns it is.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from tiered_kv.index import Index, TierState
from tiered_kv.keys import KeyChain, PageKey
from tiered_kv.plan import DISK, HBM, HOST, LOAD_ALL, TIERS, Draft, Gate, Move, Plan
from tiered_kv.room import Grant, Room, Slots, move_of


class StoredPage(NamedTuple):
    """A page that a tier still holds from an earlier run."""

    key: PageKey
    parent: PageKey | None
    slot: int


class Planner:
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
        names = [name for name in TIERS if name in slots]
        self.index = Index(names, policy)
        self.room = Room(self.index, dict(slots), dict(capacity))
        self._hbm = self.index.by_name.get(HBM)
        self._host = self.index.by_name[HOST]
        self._disk = self.index.by_name.get(DISK)
        self._write_through = write_through and self._disk is not None
        self._restores = restores
        self._returned: set[Move] = set()  # demotions that failed in plans not ended yet

    # -- get ---------------------------------------------------------------------------------------

    def source_of(self, page: int) -> str:
        """The fastest tier that has a page, or awaits it."""
        for tier in self.index.tiers:
            if tier.state[page]:
                return tier.name
        raise KeyError(page)

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
        slots = self._hbm_slots(pages, sources, into, draft)
        if len(slots) < len(pages):
            draft.miss("no_room", len(pages) - len(slots))
            pages, sources = pages[: len(slots)], sources[: len(slots)]
        load, grants = self._loads(pages, sources, draft)
        fill = [
            self._fill(page, source, slot, grants.get(page))
            for page, source, slot in zip(pages, sources, slots, strict=True)
        ]
        if into is None:
            self._lease(pages, slots)
        return Plan(
            pages=tuple(pages),
            sources=tuple(sources),
            slots=tuple(slots),
            demote=tuple(draft.demote),
            load=tuple(load),
            fill=tuple(fill),
            pins=tuple(draft.pins),
            misses=tuple(draft.misses.items()),
        )

    def plan_prefetch(self, keys: Sequence[PageKey], *, gate: Gate = LOAD_ALL) -> Plan:
        """Bring the pages of the longest present prefix that are on disk alone up to host."""
        draft = Draft()
        pages, sources = self._hit(keys, gate, draft)
        load, _ = self._loads(pages, sources, draft)
        return Plan(
            pages=tuple(pages),
            sources=tuple(sources),
            demote=tuple(draft.demote),
            load=tuple(load),
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
        sources = [self.source_of(page) for page in pages]
        count, reason = gate.cut(sources)
        draft.miss(reason, len(pages) - count)
        pages, sources = pages[:count], sources[:count]
        for page, source in zip(pages, sources, strict=True):
            self.index.pin(self.index.by_name[source], page)
            draft.pins.append((source, page))
        self.index.touch(pages)
        return pages, sources

    def why_missed(self, keys: Sequence[PageKey]) -> Iterator[str]:
        """For each of consecutive pages, the first of which is nowhere, why it cannot hit."""
        for depth, key in enumerate(keys):
            page = self.index.find(key)
            present = page >= 0 and self.index.is_present(page)
            yield "no_parent" if depth and present else self.index.why_missing(key)

    def _hbm_slots(
        self, pages: list[int], sources: list[str], into: Sequence[int] | None, draft: Draft
    ) -> list[int]:
        """One slot a page of the hit, as far as HBM has room; new ones are reserved.

        Where there is too little, the deepest pages of the hit are let go of, and if they stand in
        HBM they make room for the first: a hit is a prefix. Their pins leave the draft.
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
                self._let_go(draft)
                if sources[end] == HBM:
                    fresh += self.room.on_hbm(1, self._hbm)
        while len(draft.pins) > len(slots):
            self._let_go(draft)
        self.room.free(HBM, fresh)
        return slots

    def _let_go(self, draft: Draft) -> None:
        """Take back the last pin of a draft, which so far has one a page of the hit, in order."""
        self._unpin(*draft.pins.pop())

    def _loads(
        self, pages: list[int], sources: list[str], draft: Draft
    ) -> tuple[list[Move], dict[int, Grant]]:
        """Moves disk -> host for the pages on disk alone, as far as host has room for them."""
        cold = [
            page
            for page, source in zip(pages, sources, strict=True)
            if source == DISK and page not in self._host.doomed
        ]
        grants = dict(zip(cold, self.room.on_host(len(cold), draft), strict=False))
        moves = []
        for page, grant in grants.items():
            moves.append(self._move(page, DISK, HOST, grant.slot, grant.after))
            self.index.begin(self._host, page, grant.slot)
            self.index.pin(self._host, page)
            draft.pins.append((HOST, page))
        return moves, grants

    def _fill(self, page: int, source: str, slot: int, grant: Grant | None) -> Move:
        """The last move of a page, into HBM; from host if it is loaded there on the way."""
        return self._move(page, HOST if grant else source, HBM, slot)

    def _move(self, page: int, source: str, target: str, slot: int, after: int = -1) -> Move:
        return move_of(self.index, page, source, target, slot, after=after)

    def _lease(self, pages: list[int], slots: list[int]) -> None:
        assert self._hbm is not None
        for page, slot in zip(pages, slots, strict=True):
            if not self._hbm.state[page]:
                self.index.begin(self._hbm, page, slot)
            self.index.pin(self._hbm, page)

    # -- put ---------------------------------------------------------------------------------------

    def plan_put(self, keys: KeyChain, slots: Sequence[int]) -> Plan:
        """Take over pages that stand in HBM slots, and copy them to host (and disk).

        Args:
            keys: their keys; `keys.parent` says where the first hangs.
            slots: their HBM slots, one a key.
        """
        draft = Draft()
        parent = -1 if keys.parent is None else self.index.find(keys.parent)
        if keys.parent is not None and parent < 0:
            draft.miss("no_parent", len(keys))
            return Plan(
                spare_slots=tuple(slots) if self._hbm else (),
                misses=tuple(draft.misses.items()),
                not_stored=len(keys),
            )
        pages = self.index.add(keys, parent)
        bind, spare = self._bind(pages, slots)
        self.index.touch(pages)
        store = self._stores(pages, slots, draft)
        write = self._writes([move.page for move in store], draft) if self._write_through else []
        not_stored = sum(not self.is_below_hbm(page) for page in pages)
        self.index.forget(reversed(pages))
        return Plan(
            pages=tuple(pages),
            slots=tuple(slots),
            demote=tuple(draft.demote),
            bind=tuple(bind),
            store=tuple(store),
            write=tuple(write),
            pins=tuple(draft.pins),
            spare_slots=tuple(spare),
            not_stored=not_stored,
        )

    def _bind(self, pages: list[int], slots: Sequence[int]) -> tuple[list[Move], list[int]]:
        """Pages enter HBM where the caller has put them; slots of pages already there are spare."""
        if self._hbm is None:
            return [], []
        bind, spare = [], []
        for page, slot in zip(pages, slots, strict=True):
            if self._hbm.state[page] or page in self._hbm.doomed:
                spare.append(slot)
                continue
            self.index.begin(self._hbm, page, slot)
            bind.append(self._move(page, HBM, HBM, slot))
        return bind, spare

    def _stores(self, pages: list[int], slots: Sequence[int], draft: Draft) -> list[Move]:
        """Copies HBM -> host of the pages not there, parents first, as far as host has room."""
        given = dict(zip(pages, slots, strict=True))
        wanted = [
            page
            for page in self._unstored_ancestors(pages[0] if pages else -1) + pages
            if not self._host.state[page] and page not in self._host.doomed
        ]
        above = self.index.parent_of[wanted[0]] if wanted else -1
        grants = self.room.on_host(len(wanted), draft, below=above)
        moves = []
        for page, grant in zip(wanted, grants, strict=False):
            self.index.begin(self._host, page, grant.slot)
            moves.append(self._store_move(page, given.get(page), grant, draft))
        return moves

    def _store_move(self, page: int, slot: int | None, grant: Grant, draft: Draft) -> Move:
        if self._hbm is not None and self._hbm.state[page]:
            self.index.pin(self._hbm, page)
            draft.pins.append((HBM, page))
        if slot is None:
            return self._move(page, HBM, HOST, grant.slot, grant.after)
        key, parent = self.index.key(page), self.index.parent_key(page)
        is_bound = self._hbm is not None and self._hbm.slot[page] == slot  # or in a spare slot
        return Move(
            page, key, parent, HBM, slot, HOST, grant.slot, waits=is_bound, after=grant.after
        )

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

    def key(self, page: int) -> PageKey:
        """The key of a page."""
        return self.index.key(page)

    def has(self, key: PageKey, tiers: Iterable[str]) -> bool:
        """Whether one of these tiers has a page."""
        page = self.index.find(key)
        named = [self.index.by_name[name] for name in tiers if name in self.index.by_name]
        return page >= 0 and any(tier.is_resident(page) for tier in named)

    def _writes(self, pages: list[int], draft: Draft) -> list[Move]:
        """Copies host -> disk of pages and their ancestors, as far as disk has room."""
        assert self._disk is not None
        dirty = [page for page in self.room.durable(pages) if not self._disk.state[page]]
        slots = self.room.write_slots(dirty)
        while slots is None and len(dirty) > 1:
            dirty = dirty[: len(dirty) // 2]
            slots = self.room.write_slots(dirty)
        if slots is None:
            return []
        return [self.room.write(page, slot, draft) for page, slot in slots.items()]

    def dirty_pages(self) -> list[int]:
        """Host pages that are not on disk and could be written there, coldest first. O(pages).

        No more than disk holds beside the host pages that are on it already: where it is smaller
        than host, flushing would otherwise make pages take each other's place for ever.
        """
        if self._disk is None:
            return []
        on_host = [page for page in self.index if self._host.is_resident(page)]
        dirty = self.room.durable([page for page in on_host if not self._disk.state[page]])
        dirty.sort(key=self._host.last_use)
        clean = sum(self._disk.is_resident(page) for page in on_host)
        return dirty[max(0, len(dirty) - (self.room.capacity[DISK] - clean)) :]

    def plan_flush(self, pages: Sequence[int]) -> Plan:
        """Write these of the `dirty_pages`, as far as they still are, and their ancestors."""
        draft = Draft()
        if self._disk is None:
            return Plan()
        write = self._writes([page for page in pages if self._host.is_resident(page)], draft)
        return Plan(write=tuple(write), pins=tuple(draft.pins))

    # -- what became of a plan ---------------------------------------------------------------------

    def arrived(self, move: Move) -> None:
        """The bytes of a move are in place and verified: the page counts from now on."""
        if self.is_arriving(move):
            self.index.finish(self.index.by_name[move.target], move.page)

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
        return tier.state[move.page] == TierState.ARRIVING

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

    def durable(self, moves: Sequence[Move]) -> list[Move]:
        """The writes that leave disk prefix-closed: their parents are there, or go before them."""
        assert self._disk is not None
        good: list[Move] = []
        going: set[int] = {-1}
        for move in moves:
            parent = self.index.parent_of[move.page]
            has_source = move.leaves or self.is_possible(move)
            if has_source and (parent in going or self._disk.is_resident(parent)):
                going.add(move.page)
                good.append(move)
        return good

    def _restore(self, move: Move) -> None:
        """A demotion failed: the page is back in the slot it was leaving.

        Unless another plan is already bringing it to host again, from the copy that has just
        failed.
        """
        if self._host.state[move.page] or move.page in self._host.doomed:
            return
        self.index.begin(self._host, move.page, move.source_slot)
        self.index.finish(self._host, move.page)
        self.index.pin(self._host, move.page)  # who was promised its slot must find it taken
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
        for tier, page in plan.pins:
            self._unpin(tier, page)
        for move in self._returned.intersection(plan.demote):
            self._returned.remove(move)
            self._unpin(HOST, move.page)
        if self._hbm is not None:
            self.room.free(HBM, plan.spare_slots)

    def release(self, pages: Iterable[int]) -> None:
        """End the lease of pages that a get() brought into HBM."""
        for page in pages:
            self._unpin(HBM, page)

    def _unpin(self, tier: str, page: int) -> None:
        slot = self.index.unpin(self.index.by_name[tier], page)
        if slot is not None:
            self.room.free(tier, [slot])

    def carry_out(self, plan: Plan) -> Plan:
        """Make every move of a plan at once, without bytes: how a simulator uses it."""
        for move in plan.moves():
            self.arrived(move)
        self.end(plan)
        return plan

    def adopt(self, tier: str, pages: Iterable[StoredPage]) -> list[int]:
        """Pages a tier still holds from an earlier run, oldest first. Returns the slots of orphans.

        An orphan, a page whose parent is not there, cannot hit; its slot is freed. Parents mostly
        come before their children; a child that comes first waits for them.
        """
        waiting: dict[PageKey, list[StoredPage]] = {}  # by the parent that is not here yet
        for page in pages:
            self.room.claim(tier, 1)
            if page.parent is None or self.index.find(page.parent) >= 0:
                self._adopt_tree(tier, page, waiting)
            else:
                waiting.setdefault(page.parent, []).append(page)
        orphans = [page.slot for children in waiting.values() for page in children]
        self.room.free(tier, orphans)
        return orphans

    def _adopt_tree(
        self, tier: str, root: StoredPage, waiting: dict[PageKey, list[StoredPage]]
    ) -> None:
        """Adopt a page, and those that have been waiting for it."""
        target = self.index.by_name[tier]
        ready = [root]
        while ready:
            page = ready.pop()
            parent = -1 if page.parent is None else self.index.find(page.parent)
            (page_id,) = self.index.add([page.key], parent)
            self.index.begin(target, page_id, page.slot)
            self.index.finish(target, page_id)
            self.index.touch([page_id])
            ready += waiting.pop(page.key, [])
