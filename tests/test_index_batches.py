"""Whole batches do to an index, and to a planner, what page by page does."""

from __future__ import annotations

import pickle
from random import Random

import pytest
from contracts import key_of
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_rig import chain

from tiered_kv import planner as planner_module
from tiered_kv.index import Index, TierState
from tiered_kv.keys import PageKey
from tiered_kv.plan import DISK, HBM, HOST, Move, make_moves
from tiered_kv.planner import Planner, StoredPage
from tiered_kv.slots import SlotPool

_TIERS = [HBM, HOST, DISK]
_CHAINS = {
    f"{name}{turn}": [(name, at) for at in range(4 * turn)] for name in "abc" for turn in (1, 2)
}


class Pair:
    """An index that is told of batches, and one that is told the same page by page."""

    def __init__(self, policy: str, seed: int) -> None:
        self.batched, self.single = Index(_TIERS, policy), Index(_TIERS, policy)
        self.random = Random(seed)
        self.slots = iter(range(10**6))
        self.told: dict[int, list[tuple[str, PageKey, bool]]] = {}
        for index in (self.batched, self.single):
            events = self.told.setdefault(id(index), [])
            index.on_change = lambda *event, events=events: events.append(event)

    def step(self) -> None:
        verbs = (self.bring, self.bring, self.evict, self.pin, self.fail, self.condemn, self.hint)
        self.random.choice(verbs)()

    def _some_chain(self) -> list[object]:
        return list(self.random.choice(list(_CHAINS.values())))

    def bring(self) -> None:
        """A conversation arrives in a tier, and is used."""
        name, keys = self.random.choice(_TIERS), chain(*self._some_chain())
        slots = {key: next(self.slots) for key in keys}
        for index in (self.batched, self.single):
            tier, pages = index.by_name[name], index.add(keys, -1)
            new = [p for p in pages if not tier.state[p] and p not in tier.doomed]
            where = [slots[index.key(page)] for page in new]
            if index is self.batched:
                index.begin(tier, new, where)
                index.finish(tier, new)
            else:
                for page, slot in zip(new, where, strict=True):
                    index.begin(tier, [page], [slot])
                for page in new:
                    index.finish(tier, [page])
            index.touch(pages)
            index.forget(pages)

    def evict(self) -> None:
        name, n = self.random.choice(_TIERS), self.random.randint(1, 9)
        demote = self.random.random() < 0.5
        left = [self._victims(index, name, n, demote) for index in (self.batched, self.single)]
        assert left[0] == left[1]
        tier = self.batched.by_name[name]
        pages = [self.batched.find(key) for key in left[0]]
        slots = self.batched.evict(tier, pages)
        tier = self.single.by_name[name]
        assert slots == [
            s for key in left[1] for s in self.single.evict(tier, [self.single.find(key)])
        ]

    @staticmethod
    def _victims(index: Index, name: str, n: int, demote: bool) -> list[PageKey]:
        return index.keys(index.victims(index.by_name[name], n, demote=demote))

    def _resident(self, name: str) -> list[PageKey]:
        tier = self.batched.by_name[name]
        return sorted(self.batched.key(page) for page in self.batched if tier.is_resident(page))

    def pin(self) -> None:
        """Some pages are held while others leave, and are let go of."""
        name = self.random.choice(_TIERS)
        here = self._resident(name)
        keys = self.random.sample(here, min(3, len(here)))
        bad = self.random.sample(keys, min(1, len(keys)))
        for index in (self.batched, self.single):
            tier, pages = index.by_name[name], [index.find(key) for key in keys]
            index.pin(tier, pages)
            for key in bad:
                assert index.condemn(tier, index.find(key), "corrupt") is None
        self.evict()
        tier = self.batched.by_name[name]
        freed = self.batched.unpin(tier, [self.batched.find(key) for key in keys])
        one = self.single.by_name[name]
        assert freed == [s for k in keys for s in self.single.unpin(one, [self.single.find(k)])]
        assert len(freed) == len(bad)

    def fail(self) -> None:
        """A page is awaited and does not come."""
        name, key = self.random.choice(_TIERS), chain(("lone", self.random.randrange(3)))
        slot = next(self.slots)
        for index in (self.batched, self.single):
            tier = index.by_name[name]
            pages = index.add(key, -1)
            if not tier.state[pages[0]]:
                index.begin(tier, pages, [slot])
                assert index.abort(tier, pages[0]) == slot

    def condemn(self) -> None:
        name = self.random.choice(_TIERS)
        here = self._resident(name)
        if here:
            key = self.random.choice(here)
            slots = [
                index.condemn(index.by_name[name], index.find(key), "corrupt")
                for index in (self.batched, self.single)
            ]
            assert slots[0] == slots[1] is not None

    def hint(self) -> None:
        keys, priority = chain(*self._some_chain()), self.random.choice([0, 20, 50, 100])
        for index in (self.batched, self.single):
            index.hint(index.match(keys), priority)

    def check(self) -> None:
        assert self.batched.check() == self.single.check() == []
        assert self._seen(self.batched) == self._seen(self.single)
        told = [sorted(events, key=repr) for events in self.told.values()]
        assert told[0] == told[1]

    def _where(self, index: Index, pages: list[int]) -> list[str]:
        """The fastest tier of each page, told in three ways."""
        sources = index.sources(pages)
        first = [next(tier for tier in index.tiers if tier.state[page]) for page in pages]
        assert sources == [tier.name for tier in first]
        arriving = [
            tier.name
            for tier, page in zip(first, pages, strict=True)
            if tier.state[page] == TierState.ARRIVING
        ]
        counted = {name: (sources.count(name), arriving.count(name)) for name in set(sources)}
        assert index.spread(pages) == counted
        return sources

    def _seen(self, index: Index) -> object:
        every = [chain(*path) for path in _CHAINS.values()]
        return (
            [index.keys(index.match(keys)) for keys in every],
            [self._where(index, index.match(keys)) for keys in every],
            [index.why_missing(key) for keys in every for key in keys],
            [self._victims(index, name, 99, demote) for name in _TIERS for demote in (True, False)],
            {
                (tier.name, index.key(page)): (tier.state[page], tier.slot[page], tier.pins[page])
                for tier in index.tiers
                for page in index
            },
        )


