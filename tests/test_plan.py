"""Plans: what a request needs, decided before any byte moves."""

from __future__ import annotations

import pickle
from random import Random
from typing import Any

import pytest
from contracts import key_of
from plan_rig import PlannerRig, chain

from tiered_kv.found import FoundPages, StoredPage
from tiered_kv.keys import KeyChain
from tiered_kv.plan import DISK, HBM, HOST, LOAD_ALL, MISS_REASONS, Gate, Move, Plan, pages_of
from tiered_kv.planner import Planner
from tiered_kv.slots import SlotPool

# -- what is worth loading -------------------------------------------------------------------------


def test_without_a_gate_everything_is_loaded() -> None:
    assert LOAD_ALL.cut(["hbm", "disk", "host"]) == (3, "")
    assert LOAD_ALL.cut([]) == (0, "")


def test_a_hit_shorter_than_the_threshold_is_not_loaded() -> None:
    gate = Gate(min_pages=3)
    assert gate.cut(["hbm"] * 2) == (0, "below_threshold")
    assert gate.cut(["hbm"] * 3) == (3, "")


def test_pages_that_load_slower_than_they_compute_are_left_at_the_end() -> None:
    gate = Gate(compute_s_per_page=1.0, load_s_per_page={"host": 0.1, "disk": 5.0})
    assert gate.cut(["host", "host", "disk", "disk"]) == (2, "not_worth_loading")
    assert gate.cut(["disk", "disk"]) == (0, "not_worth_loading")


def test_a_slow_page_before_many_fast_ones_is_loaded_for_their_sake() -> None:
    gate = Gate(compute_s_per_page=1.0, load_s_per_page={"host": 0.1, "disk": 3.0})
    assert gate.cut(["disk", *["host"] * 3])[0] == 4
    assert gate.cut(["disk", *["host"] * 2])[0] == 0


def test_a_tier_whose_rate_is_not_known_yet_is_taken_for_free() -> None:
    gate = Gate(compute_s_per_page=1.0)
    assert gate.cut(["disk"] * 4)[0] == 4


def test_at_break_even_the_store_is_used() -> None:
    gate = Gate(compute_s_per_page=1.0, load_s_per_page={"disk": 1.0})
    assert gate.cut(["disk"] * 4)[0] == 4


# -- put -------------------------------------------------------------------------------------------


def test_put_takes_pages_over_where_they_stand_and_copies_them_to_host() -> None:
    rig = PlannerRig(hbm=4, host=4, disk=4)
    flight = rig.begin_put(chain("a", "b"))
    assert flight is not None
    assert [(m.source, m.target) for m in flight.plan.moves()] == [
        (HBM, HBM),
        (HBM, HBM),
        (HBM, HOST),
        (HBM, HOST),
    ]
    assert flight.plan.is_put
    assert not rig.planner.index.by_name[HOST].resident
    rig.land(flight)
    assert rig.tiers_of("a", "b") == ["hbm+host"] * 2


def test_a_page_counts_as_arriving_until_its_copy_has_landed() -> None:
    rig = PlannerRig(hbm=4, host=4, disk=0)
    flight = rig.begin_put(chain("a"))
    assert flight is not None
    assert len(rig.planner.index.match(chain("a"))) == 1
    assert rig.tiers_of("a") == [""]
    rig.land(flight)
    assert rig.tiers_of("a") == ["hbm+host"]


def test_pages_put_twice_are_stored_once_and_the_callers_slots_come_back() -> None:
    rig = PlannerRig(hbm=4, host=4, disk=0)
    rig.put(chain("a", "b"))
    again = rig.put(chain("a", "b"))
    assert again.plan.spare_slots == again.plan.slots
    assert again.plan.store == ()
    assert rig.pools[HBM].used == 2
    rig.check()


def test_a_tail_hangs_where_its_chain_says() -> None:
    rig = PlannerRig(hbm=6, host=6, disk=0)
    keys = chain("a", "b", "c")
    rig.put(keys[:1])
    rig.put(keys[1:])
    assert rig.planner.index.parent_key(rig.planner.index.find(keys[1])) == keys[0]
    assert len(rig.planner.index.match(keys)) == 3


