"""A disk tier and its directory, for the files of tests of the disk tier."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from disk_rig import open_tier

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