@settings(max_examples=150, deadline=None, derandomize=True, database=None)
@given(
    seed=st.integers(0, 2**32), steps=st.integers(1, 30), policy=st.sampled_from(["lru", "fifo"])
)
def test_a_batch_does_what_its_pages_one_by_one_do(seed: int, steps: int, policy: str) -> None:
    pair = Pair(policy, seed)
    for _ in range(steps):
        pair.step()
        pair.check()


# -- what a batch must not get wrong ---------------------------------------------------------------


def test_pages_that_leave_their_last_tier_together_are_all_remembered() -> None:
    """The first of them to be forgotten takes its parents along, before these are looked at."""
    index = Index(_TIERS)
    host, keys = index.by_name[HOST], chain("a", "b", "c")
    pages = index.add(keys, -1)
    index.begin(host, pages, [0, 1, 2])
    index.finish(host, pages)
    assert index.evict(host, pages[::-1]) == [2, 1, 0]
    assert len(index) == 0
    assert [index.why_missing(key) for key in keys] == ["evicted"] * 3
    assert index.check() == []


def test_a_pinned_page_in_a_batch_stops_it_before_anything_has_changed() -> None:
    index = Index(_TIERS)
    host = index.by_name[HOST]
    pages = index.add(chain("a", "b"), -1)
    index.begin(host, pages, [0, 1])
    index.finish(host, pages)
    index.pin(host, pages[:1])
    with pytest.raises(AssertionError):
        index.evict(host, pages[::-1])
    assert host.resident == 2
    assert index.check() == []


def test_a_batch_of_another_length_than_its_slots_is_a_bug_and_says_so() -> None:
    index = Index(_TIERS)
    pages = index.add(chain("a", "b"), -1)
    with pytest.raises(ValueError, match="shorter"):
        index.begin(index.by_name[HOST], pages, [0])


