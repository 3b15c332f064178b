"""Reads that are interrupted, or that want descriptors: no page counts as bad, nothing is held."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from disk_rig import PAGE_BYTES, assert_holds, buffers, chain, open_tier, put, raising_once

from tiered_kv.errors import TierIOError
from tiered_kv.storage.disk import DiskTier, lane, reader, ring, runs
from tiered_kv.storage.disk.precedence import Precedence
from tiered_kv.storage.disk.records import Records
from tiered_kv.storage.disk.ring import Ring
from tiered_kv.storage.disk.segment import SegmentFiles


@pytest.fixture
def tier(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[DiskTier]:
    for module in (runs, reader, lane):
        monkeypatch.setattr(module, "RUN_BYTES", PAGE_BYTES)
    monkeypatch.setattr(runs, "MIN_RUN_BYTES", PAGE_BYTES)
    tier = open_tier(tmp_path / "store", capacity_bytes=64 << 20)
    yield tier
    tier.close()


def refused(monkeypatch: pytest.MonkeyPatch, passed: int, until: int) -> list[int]:
    """Opening to read fails for want of descriptors, from one call to another."""
    calls: list[int] = []
    real = SegmentFiles.open_for_reads

    def opened(self: SegmentFiles, segment: int, into: dict[int, int]) -> None:
        calls.append(segment)
        if passed < len(calls) <= until:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        real(self, segment, into)

    monkeypatch.setattr(SegmentFiles, "open_for_reads", opened)
    return calls


@pytest.mark.parametrize("count", [1, 40])
def test_no_page_fails_for_want_of_descriptors(
    tier: DiskTier, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    pages = chain(range(count))
    slots = put(tier, pages)
    calls = refused(monkeypatch, 0, 3)
    assert_holds(tier, slots, pages)
    assert len(calls) >= 4


@pytest.mark.parametrize("count", [1, 4])
def test_a_shortage_that_does_not_end_is_no_outcome_of_a_page(
    tier: DiskTier, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    slots = put(tier, chain(range(count)))
    monkeypatch.setattr(lane, "_SHORTAGE_S", 0.0)
    refused(monkeypatch, 0, 1 << 30)
    with pytest.raises(TierIOError, match="cannot be opened: Too many open files"):
        tier.read(slots, buffers(count))
    assert not any(tier._records._readers) and not tier._precedence._reads


def test_runs_of_one_segment_share_a_descriptor(
    tier: DiskTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    pages = chain(range(40))
    slots = put(tier, pages)
    assert_holds(tier, slots, pages)  # now this thread has its ring
    before = len(os.listdir("/proc/self/fd"))
    end = tier.begin_read(slots, buffers(40))
    own = tier._reader._lane()
    assert len(own._under_way) > 1
    assert len(own._open) == 1
    assert end() == [None] * 40
    assert own._open == {}
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("first_pages", [20, 12, 1])
@pytest.mark.parametrize(
    ("owner", "name"),
    [(Records, "locate"), (Records, "release"), (Precedence, "begin_read")],
)
def test_an_interrupt_after_counting_leaves_nothing_held(
    tier: DiskTier, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, first_pages: int
) -> None:
    pages = chain(range(20))
    slots = put(tier, pages)
    monkeypatch.setattr(reader, "FIRST_BYTES", first_pages * tier._reader.stride_bytes)
    monkeypatch.setattr(owner, name, raising_once(getattr(owner, name), KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        tier.read(slots, buffers(20))
    assert set(tier._records._readers) == {0}
    assert tier._precedence._reads == set()
    assert_holds(tier, slots, pages)


def test_a_ring_that_cannot_be_drained_is_replaced(
    tier: DiskTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not ring.is_ring_allowed():
        pytest.skip("io_uring is not allowed here")
    pages = chain(range(40))
    slots = put(tier, pages)
    assert_holds(tier, slots, pages)
    first = tier._reader._lane()._requests

    calls, enter = 0, Ring.enter

    def refuse(self: Ring, wait: int) -> None:
        nonlocal calls
        calls += 1
        if calls == 1:
            return enter(self, wait)
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    with monkeypatch.context() as patch:
        patch.setattr(ring, "_DRAIN_TRIES", 1)
        patch.setattr(Ring, "enter", refuse)
        patch.setattr(Ring, "next_completion", lambda _: None)  # nor had it been done by then
        with pytest.raises(OSError, match="Cannot allocate memory"):
            tier.read(slots, buffers(40))
    assert tier._reader._lane()._requests is not first
    assert_holds(tier, slots, pages)
