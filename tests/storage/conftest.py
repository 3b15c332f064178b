"""A disk tier and its directory, for the files of tests of the disk tier."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from disk_rig import AHEAD, open_tier

import tiered_kv.storage.disk.tier
from tiered_kv.storage.disk import DiskTier


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """The directory of `tier`; not there before a tier is opened."""
    return tmp_path / "store"


@pytest.fixture
def tier(path: Path) -> Iterator[DiskTier]:
    """An empty tier of `CAPACITY_BYTES`, closed in the end."""
    opened = open_tier(path)
    yield opened
    opened.close()


@pytest.fixture
def ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """`AHEAD` pages are told to the catalog ahead."""
    monkeypatch.setattr(tiered_kv.storage.disk.tier, "_AHEAD_PAGES", AHEAD)
    monkeypatch.setattr(tiered_kv.storage.disk.tier, "_AHEAD_BYTES", 0)