def test_check_finds_a_page_whose_presence_is_noted_wrongly() -> None:
    index = Index(_TIERS)
    host = index.by_name[HOST]
    pages = index.add(chain("a"), -1)
    index.begin(host, pages, [0])
    host.state[pages[0]] = TierState.ABSENT
    assert any("not in a tier, and not noted so" in line for line in index.check())


def test_moves_made_by_columns_are_moves() -> None:
    made = make_moves(
        [4, 5],
        [key_of("a"), key_of("b")],
        [None, key_of("a")],
        (HOST, [1, 2], DISK, [8, 9]),
        waits=[False, True],
        after=[-1, 3],
        leaves=[True, False],
    )
    assert made == [
        Move(4, key_of("a"), None, HOST, 1, DISK, 8, leaves=True),
        Move(5, key_of("b"), key_of("a"), HOST, 2, DISK, 9, waits=True, after=3),
    ]
    assert all(type(move) is Move for move in made)
    assert pickle.loads(pickle.dumps(made)) == made


# -- adopting --------------------------------------------------------------------------------------


def adopted(pages: list[StoredPage], at_once: int) -> tuple[Planner, set[int]]:
    pool = SlotPool(64)
    for page in pages:
        pool.reserve_exact(page.slot)
    planner = Planner({HOST: SlotPool(2), DISK: pool}, {HOST: 2, DISK: 64})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(planner_module, "_ADOPTED_AT_ONCE", at_once)
        if at_once == 1:
            patch.setattr(Index, "restore", lambda *columns: False)
        orphans = planner.adopt(DISK, iter(pages))
    assert planner.index.check(lambda: True) == []
    assert pool.used == len(pages) - len(orphans) == planner.index.by_name[DISK].resident
    assert planner.room.free_pages[DISK] == 64 - pool.used
    return planner, set(orphans)


@settings(max_examples=120, deadline=None, derandomize=True, database=None)
@given(
    parents=st.lists(st.integers(-1, 40), max_size=40),
    at_once=st.integers(2, 50),
    lost=st.sets(st.integers(0, 39), max_size=3),
    seed=st.none() | st.integers(0, 99),
)
def test_pages_adopted_in_whole_columns_are_those_adopted_one_by_one(
    parents: list[int], at_once: int, lost: set[int], seed: int | None
) -> None:
    """In the order in which they were written, or in any; some parents are gone."""
    pages = [
        StoredPage(key_of(at), key_of(parent % at) if at and parent >= 0 else None, at)
        for at, parent in enumerate(parents)
    ]
    pages = [page for page in pages if page.slot not in lost]
    if seed is not None:
        Random(seed).shuffle(pages)
    (ours, orphans), (plain, expected) = adopted(pages, at_once), adopted(pages, 1)
    assert orphans == expected
    disk = [planner.index.by_name[DISK] for planner in (ours, plain)]
    found = [
        {index.key(page): (index.parent_key(page), tier.slot[page]) for page in index}
        for index, tier in zip((ours.index, plain.index), disk, strict=True)
    ]
    assert found[0] == found[1]
    assert set(found[0]) == {page.key for page in pages if page.slot not in orphans}
    order = [p.index.keys(p.index.victims(p.index.by_name[DISK], 99)) for p in (ours, plain)]
    if seed is None:
        assert order[0] == order[1]
    else:
        assert set(order[0]) == set(order[1])


def test_pages_are_adopted_beside_those_that_are_known() -> None:
    """Into an index that has had pages, and given some up, none is taken for another."""
    planner, _ = adopted([StoredPage(key_of("a"), None, 0), StoredPage(key_of("b"), None, 1)], 9)
    disk = planner.index.by_name[DISK]
    planner.room.free(DISK, planner.index.evict(disk, [planner.index.find(key_of("b"))]))
    slots = planner.room.reserve_free(DISK, 2)
    more = [StoredPage(key_of("c"), key_of("a"), slots[0]), StoredPage(key_of("d"), None, slots[1])]
    planner.room.free_pages[DISK] += 2  # adopt() counts what the tier held already
    assert planner.adopt(DISK, more) == []
    assert planner.index.keys(planner.index.match(chain("a", "c"))) == list(chain("a", "c"))
    assert planner.index.check(lambda: True) == []
    assert planner.index.why_missing(key_of("b")) == "evicted"
