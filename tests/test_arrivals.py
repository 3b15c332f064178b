"""Arrivals: what is on its way into which tier."""

from __future__ import annotations

import pytest
from contracts import key_of

from tiered_kv.arrivals import Arrivals
from tiered_kv.plan import DISK, HBM, HOST, Moves
from tiered_kv.streams import Event


def test_pages_that_come_together_have_one_event_in_the_tier_they_come_into() -> None:
    arrivals, done = Arrivals(), Event()
    arrivals.announce(HOST, [key_of("a"), key_of("b")], done)
    assert arrivals.event(HOST, key_of("a")) is arrivals.event(HOST, key_of("b")) is done
    assert arrivals.event(DISK, key_of("a")) is None
    assert arrivals.event(HOST, key_of("c")) is None
    assert len(arrivals) == 2


def test_a_page_may_be_on_its_way_into_two_tiers() -> None:
    arrivals, to_host, to_disk = Arrivals(), Event(), Event()
    arrivals.announce(HOST, [key_of("a")], to_host)
    arrivals.announce(DISK, [key_of("a")], to_disk)
    arrivals.end(HOST, [key_of("a")])
    assert arrivals.event(HOST, key_of("a")) is None
    assert arrivals.event(DISK, key_of("a")) is to_disk
    assert len(arrivals) == 1


def test_what_was_not_announced_cannot_end() -> None:
    arrivals = Arrivals()
    with pytest.raises(KeyError):
        arrivals.end(HOST, [key_of("a")])
    assert not arrivals


def test_moves_await_the_pages_that_come_into_their_source_and_no_others() -> None:
    arrivals = Arrivals()
    keys = [key_of(name) for name in "abc"]
    slots = [0, 1, 2]
    way = HOST, slots, HBM, slots
    moves = Moves(slots, keys, [None, *keys[:2]], way, waits=[True, False, True])
    assert arrivals.awaited(moves) == arrivals.awaited(tuple(moves)) == set()
    arrivals.announce(HOST, keys[:2], Event())
    arrivals.announce(DISK, keys[2:], Event())
    assert arrivals.awaited(moves) == arrivals.awaited(tuple(moves)) == {keys[0]}