def test_a_tail_whose_parent_is_not_stored_is_not_stored_either() -> None:
    """It could never hit: it would only take room."""
    rig = PlannerRig(hbm=4, host=4, disk=0)
    flight = rig.put(chain("a", "b", "c")[1:])
    assert flight.plan.not_stored == 2
    assert flight.plan.misses == (("no_parent", 2),)
    assert rig.pools[HBM].used == rig.pools[HOST].used == 0
    assert len(rig.planner.index) == 0


def test_put_under_pressure_stores_what_fits_and_says_how_much_did_not() -> None:
    """vllm #26329, #43884: running out of host blocks raised and killed the engine."""
    rig = PlannerRig(hbm=8, host=3, disk=0)
    flight = rig.put(chain(*"abcde"))
    assert flight.plan.not_stored == 2
    assert rig.tiers_of(*"abcde") == ["hbm+host"] * 3 + ["hbm"] * 2
    rig.check()


def test_pages_that_found_no_room_are_tried_again_with_the_next_put_below_them() -> None:
    rig = PlannerRig(hbm=8, host=3, disk=0)
    keys = chain(*"abcdef")
    rig.put(chain("x", "y"))
    held = rig.begin_get(chain("x", "y"))
    rig.land(held)
    for page in held.plan.pages:  # whoever reads host pages keeps them there
        rig.planner.index.pin(rig.planner.index.by_name[HOST], [page])
    rig.put(keys[:2])
    assert rig.tiers_of("a", "b") == ["hbm+host", "hbm"]
    for page in held.plan.pages:
        rig.planner.index.unpin(rig.planner.index.by_name[HOST], [page])
    rig.put(keys[2:3])
    assert rig.tiers_of("a", "b", "c") == ["hbm+host"] * 3
    rig.check()


def test_without_a_disk_what_host_gives_up_is_gone() -> None:
    rig = PlannerRig(hbm=2, host=2, disk=0)
    rig.put(chain("a", "b"))
    rig.put(chain("c", "d"))
    assert rig.tiers_of(*"abcd") == ["", "", "hbm+host", "hbm+host"]
    assert rig.planner.index.why_missing(key_of("a")) == "evicted"
    rig.check()


def test_pages_below_one_that_stays_are_not_stored_for_it_to_leave() -> None:
    """The page that new ones hang from must not be dropped to make room for them."""
    rig = PlannerRig(hbm=8, host=2, disk=0)
    keys = chain(*"abcd")
    rig.put(keys[:2])
    rig.put(keys[2:])
    assert rig.tiers_of("a", "b") == ["hbm+host"] * 2
    assert len(rig.planner.index.match(keys)) == 4
    rig.check()


def test_an_engine_that_owns_its_pages_has_no_hbm_tier_to_bind_them_in() -> None:
    rig = PlannerRig(hbm=0, host=4, disk=4)
    flight = rig.put(chain("a", "b"))
    assert not flight.plan.bind
    assert not flight.plan.spare_slots
    assert rig.tiers_of("a", "b") == ["host"] * 2


# -- demotion --------------------------------------------------------------------------------------


def test_what_host_gives_up_goes_to_disk_and_only_then_is_its_slot_filled() -> None:
    rig = PlannerRig(hbm=4, host=2, disk=8)
    rig.put(chain("a", "b"))
    flight = rig.begin_put(chain("c", "d"))
    assert flight is not None
    assert [move.after for move in flight.plan.store] == pages_of(flight.plan.demote)
    assert all(move.leaves for move in flight.plan.demote)
    rig.land(flight)
    assert rig.tiers_of(*"abcd") == ["hbm+disk", "hbm+disk", "hbm+host", "hbm+host"]
    rig.check()


def test_a_demotion_writes_the_ancestors_that_are_not_on_disk_first_root_first() -> None:
    """Whatever a crash leaves on disk must be able to hit."""
    rig = PlannerRig(hbm=8, host=4, disk=8)
    rig.put(chain(*"abcd"))
    flight = rig.begin_put(chain("x"))
    assert flight is not None
    index = rig.planner.index
    written = [index.key(move.page) for move in flight.plan.demote]
    assert written == list(chain(*"abcd"))
    assert [move.leaves for move in flight.plan.demote] == [False, False, False, True]
    assert [move.parent for move in flight.plan.demote] == [None, *chain(*"abc")]
    rig.land(flight)
    assert rig.tiers_of(*"abcdx") == ["hbm+host+disk"] * 3 + ["hbm+disk", "hbm+host"]
    rig.check()


