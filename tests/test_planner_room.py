"""Plans where a tier is shorter than one conversation."""

from __future__ import annotations

from tiered_kv.keys import KeyChain, PageKey
from tiered_kv.planner import Planner
from tiered_kv.slots import SlotPool


def chain(pages: int) -> KeyChain:
    return KeyChain([PageKey(page.to_bytes(32, "big")) for page in range(pages)])


def planner_of(**capacity: int) -> Planner:
    return Planner({name: SlotPool(n) for name, n in capacity.items()}, capacity)


def put(planner: Planner, keys: KeyChain) -> int:
    """Hand pages over as a caller with its own slots would; how many were stored."""
    slots = planner.room.exactly("hbm", len(keys))
    assert slots is not None
    plan = planner.plan_put(keys, slots)
    planner.carry_out(plan)
    return len(keys) - plan.not_stored


def test_the_first_pages_hit_though_hbm_is_full_of_deeper_ones() -> None:
    """A get of all keys pinned the deep pages that stood in HBM, found no room for the first ones
    and returned nothing; a hit is a prefix, so the deep ones must make room."""
    planner = planner_of(hbm=8, host=32)
    keys = chain(16)
    for start in range(0, 16, 8):
        assert put(planner, keys[start : start + 8]) == 8
    plan = planner.plan_get(keys)
    assert len(plan.pages) == 8
    assert plan.sources == ("host",) * 8
    assert dict(plan.misses) == {"no_room": 8}
    planner.carry_out(plan)
    planner.release(plan.pages)
    assert planner.index.check(lambda: True) == []


def test_a_hit_is_cut_where_hbm_is_leased_out() -> None:
    planner = planner_of(hbm=8, host=32)
    keys, other = chain(8), KeyChain([PageKey(bytes([page]) * 32) for page in range(200, 206)])
    put(planner, other)
    leased = planner.carry_out(planner.plan_get(other))
    for start in range(0, 8, 2):
        put(planner, keys[start : start + 2])
    plan = planner.carry_out(planner.plan_get(keys))
    assert len(plan.pages) == 2
    planner.release(plan.pages)
    planner.release(leased.pages)
    assert planner.index.check(lambda: True) == []


def test_without_a_disk_the_prefix_stays_and_what_continues_it_is_not_stored() -> None:
    planner = planner_of(hbm=8, host=12)
    keys = chain(32)
    stored = [put(planner, keys[start : start + 4]) for start in range(0, 32, 4)]
    assert stored == [4, 4, 4, 0, 0, 0, 0, 0]
    put(planner, KeyChain([PageKey(bytes([page]) * 32) for page in range(100, 108)]))
    assert len(planner.index.match(keys)) >= 4
    assert planner.index.check(lambda: True) == []


def test_a_conversation_longer_than_host_is_stored_on_disk() -> None:
    """put() pinned the parent of the new pages, the only leaf on host: nothing could be demoted,
    and the conversation was never stored past the size of host, with disk free."""
    planner = planner_of(hbm=8, host=6, disk=64)
    keys = chain(40)
    for start in range(0, 40, 4):
        assert put(planner, keys[start : start + 4]) == 4
    disk = planner.index.by_name["disk"]
    assert len(planner.index.match(keys)) == 40
    assert disk.resident >= 40 - 6
    assert planner.index.check(lambda: True) == []


def test_pages_are_written_root_first_with_those_above_that_are_not_on_disk() -> None:
    planner = planner_of(hbm=64, host=64, disk=64)
    keys = chain(20)
    put(planner, keys)
    pages = [planner.index.find(key) for key in keys]
    assert planner.room.root_first(pages[::-1]) == pages, "in columns"
    assert planner.room.root_first(pages[3:6]) == pages[:6], "one after the other"
    planner.carry_out(planner.plan_flush(pages[:8]))
    assert planner.room.root_first(pages[:7:-1]) == pages[8:]
    assert planner.room.root_first([pages[10], pages[9]]) == pages[8:11]
    assert planner.room.root_first([]) == []


def test_slots_of_what_left_are_in_order_and_none_was_given_back_in_between() -> None:
    """Pages leave children first, but are copied faster where they stand side by side."""
    slots = {"hbm": SlotPool(8), "host": SlotPool(4)}
    planner = Planner(slots, {"hbm": 8, "host": 4})
    put(planner, chain(4))
    others = KeyChain([PageKey(bytes([page]) * 32) for page in range(100, 104)])
    at = planner.room.exactly("hbm", 4)
    assert at == [4, 5, 6, 7]
    plan = planner.plan_put(others, at)
    assert [move.target_slot for move in plan.store] == [0, 1, 2, 3]
    assert (slots["host"].used, planner.room.free_pages["host"]) == (4, 0)
    planner.carry_out(plan)
    assert planner.room.exactly("hbm", 4) == [0, 1, 2, 3]
    assert (slots["hbm"].used, planner.room.free_pages["hbm"]) == (8, 0)
    assert planner.index.check() == []
