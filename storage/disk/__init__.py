"""The disk tier: append-only segments and an LMDB catalog (`docs/storage-format.md`)."""

from __future__ import annotations

from tiered_kv.storage.disk.records import StoredPage
from tiered_kv.storage.disk.tier import DiskTier

__all__ = ["DiskTier", "StoredPage"]