def test_a_page_that_is_on_disk_already_is_not_written_again() -> None:
    rig = PlannerRig(hbm=4, host=2, disk=8, write_through=True)
    rig.put(chain("a", "b"))
    flight = rig.put(chain("c", "d"))
    assert flight.plan.demote == ()
    assert rig.tiers_of("a", "b") == ["hbm+disk"] * 2
    rig.check()


def test_a_full_disk_drops_its_oldest_leaves_for_what_host_gives_up() -> None:
    rig = PlannerRig(hbm=2, host=2, disk=2)
    for names in ("ab", "cd", "ef"):
        rig.put(chain(*names))
    assert rig.tiers_of(*"abcdef") == [""] * 2 + ["disk"] * 2 + ["hbm+host"] * 2
    assert rig.planner.index.why_missing(key_of("a")) == "evicted"
    rig.check()


def test_a_disk_that_cannot_take_a_page_with_its_ancestors_loses_the_page_not_the_put() -> None:
    rig = PlannerRig(hbm=4, host=3, disk=1)
    rig.put(chain("a", "b", "c"))
    rig.put(chain("x"))
    assert rig.tiers_of("x") == ["hbm+host"]
    rig.check()


def test_a_failed_demotion_goes_back_and_what_was_to_take_its_place_is_not_stored() -> None:
    """A page promised to disk leaves host only once it is there, however the disk fails."""
    rig = PlannerRig(hbm=4, host=2, disk=8)
    rig.put(chain("a", "b"))
    flight = rig.begin_put(chain("c", "d"))
    assert flight is not None
    for move in flight.plan.demote:
        rig.begin(flight, move, fails=True)
        rig.publish(flight)
    rig.land(flight)
    assert rig.tiers_of(*"abcd") == ["hbm+host"] * 2 + ["hbm"] * 2
    assert flight.arrived_pages() == 0
    rig.check()


def test_a_page_is_not_written_below_one_whose_write_failed() -> None:
    rig = PlannerRig(hbm=4, host=2, disk=8)
    rig.put(chain("a", "b"))
    flight = rig.begin_put(chain("c", "d"))
    assert flight is not None
    rig.begin(flight, flight.plan.demote[0], fails=True)
    rig.publish(flight)
    rig.land(flight)
    assert [page.key for page in rig.on_disk()] == []
    assert rig.tiers_of("a", "b") == ["hbm+host"] * 2
    rig.check()


def test_a_page_on_its_way_to_disk_can_be_got_and_is_waited_for() -> None:
    rig = PlannerRig(hbm=2, host=1, disk=4)
    rig.put(chain("a"))
    flight = rig.begin_put(chain("b"))
    assert flight is not None
    into = rig.allocate(1)  # `a` leaves HBM, and has left host: its only copy is on its way
    assert into is not None
    found = rig.begin_get(chain("a"), into=into)
    assert found.plan.sources == (DISK,)
    assert all(move.waits for move in (*found.plan.load, *found.plan.fill))
    rig.land_all()
    assert found.arrived_pages() == 1
    rig.check()


# -- write-through and flush -----------------------------------------------------------------------


def test_write_through_puts_every_page_on_disk_at_once() -> None:
    rig = PlannerRig(hbm=4, host=4, disk=4, write_through=True)
    flight = rig.put(chain("a", "b"))
    assert [(m.source, m.target, m.waits) for m in flight.plan.write] == [(HOST, DISK, True)] * 2
    assert rig.tiers_of("a", "b") == ["hbm+host+disk"] * 2
    rig.check()


def test_write_through_writes_as_much_as_disk_can_take() -> None:
    rig = PlannerRig(hbm=8, host=8, disk=2, write_through=True)
    flight = rig.put(chain(*"abcd"))
    assert len(flight.plan.write) == 2
    assert rig.tiers_of(*"abcd") == ["hbm+host+disk"] * 2 + ["hbm+host"] * 2
    rig.check()


