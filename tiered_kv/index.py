"""Where each page is, in which state, how often it is pinned, and what hangs from it.

Pure decisions' memory: no bytes, no I/O, no torch. Pages are small integers into flat arrays, so
that a million of them cost about 240 bytes each. Not locked: the store that owns it is.

The tree is *prefix-closed*: a page is known only while its parent is, and gives way only after its
children. One exception, and only by damage: a page whose last copy was found corrupt stays as an
empty node (a **hole**) while it has children. Its children cannot hit, because a match stops at the
hole; as soon as the page is computed and put again they can, for a key stands for its whole prefix.
"""

from __future__ import annotations

import mmap
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from enum import IntEnum

from tiered_kv.keys import PageKey
from tiered_kv.policy import Policy, make

GHOST_PAGES = 65_536  # departed keys remembered, to say "evicted" rather than "never stored"


class TierState(IntEnum):
    """What one tier has of one page."""

    ABSENT = 0
    ARRIVING = 1
    RESIDENT = 2


_FIRST_PAGES = 4096


def _column(typecode: str, pages: int = _FIRST_PAGES) -> memoryview[int]:
    """A column of zeros, one integer a page, in a mapping of its own.

    Only what is used becomes resident, and growing gives all of the old one back: arrays that are
    appended to left 30 bytes a page behind in malloc's heap (1 M pages, glibc 2.36, 2026-11).
    """
    n_bytes = pages * array(typecode).itemsize
    mapping = mmap.mmap(-1, n_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    column: memoryview[int] = memoryview(mapping).cast(typecode)  # type: ignore[call-overload]
    return column


def _longer(old: memoryview[int], pages: int) -> memoryview[int]:
    new = _column(old.format, pages)
    new[: len(old)] = old
    return new


class TierIndex:
    """One tier's share of the index: state, slot, pins, children by page; the policy's `Tree`."""

    __slots__ = (
        "_index",
        "children",
        "doomed",
        "name",
        "pins",
        "policy",
        "resident",
        "slot",
        "state",
    )

    def __init__(self, name: str, policy: str, index: Index) -> None:
        self.name = name
        self._index = index
        self.state = _column("B")
        self.slot = _column("i")
        self.pins = _column("I")
        self.children = _column("i")  # children in this tier or on their way into it
        self.doomed: dict[int, int] = {}  # page -> slot of a condemned copy somebody still reads
        self.resident = 0
        self.policy: Policy = make(policy, self)

    def parent(self, page: int) -> int:
        """The page before this one, or -1."""
        return self._index.parent_of[page]

    def child_count(self, page: int) -> int:
        """Children of a page in this tier, or on their way into it."""
        return self.children[page]

    def last_use(self, page: int) -> int:
        """Logical time of the last use."""
        return self._index.last_use_of[page]

    def grow(self, pages: int) -> None:
        """Room for `pages` pages in all."""
        self.state = _longer(self.state, pages)
        self.slot = _longer(self.slot, pages)
        self.pins = _longer(self.pins, pages)
        self.children = _longer(self.children, pages)

    def favour(self, page: int) -> int:
        """Logical time that a caller's hint adds to the last use; negative for "give up early"."""
        return self._index.favour(page)

    def is_resident(self, page: int) -> bool:
        """Whether the page's bytes are here and verified."""
        return self.state[page] == TierState.RESIDENT


OnChange = Callable[[str, PageKey, bool], None]
"""Told of (tier, page, whether it is there now) when a page begins or ends to count in a tier."""


class _Guard:
    """Says which pages a tier may not give up, asked in turn: it remembers what it let go.

    A page that lives nowhere else must not leave while a child of it lives elsewhere: the child
    would be orphaned. Letting a child go that lives elsewhere too adds to that.
    """

    def __init__(self, index: Index, tier: TierIndex, only_copies_may_go: bool) -> None:
        self._index = index
        self._tier = tier
        self._only_copies_may_go = only_copies_may_go
        self._kept: dict[int, int] = {}

    def __call__(self, page: int) -> bool:
        index, tier = self._index, self._tier
        if tier.pins[page] or not tier.is_resident(page):
            return True
        lives_elsewhere = index.is_present(page, besides=tier)
        if not lives_elsewhere and not self._only_copies_may_go:
            elsewhere = index.children_of[page] - tier.children[page] + self._kept.get(page, 0)
            if elsewhere:
                return True
        if lives_elsewhere:
            parent = index.parent_of[page]
            self._kept[parent] = self._kept.get(parent, 0) + 1
        return False


class Index:
    """All pages of a store over its tiers, fastest first.

    Args:
        tiers: names, fastest first.
        policy: name of the eviction policy every tier uses.
    """

    def __init__(self, tiers: Sequence[str], policy: str = "lru") -> None:
        self.tiers = tuple(TierIndex(name, policy, self) for name in tiers)
        self.by_name = {tier.name: tier for tier in self.tiers}
        self._ids: dict[PageKey, int] = {}
        self._keys: list[PageKey | None] = []
        self._free_ids: list[int] = []
        self._clock = 0
        self._ghosts: OrderedDict[PageKey, str] = OrderedDict()
        self.parent_of = _column("i")
        self.children_of = _column("i")  # nodes that name this page as parent, wherever they are
        self.last_use_of = _column("q")
        self.hits_of = _column("I")
        self._favours: dict[int, int] = {}  # page -> logical time its hint adds to its last use
        self.on_change: OnChange | None = None

    def __len__(self) -> int:
        return len(self._ids)

    def __iter__(self) -> Iterator[int]:
        return iter(self._ids.values())

    # -- questions ---------------------------------------------------------------------------------

    def find(self, key: PageKey) -> int:
        """The page of a key, or -1."""
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

    def is_present(self, page: int, besides: TierIndex | None = None) -> bool:
        """Whether any tier (besides one) has the page or awaits it."""
        for tier in self.tiers:  # noqa: SIM110 - any() costs 1 us more, in every match
            if tier.state[page] and tier is not besides:
                return True
        return False

    def match(self, keys: Sequence[PageKey]) -> list[int]:
        """Pages of the longest prefix that is in some tier, or arriving; changes nothing."""
        pages: list[int] = []
        find = self._ids.get
        for key in keys:
            page = find(key, -1)
            if page < 0 or not self.is_present(page):
                break
            pages.append(page)
        return pages

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
        return tier.policy.victims(n, _Guard(self, tier, demote)) if n > 0 else []

    # -- use ---------------------------------------------------------------------------------------

    def touch(self, pages: Sequence[int]) -> None:
        """Mark the pages of one request as used now, the deepest as the oldest."""
        self._clock += len(pages)
        for depth, page in enumerate(pages):
            self.last_use_of[page] = self._clock - depth
            self.hits_of[page] += 1
            for tier in self.tiers:
                if tier.state[page]:
                    tier.policy.touch(page)

    def hint(self, pages: Sequence[int], priority: int) -> None:
        """A caller's advice on what to keep: 0 to 100, 50 for none.

        100 counts as if the pages had been used one whole turnover of the index later than they
        were, 0 as much earlier; so it fades as other pages are used, and is never a pin.
        """
        favour = (priority - 50) * len(self) // 50
        for page in pages:
            self._favours[page] = favour
            for tier in self.tiers:
                if tier.is_resident(page):
                    tier.policy.rerank(page)

    def favour(self, page: int) -> int:
        """Logical time that a hint adds to a page's last use."""
        return self._favours.get(page, 0)

    def pin(self, tier: TierIndex, page: int) -> None:
        """Keep a page in a tier until `unpin`."""
        tier.pins[page] += 1

    def unpin(self, tier: TierIndex, page: int) -> int | None:
        """Take one pin back. Returns the slot to free if a condemned copy was waiting for that."""
        assert tier.pins[page] > 0, "a pin is taken back twice"
        tier.pins[page] -= 1
        if tier.pins[page]:
            return None
        slot = tier.doomed.pop(page, None)
        if slot is not None or not self.is_present(page):
            self._forget_if_empty(page)
        return slot

    # -- change ------------------------------------------------------------------------------------

    def add(self, keys: Sequence[PageKey], parent: int) -> list[int]:
        """Pages for consecutive keys, made where unknown; the first hangs from `parent` or -1.

        A new page is nowhere yet: begin() it in a tier, or forget() it, before anything else is
        decided.
        """
        pages: list[int] = []
        for key in keys:
            page = self._ids.get(key, -1)
            if page < 0:
                page = self._new_page(key, parent)
            pages.append(page)
            parent = page
        return pages

    def forget(self, pages: Iterable[int]) -> None:
        """Drop those of the pages that are nowhere and have no children; give the deepest first."""
        for page in pages:
            if self._keys[page] is not None:
                self._forget_if_empty(page)

    def begin(self, tier: TierIndex, page: int, slot: int) -> None:
        """The page is on its way into a slot of the tier."""
        assert tier.state[page] == TierState.ABSENT and page not in tier.doomed
        tier.state[page] = TierState.ARRIVING
        tier.slot[page] = slot
        parent = self.parent_of[page]
        if parent >= 0:
            tier.children[parent] += 1

    def finish(self, tier: TierIndex, page: int) -> None:
        """The page has arrived and is verified."""
        assert tier.state[page] == TierState.ARRIVING
        tier.state[page] = TierState.RESIDENT
        tier.resident += 1
        tier.policy.insert(page)
        self._tell(tier, page, True)

    def abort(self, tier: TierIndex, page: int, reason: str = "failed") -> int:
        """The page will not arrive. Returns the slot it was promised."""
        assert tier.state[page] == TierState.ARRIVING
        return self._leave(tier, page, reason)

    def evict(self, tier: TierIndex, page: int, reason: str = "evicted") -> int:
        """The page leaves the tier. Returns its slot, which is the caller's to free."""
        assert tier.state[page] == TierState.RESIDENT and not tier.pins[page]
        tier.resident -= 1
        self._tell(tier, page, False)
        return self._leave(tier, page, reason)

    def condemn(self, tier: TierIndex, page: int, reason: str) -> int | None:
        """A resident copy is bad: it stops counting now, whoever reads it.

        Returns the slot to free, or None if readers hold it: the last `unpin` then returns it.
        """
        tier.resident -= 1
        self._tell(tier, page, False)
        if not tier.pins[page]:
            return self._leave(tier, page, reason)
        tier.doomed[page] = tier.slot[page]
        self._leave(tier, page, reason)
        return None

    def _tell(self, tier: TierIndex, page: int, is_there: bool) -> None:
        if self.on_change is not None:
            self.on_change(tier.name, self.key(page), is_there)

    def _leave(self, tier: TierIndex, page: int, reason: str) -> int:
        slot = tier.slot[page]
        tier.state[page] = TierState.ABSENT
        tier.slot[page] = -1
        parent = self.parent_of[page]
        if parent >= 0:
            tier.children[parent] -= 1
        tier.policy.remove(page)
        if not self.is_present(page):
            self._remember(self.key(page), reason)
            self._forget_if_empty(page)
        return slot

    def _remember(self, key: PageKey, reason: str) -> None:
        self._ghosts[key] = reason
        self._ghosts.move_to_end(key)
        if len(self._ghosts) > GHOST_PAGES:
            self._ghosts.popitem(last=False)

    def _new_page(self, key: PageKey, parent: int) -> int:
        if self._free_ids:
            page = self._free_ids.pop()
            self._keys[page] = key
            self.parent_of[page] = parent
            self.hits_of[page] = 0
        else:
            page = len(self._keys)
            if page == len(self.parent_of):
                self._grow(max(_FIRST_PAGES, 2 * page))
            self._keys.append(key)
            self.parent_of[page] = parent
            for tier in self.tiers:
                tier.slot[page] = -1
        self._ids[key] = page
        self._ghosts.pop(key, None)
        if parent >= 0:
            self.children_of[parent] += 1
        return page

    def _grow(self, pages: int) -> None:
        """Room for `pages` pages in all."""
        self.parent_of = _longer(self.parent_of, pages)
        self.children_of = _longer(self.children_of, pages)
        self.last_use_of = _longer(self.last_use_of, pages)
        self.hits_of = _longer(self.hits_of, pages)
        for tier in self.tiers:
            tier.grow(pages)

    def _forget_if_empty(self, page: int) -> None:
        """Drop a node that is nowhere, held by nobody and parent of none; then maybe its parent."""
        while page >= 0 and self._is_empty(page):
            parent = self.parent_of[page]
            del self._ids[self.key(page)]
            self._keys[page] = None
            self._favours.pop(page, None)
            self._free_ids.append(page)
            if parent >= 0:
                self.children_of[parent] -= 1
            page = parent

    def _is_empty(self, page: int) -> bool:
        if self.children_of[page] or self.is_present(page):
            return False
        return not any(tier.pins[page] or page in tier.doomed for tier in self.tiers)

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
        if not self.is_present(page) and not children and self._is_empty(page):
            yield f"page {name} is nowhere and kept"
        for tier in self.tiers:
            if settled and (tier.state[page] == TierState.ARRIVING or tier.pins[page]):
                yield f"page {name} is arriving or pinned in {tier.name} with nothing in flight"

    def _faults_of_tier(self, tier: TierIndex) -> Iterator[str]:
        slots = [tier.slot[page] for page in self if tier.is_resident(page)]
        slots += tier.doomed.values()
        coming = [tier.slot[page] for page in self if tier.state[page] == TierState.ARRIVING]
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
