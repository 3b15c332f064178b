"""Space of segments that hold nothing any more: free with the commit that says so, not before."""

from __future__ import annotations

from typing import Any

import pytest
from disk_rig import page, put

from tiered_kv.errors import TierIOError
from tiered_kv.storage.disk import DiskTier
from tiered_kv.storage.disk.catalog import Catalog


class Filled:
    """A tier with one segment full, its pages' slots, and one page in the next segment."""

    def __init__(self, tier: DiskTier) -> None:
        self.tier = tier
        self.slots: list[int] = []
        self.number = 0
        while not tier._log.sealed:
            self.slots += self.put()
        self.after = [self.slots.pop()]
        (self.segment,) = tier._log.sealed
        assert tier._records.live_pages(self.segment) == len(self.slots)

    def put(self) -> list[int]:
        self.number += 1
        return put(self.tier, [page(self.number)])

    @property
    def is_free(self) -> bool:
        return self.segment in self.tier._log.free


def test_a_segment_is_free_with_the_commit_that_forgets_its_pages(tier: DiskTier) -> None:
    filled = Filled(tier)
    tier.free(filled.slots)
    assert not filled.is_free, "the catalog still names its pages"
    filled.put()
    assert filled.is_free
    assert tier._catalog.entries == 2


def test_what_is_freed_while_a_commit_is_made_waits_for_the_next(
    tier: DiskTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    filled, commit = Filled(tier), Catalog.commit

    def freed_meanwhile(catalog: Catalog, **changes: Any) -> None:
        monkeypatch.setattr(Catalog, "commit", commit)
        tier.free(filled.slots)
        commit(catalog, **changes)

    monkeypatch.setattr(Catalog, "commit", freed_meanwhile)
    filled.put()
    assert not filled.is_free, "that commit did not know of it"
    filled.put()
    assert filled.is_free


def test_a_commit_that_fails_frees_nothing(tier: DiskTier, monkeypatch: pytest.MonkeyPatch) -> None:
    filled, commit = Filled(tier), Catalog.commit
    tier.free(filled.slots)

    def failing(catalog: Catalog, **changes: Any) -> None:
        raise TierIOError("the catalog broke", tier="disk", errno=5)

    monkeypatch.setattr(Catalog, "commit", failing)
    with pytest.raises(TierIOError, match="broke"):
        filled.put()
    assert not filled.is_free
    monkeypatch.setattr(Catalog, "commit", commit)
    filled.put()
    assert tier._log._filling == filled.segment, "free, and filled first: it has a file"


def test_a_segment_that_is_read_is_not_free_and_no_write_waits_for_its_reader(
    tier: DiskTier,
) -> None:
    filled = Filled(tier)
    held: dict[int, int] = {}
    tier._records.locate(filled.slots[:1], held)
    tier.free(filled.slots)
    filled.put()
    assert not filled.is_free
    tier._records.release(filled.segment, 1, held)
    filled.put()
    assert filled.is_free