def test_write_back_writes_nothing_until_it_must() -> None:
    rig = PlannerRig(hbm=4, host=4, disk=4)
    assert rig.put(chain("a", "b")).plan.write == ()
    assert rig.on_disk() == []


def test_flush_writes_the_coldest_pages_and_their_ancestors() -> None:
    rig = PlannerRig(hbm=8, host=8, disk=8)
    rig.put(chain("a", "b"))
    rig.put(chain("x"))
    flight = rig.begin_flush(1)
    rig.land(flight)
    assert rig.tiers_of("a", "b", "x") == ["hbm+host+disk"] * 2 + ["hbm+host"]
    rig.land(rig.begin_flush(9))
    assert rig.tiers_of("x") == ["hbm+host+disk"]
    assert rig.planner.plan_flush(rig.planner.dirty_pages()) == Plan()
    rig.check()


def test_flush_without_a_disk_has_nothing_to_do() -> None:
    rig = PlannerRig(hbm=4, host=4, disk=0)
    rig.put(chain("a"))
    assert rig.planner.plan_flush(rig.planner.dirty_pages()) == Plan()


# -- get -------------------------------------------------------------------------------------------


def test_get_of_what_stands_in_hbm_moves_nothing_and_leases_it() -> None:
    rig = PlannerRig(hbm=4, host=4, disk=0)
    put = rig.put(chain("a", "b"))
    flight = rig.get(chain("a", "b"))
    assert flight.plan.sources == (HBM, HBM)
    assert flight.plan.slots == put.plan.slots
    assert all(move.is_in_place for move in flight.plan.fill)
    assert rig.allocate(3) is None
    rig.release(flight)
    assert rig.allocate(3) is not None
    rig.check()


def test_get_says_for_every_page_where_it_was() -> None:
    rig = PlannerRig(hbm=4, host=2, disk=8, write_through=True)
    keys = chain(*"abcd")
    rig.put(keys[:2])
    rig.put(keys[2:])
    rig.restart()
    rig.prefetch(keys[:2])
    rig.release(rig.get(keys[:1]))
    flight = rig.get(keys)
    assert flight.plan.sources == (HBM, HOST, DISK, DISK)
    assert flight.arrived_pages() == 4
    rig.release(flight)
    rig.check()


def test_get_brings_disk_pages_over_host() -> None:
    rig = PlannerRig(hbm=4, host=4, disk=4)
    rig.put(chain("a", "b"))
    rig.land(rig.begin_flush(9))
    rig.restart()
    flight = rig.get(chain("a", "b"))
    assert flight.plan.sources == (DISK, DISK)
    assert [(m.source, m.target) for m in flight.plan.load] == [(DISK, HOST)] * 2
    assert [(m.source, m.target, m.waits) for m in flight.plan.fill] == [(HOST, HBM, True)] * 2
    rig.release(flight)
    assert rig.tiers_of("a", "b") == ["hbm+host+disk"] * 2
    rig.check()


def test_a_hit_longer_than_host_passes_through_staging_where_host_is_full() -> None:
    """A busy loop for ever when staging was full and the hot tier off: LMCache #2942."""
    rig = PlannerRig(hbm=8, host=2, disk=8)
    keys = chain(*"abcdef")
    for name in range(0, 6, 2):
        rig.put(keys[name : name + 2])
    rig.land(rig.begin_flush(9))
    rig.restart()
    found = len(rig.planner.index.match(keys))
    assert found > 2
    flight = rig.get(keys)
    assert flight.arrived_pages() == found
    assert len(flight.plan.load) == 2
    assert [m.source for m in flight.plan.fill] == [HOST] * 2 + [DISK] * (found - 2)
    rig.release(flight)
    rig.check()


def test_a_hit_longer_than_hbm_ends_there_and_says_no_room() -> None:
    rig = PlannerRig(hbm=3, host=8, disk=0)
    keys = chain(*"abcdef")
    rig.put(keys[:3])
    rig.put(keys[3:])
    flight = rig.get(keys)
    assert flight.arrived_pages() == 3
    assert dict(flight.plan.misses) == {"no_room": 3}
    rig.release(flight)
    rest = rig.get(keys[3:])
    assert rest.arrived_pages() == 3
    rig.release(rest)
    rig.check()


