"""Checking a disk store: what it reports, what it mends, what it leaves alone."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest
from disk_rig import PAGE_BYTES, assert_holds, buffers, chain, flip, key_of, open_tier, put

from tiered_kv.config import StoreConfig
from tiered_kv.errors import CorruptPageError
from tiered_kv.keys import KeyChain
from tiered_kv.layout import KVLayout
from tiered_kv.storage.base import Page
from tiered_kv.storage.disk import DiskTier
from tiered_kv.storage.disk.extent import Record
from tiered_kv.storage.disk.recovery import keep_within, leave_one_empty
from tiered_kv.store import TieredStore


def test_check_reports_a_bad_page_once_and_fix_keeps_what_hangs_from_it(
    tier: DiskTier, path: Path
) -> None:
    """One damaged root cost all that hung from it; a key stands for its whole prefix, so it hits
    again once the root is computed (docs/decisions/0002)."""
    pages = chain(range(6))
    slots = put(tier, pages)
    flip(tier, slots[0], path)
    report = tier.check()
    assert (report.pages, len(report.problems), report.fixed) == (6, 1, 0)
    assert report.hanging_pages == 5
    assert not report.is_clean
    report = tier.check(fix=True)
    assert (len(report.problems), report.fixed, report.hanging_pages) == (1, 1, 5)
    assert report.is_clean
    report = tier.check()
    assert (report.pages, report.problems, report.hanging_pages) == (5, [], 5)
    assert [p.slot for p in tier.pages()] == slots[1:]
    assert isinstance(tier.read(slots[:1], buffers(1))[0], CorruptPageError)
    tier.free(slots[:1])
    assert_holds(tier, put(tier, pages[:1]), pages[:1])
    assert_holds(tier, slots[1:], pages[1:])
    assert tier.check().hanging_pages == 0


def heal(tier: DiskTier, path: Path, slots: list[int], root: Page) -> None:
    """The root is found corrupt, given up, computed and put again: it is newer than the rest."""
    flip(tier, slots[0], path)
    assert isinstance(tier.read(slots[:1], buffers(1))[0], CorruptPageError)
    tier.free(slots[:1])
    assert put(tier, [root]) == slots[:1]


@pytest.mark.parametrize("without_catalog", [False, True], ids=["catalog", "rebuilt"])
def test_healed_page_keeps_its_descendants_over_a_restart(
    path: Path, without_catalog: bool
) -> None:
    """`check` took each descendant of a page written again for an orphan, and dropped it."""
    tier = open_tier(path)
    pages = chain(range(30))
    slots = put(tier, pages)
    heal(tier, path, slots, pages[0])
    tier.close()
    if without_catalog:
        (path / "catalog" / "data.mdb").unlink()
    again = open_tier(path)
    report = again.check(fix=True)
    assert (report.pages, report.problems, report.hanging_pages) == (30, [], 0)
    listed = {found.key: found.slot for found in again.pages()}
    assert next(reversed(listed)) == pages[0].key  # newer than what hangs from it
    assert_holds(again, [listed[one.key] for one in pages], pages)
    again.close()


def test_page_with_two_faults_is_reported_once(tier: DiskTier, path: Path) -> None:
    slots = put(tier, chain(range(3)))
    flip(tier, slots[1], path)
    flip(tier, slots[0], path, at=300 - 4096)  # the header of all three
    report = tier.check(fix=True)
    assert (len(report.problems), report.fixed, report.hanging_pages) == (3, 3, 1)
    assert tier.check().problems == []


def test_fix_does_not_count_what_it_leaves_as_it_is(tier: DiskTier, path: Path) -> None:
    """A wrong counter, or too many bytes, do not go away by dropping a page."""
    slots = put(tier, chain(range(3)))
    flip(tier, slots[2], path)
    tier._records._live_pages[1] += 1
    report = tier.check(fix=True)
    assert (len(report.problems), report.fixed, report.is_clean) == (2, 1, False)
    tier._records._live_pages[1] -= 1
    assert tier.check().problems == []


def test_fix_writes_pages_with_a_lost_header_again(tier: DiskTier, path: Path) -> None:
    pages = chain(range(4))
    slots = put(tier, pages)
    flip(tier, slots[0], path, at=300 - 4096)
    assert len(tier.check().problems) == 4
    assert tier.check(fix=True).is_clean
    assert tier.check().problems == []
    assert_holds(tier, slots, pages)


def test_store_with_a_healed_page_hits_as_far_as_before(path: Path) -> None:
    layout = KVLayout.uniform(PAGE_BYTES, 16)
    config = StoreConfig.model_validate(
        {"hbm": 1 << 20, "host": 1 << 20, "disk": path, "disk_size": 4 << 20, "device": "cpu"}
    )

    def store_pages(store: TieredStore, keys: KeyChain) -> None:
        slots = store.hbm.allocate(len(keys))
        assert slots is not None
        assert store.put(keys, slots).wait() == len(keys)

    with TieredStore.open(layout, config) as store:
        keys = store.keys(list(range(16 * 8)))
        store_pages(store, keys)
    with closing(open_tier(path, fingerprint=layout.fingerprint)) as tier:
        (root,) = [found.slot for found in tier.pages() if found.parent is None]
        flip(tier, root, path)
    with TieredStore.open(layout, config) as store:
        with store.get(keys) as load:
            assert load.wait() == 0
        store_pages(store, keys[:1])
        assert store.match(keys).pages == 8
    with closing(open_tier(path, fingerprint=layout.fingerprint)) as tier:
        report = tier.check(fix=True)
        assert (report.pages, report.problems, report.hanging_pages) == (8, [], 0)
    with TieredStore.open(layout, config) as store:
        assert store.match(keys).pages == 8
        with store.get(keys) as load:
            assert load.wait() == 8


def record(number: int, parent: int | None, sequence: int, segment: int = 0) -> Record:
    hangs_from = None if parent is None else key_of(parent)
    return Record(key_of(number), hangs_from, bytes(16), sequence, segment, 4096, PAGE_BYTES)


def test_rebuild_with_too_many_pages_keeps_a_healed_root_before_its_children() -> None:
    """A chain 0-1-2-3 whose root was written again, and an older chain 10-11."""
    records = [record(10, None, 1), record(11, 10, 2)]
    records += [record(1, 0, 3), record(2, 1, 4), record(3, 2, 5), record(0, None, 6)]
    for limit, kept in ((5, {0, 1, 2, 3, 10}), (3, {0, 1, 2}), (1, {0})):
        assert {found.key for found in keep_within(records, limit)} == {key_of(n) for n in kept}


def test_rebuild_gives_up_the_emptiest_segment_with_what_hangs_from_it() -> None:
    records = [record(1, 0, 2, 1), record(2, 1, 3, 1), record(5, None, 4, 1)]
    records.append(record(0, None, 9, 0))  # healed: newer than its children
    assert [found.key for found in leave_one_empty(records, 2)] == [key_of(5)]
    assert leave_one_empty(records, 3) == records
