"""What fails in the middle of a write or a compaction, and that the store goes on after it."""

from __future__ import annotations

import errno
import os
import random
import shutil
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lmdb
import pytest
from disk_rig import assert_holds, key_of, open_tier, page, put

from tiered_kv.errors import TierIOError
from tiered_kv.storage.base import Page
from tiered_kv.storage.disk import DiskTier
from tiered_kv.storage.disk.catalog import Catalog
from tiered_kv.storage.disk.compaction import Compaction
from tiered_kv.storage.disk.log import SegmentLog
from tiered_kv.storage.disk.records import Records
from tiered_kv.storage.disk.segment import SegmentFiles

PAGE_BYTES = 4096
FAILURES = 3  # one after the other


def open_small(path: Path) -> DiskTier:
    return open_tier(path, page_bytes=PAGE_BYTES, capacity_bytes=1 << 20)


@pytest.fixture
def tier(path: Path) -> Iterator[DiskTier]:
    opened = open_small(path)
    yield opened
    opened.close()


class Churn:
    """Writes page after page to an almost full tier and frees others, by chance."""

    def __init__(self, tier: DiskTier) -> None:
        self.tier = tier
        self.numbers: dict[int, int] = {}  # of the page in a slot
        self.random = random.Random(1)
        self.number = 0

    def put(self) -> None:
        while len(self.numbers) > self.tier.capacity_pages - 3:
            slot = self.random.choice(list(self.numbers))
            del self.numbers[slot]
            self.tier.free([slot])
        self.number += 1
        slots = self.tier.reserve(1)
        assert slots is not None
        try:
            self.tier.write(slots, [page(self.number, PAGE_BYTES)])
        except BaseException:
            self.tier.free(slots)
            raise
        self.numbers[slots[0]] = self.number

    def put_many(self, count: int) -> None:
        for _ in range(count):
            self.put()

    def assert_sound(self) -> None:
        pages = [page(number, PAGE_BYTES) for number in self.numbers.values()]
        assert_holds(self.tier, list(self.numbers), pages)
        assert self.tier.check().problems == []
        assert_one_is_empty(self.tier)

    def reopen(self, path: Path) -> None:
        self.tier.close()
        self.tier = open_small(path)
        assert not self.tier.was_rebuilt
        by_key = {key_of(number): number for number in self.numbers.values()}
        self.numbers = {found.slot: by_key.pop(found.key) for found in self.tier.pages()}
        assert by_key == {}


def assert_one_is_empty(tier: DiskTier) -> None:
    named = {record.segment for record, _ in tier._catalog.records()}
    assert len(named) < tier._geometry.segments