def test_get_does_not_evict_what_another_lease_holds() -> None:
    rig = PlannerRig(hbm=3, host=8, disk=0)
    rig.put(chain("a", "b"))
    lease = rig.get(chain("a", "b"))
    rig.put(chain("x"))
    rig.release_owned(rig.allocate(1) or [])
    other = rig.get(chain("x"))
    assert other.arrived_pages() == 1
    assert rig.get(chain("x")).plan.sources == (HBM,)
    assert rig.allocate(1) is None
    for flight in (lease, *rig.leases[1:]):
        rig.release(flight)
    assert rig.allocate(3) is not None
    rig.check()


def test_get_into_fills_the_callers_slots_and_leases_nothing() -> None:
    rig = PlannerRig(hbm=4, host=4, disk=0)
    rig.put(chain("a", "b"))
    into = rig.allocate(2)
    assert into is not None
    flight = rig.get(chain("a", "b", "c"), into=[*into, 99])
    assert flight.plan.slots == tuple(into)
    assert flight.arrived_pages() == 2
    assert not rig.leases
    rig.release_owned(into)
    rig.check()


def test_get_into_copies_within_hbm_what_stands_there_already() -> None:
    rig = PlannerRig(hbm=4, host=4, disk=0)
    rig.put(chain("a"))
    into = rig.allocate(1)
    flight = rig.get(chain("a"), into=into)
    (move,) = flight.plan.fill
    assert (move.source, move.target) == (HBM, HBM)
    assert not move.is_in_place


def test_two_gets_of_one_cold_page_share_one_load() -> None:
    rig = PlannerRig(hbm=4, host=4, disk=4)
    rig.put(chain("a"))
    rig.land(rig.begin_flush(9))
    rig.restart()
    first, second = rig.begin_get(chain("a")), rig.begin_get(chain("a"))
    assert len(first.plan.load) == 1
    assert second.plan.load == ()
    assert all(move.is_in_place and move.waits for move in second.plan.fill)
    rig.land_all()
    assert first.arrived_pages() == second.arrived_pages() == 1
    for flight in (first, second):
        rig.release(flight)
    rig.check()


def test_when_a_shared_load_fails_both_miss() -> None:
    rig = PlannerRig(hbm=4, host=4, disk=4)
    rig.put(chain("a"))
    rig.land(rig.begin_flush(9))
    rig.restart()
    first, second = rig.begin_get(chain("a")), rig.begin_get(chain("a"))
    rig.begin(first, first.plan.load[0], fails=True)
    rig.publish(first)
    rig.land_all()
    assert first.arrived_pages() == second.arrived_pages() == 0
    for flight in (first, second):
        rig.release(flight)
    rig.check()


def test_get_makes_no_room_by_dropping_what_it_is_about_to_read() -> None:
    """Hit length is settled by pins, not by the lookup: sglang #31881, #30322."""
    rig = PlannerRig(hbm=4, host=2, disk=8)
    keys = chain(*"abcd")
    rig.put(keys[:2])
    rig.put(keys[2:])
    rig.land(rig.begin_flush(9))
    rig.release_owned(rig.allocate(4) or [])
    flight = rig.get(keys)
    assert flight.arrived_pages() == len(flight.plan.pages) > 2
    rig.release(flight)
    rig.check()


@pytest.mark.parametrize(
    ("asked", "misses"),
    [
        ("xy", {"never_stored": 2}),
        ("abx", {"never_stored": 1}),
        ("xb", {"never_stored": 1, "no_parent": 1}),
    ],
)
def test_a_miss_says_why(asked: str, misses: dict[str, int]) -> None:
    rig = PlannerRig(hbm=4, host=4, disk=0)
    rig.put(chain("a", "b"))
    plan = rig.get(chain(*asked)).plan
    assert dict(plan.misses) == misses
    assert set(misses) <= set(MISS_REASONS)


def test_what_is_not_worth_loading_is_a_miss_that_says_so() -> None:
    rig = PlannerRig(hbm=4, host=4, disk=0)
    rig.put(chain("a", "b"))
    plan = rig.planner.plan_prefetch(chain("a", "b", "c"), gate=Gate(min_pages=3))
    assert dict(plan.misses) == {"never_stored": 1, "below_threshold": 2}
    assert plan.pages == ()


