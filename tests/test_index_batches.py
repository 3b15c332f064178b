"""Whole batches do to an index, and to a planner, what page by page does."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from random import Random

import pytest
from contracts import key_of
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_rig import chain

from tiered_kv import index as index_module
from tiered_kv import ledger, page_ids, room, tier_index
from tiered_kv.columns import FEW, Numbers, numbers
from tiered_kv.index import Index, TierState
from tiered_kv.keys import PageKey
from tiered_kv.plan import DISK, HBM, HOST, Move, Moves
from tiered_kv.planner import Planner
from tiered_kv.policy import base
from tiered_kv.slots import SlotPool

_TIERS = [HBM, HOST, DISK]
_IN_COLUMNS = (base, index_module, ledger, page_ids, tier_index)
_CHAINS = {
    f"{name}{turn}": [(name, at) for at in range(4 * turn)] for name in "abc" for turn in (1, 2)
}


@contextmanager
def columns_from(few: int) -> Iterator[None]:
    """Batches of so many pages and more are dealt with in columns."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(base, "LONG", min(few, base.LONG))
        for module in _IN_COLUMNS:
            patch.setattr(module, "FEW", few)
        yield


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
    seed=st.integers(0, 2**32),
    steps=st.integers(1, 30),
    policy=st.sampled_from(["lru", "fifo"]),
    few=st.sampled_from([2, FEW]),
)
def test_a_batch_does_what_its_pages_one_by_one_do(
    seed: int, steps: int, policy: str, few: int
) -> None:
    """Also where it is done in columns, which it is from `few` pages on."""
    pair = Pair(policy, seed)
    with columns_from(few):
        for _ in range(steps):
            pair.step()
            pair.check()


# -- what a batch must not get wrong ---------------------------------------------------------------


@pytest.mark.parametrize("few", [2, FEW])
def test_pages_that_leave_their_last_tier_together_are_all_remembered(few: int) -> None:
    """The first of them to be forgotten takes its parents along, before these are looked at."""
    index = Index(_TIERS)
    host, keys = index.by_name[HOST], chain("a", "b", "c")
    with columns_from(few):
        pages = index.add(keys, -1)
        index.begin(host, pages, [0, 1, 2])
        index.finish(host, pages)
        assert index.evict(host, pages[::-1]) == [2, 1, 0]
    assert len(index) == 0
    assert [index.why_missing(key) for key in keys] == ["evicted"] * 3
    assert index.check() == []


@pytest.mark.parametrize("few", [2, FEW])
def test_a_pinned_page_in_a_batch_stops_it_before_anything_has_changed(few: int) -> None:
    index = Index(_TIERS)
    host = index.by_name[HOST]
    pages = index.add(chain("a", "b"), -1)
    index.begin(host, pages, [0, 1])
    index.finish(host, pages)
    index.pin(host, pages[:1])
    with columns_from(few), pytest.raises(AssertionError):
        index.evict(host, pages[::-1])
    assert host.resident == 2
    assert index.check() == []


@pytest.mark.parametrize("few", [2, FEW])
@pytest.mark.parametrize("slots", [[0], [0, 1, 2]])
def test_a_batch_of_another_length_than_its_slots_is_a_bug_and_says_so(
    few: int, slots: list[int]
) -> None:
    index = Index(_TIERS)
    pages = index.add(chain("a", "b"), -1)
    with columns_from(few), pytest.raises(ValueError, match=r"shorter|longer|slots"):
        index.begin(index.by_name[HOST], pages, slots)


def test_what_could_be_written_to_disk_is_the_same_by_columns_and_page_by_page() -> None:
    """A chain of which disk has the first page; one whose first page is nowhere below; a hole."""
    planner = Planner({HOST: SlotPool(9), DISK: SlotPool(9)}, {HOST: 9, DISK: 9})
    index = planner.index
    host, disk = index.by_name[HOST], index.by_name[DISK]
    begun = index.add(chain("a", "b", "c"), -1)
    cut = index.add(chain("x", "y", "z"), -1)
    for tier, pages in ((disk, begun[:1]), (host, begun), (host, cut[1:])):
        index.begin(tier, pages, range(len(pages)))
    asked = [begun, begun[1:], begun[2:], cut[1:], [*begun, cut[2]]]
    with columns_from(2):
        by_columns = [planner.room.durable(pages) for pages in asked]
    assert by_columns == [planner.room.durable(pages) for pages in asked]
    assert by_columns == [begun, begun[1:], begun[2:], [], begun]