class Faults:
    """Lets the next `FAILURES` compactions fail, each at the given call of a method."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.patch = patch
        self.left = 0
        self.calls = 0  # until one fails, in this compaction
        self.compactions = 0
        self.is_compacting = False
        real = Compaction.compact

        def compact(compaction: Compaction, victim: int) -> None:
            self.compactions += 1
            self.is_compacting, self.calls = True, 0
            try:
                real(compaction, victim)
            finally:
                self.is_compacting = False

        patch.setattr(Compaction, "compact", compact)

    def fail_at(self, owner: type, name: str, call: int, error: Callable[[], Any]) -> None:
        real = getattr(owner, name)

        def failing(*args: Any, **named: Any) -> Any:
            if self.is_compacting and self.left:
                self.calls += 1
                if self.calls == call:
                    self.left -= 1
                    raise error()
            return real(*args, **named)

        self.patch.setattr(owner, name, failing)


def bad_medium() -> OSError:
    return OSError(errno.EIO, "the medium broke")


def bad_catalog() -> TierIOError:
    return TierIOError("the catalog broke", tier="disk", errno=errno.EIO)


@pytest.mark.parametrize(
    ("owner", "name", "call", "error", "gives_back"),
    [
        (SegmentLog, "write_copy", 1, bad_medium, True),
        (SegmentFiles, "sync", 1, bad_medium, True),
        (Compaction, "_fetch", 1, KeyboardInterrupt, True),
        (SegmentLog, "seal", 1, KeyboardInterrupt, True),
        (Records, "move", 1, KeyboardInterrupt, False),
        (Records, "move", 3, KeyboardInterrupt, False),
        (Catalog, "commit", 1, bad_catalog, False),
    ],
)
def test_a_store_goes_on_after_compactions_that_failed(
    path: Path,
    monkeypatch: pytest.MonkeyPatch,
    owner: type,
    name: str,
    call: int,
    error: Callable[[], Any],
    gives_back: bool,
) -> None:
    faults = Faults(monkeypatch)
    churn = Churn(open_small(path))
    while faults.compactions < 5:
        churn.put()
    faults.fail_at(owner, name, call, error)
    faults.left, failed = FAILURES, 0
    for _ in range(1000):
        if not faults.left:
            break
        before, left = list(churn.tier._log.free), faults.left
        try:
            churn.put()
        except (TierIOError, KeyboardInterrupt):
            failed += 1
            assert faults.left == left - 1
            if gives_back:
                assert sorted(churn.tier._log.free) == sorted(before)
            assert_one_is_empty(churn.tier)
    assert failed == FAILURES
    churn.put_many(100)
    churn.assert_sound()
    churn.reopen(path)
    churn.put_many(100)
    churn.assert_sound()
    churn.tier.close()


@pytest.mark.parametrize("fault", ["copy", "commit"])
def test_a_store_opens_whole_right_after_a_compaction_that_failed(
    path: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    faults = Faults(monkeypatch)
    churn = Churn(open_small(path))
    while faults.compactions < 5:
        churn.put()
    if fault == "copy":
        faults.fail_at(SegmentFiles, "sync", 1, bad_medium)
    else:
        faults.fail_at(Catalog, "commit", 1, bad_catalog)
    faults.left = 1
    with pytest.raises(TierIOError, match="broke"):
        churn.put_many(1000)
    churn.reopen(path)
    churn.assert_sound()
    churn.put_many(100)
    churn.assert_sound()
    churn.tier.close()


def wedge(tier: DiskTier) -> dict[int, int]:
    """Leave no segment empty, as an older version could: of each the slot of its one page."""
    held: dict[int, int] = {}
    number = 0
    while tier._log.free or tier._log.places():
        if not tier._log.places():
            tier._log.fill_next()
        (slot,) = put(tier, [page(number, PAGE_BYTES)])
        number += 1
        record = tier._records.record(slot)
        assert record is not None
        if record.segment in held:
            tier.free([slot])
        else:
            held[record.segment] = slot
    assert sorted(held) == list(range(tier._geometry.segments))
    return held


def test_without_an_empty_segment_a_write_says_so_until_one_is_emptied(tier: DiskTier) -> None:
    held = wedge(tier)
    slots = tier.reserve(1)
    assert slots is not None
    for _ in range(2):
        with pytest.raises(TierIOError, match="no segment is left to fill") as caught:
            tier.write(slots, [page(10_000, PAGE_BYTES)])
        assert caught.value.errno == errno.ENOSPC
    tier.free([held[3]])
    tier.write(slots, [page(10_000, PAGE_BYTES)])
    assert_holds(tier, slots, [page(10_000, PAGE_BYTES)])


def test_a_store_left_without_an_empty_segment_opens_and_gives_one_up(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tier = open_small(path)
    held = wedge(tier)
    slots = list(held.values())
    keys = {found.key for found in tier.pages()}
    assert len(keys) == len(slots)
    tier.close()
    tier = open_small(path)
    assert not tier.was_rebuilt
    assert "1 pages given up" in caplog.text
    kept = {found.key for found in tier.pages()}
    assert kept < keys and len(kept) == len(keys) - 1
    assert_one_is_empty(tier)
    churn = Churn(tier)
    churn.number = 20_000
    tier.free([found.slot for found in list(tier.pages())[:-1]])
    churn.put_many(200)
    churn.assert_sound()
    tier.close()


@pytest.mark.parametrize("made", [2, 3, 5])
def test_on_a_full_medium_the_segments_there_are_are_filled_again_and_again(
    path: Path, monkeypatch: pytest.MonkeyPatch, made: int
) -> None:
    """All that had no file were first in line, and nothing was written any more."""
    tier = open_small(path)
    create, left = SegmentFiles.create, made

    def limited(self: SegmentFiles, segment: int) -> None:
        nonlocal left
        if not left:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        left -= 1
        create(self, segment)

    monkeypatch.setattr(SegmentFiles, "create", limited)
    kept: deque[tuple[int, Page]] = deque()  # few enough that segments empty, or can be compacted

    def keep(number: int) -> None:
        one = page(number, PAGE_BYTES)
        (slot,) = put(tier, [one])
        kept.append((slot, one))

    for number in range(40 * made):
        keep(number)
        if len(kept) >= made:
            tier.free([kept.popleft()[0]])
    assert_holds(tier, [slot for slot, _ in kept], [one for _, one in kept])
    assert tier.check().problems == []
    with pytest.raises(TierIOError, match=os.strerror(errno.ENOSPC)):  # when all of them are full
        deque(map(keep, range(10_000, 10_000 + 40 * made)), maxlen=0)
    assert len(os.listdir(path / "segments")) == made
    assert_holds(tier, [slot for slot, _ in kept], [one for _, one in kept])
    tier.free([kept.popleft()[0] for _ in range(len(kept) - 1)])
    left = 1
    for number in range(20_000, 20_020):
        tier.free(put(tier, [page(number, PAGE_BYTES)]))
    assert_holds(tier, [kept[0][0]], [kept[0][1]])
    tier.close()


def test_a_rebuild_finds_what_was_written_after_a_write_that_failed(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = open_small(path)
    number, held = 0, []
    while len(tier._log.generations) < tier._geometry.segments:  # headers of long extents
        first, *others = put(tier, [page(number + at, PAGE_BYTES) for at in range(5)])
        held.append(first)  # or it would go on in the files that there are
        tier.free(others)
        number += 5
    tier.free(held)
    put(tier, [page(number, PAGE_BYTES)])
    tier._log.fill_next()
    write = SegmentFiles.write

    def broken(*args: Any) -> None:
        monkeypatch.setattr(SegmentFiles, "write", write)
        raise bad_medium()

    monkeypatch.setattr(SegmentFiles, "write", broken)
    with pytest.raises(TierIOError, match="the medium broke"):
        put(tier, [page(number + 1, PAGE_BYTES)])
    pages = [page(number + 2 + at, PAGE_BYTES) for at in range(4)]
    for one in pages:
        put(tier, [one])
    assert tier.check().problems == []
    tier.close()
    shutil.rmtree(path / "catalog")
    tier = open_small(path)
    assert tier.was_rebuilt
    slots = {found.key: found.slot for found in tier.pages()}
    assert_holds(tier, [slots[one.key] for one in pages], pages)
    tier.close()


def test_a_catalog_whose_list_of_free_pages_is_damaged_is_rebuilt(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tier = open_small(path)
    pages = [page(number, PAGE_BYTES) for number in range(8)]
    for one in pages:
        put(tier, [one])
    tier.close()
    with open(path / "catalog" / "data.mdb", "r+b") as file:
        for meta in (0, 4096):  # in each the root of that list: now far behind the end
            file.seek(meta + 80 + 2)
            file.write(b"\x07")
    tier = open_small(path)
    assert tier.was_rebuilt
    assert "rebuilding it" in caplog.text
    slots = {found.key: found.slot for found in tier.pages()}
    assert_holds(tier, [slots[one.key] for one in pages], pages)
    tier.close()
    tier = open_small(path)
    assert not tier.was_rebuilt
    assert tier.recovered_pages == len(pages)
    tier.close()


@pytest.mark.parametrize(
    "cause",
    [
        lmdb.MapFullError("mdb_put: MDB_MAP_FULL"),
        lmdb.DiskError("mdb_txn_commit: No space left on device"),
        lmdb.Error("mdb_txn_commit: Input/output error"),
    ],
    ids=["map full", "disk full", "medium"],
)
def test_a_catalog_that_cannot_be_written_is_not_rebuilt(
    path: Path, monkeypatch: pytest.MonkeyPatch, cause: lmdb.Error
) -> None:
    tier = open_small(path)
    put(tier, [page(1, PAGE_BYTES)])
    tier.close()

    def failing(*args: Any, **named: Any) -> None:
        raise bad_catalog() from cause

    with monkeypatch.context() as patch:
        patch.setattr(Catalog, "commit", failing)
        with pytest.raises(TierIOError, match="the catalog broke"):
            open_small(path)
    tier = open_small(path)
    assert (tier.was_rebuilt, tier.recovered_pages) == (False, 1)
    tier.close()