# -- prefetch --------------------------------------------------------------------------------------


def test_prefetch_brings_pages_that_are_on_disk_alone_to_host_and_no_others() -> None:
    rig = PlannerRig(hbm=4, host=4, disk=4)
    rig.put(chain("a", "b"))
    rig.land(rig.begin_flush(9))
    rig.restart()
    rig.put(chain("x"))
    flight = rig.prefetch(chain("a", "b"))
    assert len(flight.plan.load) == 2
    assert flight.plan.fill == ()
    assert rig.tiers_of("a", "b") == ["host+disk"] * 2
    assert rig.prefetch(chain("a", "b")).plan.moves() == ()
    rig.check()


def test_prefetch_of_more_than_host_holds_brings_the_front() -> None:
    rig = PlannerRig(hbm=8, host=2, disk=8)
    keys = chain(*"abcd")
    rig.put(keys[:2])
    rig.put(keys[2:])
    rig.land(rig.begin_flush(9))
    rig.restart()
    rig.prefetch(keys)
    assert rig.tiers_of("a", "b") == ["host+disk"] * 2
    rig.check()


# -- damage ----------------------------------------------------------------------------------------


def test_a_corrupt_page_is_a_miss_and_so_are_all_after_it() -> None:
    """dynamo #15079: a failed disk load was served as a full hit."""
    rig = PlannerRig(hbm=4, host=4, disk=4)
    rig.put(chain("a", "b", "c"))
    rig.land(rig.begin_flush(9))
    rig.restart()
    flight = rig.begin_get(chain("a", "b", "c"))
    rig.begin(flight, flight.plan.load[1], is_corrupt=True)
    rig.publish(flight)
    rig.land(flight)
    assert flight.arrived_pages() == 1
    rig.release(flight)
    assert len(rig.planner.index.match(chain("a", "b", "c"))) == 1
    assert rig.planner.index.why_missing(key_of("b")) in {"corrupt", "failed"}
    rig.check()


def test_a_page_computed_again_heals_what_hung_from_the_corrupt_one() -> None:
    rig = PlannerRig(hbm=6, host=4, disk=4)
    keys = chain("a", "b", "c")
    rig.put(keys)
    rig.land(rig.begin_flush(9))
    rig.restart()
    flight = rig.begin_prefetch(keys)
    rig.begin(flight, flight.plan.load[1], is_corrupt=True)
    rig.publish(flight)
    rig.land(flight)
    assert len(rig.planner.index.match(keys)) == 1
    rig.put(keys[1:2])
    assert len(rig.planner.index.match(keys)) == 3
    rig.check()


# -- a store found again ---------------------------------------------------------------------------


def stored(name: str, parent: str | None, slot: int) -> StoredPage:
    return StoredPage(key_of(name), None if parent is None else key_of(parent), slot)


def adopting(pages: list[StoredPage]) -> tuple[Planner, SlotPool, list[int]]:
    pool = SlotPool(8)
    for page in pages:
        pool.reserve_exact(page.slot)
    planner = Planner({HOST: SlotPool(2), DISK: pool}, {HOST: 2, DISK: 8})
    return planner, pool, planner.adopt(DISK, FoundPages.of(pages))


def test_pages_found_on_disk_can_hit_at_once() -> None:
    planner, pool, orphans = adopting([stored("a", None, 0), stored("b", "a", 3)])
    assert orphans == []
    assert len(planner.index.match(chain("a", "b"))) == 2
    assert planner.room.free_pages[DISK] == 6 == pool.capacity - pool.used
    assert planner.index.check(lambda: True) == []


def test_a_page_listed_before_its_parent_is_found_too() -> None:
    planner, _, orphans = adopting([stored("b", "a", 3), stored("c", "b", 1), stored("a", None, 0)])
    assert orphans == []
    assert len(planner.index.match(chain("a", "b", "c"))) == 3


