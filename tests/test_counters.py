"""Counters: what is added is in the snapshot, and a snapshot does not move."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from tiered_kv.counters import Counters
from tiered_kv.plan import TIERS


def test_a_new_store_has_done_nothing() -> None:
    stats = Counters().snapshot({})
    assert stats.hit_pages == stats.bytes_read == stats.bytes_written == dict.fromkeys(TIERS, 0)
    assert stats.missed_pages == stats.put_pages == stats.not_stored_pages == 0
    assert stats.checksums_verified == stats.checksums_failed == 0
    assert stats.why_miss == {}
    assert stats.load_s_per_page == {}


def test_hits_are_kept_apart_by_tier() -> None:
    counters = Counters()
    counters.add("hit", "host", 3)
    counters.add("hit", "disk", 2)
    counters.add("hit", "host", 1)
    assert counters.snapshot({}).hit_pages == {"hbm": 0, "host": 4, "disk": 2}


def test_misses_are_the_sum_of_their_reasons() -> None:
    counters = Counters()
    counters.add("miss", "evicted", 3)
    counters.add("miss", "corrupt", 1)
    stats = counters.snapshot({})
    assert stats.missed_pages == 4
    assert stats.why_miss == {"evicted": 3, "corrupt": 1}


def test_a_count_of_nothing_leaves_no_trace() -> None:
    counters = Counters()
    counters.add("miss", "evicted", 0)
    assert counters.snapshot({}).why_miss == {}


def test_moved_bytes_are_read_from_one_tier_and_written_to_the_other() -> None:
    counters = Counters()
    counters.moved("disk", "host", 100)
    counters.moved("host", "hbm", 30)
    stats = counters.snapshot({})
    assert stats.bytes_read == {"hbm": 0, "host": 30, "disk": 100}
    assert stats.bytes_written == {"hbm": 30, "host": 100, "disk": 0}


def test_totals_have_names_of_their_own() -> None:
    counters = Counters()
    for n, name in enumerate(("verified", "corrupt", "put", "not_stored"), start=1):
        counters.add("total", name, n)
    stats = counters.snapshot({"host": 7})
    assert (stats.checksums_verified, stats.checksums_failed) == (1, 2)
    assert (stats.put_pages, stats.not_stored_pages) == (3, 4)
    assert stats.resident_pages == {"host": 7}


def test_a_snapshot_does_not_change_afterwards() -> None:
    counters = Counters()
    counters.add("hit", "host", 1)
    before = counters.snapshot({})
    counters.add("hit", "host", 1)
    counters.add("miss", "evicted", 1)
    assert before.hit_pages["host"] == 1
    assert before.why_miss == {}


def test_the_first_load_sets_the_rate_and_later_ones_move_it() -> None:
    counters = Counters()
    counters.loaded("disk", 4, 2.0)
    assert counters.load_s_per_page() == {"disk": 0.5}
    counters.loaded("disk", 1, 1.0)
    assert counters.load_s_per_page()["disk"] == pytest.approx(0.6)
    counters.loaded("host", 10, 1.0)
    assert counters.load_s_per_page()["host"] == pytest.approx(0.1)


def test_a_load_of_no_pages_says_nothing_about_the_rate() -> None:
    counters = Counters()
    counters.loaded("disk", 0, 3.0)
    assert counters.load_s_per_page() == {}


def test_a_rate_that_was_handed_out_does_not_change() -> None:
    counters = Counters()
    counters.loaded("disk", 1, 1.0)
    rates = counters.load_s_per_page()
    counters.loaded("disk", 1, 2.0)
    assert rates == {"disk": 1.0}


def test_threads_lose_no_count() -> None:
    counters = Counters()

    def work(_: int) -> None:
        for _ in range(500):
            counters.add("hit", "hbm", 1)
            counters.moved("disk", "host", 2)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))
    stats = counters.snapshot({})
    assert stats.hit_pages["hbm"] == 2000
    assert stats.bytes_read["disk"] == 4000
