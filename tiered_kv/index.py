"""Where each page is, in which state, how often it is pinned, and what hangs from it.

Pure decisions' memory: no bytes, no I/O, no torch. Pages are small integers into flat arrays, so
that a million of them cost about 240 bytes each. Not locked: the store that owns it is.

The tree is *prefix-closed*: a page is known only while its parent is, and gives way only after its
children. One exception, and only by damage: a page whose last copy was found corrupt stays as an
empty node (a **hole**) while it has children. Its children cannot hit, because a match stops at the
hole; as soon as the page is computed and put again they can, for a key stands for its whole prefix.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from itertools import compress, islice, repeat

import numpy as np

from tiered_kv.columns import FEW, FIRST_PAGES, Numbers, array_of, numbers
from tiered_kv.found import FoundPages
from tiered_kv.guard import Guard
from tiered_kv.keys import PageKey
from tiered_kv.page_ids import PageIds
from tiered_kv.tier_index import ABSENT, ARRIVING, RESIDENT, Nodes, TierIndex, TierState

__all__ = ["GHOST_PAGES", "Index", "OnChange", "TierIndex", "TierState"]

GHOST_PAGES = 65_536  # departed keys remembered, to say "evicted" rather than "never stored"
GHOSTS_DROPPED = 1024  # at once: to drop each in its turn takes 0.35 us a page more

_run_through = deque[object](maxlen=0).extend  # an iterator, for what it does: 30 ns a step less

OnChange = Callable[[str, PageKey, bool], None]
"""Told of (tier, page, whether it is there now) when a page begins or ends to count in a tier."""


class Index(Nodes):
    """All pages of a store over its tiers, fastest first.

    Args:
        tiers: names, fastest first.
        policy: name of the eviction policy every tier uses.
    """

    def __init__(self, tiers: Sequence[str], policy: str = "lru") -> None:
        super().__init__()
        self.tiers = tuple(TierIndex(name, policy, self) for name in tiers)
        self.by_name = {tier.name: tier for tier in self.tiers}
        self._ids = PageIds()
        self._keys: list[PageKey | None] = []
        self._free_ids: list[int] = []
        self._nowhere: set[int] = set()  # pages that no tier has or awaits: holes, and new ones
        self._clock = 0
        self._ghosts: dict[PageKey, str] = {}
        self.on_change: OnChange | None = None

    def __len__(self) -> int:
        return len(self._keys) - len(self._free_ids)

    def __iter__(self) -> Iterator[int]:
        return (page for page, key in enumerate(self._keys) if key is not None)

    # -- questions ---------------------------------------------------------------------------------

    def find(self, key: PageKey) -> int:
        """The page of a key, or -1."""
        if self._ids.sleeps:
            self._ids.rouse([key])
        return self._ids.get(key, -1)

    def key(self, page: int) -> PageKey:
        """The key of a page."""
        key = self._keys[page]
        assert key is not None
        return key

    def parent_key(self, page: int) -> PageKey | None:
        """The key before a page's, or None for the first of a prompt."""
        parent = self.parent_of[page]
        return self._keys[parent] if parent >= 0 else None

    def keys(self, pages: Iterable[int]) -> list[PageKey]:
        """The keys of pages."""
        return list(map(self._keys.__getitem__, pages))  # type: ignore[arg-type]

    def links(self, pages: Sequence[int]) -> tuple[list[PageKey], list[PageKey | None]]:
        """The key of each page, and the one before it, or None for the first of a prompt."""
        keys, known = self.keys(pages), self._keys
        if len(pages) >= FEW:
            at = numbers(pages)
            if (array_of(self.parent_of)[at[1:]] == at[:-1]).all():  # one prefix: mostly so
                return keys, [self.parent_key(pages[0]), *keys[:-1]]
        parents = map(self.parent_of.__getitem__, pages)
        return keys, [known[parent] if parent >= 0 else None for parent in parents]

    def is_present(self, page: int) -> bool:
        """Whether any tier has a known page, or awaits it."""
        return page not in self._nowhere

    def match(self, keys: Sequence[PageKey]) -> list[int]:
        """Pages of the longest prefix that is in some tier, or arriving; changes nothing."""
        pages = self._ids.prefix(keys)
        if self._nowhere:
            cut = (at for at, page in enumerate(pages) if page in self._nowhere)
            del pages[next(cut, len(pages)) :]
        return pages

    def knows(self, keys: Sequence[PageKey]) -> list[bool]:
        """For each key whether there is a node of it, be its page in a tier or not."""
        if self._ids.sleeps:
            self._ids.rouse(keys)
        return list(map(self._ids.__contains__, keys))

    def sources(self, pages: Sequence[int]) -> list[str]:
        """For each page, all of which are present, the fastest tier that has it or awaits it."""
        *faster, slowest = self.tiers
        names = [slowest.name] * len(pages)
        for tier in reversed(faster):
            states = tier.states(pages)
            if ABSENT not in states:
                names = [tier.name] * len(pages)
            else:
                for at in compress(range(len(pages)), states):
                    names[at] = tier.name
        return names

    def spread(self, pages: Sequence[int]) -> dict[str, tuple[int, int]]:
        """By tier, of how many of the pages it is the `sources`, and how many of them arrive."""
        found: dict[str, tuple[int, int]] = {}
        left = numbers(pages)
        for tier in self.tiers:
            if not len(left):
                break
            states = array_of(tier.state)[left]
            count = int(np.count_nonzero(states))
            if count:
                found[tier.name] = count, int(np.count_nonzero(states == ARRIVING))
                left = left[states == ABSENT]
        return found

    def why_missing(self, key: PageKey) -> str:
        """Why a page is not here: evicted, failed, corrupt, no_room, or never_stored."""
        return self._ghosts.get(key, "never_stored")

    def victims(self, tier: TierIndex, n: int, *, demote: bool = False) -> list[int]:
        """Up to n pages the tier's policy would give up now; changes nothing.

        Args:
            tier: which tier.
            n: how many are wanted.
            demote: they will live on in a lower tier, so that a last copy may be named too.
        """
        if n <= 0:
            return []
        others = [other for other in self.tiers if other is not tier]
        guard = Guard(tier, others, self, only_copies_may_go=demote)
        return Numbers(tier.policy.victims(n, guard))

    # -- use ---------------------------------------------------------------------------------------

    def touch(self, pages: Sequence[int]) -> None:
        """Mark the pages of one request as used now, the deepest as the oldest."""
        self._clock += len(pages)
        self.use(pages, self._clock)
        for tier in self.tiers:
            tier.policy.touch(pages)

    def hint(self, pages: Sequence[int], priority: int) -> None:
        """A caller's advice on what to keep: 0 to 100, 50 for none.

        100 counts as if the pages had been used one whole turnover of the index later than they
        were, 0 as much earlier; so it fades as other pages are used, and is never a pin.
        """
        favour = (priority - 50) * len(self) // 50
        self.favours.update(dict.fromkeys(pages, favour))
        for tier in self.tiers:
            tier.policy.rerank([page for page in pages if tier.is_resident(page)])

    def favour(self, page: int) -> int:
        """Logical time that a hint adds to a page's last use."""
        return self.favours.get(page, 0)

    def pin(self, tier: TierIndex, pages: Sequence[int]) -> None:
        """Keep pages in a tier until `unpin`."""
        tier.pin(pages)

    def unpin(self, tier: TierIndex, pages: Sequence[int]) -> list[int]:
        """Take pins back. Returns the slots to free of condemned copies that waited for that."""
        tier.unpin(pages)
        free: list[int] = []
        if tier.doomed or self._nowhere:
            for page in pages:
                if not tier.pins[page]:
                    free += self._let_go(tier, page)
        return free

    def _let_go(self, tier: TierIndex, page: int) -> list[int]:
        """The last pin of a page is gone; its condemned copy's slot, if there is one."""
        slot = tier.doomed.pop(page, None)
        self.forget([page])
        return [] if slot is None else [slot]

    # -- change ------------------------------------------------------------------------------------

    def add(self, keys: Sequence[PageKey], parent: int) -> list[int]:
        """Pages for consecutive keys, made where unknown; the first hangs from `parent` or -1.

        A new page is nowhere yet: begin() it in a tier, or forget() it, before anything else is
        decided.
        """
        ids = self._ids
        pages = ids.prefix(keys)
        unknown = keys[len(pages) :]
        parent = pages[-1] if pages else parent
        if len(set(unknown)) == len(unknown) and ids.keys().isdisjoint(unknown):
            return pages + self._new_pages(unknown, parent) if unknown else pages
        for key in unknown:
            page = ids.get(key, -1)
            if page < 0:
                (page,) = self._new_pages([key], parent)
            pages.append(page)
            parent = page
        return pages

    def restore(self, tier: TierIndex, found: FoundPages) -> None:
        """Take over pages that are resident in a tier from an earlier run, all at once.

        Only an index that never had a page can, and every parent must be among them. The page of a
        key is its row. Keeps `found.keys`.
        """
        assert not self._keys, "pages are restored into an empty index"
        count = len(found)
        if not count:
            return
        self._keys = found.keys  # type: ignore[assignment]  # none is None yet
        self._ids.restore(self._keys, found.order)
        self.grow(max(FIRST_PAGES, 2 * count))
        array_of(self.parent_of)[:count] = found.parent
        array_of(self.last_use_of)[:count] = found.rank + 1
        self._clock = int(found.rank.max()) + 1
        array_of(self.hits_of)[:count] = 1
        for other in self.tiers:
            array_of(other.slot)[:count] = -1
        array_of(tier.slot)[:count] = found.slot
        array_of(tier.state)[:count] = RESIDENT
        children = np.bincount(found.parent + 1, minlength=count + 1)[1:]
        array_of(self.children_of)[:count] = children
        array_of(tier.children)[:count] = children
        tier.resident = count
        tier.policy.fill(range(count))
        self._tell(tier, range(count), True)

    def forget(self, pages: Collection[int]) -> None:
        """Drop those of the pages that are nowhere, held by nobody and parent of none.

        Then those above them that only they kept.
        """
        nowhere = self._nowhere
        if not nowhere:
            return
        if len(pages) >= FEW and nowhere.issuperset(pages) and self._forget_all(pages):
            return
        children_of, parent_of, keys, ids = self.children_of, self.parent_of, self._keys, self._ids
        is_held = self._is_held
        for page in pages:
            while page in nowhere and not children_of[page] and not is_held(page):
                nowhere.remove(page)
                parent = parent_of[page]
                ids.pop(self.key(page), None)
                keys[page] = None
                if self.favours:
                    self.favours.pop(page, None)
                self._free_ids.append(page)
                if parent >= 0:
                    children_of[parent] -= 1
                page = parent

    def _drop(self, pages: Sequence[int]) -> None:
        """`forget` pages that have left their last tier just now; note those that must stay."""
        if len(pages) >= FEW and self._forget_all(pages):
            return
        if any(tier.doomed or any(map(tier.pins.__getitem__, pages)) for tier in self.tiers):
            self._nowhere.update(pages)
            self.forget(pages)
            return
        children_of, parent_of, keys, ids = self.children_of, self.parent_of, self._keys, self._ids
        for page in pages:
            if children_of[page]:
                self._nowhere.add(page)
                continue
            ids.pop(keys[page], None)  # type: ignore[arg-type]
            keys[page] = None
            if self.favours:
                self.favours.pop(page, None)
            self._free_ids.append(page)
            parent = parent_of[page]
            if parent >= 0:
                children_of[parent] -= 1
                if parent in self._nowhere:
                    self.forget([parent])

    def _forget_all(self, pages: Collection[int]) -> bool:
        """`forget` in columns: of pages, each once, that hang together and are all to be dropped.

        Returns False, and nothing has changed, where one of them must stay.
        """
        at = numbers(pages)
        if any(array_of(tier.pins)[at].any() or tier.doomed for tier in self.tiers):
            return False
        parents = array_of(self.parent_of)[at]
        parents = parents[parents >= 0]
        children = array_of(self.children_of)
        np.subtract.at(children, parents, np.int32(1))
        if children[at].any():  # of others, that stay
            np.add.at(children, parents, np.int32(1))
            return False
        _run_through(map(self._ids.pop, self.keys(pages), repeat(None)))
        _run_through(map(self._keys.__setitem__, pages, repeat(None)))
        if self.favours:
            _run_through(map(self.favours.pop, pages, repeat(None)))
        self._free_ids += pages
        if self._nowhere:
            self._nowhere.difference_update(pages)
            self.forget({*parents[children[parents] == 0].tolist()} & self._nowhere)
        return True

    def _is_held(self, page: int) -> bool:
        """Whether somebody reads, or would write, a copy that does not count."""
        for tier in self.tiers:  # noqa: SIM110 - any() costs 0.4 us more
            if tier.pins[page] or (tier.doomed and page in tier.doomed):
                return True
        return False

    def begin(self, tier: TierIndex, pages: Sequence[int], slots: Sequence[int]) -> None:
        """Pages are on their way into slots of the tier, one each."""
        tier.begin(pages, slots)
        assert not tier.doomed or tier.doomed.keys().isdisjoint(pages)
        if self._nowhere:
            self._nowhere.difference_update(pages)

    def finish(self, tier: TierIndex, pages: Sequence[int]) -> None:
        """Pages have arrived and are verified."""
        tier.finish(pages)
        tier.policy.insert(pages)
        self._tell(tier, pages, True)

    def abort(self, tier: TierIndex, page: int, reason: str = "failed") -> int:
        """The page will not arrive. Returns the slot it was promised."""
        assert tier.state[page] == ARRIVING
        (slot,) = self._leave(tier, [page], reason)
        return slot

    def evict(self, tier: TierIndex, pages: Sequence[int], reason: str = "evicted") -> list[int]:
        """Pages leave the tier, children first. Returns their slots: the caller's to free."""
        if not pages:
            return []
        assert tier.may_leave(pages)
        tier.resident -= len(pages)
        self._tell(tier, pages, False)
        return self._leave(tier, pages, reason)

    def condemn(self, tier: TierIndex, page: int, reason: str) -> int | None:
        """A resident copy is bad: it stops counting now, whoever reads it.

        Returns the slot to free, or None if readers hold it: the last `unpin` then returns it.
        """
        tier.resident -= 1
        self._tell(tier, [page], False)
        if tier.pins[page]:
            tier.doomed[page] = tier.slot[page]
        (slot,) = self._leave(tier, [page], reason)
        return None if page in tier.doomed else slot

    def _tell(self, tier: TierIndex, pages: Iterable[int], is_there: bool) -> None:
        if self.on_change is not None:
            for page in pages:
                self.on_change(tier.name, self.key(page), is_there)

    def _leave(self, tier: TierIndex, pages: Sequence[int], reason: str) -> list[int]:
        slots = tier.leave(pages)
        tier.policy.remove(pages)
        gone = self._in_no_tier(pages)
        if gone:
            self._remember(self.keys(gone), reason)
            self._drop(gone)
        return slots

    def _in_no_tier(self, pages: Sequence[int]) -> Sequence[int]:
        if len(pages) < FEW:
            gone = list(pages)
            for tier in self.tiers:
                state = tier.state
                gone = [page for page in gone if not state[page]]
            return gone
        left = numbers(pages)
        for tier in self.tiers:
            is_absent = array_of(tier.state)[left] == ABSENT
            left = left if is_absent.all() else left[is_absent]
        found: Sequence[int] = pages if len(left) == len(pages) else left.tolist()
        return found

    def _remember(self, keys: Sequence[PageKey], reason: str) -> None:
        ghosts = self._ghosts
        if not ghosts.keys().isdisjoint(keys):
            for key in list(filter(ghosts.__contains__, keys)):
                del ghosts[key]  # to stand at the end again
        ghosts.update(zip(keys, repeat(reason)))
        too_many = len(ghosts) - GHOST_PAGES
        if too_many >= GHOSTS_DROPPED:
            for key in list(islice(ghosts, too_many)):
                del ghosts[key]

    def _new_pages(self, keys: Sequence[PageKey], parent: int) -> list[int]:
        """Pages for keys that are unknown, each once; each hangs from the one before."""
        free, known = self._free_ids, self._keys
        pages = free[: -len(keys) - 1 : -1]  # the last to become free first
        del free[len(free) - len(pages) :]
        for page, key in zip(pages, keys, strict=False):
            known[page] = key
        first, missing = len(known), len(keys) - len(pages)
        if missing:
            while first + missing > len(self.parent_of):
                self.grow(2 * len(self.parent_of))
            known += keys[len(pages) :]
            for tier in self.tiers:
                array_of(tier.slot)[first : first + missing] = -1
            pages += range(first, first + missing)
        self.hang(pages, parent)
        self._ids.update(zip(keys, pages, strict=True))
        self._nowhere.update(pages)
        if not self._ghosts.keys().isdisjoint(keys):
            for key in list(filter(self._ghosts.__contains__, keys)):
                del self._ghosts[key]
        return pages

    def grow(self, pages: int) -> None:
        """Room for `pages` pages in all."""
        super().grow(pages)
        for tier in self.tiers:
            tier.grow(pages)

    # -- proof -------------------------------------------------------------------------------------

    def check(self, is_settled: Callable[[], bool] = lambda: False) -> list[str]:
        """Every broken invariant as one line; none if all is well. O(pages).

        Args:
            is_settled: whether nothing is in flight, so that nothing may be arriving or pinned.
        """
        problems: list[str] = []
        children = [0] * len(self._keys)
        for page in self:
            if self.parent_of[page] >= 0:
                children[self.parent_of[page]] += 1
        for page in self:
            problems += self._faults_of(page, children[page], is_settled())
        for tier in self.tiers:
            problems += self._faults_of_tier(tier)
        return problems

    def _faults_of(self, page: int, children: int, settled: bool) -> Iterator[str]:
        name = self.key(page).hex()[:12]
        parent = self.parent_of[page]
        if parent >= 0 and self._keys[parent] is None:
            yield f"page {name} has a parent that is gone"
        if children != self.children_of[page]:
            yield f"page {name} counts {self.children_of[page]} children, has {children}"
        is_present = any(tier.state[page] for tier in self.tiers)
        if is_present != self.is_present(page):
            yield f"page {name} is {'' if is_present else 'not '}in a tier, and not noted so"
        if not is_present and not children and not self._is_held(page):
            yield f"page {name} is nowhere and kept"
        for tier in self.tiers:
            if settled and (tier.state[page] == ARRIVING or tier.pins[page]):
                yield f"page {name} is arriving or pinned in {tier.name} with nothing in flight"

    def _faults_of_tier(self, tier: TierIndex) -> Iterator[str]:
        slots = [tier.slot[page] for page in self if tier.is_resident(page)]
        slots += tier.doomed.values()
        coming = [tier.slot[page] for page in self if tier.state[page] == ARRIVING]
        if len(set(slots)) != len(slots) or len(set(coming)) != len(coming):
            yield f"two pages share a slot of {tier.name}"  # but for one that a page went back to
        resident = sum(tier.is_resident(page) for page in self)
        if resident != tier.resident:
            yield f"{tier.name} counts {tier.resident} resident pages, has {resident}"
        inside = [0] * len(self._keys)
        for page in self:
            if tier.state[page] and self.parent_of[page] >= 0:
                inside[self.parent_of[page]] += 1
        if any(inside[page] != tier.children[page] for page in self):
            yield f"a page's count of children in {tier.name} is wrong"
