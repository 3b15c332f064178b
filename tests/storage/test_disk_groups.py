"""Writes that have begun become durable together, with one commit, or fail together."""

from __future__ import annotations

import errno
import os
import shutil
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from disk_rig import AHEAD, assert_holds, buffers, chain, noted_calls, open_tier, put

from tiered_kv.errors import TierIOError
from tiered_kv.storage.base import Page
from tiered_kv.storage.disk import DiskTier
from tiered_kv.storage.disk.catalog import Catalog
from tiered_kv.storage.disk.log import SegmentLog

PATIENCE_S = 30

End = Callable[[], None]


@pytest.fixture
def commits(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The steps of the catalog's commits, in order."""
    return noted_calls(monkeypatch, (Catalog, "prepare"), (Catalog, "commit"))


def begin(tier: DiskTier, pages: list[Page]) -> tuple[list[int], End]:
    slots = tier.reserve(len(pages))
    assert slots is not None
    return slots, tier.begin_write(slots, pages)


def assert_absent(tier: DiskTier, slots: list[int]) -> None:
    assert all(isinstance(one, TierIOError) for one in tier.read(slots, buffers(len(slots))))


def test_writes_that_have_begun_count_from_one_commit_on(
    tier: DiskTier, commits: list[str]
) -> None:
    sets = [chain(range(at, at + 4)) for at in (0, 100, 200)]
    begun = [begin(tier, pages) for pages in sets]
    assert commits == []
    for slots, _ in begun:
        assert_absent(tier, slots)
    assert tier.bytes_written_user == 0
    begun[1][1]()
    assert commits == ["commit"]
    for (slots, _), pages in zip(begun, sets, strict=True):
        assert_holds(tier, slots, pages)
    begun[0][1]()
    begun[2][1]()
    assert commits == ["commit"]
    assert tier.bytes_written_user == 12 * tier.page_bytes
    assert tier.check().is_clean


@pytest.mark.usefixtures("ahead")
def test_the_catalog_hears_ahead_of_writes_that_are_large_together(
    tier: DiskTier, commits: list[str]
) -> None:
    ends = [begin(tier, chain(range(at, at + AHEAD - 1)))[1] for at in (0, 100)]
    for end in ends:
        end()
    assert commits == ["prepare", "commit"]
    begin(tier, chain(range(200, 199 + AHEAD)))[1]()
    assert commits == ["prepare", "commit", "commit"]


def test_a_write_of_no_pages_ends_at_once(tier: DiskTier, commits: list[str]) -> None:
    tier.begin_write([], [])()
    assert commits == []


def test_a_crash_before_the_end_leaves_nothing_of_what_had_begun(
    path: Path, tier: DiskTier
) -> None:
    before = chain(range(5))
    put(tier, before)
    ends = [begin(tier, chain(range(at, at + 7)))[1] for at in (100, 200)]
    tier._log.drain()  # the data are on the medium, and still nobody was told that they count
    shutil.copytree(path, path.parent / "crashed")
    for end in ends:
        end()
    after = open_tier(path.parent / "crashed")
    assert {page.key for page in after.pages()} == {page.key for page in before}
    assert after.check().is_clean
    after.close()


def test_when_one_write_fails_on_the_medium_all_that_have_begun_fail(
    tier: DiskTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = put(tier, chain(range(5)))
    write, calls = os.pwritev, iter(range(100))

    def failing(*arguments: Any) -> int:
        if next(calls) == 1:
            raise OSError(errno.EIO, "the medium broke")
        return write(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwritev", failing)
        begun = [begin(tier, chain(range(at, at + 4 + at // 100))) for at in (100, 200, 300)]
        for pages, (_, end) in zip((5, 6, 7), begun, strict=True):
            with pytest.raises(TierIOError, match=f"writing {pages} pages failed: .*broke") as told:
                end()
            assert told.value.errno == errno.EIO
    for slots, _ in begun:
        assert_absent(tier, slots)
    again = chain(range(400, 405))
    tier.write(begun[0][0], again)
    assert_holds(tier, [*kept, *begun[0][0]], [*chain(range(5)), *again])
    assert tier.bytes_written_user == 10 * tier.page_bytes
    assert tier.check().is_clean


def test_a_failing_commit_fails_all_that_have_begun_in_the_same_words(
    tier: DiskTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = [begin(tier, chain(range(at, at + 4))) for at in (0, 100)]

    def full(*_: Any, **__: Any) -> None:
        raise TierIOError("the catalog is full", tier="disk", errno=errno.ENOSPC)

    with monkeypatch.context() as patch:
        patch.setattr(Catalog, "commit", full)
        with pytest.raises(TierIOError, match="the catalog is full"):
            begun[0][1]()
    with pytest.raises(TierIOError, match="the catalog is full") as told:
        begun[1][1]()
    assert told.value.errno == errno.ENOSPC
    assert tier.check().is_clean
    assert tier._catalog.entries == 0


def test_a_write_that_cannot_begin_fails_alone(
    tier: DiskTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    pages = chain(range(4))
    first, end = begin(tier, pages)
    slots = tier.reserve(4)
    assert slots is not None

    def full(*_: Any) -> int:
        raise OSError(errno.ENOSPC, "no segment is left to fill")

    with monkeypatch.context() as patch:
        patch.setattr(SegmentLog, "append", full)
        with pytest.raises(TierIOError, match="no segment is left to fill"):
            tier.begin_write(slots, chain(range(100, 104)))
    end()
    assert_holds(tier, first, pages)
    assert_absent(tier, slots)
    tier.write(slots, chain(range(100, 104)))
    assert_holds(tier, slots, chain(range(100, 104)))
    assert tier.check().is_clean


def test_an_interrupt_in_one_end_fails_the_others_and_is_not_theirs(
    tier: DiskTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = [begin(tier, chain(range(at, at + 4))) for at in (0, 100)]

    def stop(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Catalog, "commit", stop)
        with pytest.raises(KeyboardInterrupt):
            begun[0][1]()
    with pytest.raises(TierIOError, match="was interrupted") as told:
        begun[1][1]()
    assert told.value.errno == errno.EINTR
    for slots, _ in begun:
        assert_absent(tier, slots)
    put(tier, chain(range(200, 204)))
    assert tier.check().is_clean
    assert tier._catalog.entries == 4


@pytest.mark.parametrize("is_freed", [True, False], ids=["freed", "written again"])
def test_what_nobody_will_end_takes_nothing_from_what_comes_after(
    tier: DiskTier, is_freed: bool
) -> None:
    """An interrupt as `begin_write` returned: the caller never had the end of it."""
    before = chain(range(3))
    first, end_first = begin(tier, before)
    slots, end_lost = begin(tier, chain(range(100, 104)))
    if is_freed:
        tier.free(slots)
        assert tier.reserve(len(slots)) == slots
    again = chain(range(200, 204))
    end = tier.begin_write(slots, again)
    end()
    assert_holds(tier, [*first, *slots], [*before, *again])
    end_first()
    with pytest.raises(TierIOError, match="a page was lost before it was durable"):
        end_lost()
    assert_holds(tier, [*first, *slots], [*before, *again])
    assert tier._catalog.entries == 7
    assert tier.check().is_clean


def test_check_ends_what_has_begun_first(tier: DiskTier, commits: list[str]) -> None:
    pages = chain(range(6))
    slots, end = begin(tier, pages)
    report = tier.check()
    assert (report.pages, report.problems) == (6, [])
    end()
    assert commits == ["commit"]
    assert_holds(tier, slots, pages)


def test_close_ends_what_has_begun_first(path: Path) -> None:
    tier = open_tier(path)
    pages = chain(range(6))
    _, end = begin(tier, pages)
    tier.close()
    end()
    tier = open_tier(path)
    assert {page.key for page in tier.pages()} == {page.key for page in pages}
    tier.close()


def test_close_with_a_failing_medium_is_told_by_the_end(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = open_tier(path)
    _, end = begin(tier, chain(range(6)))

    def broken(*_: Any) -> None:
        raise OSError(errno.EIO, "the medium broke")

    with monkeypatch.context() as patch:
        patch.setattr(SegmentLog, "sync", broken)
        tier.close()
    with pytest.raises(TierIOError, match="the medium broke"):
        end()
    tier = open_tier(path)
    assert tier.recovered_pages == 0
    tier.close()


def test_writes_of_several_threads_share_a_commit(
    tier: DiskTier, commits: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    all_begun, real = threading.Barrier(3), DiskTier._end

    def end(self: DiskTier, batch: Any) -> None:
        all_begun.wait(PATIENCE_S)
        real(self, batch)

    monkeypatch.setattr(DiskTier, "_end", end)
    sets = [chain(range(at, at + 4)) for at in (0, 100, 200)]
    with ThreadPoolExecutor(3) as pool:
        slots = list(pool.map(lambda pages: put(tier, pages), sets))
    assert commits == ["commit"]
    for own, pages in zip(slots, sets, strict=True):
        assert_holds(tier, own, pages)


def test_a_store_that_is_full_and_written_over_in_groups_stays_whole(path: Path) -> None:
    """Segments are emptied, compacted and filled again while pages of the group are under way."""
    tier = open_tier(path, capacity_bytes=2 << 20)
    slots = put(tier, chain(range(tier.capacity_pages)))
    numbers = list(range(len(slots)))
    for turn in range(1, 12):
        ends = []
        for part in range(3):
            here = range(part * 2 + turn % 5, len(slots), 9)
            for at in here:
                numbers[at] = turn * 1000 + part * 300 + at
            ends.append(tier.begin_write([slots[at] for at in here], _pages(numbers, here)))
        for end in ends:
            end()
        assert_holds(tier, slots, _pages(numbers, range(len(slots))))
    assert tier.check().is_clean
    tier.close()
    tier = open_tier(path, capacity_bytes=2 << 20)
    assert tier.recovered_pages == len(slots)
    assert tier.check().is_clean
    tier.close()


def _pages(numbers: list[int], here: range) -> list[Page]:
    return [chain(range(numbers[at], numbers[at] + 1))[0] for at in here]
