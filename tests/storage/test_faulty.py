"""Tiers around a tier keep the contract while nothing is injected, and fail as they are told."""

from __future__ import annotations

import errno
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from contracts import TierContract, buffers, page_of, pages_of, read_all, take

from tiered_kv.errors import CorruptPageError, TierIOError
from tiered_kv.storage.base import Tier
from tiered_kv.storage.faulty import CountingTier, FaultyTier, LatencyTier, WrappedTier
from tiered_kv.storage.host import HostTier
from tiered_kv.storage.memory import MemoryTier

PAGE_BYTES = 64


class TestWrappedTier(TierContract):
    def wrap(self, inner: Tier) -> WrappedTier:
        return WrappedTier(inner)

    def open_tier(self, folder: Path) -> WrappedTier:
        return self.wrap(MemoryTier(self.page_bytes, self.capacity_pages))

    def raw_read(self, tier: WrappedTier, slot: int) -> bytes:
        inner = tier.inner
        assert isinstance(inner, MemoryTier)
        return inner._pages[slot]

    def raw_write(self, tier: WrappedTier, slot: int, data: bytes) -> None:
        inner = tier.inner
        assert isinstance(inner, MemoryTier)
        inner._pages[slot] = data


class TestLatencyTier(TestWrappedTier):
    def wrap(self, inner: Tier) -> WrappedTier:
        gate = threading.Event()
        gate.set()
        return LatencyTier(inner, gate=gate)


class TestFaultyTierWithNothingInjected(TestWrappedTier):
    def wrap(self, inner: Tier) -> WrappedTier:
        return FaultyTier(inner)


class TestCountingTier(TestWrappedTier):
    def wrap(self, inner: Tier) -> WrappedTier:
        return CountingTier(inner)


@pytest.fixture
def faulty() -> FaultyTier:
    tier = FaultyTier(MemoryTier(PAGE_BYTES, 8))
    take(tier, 8)
    return tier


def test_a_write_told_to_fail_raises_no_space_and_writes_nothing(faulty: FaultyTier) -> None:
    faulty.write([0], [page_of("old", PAGE_BYTES)])
    faulty.fail_write = lambda slots: 1 in slots
    with pytest.raises(TierIOError) as caught:
        faulty.write([0, 1], pages_of(["a", "b"], PAGE_BYTES))
    assert caught.value.errno == errno.ENOSPC
    assert caught.value.tier == "memory"
    assert read_all(faulty, [0]) == [page_of("old", PAGE_BYTES).data.tobytes()]


def test_a_write_not_told_to_fail_goes_through(faulty: FaultyTier) -> None:
    faulty.fail_write = lambda slots: 1 in slots
    faulty.write([2], [page_of("a", PAGE_BYTES)])
    assert read_all(faulty, [2]) == [page_of("a", PAGE_BYTES).data.tobytes()]


def test_a_read_told_to_fail_fails_for_that_slot_alone(faulty: FaultyTier) -> None:
    faulty.write([0, 1, 2], pages_of("abc", PAGE_BYTES))
    faulty.fail_read = lambda slot: slot == 1
    into = buffers(3, PAGE_BYTES)
    outcome = faulty.read([0, 1, 2], into)
    assert outcome[0] is None
    assert outcome[2] is None
    assert isinstance(outcome[1], TierIOError)
    assert outcome[1].errno == errno.EIO


def test_a_flipped_bit_is_reported_and_really_flipped(faulty: FaultyTier) -> None:
    faulty.write([0, 1], pages_of("ab", PAGE_BYTES))
    faulty.flip = lambda slot: slot == 0
    into = buffers(2, PAGE_BYTES)
    outcome = faulty.read([0, 1], into)
    assert isinstance(outcome[0], CorruptPageError)
    assert outcome[1] is None
    good = page_of("a", PAGE_BYTES).data
    assert (into[0] != good).sum() == 1
    assert into[0][0] == good[0] ^ 1


def test_a_closed_gate_holds_a_read_until_it_is_opened() -> None:
    gate = threading.Event()
    gate.set()
    tier = LatencyTier(MemoryTier(PAGE_BYTES, 2), gate=gate)
    slots = take(tier, 1)
    tier.write(slots, [page_of("a", PAGE_BYTES)])
    gate.clear()
    into = buffers(1, PAGE_BYTES)
    untouched = into[0].tobytes()
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(tier.read, slots, into)
        assert not reading.done()
        assert into[0].tobytes() == untouched
        gate.set()
        assert reading.result() == [None]
    assert into[0].tobytes() == page_of("a", PAGE_BYTES).data.tobytes()


def test_counting_counts_calls_and_pages_each_way() -> None:
    tier = CountingTier(MemoryTier(PAGE_BYTES, 8))
    slots = take(tier, 3)
    tier.write(slots, pages_of("abc", PAGE_BYTES))
    read_all(tier, slots[:2])
    read_all(tier, slots[:1])
    assert tier.counts == {"write": 1, "pages_write": 3, "read": 2, "pages_read": 3}


def test_a_wrapper_passes_on_what_its_tier_has_beyond_the_contract() -> None:
    host = HostTier(PAGE_BYTES, 8 * 4096, with_staging=True)
    tier = CountingTier(FaultyTier(host))
    assert tier.name == "host"
    assert tier.staging_pages == host.staging_pages
    assert tier.view(0).ctypes.data == host.view(0).ctypes.data
    with pytest.raises(AttributeError):
        _ = tier.no_such_thing