def page_by_page(index: Index, pages: list[int]) -> tuple[list[int], set[int]]:
    """Pages with their ancestors that disk lacks, root first; and the pages there above them."""
    state = index.by_name[DISK].state
    order: dict[int, None] = {}
    above = set()
    for page in pages:
        path = []
        while page >= 0 and not state[page] and page not in order:
            path.append(page)
            page = index.parent_of[page]
        order.update(dict.fromkeys(reversed(path)))
        if page >= 0 and state[page]:
            above.add(page)
    return list(order), above


@settings(max_examples=200, deadline=None, derandomize=True, database=None)
@given(seed=st.integers(0, 2**32))
def test_pages_find_their_way_to_disk_in_columns_as_they_do_one_by_one(seed: int) -> None:
    """Prefixes that branch, of which disk has some already; deepest first, root first or mixed."""
    random = Random(seed)
    planner = Planner({HOST: SlotPool(200), DISK: SlotPool(200)}, {HOST: 200, DISK: 200})
    index = planner.index
    paths: list[list[object]] = [[("x", at) for at in range(9)]]
    host, disk = index.by_name[HOST], index.by_name[DISK]
    for name in range(random.randint(1, 4)):
        begun = random.choice(paths)[: random.randint(0, 9)]
        paths.append([*begun, *((name, at) for at in range(random.randint(1, 9)))])
        pages = index.add(chain(*paths[-1]), -1)
        index.begin(host, new := [p for p in pages if not host.state[p]], range(len(new)))
        index.finish(host, new)
        written = [p for p in pages[: random.randint(0, 4)] if not disk.state[p]]
        index.begin(disk, written, range(len(written)))
        if random.random() < 0.7:
            index.finish(disk, written)
    dirty = [page for page in index if not disk.state[page]]
    wanted = random.choice([dirty, dirty[::-1], random.sample(dirty, len(dirty)), dirty[::2]])
    order, above = page_by_page(index, wanted)
    moves = room.moves_of(index, order, HOST, DISK, range(len(order)))
    some = moves.where([random.random() < 0.8 for _ in moves])
    one_by_one = planner.durable(moves), planner.durable(some)
    for few in (1, FEW):
        with columns_from(few):
            found, below = planner.room._paths(wanted)
            assert (list(found), set(below)) == (order, above)
            assert (planner.durable(moves), planner.durable(some)) == one_by_one


@pytest.mark.parametrize("few", [2, FEW])
def test_pages_are_cut_into_runs_up_a_branch_whichever_way_they_come(few: int) -> None:
    index = Index(_TIERS)
    stem = index.add(chain("a", "b"), -1)
    branches = [index.add(chain("a", "b", *((at, n) for n in range(4))), -1)[2:] for at in "xyz"]
    with columns_from(few):
        assert index.runs([]) == []
        assert index.runs(stem[:1]) == [stem[:1]]
        turned = [branch[::-1] for branch in branches]
        assert index.runs([page for branch in turned for page in branch]) == turned
        assert index.runs([page for branch in branches for page in branch]) == turned
        assert index.runs([*turned[0], *stem[::-1]]) == [[*turned[0], *stem[::-1]]]
        apart = [stem[1], *branches[1][1::2]]
        assert index.runs(apart) == [[page] for page in apart]


def test_numbers_are_made_an_array_once_and_travel_without_it() -> None:
    some = Numbers([3, 1, 2])
    assert numbers(some) is numbers(some)
    assert numbers(some).tolist() == some == [3, 1, 2]
    there = pickle.loads(pickle.dumps(some))
    assert type(there) is Numbers and there == some and there.array is None


def test_a_match_ends_at_the_first_unknown_key_also_where_the_last_is_known() -> None:
    index = Index(_TIERS)
    pages = index.add(chain("a", "b"), -1)
    index.begin(index.by_name[HOST], pages, [0, 1])
    assert index.match(chain("a", "b")) == pages
    assert index.match(chain("a", "x", "b")) == pages[:1]
    assert index.match(chain("x", "b")) == index.match([]) == []


def test_check_finds_a_page_whose_presence_is_noted_wrongly() -> None:
    index = Index(_TIERS)
    host = index.by_name[HOST]
    pages = index.add(chain("a"), -1)
    index.begin(host, pages, [0])
    host.state[pages[0]] = TierState.ABSENT
    assert any("not in a tier, and not noted so" in line for line in index.check())


def test_moves_in_columns_are_moves() -> None:
    made = Moves(
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
    assert made[-1] == list(made)[1] and made[1:] == list(made)[1:]
    assert made.where([False, True]) == list(made)[1:]
    assert tuple(made[:1]) + made[1:] == made[:1] + tuple(made[1:]) == tuple(made)
    with pytest.raises(IndexError):
        made[2]
