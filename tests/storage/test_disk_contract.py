"""DiskTier under the contract of a tier, with pages that fill blocks and pages that do not."""

from __future__ import annotations

import os
from pathlib import Path

from contracts import TierContract

from tiered_kv.storage.disk import DiskTier

FINGERPRINT = "test layout"


class TestDiskTier(TierContract):
    verifies = True

    def open_tier(self, folder: Path) -> DiskTier:
        return DiskTier.open(folder, self.page_bytes, 1 << 20, FINGERPRINT, io_threads=2)

    def raw_read(self, tier: DiskTier, slot: int) -> bytes:
        path, offset = self._place(tier, slot)
        with open(path, "rb") as file:
            file.seek(offset)
            return file.read(self.page_bytes)

    def raw_write(self, tier: DiskTier, slot: int, data: bytes) -> None:
        path, offset = self._place(tier, slot)
        with open(path, "r+b") as file:
            file.seek(offset)
            file.write(data)
            os.fsync(file.fileno())

    def _place(self, tier: DiskTier, slot: int) -> tuple[str, int]:
        record = tier._records.record(slot)
        assert record is not None
        return tier._files.path(record.segment), record.offset


class TestDiskTierWithPagesOfWholeBlocks(TestDiskTier):
    page_bytes = 8192


class TestDiskTierWithTinyPages(TestDiskTier):
    page_bytes = 100
