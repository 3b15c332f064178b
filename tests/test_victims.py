"""Victims chosen in runs are those that are chosen page by page, in the same order."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_rig import chain

from tiered_kv.index import Index, TierIndex
from tiered_kv.plan import DISK, HBM, HOST
from tiered_kv.policy import base
from tiered_kv.tier_index import RESIDENT

_TIERS = [HBM, HOST, DISK]
_PAGE = 0xFFFFFFFF


def held(index: Index, tier: TierIndex, *, demote: bool) -> Callable[[int], bool]:
    """What `Guard` says of pages one by one, from its words."""
    others = [other for other in index.tiers if other is not tier]
    gone: list[int] = []  # children let go, by their parent, that live elsewhere

    def holds(page: int) -> bool:
        if tier.pins[page] or tier.state[page] != RESIDENT:
            return True
        if any(other.state[page] for other in others):
            gone.append(index.parent_of[page])
            return False
        elsewhere = index.children_of[page] - tier.children[page] + gone.count(page)
        return not demote and elsewhere > 0

    return holds


def page_by_page(policy: base.LeafFirst, n: int, holds: Callable[[int], bool]) -> list[int]:
    """The plain loop: one page after the other, from a copy of the policy's heap."""
    tree, heap, resident = policy._tree, policy._heap.copy(), policy._resident
    chosen: list[int] = []
    taken: dict[int, int] = {}
    asked: set[int] = set()
    extra: list[int] = []
    while len(chosen) < n and (heap or extra):
        if extra and (not heap or extra[0] < heap[0]):
            page = heapq.heappop(extra) & _PAGE
        else:
            entry = heapq.heappop(heap)
            page = entry & _PAGE
            if not resident[page] or tree.child_count(page) or page in asked:
                continue
            fresh = policy.rank(page) << 32 | page
            if fresh != entry:
                heapq.heappush(heap, fresh)
                continue
        asked.add(page)
        if holds(page):
            continue
        chosen.append(page)
        parent = tree.parent(page)
        taken[parent] = taken.get(parent, 0) + 1
        is_known = 0 <= parent < len(resident) and resident[parent]
        if is_known and taken[parent] == tree.child_count(parent):
            heapq.heappush(extra, policy.rank(parent) << 32 | parent)
    return chosen


class History:
    """Conversations that branch, in three tiers, used, pinned and hinted at as it comes."""

    def __init__(self, policy: str, seed: int) -> None:
        self.random = Random(seed)
        self.index = Index(_TIERS, policy)
        self.slots = iter(range(10**6))
        self.paths: list[list[object]] = []

    def tier(self) -> TierIndex:
        return self.random.choice(self.index.tiers)

    def path(self) -> list[object]:
        """A new conversation, or one that leaves a known one somewhere."""
        begun = self.random.choice(self.paths) if self.paths and self.random.random() < 0.7 else []
        name = len(self.paths)
        begun = begun[: self.random.randint(0, len(begun))]
        self.paths.append([*begun, *((name, at) for at in range(self.random.randint(1, 40)))])
        return self.paths[-1]

    def bring(self) -> None:
        """A conversation into tiers, or only its first or last pages."""
        keys = chain(
            *(
                self.path()
                if self.random.random() < 0.6
                else self.random.choice(self.paths or [self.path()])
            )
        )
        pages = self.index.add(keys, -1)
        for tier in self.random.sample(self.index.tiers, self.random.randint(1, 3)):
            first, upto = sorted(self.random.randint(0, len(pages)) for _ in range(2))
            some = pages if self.random.random() < 0.5 else pages[first:upto]
            new = [page for page in some if not tier.state[page]]
            self.index.begin(tier, new, [next(self.slots) for _ in new])
            came = len(new) if self.random.random() < 0.9 else self.random.randint(0, len(new))
            self.index.finish(tier, new[:came])
        self.index.touch(pages)
        self.index.forget(pages[::-1])

    def touch(self) -> None:
        if self.paths:
            pages = self.index.match(chain(*self.random.choice(self.paths)))
            self.index.touch(pages[: self.random.randint(0, len(pages))])

    def hint(self) -> None:
        """Also more than once, so that pages stand in the heap twice."""
        if self.paths:
            pages = self.index.match(chain(*self.random.choice(self.paths)))
            self.index.hint(pages, self.random.choice([0, 30, 50, 100]))

    def pin(self) -> None:
        tier = self.tier()
        here = [page for page in self.index if tier.is_resident(page)]
        self.index.pin(tier, self.random.sample(here, min(len(here), self.random.randint(0, 2))))

    def evict(self) -> None:
        tier, n = self.tier(), self.random.randint(1, 60)
        self.index.evict(tier, self.index.victims(tier, n, demote=self.random.random() < 0.5))

    def step(self) -> None:
        steps = (self.bring, self.bring, self.bring, self.touch, self.hint, self.pin, self.evict)
        self.random.choice(steps)()


@settings(max_examples=150, deadline=None, derandomize=True, database=None)
@given(
    seed=st.integers(0, 2**32),
    steps=st.integers(1, 25),
    policy=st.sampled_from(["lru", "fifo"]),
    long=st.sampled_from([1, 3, base.LONG]),
    few=st.sampled_from([1, 20]),
)
def test_runs_give_the_victims_that_the_plain_loop_gives(
    seed: int, steps: int, policy: str, long: int, few: int
) -> None:
    history = History(policy, seed)
    index = history.index
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(base, "LONG", long)
        patch.setattr(base, "FEW", few)
        for _ in range(steps):
            history.step()
            for tier in index.tiers:
                for n, demote in ((7, True), (60, False), (10**6, True), (10**6, False)):
                    assert isinstance(tier.policy, base.LeafFirst)
                    plain = page_by_page(tier.policy, n, held(index, tier, demote=demote))
                    assert index.victims(tier, n, demote=demote) == plain
