"""SlotPool against a set, and what a check report says."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tiered_kv.slots import SlotPool
from tiered_kv.storage.base import CheckReport


def test_slots_come_lowest_first() -> None:
    pool = SlotPool(5)
    assert pool.reserve(3) == [0, 1, 2]
    pool.free([1])
    assert pool.reserve(2) == [1, 3]


def test_a_reservation_that_does_not_fit_takes_nothing() -> None:
    pool = SlotPool(3)
    assert pool.reserve(2) == [0, 1]
    assert pool.reserve(2) is None
    assert pool.used == 2
    assert pool.reserve(1) == [2]


def test_a_negative_reservation_takes_nothing() -> None:
    pool = SlotPool(3)
    assert pool.reserve(-1) is None
    assert pool.used == 0


def test_a_pool_of_no_slots_gives_none() -> None:
    pool = SlotPool(0)
    assert pool.reserve(0) == []
    assert pool.reserve(1) is None


def test_free_refuses_a_slot_that_is_free_unknown_or_named_twice_and_frees_none() -> None:
    pool = SlotPool(4)
    pool.reserve(3)
    for wrong in ([0, 3], [0, 4], [0, -1], [0, 0]):
        with pytest.raises(ValueError, match="slot"):
            pool.free(wrong)
        assert pool.used == 3


def test_the_first_slots_of_a_pool_are_taken_unnamed() -> None:
    pool = SlotPool(6)
    pool.take_first(0)
    pool.take_first(4)
    assert pool.used == 4
    assert [pool.is_taken(slot) for slot in range(6)] == [True] * 4 + [False] * 2
    pool.free([1])
    assert pool.reserve(2) == [1, 4]
    with pytest.raises(ValueError, match="the first 2 of 6 slots"):
        pool.take_first(2)
    with pytest.raises(ValueError, match="the first 3 of 2 slots"):
        SlotPool(2).take_first(3)


def test_a_named_slot_can_be_claimed_and_those_below_it_stay_free() -> None:
    pool = SlotPool(6)
    pool.reserve_exact(3)
    assert pool.used == 1
    assert pool.is_taken(3)
    assert pool.reserve(5) == [0, 1, 2, 4, 5]
    assert pool.reserve(1) is None


def test_a_returned_slot_can_be_claimed_by_name() -> None:
    pool = SlotPool(4)
    pool.reserve(4)
    pool.free([1, 2])
    pool.reserve_exact(2)
    assert pool.reserve(1) == [1]
    assert pool.reserve(1) is None


@pytest.mark.parametrize("slot", [-1, 4, 0])
def test_a_slot_that_is_taken_or_outside_cannot_be_claimed(slot: int) -> None:
    pool = SlotPool(4)
    pool.reserve(1)
    with pytest.raises(ValueError, match=f"slot {slot}"):
        pool.reserve_exact(slot)
    assert pool.used == 1


def test_is_taken_is_false_outside_the_pool() -> None:
    pool = SlotPool(2)
    pool.reserve(2)
    assert not pool.is_taken(-1)
    assert not pool.is_taken(2)


@settings(max_examples=80, deadline=None, derandomize=True, database=None)
@given(data=st.data())
def test_any_order_of_calls_gives_what_a_set_gives(data: st.DataObject) -> None:
    capacity = data.draw(st.integers(0, 12), label="capacity")
    pool, taken = SlotPool(capacity), set[int]()
    for _ in range(data.draw(st.integers(1, 15), label="calls")):
        verb = data.draw(st.sampled_from(["reserve", "claim", "free"]), label="verb")
        free = sorted(set(range(capacity)) - taken)
        if verb == "reserve":
            n = data.draw(st.integers(0, 6), label="n")
            got = pool.reserve(n)
            assert got == (free[:n] if n <= len(free) else None)
            taken |= set(got or ())
        elif verb == "claim" and free:
            slot = data.draw(st.sampled_from(free), label="slot")
            pool.reserve_exact(slot)
            taken.add(slot)
        elif verb == "free" and taken:
            slots = data.draw(st.lists(st.sampled_from(sorted(taken)), unique=True), label="slots")
            pool.free(slots)
            taken -= set(slots)
        assert pool.used == len(taken)
        assert [slot for slot in range(capacity) if pool.is_taken(slot)] == sorted(taken)


def test_a_report_is_clean_when_all_that_was_wrong_has_been_fixed() -> None:
    assert CheckReport(pages=3).is_clean
    assert not CheckReport(problems=["one", "two"], fixed=1).is_clean
    assert CheckReport(problems=["one", "two"], fixed=2).is_clean