def test_an_orphan_found_on_disk_is_dropped_with_all_below_it() -> None:
    """LMCache #562, #1175: files nobody could hit were never deleted or reused."""
    pages = [stored("a", None, 0), stored("c", "b", 1), stored("d", "c", 2)]
    planner, pool, orphans = adopting(pages)
    assert sorted(orphans) == [1, 2]
    assert pool.used == 1
    assert planner.room.free_pages[DISK] == 7
    assert planner.index.match(chain("c")) == []
    assert planner.index.check(lambda: True) == []


def test_of_pages_found_the_oldest_leaf_gives_way_first() -> None:
    planner, _, _ = adopting([stored("a", None, 0), stored("b", "a", 1), stored("x", None, 2)])
    order = planner.index.victims(planner.index.by_name[DISK], 3)
    assert [planner.index.key(page) for page in order] == list(chain("b", "a", "x"))


def test_a_restart_keeps_every_page_that_was_on_disk() -> None:
    rig = PlannerRig(hbm=8, host=8, disk=8)
    rig.put(chain("a", "b"))
    rig.put(chain("a", "b", "c")[2:])
    rig.land(rig.begin_flush(2))
    before = rig.tiers_of(*"abc")
    rig.restart()
    assert rig.tiers_of(*"abc") == ["disk" if "disk" in tiers else "" for tiers in before]
    rig.check()


# -- a plan is a value -----------------------------------------------------------------------------


def random_calls(planner: Planner, seed: int) -> list[Plan]:
    """The same calls for the same seed; every plan is carried out at once."""
    choose, plans = Random(seed), []
    for _ in range(60):
        conversation, turns = choose.randrange(5), choose.randint(1, 6)
        keys = chain(*[("shared", 0), *((conversation, at) for at in range(turns))])
        verb = choose.choice(["put", "put", "prefetch", "flush"])
        if verb == "put":
            found = len(planner.index.match(keys))
            if found == len(keys):
                continue
            rest = keys[found:]
            plan = planner.plan_put(rest, [choose.randrange(99) for _ in rest])
        elif verb == "prefetch":
            plan = planner.plan_prefetch(keys)
        else:
            plan = planner.plan_flush(planner.dirty_pages()[:3])
        plans.append(planner.carry_out(plan))
    return plans


@pytest.mark.parametrize("policy", ["lru", "fifo"])
@pytest.mark.parametrize("write_through", [False, True])
def test_two_planners_that_are_asked_the_same_decide_the_same(
    policy: str, write_through: bool
) -> None:
    """sglang #22607, #30760: ranks took different decisions, and a collective hung."""
    options: Any = {"policy": policy, "write_through": write_through}
    planners = [
        Planner({HOST: SlotPool(7), DISK: SlotPool(11)}, {HOST: 7, DISK: 11}, **options)
        for _ in range(2)
    ]
    ours, theirs = (random_calls(planner, seed=5) for planner in planners)
    assert ours == theirs
    assert any(plan.demote for plan in ours) or write_through
    assert any(plan.load for plan in ours)


def test_a_plan_survives_pickling_and_is_small() -> None:
    """Rank 0 broadcasts it."""
    rig = PlannerRig(hbm=6, host=2, disk=8)
    rig.put(chain("a", "b"))
    flight = rig.begin_put(chain("c", "d"))
    assert flight is not None
    plan = flight.plan
    assert pickle.loads(pickle.dumps(plan)) == plan
    assert len(pickle.dumps(plan)) < 2048


def test_one_planner_can_carry_out_what_another_decided() -> None:
    slots = {HOST: 4, DISK: 4}
    rank_0, rank_1 = (Planner({n: SlotPool(c) for n, c in slots.items()}, slots) for _ in range(2))
    for keys in (chain("a", "b"), chain("c", "d"), chain("e")):
        sent = pickle.dumps(rank_0.plan_put(keys, range(len(keys))))
        rank_1.plan_put(keys, range(len(keys)))
        for rank in (rank_0, rank_1):
            rank.carry_out(pickle.loads(sent))
    keys = chain("a", "b")
    assert rank_0.index.match(keys) == rank_1.index.match(keys)
    assert rank_0.index.check(lambda: True) == rank_1.index.check(lambda: True) == []


