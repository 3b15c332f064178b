"""HostTier under the contract of a tier, and what it adds: alignment, zero-copy views, staging."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from contracts import TierContract, page_of, read_all, take

from tiered_kv.errors import ConfigError
from tiered_kv.storage.host import HostTier
from tiered_kv.storage.slab import ALIGNMENT, align_up


class TestHostTier(TierContract):
    def open_tier(self, folder: Path) -> HostTier:
        return HostTier(self.page_bytes, self.capacity_pages * align_up(self.page_bytes))

    def raw_read(self, tier: HostTier, slot: int) -> bytes:
        start = slot * align_up(self.page_bytes)
        return tier._slab.array[start : start + self.page_bytes].tobytes()

    def raw_write(self, tier: HostTier, slot: int, data: bytes) -> None:
        start = slot * align_up(self.page_bytes)
        tier._slab.array[start : start + self.page_bytes] = np.frombuffer(data, dtype=np.uint8)


class TestHostTierWithStaging(TestHostTier):
    def open_tier(self, folder: Path) -> HostTier:
        slots = self.capacity_pages + 1
        return HostTier(self.page_bytes, slots * align_up(self.page_bytes), with_staging=True)

    def test_staging_slots_are_no_part_of_the_capacity_and_of_no_page(self) -> None:
        tier = HostTier(self.page_bytes, 40 * align_up(self.page_bytes), with_staging=True)
        assert tier.staging_pages == 2
        assert tier.capacity_pages == 38
        slots = take(tier, 38)
        assert tier.reserve(1) is None
        pages = [page_of(slot, self.page_bytes) for slot in slots]
        tier.write(slots, pages)
        for at in range(tier.staging_pages):
            tier.staging(tier.staging_pages)[at][:] = 0xEE
        assert read_all(tier, slots) == [page.data.tobytes() for page in pages]
        tier.close()


def test_every_slot_starts_where_direct_io_can_reach_it() -> None:
    tier = HostTier(5000, 10 * 8192, with_staging=True)
    views = [tier.view(slot) for slot in range(tier.capacity_pages)]
    views += tier.staging(tier.staging_pages)
    assert {view.ctypes.data % ALIGNMENT for view in views} == {0}
    assert {view.nbytes for view in views} == {5000}


def test_a_view_is_the_slot_itself() -> None:
    tier = HostTier(5000, 4 * 8192)
    slots = take(tier, 2)
    tier.view(slots[1])[:] = page_of("a", 5000).data
    assert read_all(tier, slots[1:]) == [page_of("a", 5000).data.tobytes()]
    assert not tier.view(slots[0]).any()


def test_used_bytes_count_the_padding_of_a_page() -> None:
    tier = HostTier(5000, 4 * 8192)
    take(tier, 3)
    assert tier.used_bytes == 3 * 8192
    assert tier.capacity_bytes == 4 * 8192


def test_no_more_pages_than_their_aligned_slots_fit_into_the_budget() -> None:
    """Another system allocated 1.9 times what it was asked for (vllm #53042, #56410)."""
    tier = HostTier(4097, 8 * 8192 - 1)
    assert tier.capacity_pages == 7
    assert tier._slab.n_bytes <= tier.capacity_bytes


@pytest.mark.parametrize(("with_staging", "least"), [(False, 8192), (True, 16384)])
def test_a_budget_below_one_page_is_refused_with_the_least_that_would_do(
    with_staging: bool, least: int
) -> None:
    with pytest.raises(ConfigError, match=rf"host={least - 1}.*at least {least}"):
        HostTier(5000, least - 1, with_staging=with_staging)
    assert HostTier(5000, least, with_staging=with_staging).capacity_pages == 1


def test_memory_that_no_gpu_wants_is_not_pinned() -> None:
    assert not HostTier(4096, 4096).is_pinned
