"""Pages found again: who hangs from whom, who from nothing, and what an index makes of them."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest
from contracts import key_of
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_rig import PlannerRig, chain

from tiered_kv.columns import Array
from tiered_kv.found import FIRST, LOST, FoundPages, KeyOrder, StoredPage, parent_rows, ranks
from tiered_kv.index import Index
from tiered_kv.keys import PageKey
from tiered_kv.plan import DISK, HOST
from tiered_kv.planner import Planner
from tiered_kv.slots import SlotPool


def key_beginning(beginning: int, rest: int) -> PageKey:
    return PageKey(beginning.to_bytes(8, "big") + rest.to_bytes(24, "little"))


def rows(keys: list[PageKey]) -> Array:
    return np.frombuffer(b"".join(keys), "V32")


def found_in(keys: list[PageKey], parents: list[PageKey | None]) -> list[int]:
    hangs = np.array([parent is not None for parent in parents], np.bool_)
    wanted = rows([parent or PageKey(bytes(32)) for parent in parents])
    known = rows(keys)
    return [int(row) for row in parent_rows(known, KeyOrder.of(known), wanted, hangs)]


# -- parents ---------------------------------------------------------------------------------------


@settings(max_examples=300, deadline=None, derandomize=True, database=None)
@given(
    names=st.lists(
        st.tuples(st.integers(0, 3) | st.just(2**64 - 1), st.integers(0, 9)),
        min_size=1,
        max_size=60,
        unique=True,
    ),
    above=st.lists(st.integers(-1, 80), min_size=60, max_size=60),
    is_sorted=st.booleans(),
)
def test_a_parent_is_found_by_all_its_bytes_whatever_they_begin_with(
    names: list[tuple[int, int]], above: list[int], is_sorted: bool
) -> None:
    """Most keys here begin with the same 8 bytes as others: that can be forged."""
    keys = [key_beginning(*name) for name in names]
    if is_sorted:
        keys.sort()
    lost = [key_beginning(beginning, 99) for beginning in (0, 1, 7, 2**64 - 1)]
    choices = [*keys, *lost]
    parents = [choices[at % len(choices)] if at >= 0 else None for at in above[: len(keys)]]
    row_of = {key: row for row, key in enumerate(keys)}
    expected = [FIRST if p is None else row_of.get(p, LOST) for p in parents]
    assert found_in(keys, parents) == expected


def test_a_page_without_a_parent_does_not_hang_from_the_key_of_zeros() -> None:
    zeros = PageKey(bytes(32))
    assert found_in([zeros, key_of("a")], [None, zeros]) == [FIRST, 0]
    assert found_in([zeros, key_of("a")], [None, None]) == [FIRST, FIRST]


@pytest.mark.parametrize("far", [0, 5 << 40], ids=["near", "over-openings"])
def test_ranks_order_as_the_sequences_do(far: int) -> None:
    source = Random(0)
    first = 1 << 40
    numbers = [first + n * 3 for n in range(50)] + [first + far + 1000 + n for n in range(9)]
    source.shuffle(numbers)
    found = ranks(np.array(numbers, np.uint64))
    assert np.argsort(found).tolist() == np.argsort(numbers).tolist()
    assert found.min() == 0 and found.max() < 1 << 30
    assert len(set(found.tolist())) == len(numbers)
    assert ranks(np.array(sorted(numbers), np.uint64)).tolist() == list(range(len(numbers)))
    assert ranks(np.empty(0, np.uint64)).tolist() == []


@settings(max_examples=200, deadline=None, derandomize=True, database=None)
@given(
    beginnings=st.lists(
        st.integers(0, 9) | st.integers(2**64 - 9, 2**64 - 1) | st.integers(0, 2**64 - 1),
        max_size=70,
    )
)
def test_the_order_of_keys_is_that_of_their_beginnings(beginnings: list[int]) -> None:
    """Also of those that differ in the lowest bits alone, or in none."""
    keys = [key_beginning(beginning, at) for at, beginning in enumerate(beginnings)]
    order = KeyOrder.of(rows(keys))
    assert order.beginnings.tolist() == sorted(beginnings)
    assert [beginnings[row] for row in order.rows.tolist()] == sorted(beginnings)
    assert sorted(order.rows.tolist()) == list(range(len(keys)))
    alike = [at for at in range(1, len(keys)) if order.beginnings[at] == order.beginnings[at - 1]]
    assert order.alike().tolist() == alike


# -- orphans ---------------------------------------------------------------------------------------


def stored(parents: list[int], *, lost: set[int], seed: int | None = None) -> list[StoredPage]:
    """Page n hangs from page parents[n], if that comes before it; some are gone."""
    pages = [
        StoredPage(key_of(at), key_of(parent) if 0 <= parent < at else None, at)
        for at, parent in enumerate(parents)
        if at not in lost
    ]
    if seed is not None:
        Random(seed).shuffle(pages)
    return pages


@pytest.mark.parametrize("seed", [None, 0, 1])
def test_all_that_hangs_from_a_lost_page_however_far_is_an_orphan(seed: int | None) -> None:
    """A chain of 3,000, in the middle of which a page is lost, and a branch above that stays."""
    parents = [at - 1 for at in range(3000)] + [1000, 3000, 3001, 2000]
    found = FoundPages.of(stored(parents, lost={1500}, seed=seed))
    rooted, orphans = found.rooted()
    assert sorted(orphans) == [*range(1501, 3000), 3003]
    assert set(rooted.slot.tolist()) == {*range(1500), 3000, 3001, 3002}
    for row, parent in enumerate(rooted.parent.tolist()):
        slot = int(rooted.slot[row])
        assert rooted.keys[row] == key_of(slot)
        assert (int(rooted.slot[parent]) if parent >= 0 else -1) == parents[slot]


def test_with_no_page_lost_nothing_is_copied() -> None:
    found = FoundPages.of(stored([-1, 0, 1], lost=set()))
    rooted, orphans = found.rooted()
    assert rooted is found
    assert orphans == []


def test_pages_that_hang_from_each_other_are_orphans_beside_others() -> None:
    """No hash makes such keys; a directory that is damaged, or forged, may."""
    pages = [
        StoredPage(key_of("a"), key_of("b"), 0),
        StoredPage(key_of("b"), key_of("a"), 1),
        StoredPage(key_of("c"), key_of("b"), 2),
        StoredPage(key_of("d"), key_of("gone"), 3),
        StoredPage(key_of("e"), None, 4),
    ]
    rooted, orphans = FoundPages.of(pages).rooted()
    assert sorted(orphans) == [0, 1, 2, 3]
    assert rooted.keys == [key_of("e")]


def test_a_lost_parent_can_count_as_none() -> None:
    found = FoundPages.of(stored([-1, 0, 1, 2], lost={1}))
    assert found.parent.tolist() == [FIRST, LOST, 1]
    assert found.uprooted().parent.tolist() == [FIRST, FIRST, 1]


# -- what an index makes of them -------------------------------------------------------------------


def adopted(pages: list[StoredPage], policy: str = "lru") -> tuple[Planner, SlotPool, set[int]]:
    pool = SlotPool(64)
    for page in pages:
        pool.reserve_exact(page.slot)
    planner = Planner({HOST: SlotPool(2), DISK: pool}, {HOST: 2, DISK: 64}, policy=policy)
    orphans = planner.adopt(DISK, FoundPages.of(pages))
    assert planner.index.check(lambda: True) == []
    assert pool.used == len(pages) - len(orphans) == planner.index.by_name[DISK].resident
    assert planner.room.free_pages[DISK] == 64 - pool.used
    return planner, pool, set(orphans)


def put_one_by_one(pages: list[StoredPage], policy: str) -> Index:
    """An index that has had each page arrive and be used, those of lost parents left out."""
    index = Index([HOST, DISK], policy)
    disk = index.by_name[DISK]
    for page in pages:
        parent = -1 if page.parent is None else index.find(page.parent)
        if page.parent is None or parent >= 0:
            added = index.add([page.key], parent)
            index.begin(disk, added, [page.slot])
            index.finish(disk, added)
            index.touch(added)
    return index


def contents(index: Index) -> dict[PageKey, tuple[PageKey | None, int]]:
    slot = index.by_name[DISK].slot
    return {index.key(page): (index.parent_key(page), slot[page]) for page in index}


@settings(max_examples=150, deadline=None, derandomize=True, database=None)
@given(
    parents=st.lists(st.integers(-1, 40), max_size=40),
    lost=st.sets(st.integers(0, 39), max_size=3),
    policy=st.sampled_from(["lru", "fifo"]),
)
def test_pages_adopted_at_once_are_those_put_one_by_one(
    parents: list[int], lost: set[int], policy: str
) -> None:
    pages = stored(parents, lost=lost)
    planner, _, orphans = adopted(pages, policy)
    plain = put_one_by_one(pages, policy)
    assert contents(planner.index) == contents(plain)
    assert orphans == {page.slot for page in pages} - {slot for _, slot in contents(plain).values()}
    order = [index.keys(index.victims(index.by_name[DISK], 99)) for index in (planner.index, plain)]
    assert order[0] == order[1]


@pytest.mark.parametrize("seed", range(5))
def test_the_order_in_which_pages_are_listed_says_nothing_of_who_is_there(seed: int) -> None:
    parents = [at - 1 if at % 7 else -1 for at in range(40)]
    planner, _, orphans = adopted(stored(parents, lost={8, 30}, seed=seed))
    plain, _, expected = adopted(stored(parents, lost={8, 30}))
    assert contents(planner.index) == contents(plain.index)
    assert orphans == expected == {9, 10, 11, 12, 13, 31, 32, 33, 34}


def test_only_an_index_that_had_no_page_takes_pages_over() -> None:
    planner, pool, _ = adopted([StoredPage(key_of("a"), None, 0)])
    pool.reserve_exact(1)
    with pytest.raises(AssertionError, match="into an empty index"):
        planner.adopt(DISK, FoundPages.of([StoredPage(key_of("b"), None, 1)]))


@pytest.mark.parametrize(("policy", "order"), [("lru", "yxmba"), ("fifo", "bayxm")])
def test_adopted_pages_are_got_put_upon_and_given_up_like_others(policy: str, order: str) -> None:
    """Leaf first, the oldest first; what was used since is the last, if the policy is lru."""
    rig = PlannerRig(hbm=8, host=4, disk=8, policy=policy)
    for keys in (chain("a", "b"), chain("x", "y"), chain("m")):
        rig.put(keys)
    while dirty := rig.planner.dirty_pages():
        rig.land(rig.begin_flush(len(dirty)))
    rig.restart()
    assert rig.tiers_of(*"abxym") == ["disk"] * 5
    rig.release(rig.get(chain("a", "b")))
    assert rig.tiers_of(*"abxym") == ["hbm+host+disk"] * 2 + ["disk"] * 3
    rig.put(chain("a", "b", "c")[2:])
    assert rig.tiers_of("c") == ["hbm+host"]
    index = rig.planner.index
    victims = index.keys(index.victims(index.by_name[DISK], 9))
    assert victims == [key_of(name) for name in order]
    rig.put(chain("x", "y", *range(6))[2:])  # more than disk has room for: a branch gives way
    rig.put(chain("x", "y", *range(12))[8:])
    rig.check()
