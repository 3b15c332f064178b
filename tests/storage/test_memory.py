"""MemoryTier, the plain model the other tiers are compared with, under the contract of a tier."""

from __future__ import annotations

from pathlib import Path

from contracts import TierContract, buffers, page_of

from tiered_kv.errors import CorruptPageError
from tiered_kv.storage.memory import MemoryTier


class TestMemoryTier(TierContract):
    def open_tier(self, folder: Path) -> MemoryTier:
        return MemoryTier(self.page_bytes, self.capacity_pages)

    def raw_read(self, tier: MemoryTier, slot: int) -> bytes:
        return tier._pages[slot]

    def raw_write(self, tier: MemoryTier, slot: int, data: bytes) -> None:
        tier._pages[slot] = data


def test_a_slot_that_was_never_written_is_an_error_and_spoils_only_itself() -> None:
    tier = MemoryTier(64, 4)
    assert tier.reserve(2) == [0, 1]
    tier.write([1], [page_of("a", 64)])
    into = buffers(2, 64)
    outcome = tier.read([0, 1], into)
    assert isinstance(outcome[0], CorruptPageError)
    assert outcome[1] is None
    assert into[1].tobytes() == page_of("a", 64).data.tobytes()


def test_a_freed_slot_no_longer_gives_its_page() -> None:
    tier = MemoryTier(64, 4)
    slots = tier.reserve(1)
    assert slots is not None
    tier.write(slots, [page_of("a", 64)])
    tier.free(slots)
    assert tier.read(slots, buffers(1, 64)) != [None]