def test_moves_come_after_those_they_depend_on() -> None:
    rig = PlannerRig(hbm=8, host=2, disk=8)
    rig.put(chain("a", "b"))
    flight = rig.begin_put(chain("c", "d"))
    assert flight is not None
    order = list(flight.plan.moves())
    demoted = {move.page: at for at, move in enumerate(order) if move.target == DISK}
    for at, move in enumerate(order):
        if move.after >= 0:
            assert demoted[move.after] < at


def test_a_move_in_place_is_one_that_has_nothing_to_copy() -> None:
    def move(source: str, source_slot: int) -> Move:
        return Move(0, key_of("a"), None, source, source_slot, HBM, 3)

    assert move(HBM, 3).is_in_place
    assert not move(HBM, 2).is_in_place
    assert not move(HOST, 3).is_in_place


# -- faults found by random histories --------------------------------------------------------------


def test_a_failed_demotions_slot_is_not_promised_twice() -> None:
    """Demoting `old` for `new` fails, so `old` is back and `new` will not be stored; before that is
    done a second put demotes `old` again. Its slot was then freed while the second demotion read
    it, and given to two pages at once: wrong bytes under a good checksum.
    """
    rig = PlannerRig(hbm=8, host=1, disk=2)
    rig.put(chain("old"))
    first = rig.begin_put(chain("new"))
    assert first is not None
    (demotion,) = first.plan.demote
    rig.begin(first, demotion, fails=True)
    rig.publish(first)
    second = rig.begin_put(chain("newer"))
    assert second is not None
    rig.land(first)
    rig.check()
    rig.land(second)
    rig.check()
    assert rig.tiers_of("old") == ["hbm+host"]


def test_a_page_whose_bad_disk_copy_is_still_being_read_can_be_put_again() -> None:
    """Two plans read one disk copy; the first finds it corrupt and the page is computed and put
    again, with write-through, while the second still holds the copy: the put must not die.
    """
    rig = PlannerRig(hbm=8, host=4, disk=4, write_through=True)
    rig.put(chain("a"))
    rig.restart()
    into = rig.allocate(1)
    assert into is not None
    reading = rig.begin_get(chain("a"), into=into)
    other = rig.begin_prefetch(chain("a"))
    rig.begin(reading, rig.ready(reading)[0], is_corrupt=True)
    rig.publish(reading)
    again = rig.begin_put(chain("a"))
    assert again is not None
    rig.land_all()
    rig.check()
    assert other.is_over
    assert rig.tiers_of("a") == ["hbm+host"]


def test_a_get_that_joined_a_failed_fill_does_not_abort_the_next_one() -> None:
    """Three gets of one page: the first fill fails, the second had joined it. Before the second has
    been told, a third gets the same HBM slot; the second's failure then freed it under the third,
    which read another page's bytes from it.
    """
    rig = PlannerRig(hbm=4, host=2, disk=0)
    rig.put(chain("a"))
    rig.release_owned(rig.allocate(4) or [])
    first, second = rig.begin_get(chain("a")), rig.begin_get(chain("a"))
    rig.begin(first, first.queued[0], fails=True)
    rig.publish(first)
    rig.begin(second, second.queued[0])
    third = rig.begin_get(chain("a"))
    assert third.plan.slots == second.plan.slots
    rig.land(second)
    assert second.arrived_pages() == 0
    rig.land(third)
    rig.put(chain("x", "y", "z"))
    assert third.arrived_pages() == 1
    for flight in (first, second, third):
        rig.release(flight)
    rig.check()


def test_a_put_does_not_drop_from_disk_what_it_puts_itself() -> None:
    """An engine keeps its HBM to itself: disk alone has pages a and b when they are put again."""
    rig = PlannerRig(hbm=0, host=2, disk=3)
    rig.put(chain("a", "b"))
    rig.put(chain("x", "y"))
    rig.put(chain("a", "b"))
    rig.check()
    assert len(rig.planner.index.match(chain("a", "b"))) == 2
    rig.put(chain("m", "n"))
    rig.check()


def test_a_put_that_names_a_key_twice_changes_nothing() -> None:
    rig = PlannerRig(hbm=0, host=200, disk=0)
    (key,) = chain("a")
    with pytest.raises(ValueError, match="named twice"):
        rig.planner.plan_put(KeyChain([key] * 120), range(120))
    assert len(rig.planner.index) == 0
    rig.check()
