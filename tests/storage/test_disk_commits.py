"""When pages count: all of a write at its commit, though the catalog hears of them before."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import lmdb
import numpy as np
import pytest
from disk_rig import (
    AHEAD,
    CAPACITY_BYTES,
    assert_holds,
    buffers,
    chain,
    key_of,
    noted_calls,
    open_tier,
    put,
    raising_once,
)

import tiered_kv.storage.disk.catalog
from tiered_kv.errors import TierIOError
from tiered_kv.keys import PageKey
from tiered_kv.storage.base import Page
from tiered_kv.storage.disk import DiskTier
from tiered_kv.storage.disk.catalog import Catalog
from tiered_kv.storage.disk.compaction import Compaction
from tiered_kv.storage.disk.log import SegmentLog
from tiered_kv.storage.disk.records import Records
from tiered_kv.storage.disk.segment import SegmentFiles

EPOCH_BITS = 40

pytestmark = pytest.mark.usefixtures("ahead")


class Crash:
    """Copies a store while it is written, as a process that is killed would leave it."""

    def __init__(self, path: Path, patch: pytest.MonkeyPatch) -> None:
        self.path, self.patch = path, patch
        self.copies = path.parent
        self.left: list[Path] = []

    def between_the_steps(self, tier: DiskTier, pages: list[Page]) -> tuple[Path, list[int]]:
        """Put pages; a copy from when the catalog knew them and none counted, and their slots."""
        real, prepare = SegmentLog.sync, Catalog.prepare
        is_prepared, copies = False, list[Path]()

        def prepared(catalog: Catalog, **changes: Any) -> Any:
            nonlocal is_prepared
            is_prepared = True
            return prepare(catalog, **changes)

        def sync(log: SegmentLog, batch: Any) -> None:
            real(log, batch)
            if is_prepared:
                copies.append(self.now())

        with self.patch.context() as patch:
            patch.setattr(Catalog, "prepare", prepared)
            patch.setattr(SegmentLog, "sync", sync)
            slots = put(tier, pages)
        (copy,) = copies
        return copy, slots

    def now(self) -> Path:
        """Copy as it is."""
        self.left.append(self.copies / f"crashed-{len(self.left)}")
        shutil.copytree(self.path, self.left[-1])
        return self.left[-1]


@pytest.fixture
def crash(path: Path, monkeypatch: pytest.MonkeyPatch) -> Crash:
    return Crash(path, monkeypatch)


def listed(path: Path) -> dict[PageKey, int]:
    """What a catalog that nobody has open says: the sequence of each key."""
    with closing(lmdb.open(str(path / "catalog"), lock=False, readonly=True, max_dbs=3)) as env:
        entries = env.open_db(b"entries", create=False)
        with env.begin(db=entries) as txn:
            return {
                PageKey(bytes(value[:32])): int.from_bytes(sequence, "big")
                for sequence, value in txn.cursor()
            }


def assert_opens_with(path: Path, pages: list[Page]) -> None:
    """The store holds these pages and no others, and none is listed that does not count."""
    tier = open_tier(path)
    assert not tier.was_rebuilt
    found = {stored.key: stored.slot for stored in tier.pages()}
    assert set(found) == {one.key for one in pages}
    assert_holds(tier, [found[one.key] for one in pages], pages)
    assert tier._catalog.entries == len(pages)
    later = chain(range(5000, 5007))
    put(tier, later)
    assert tier.check().is_clean
    tier.close()
    tier = open_tier(path)
    assert {stored.key for stored in tier.pages()} == {one.key for one in [*pages, *later]}
    tier.close()


# -- in two steps or in one ------------------------------------------------------------------------


def test_the_catalog_hears_of_pages_before_their_data_are_synced_and_commits_after(
    tier: DiskTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = ((SegmentFiles, "sync"), (Catalog, "prepare"), (Catalog, "commit"))
    events = noted_calls(monkeypatch, *steps, when_done=True)
    put(tier, chain(range(AHEAD)))
    assert events == ["prepare", "sync", "commit"]
    events.clear()
    put(tier, chain(range(10, 10 + AHEAD - 1)))
    assert events == ["sync", "commit"]


def test_a_write_of_no_pages_does_nothing(tier: DiskTier, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(Catalog, "commit")
    tier.write([], [])
    monkeypatch.undo()


@pytest.mark.parametrize("count", [AHEAD - 1, 40])
def test_pages_count_after_a_crash_from_the_end_of_their_write_on(
    path: Path, crash: Crash, tier: DiskTier, count: int
) -> None:
    pages = chain(range(count))
    put(tier, pages)
    assert_opens_with(crash.now(), pages)


# -- crashes between the steps ---------------------------------------------------------------------


@pytest.mark.parametrize("by_cursor", [False, True], ids=["leaves", "cursor"])
def test_after_a_crash_between_the_steps_nothing_of_the_write_counts(
    tier: DiskTier, crash: Crash, monkeypatch: pytest.MonkeyPatch, by_cursor: bool
) -> None:
    before = chain(range(8))
    put(tier, before)
    crashed, _ = crash.between_the_steps(tier, chain(range(100, 140)))
    assert {key_of(100), key_of(139), key_of(0)} <= set(listed(crashed)), "all are listed"
    if by_cursor:
        monkeypatch.setattr(tiered_kv.storage.disk.catalog, "read_rows", lambda *_: None)
    assert_opens_with(crashed, before)


def test_what_a_crash_left_is_forgotten_however_often_the_opening_fails(
    tier: DiskTier, crash: Crash, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = chain(range(8))
    put(tier, before)
    crashed, _ = crash.between_the_steps(tier, chain(range(100, 140)))

    def broken(*_: Any, **__: Any) -> None:
        raise TierIOError("the catalog broke", tier="disk", errno=errno.EIO)

    for _ in range(2):
        with monkeypatch.context() as patch:
            patch.setattr(Catalog, "commit", broken)
            with pytest.raises(TierIOError, match="broke"):
                open_tier(crashed)
    assert_opens_with(crashed, before)


def test_a_page_that_is_written_again_is_not_lost_by_a_crash_between_the_steps(
    tier: DiskTier, crash: Crash
) -> None:
    """The same key in another slot, while the first one's page counts."""
    before = chain(range(6))
    put(tier, before)
    pages = [*chain(range(3)), *chain(range(100, 110))]
    crashed, again = crash.between_the_steps(tier, pages)
    assert_opens_with(crashed, before)
    assert_holds(tier, again[:3], before[:3])
    assert tier.check().is_clean
    assert_opens_with(crash.now(), [*before, *chain(range(100, 110))])


def test_of_a_key_that_is_listed_twice_the_newest_is_found_and_the_other_dropped(
    path: Path, tier: DiskTier, crash: Crash
) -> None:
    """Whichever is freed: what is left is found."""
    before = chain(range(6))
    old = put(tier, before)
    new = put(tier, before[:3])
    newest = {stored.key: stored.sequence for stored in tier.pages()}
    crashed = crash.now()
    tier.free([new[0], old[1]])
    tier.close()
    for store, sequence_of in ((crashed, newest), (path, {})):
        again = open_tier(store)
        found = {stored.key: stored for stored in again.pages()}
        assert set(found) == {one.key for one in before} and len(list(again.pages())) == 6
        for key, sequence in sequence_of.items():
            assert found[key].sequence == sequence
        assert_holds(again, [found[one.key].slot for one in before], before)
        assert again._catalog.entries == 6 and again.check().is_clean
        again.close()


def test_a_page_whose_old_entry_is_dropped_with_the_write_counts_from_the_commit_on(
    tier: DiskTier, crash: Crash
) -> None:
    before = chain(range(6))
    slots = put(tier, before)
    tier.free(slots[:2])
    crashed, _ = crash.between_the_steps(tier, chain(range(4)))
    assert_opens_with(crashed, before[2:])
    assert_opens_with(crash.now(), before)


def test_of_one_key_twice_in_a_write_the_later_is_found(path: Path, tier: DiskTier) -> None:
    slots = put(tier, [*chain(range(5)), *chain(range(2))])
    later = int(tier._records._rows.sequence[slots[6]])
    assert tier.check().is_clean
    tier.close()
    again = open_tier(path)
    assert {stored.key: stored.sequence for stored in again.pages()}[key_of(1)] == later
    assert again.recovered_pages == 5
    again.close()


def test_segments_say_the_same_without_a_catalog(tier: DiskTier, crash: Crash) -> None:
    before = chain(range(8))
    put(tier, before)
    crashed, _ = crash.between_the_steps(tier, chain(range(100, 140)))
    shutil.rmtree(crashed / "catalog")
    rebuilt = open_tier(crashed)
    assert rebuilt.was_rebuilt
    found = {stored.key: stored.slot for stored in rebuilt.pages()}
    assert {one.key for one in before} <= set(found)
    put(rebuilt, chain(range(200, 205)))
    assert rebuilt.check().is_clean
    rebuilt.close()
    again = open_tier(crashed)
    assert (again.was_rebuilt, again.recovered_pages) == (False, len(found) + 5)
    again.close()


# -- failures between the steps --------------------------------------------------------------------


def failing(real: Callable[..., Any], nth: int, does_it: bool, error: BaseException) -> Any:
    """A function of which the nth call raises: instead of doing what it should, or after it."""
    calls = 0

    def call(*arguments: Any, **named: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls != nth:
            return real(*arguments, **named)
        if does_it:
            real(*arguments, **named)
        raise error

    return call


@pytest.mark.parametrize("error", [OSError(errno.EIO, "broken"), KeyboardInterrupt()], ids=type)
@pytest.mark.parametrize("does_it", [False, True], ids=["instead", "after"])
@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (os, "pwritev"),
        (Catalog, "prepare"),
        (SegmentLog, "sync"),
        (os, "fdatasync"),
        (Catalog, "commit"),
        (Records, "publish"),
        (Records, "saved"),
        (Compaction, "reuse"),
    ],
    ids=lambda given: getattr(given, "__name__", given),
)
@pytest.mark.parametrize("later", [1, 5], ids=["one step", "two steps"])
def test_what_fails_leaves_nothing_that_a_later_write_makes_count(
    tier: DiskTier,
    crash: Crash,
    monkeypatch: pytest.MonkeyPatch,
    owner: Any,
    name: str,
    does_it: bool,
    error: BaseException,
    later: int,
) -> None:
    before = chain(range(100, 108))
    put(tier, before[:7])
    put(tier, before[7:])
    slots = tier.reserve(30)
    assert slots is not None
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, failing(getattr(owner, name), 1, does_it, error))
        with pytest.raises((TierIOError, KeyboardInterrupt)):
            tier.write(slots, chain(range(30)))
    outcomes = tier.read(slots, buffers(30))
    assert all(isinstance(outcome, TierIOError) for outcome in outcomes)
    after = chain(range(200, 200 + later))
    put(tier, after)
    assert_opens_with(crash.now(), [*before, *after])
    assert tier.check().is_clean
    tier.write(slots, chain(range(30)))
    assert_opens_with(crash.now(), [*before, *after, *chain(range(30))])


@pytest.mark.parametrize("name", ["prepare", "sync", "commit"])
def test_a_crash_after_a_failure_between_the_steps_finds_what_was_there(
    tier: DiskTier, crash: Crash, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    before = chain(range(100, 108))
    put(tier, before)
    owner: Any = SegmentLog if name == "sync" else Catalog
    broken = OSError(errno.EIO, "broken")
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, failing(getattr(owner, name), 1, name == "prepare", broken))
        with pytest.raises(TierIOError, match="broken"):
            put(tier, chain(range(30)))
    assert_opens_with(crash.now(), before)


def test_space_is_not_free_before_the_commit_that_makes_its_dropping_durable(
    tier: DiskTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A crash of the system may undo the first step: then its pages are there again."""
    slots: list[int] = []
    while not tier._log.sealed:
        slots += put(tier, chain(range(len(slots), len(slots) + 5)))
    (segment,) = tier._log.sealed
    tier.free(slots)
    with monkeypatch.context() as patch:
        patch.setattr(SegmentLog, "sync", failing(SegmentLog.sync, 1, True, OSError(5, "broken")))
        with pytest.raises(TierIOError, match="broken"):
            put(tier, chain(range(900, 910)))
    assert tier._catalog.entries == 10
    assert segment in tier._log.sealed and segment not in tier._log.free
    put(tier, chain(range(910, 920)))
    assert tier._log._filling == segment, (
        "free since the second step, and filled first: it has a file"
    )
    assert tier.check().is_clean


def test_while_the_catalog_cannot_drop_a_failed_write_no_other_begins(
    tier: DiskTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = chain(range(100, 108))
    put(tier, before)
    slots = tier.reserve(30)
    assert slots is not None
    with monkeypatch.context() as patch:
        patch.setattr(Catalog, "commit", failing(Catalog.commit, 1, False, OSError(5, "broken")))
        with pytest.raises(TierIOError, match="broken"):
            tier.write(slots, chain(range(30)))
    bytes_written = tier.bytes_written

    def broken(*_: Any, **__: Any) -> None:
        raise TierIOError("the catalog broke", tier="disk", errno=errno.EIO)

    with monkeypatch.context() as patch:
        patch.setattr(Catalog, "commit", broken)
        for _ in range(3):
            with pytest.raises(TierIOError, match="the catalog broke"):
                tier.write(slots, chain(range(30)))
    assert tier.bytes_written == bytes_written
    assert len(tier._records.unsaved().deleted) == 30
    tier.write(slots, chain(range(30)))
    assert_holds(tier, slots, chain(range(30)))
    assert tier.check().is_clean


def test_an_interrupt_after_the_commit_leaves_no_entry_that_nobody_knows(
    tier: DiskTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C as the call of LMDB returns: the pages count, but the write has raised."""
    with monkeypatch.context() as patch:
        patch.setattr(Catalog, "commit", raising_kept(Catalog.commit))
        with pytest.raises(KeyboardInterrupt):
            put(tier, chain(range(10)))
    assert tier._catalog.entries == 10
    assert tier.check().is_clean
    assert tier._catalog.entries == 0


def raising_kept(real: Callable[..., Any]) -> Callable[..., Any]:
    """As `raising_once`, of a method that takes its arguments by name."""

    def call(*arguments: Any, **named: Any) -> Any:
        return raising_once(lambda: real(*arguments, **named), KeyboardInterrupt)()

    return call


# -- stores of other versions ----------------------------------------------------------------------


def change_meta(path: Path, change: Callable[[Any], None]) -> None:
    with closing(lmdb.open(str(path / "catalog"), lock=False, max_dbs=3)) as env:
        meta = env.open_db(b"meta")
        with env.begin(write=True, db=meta) as txn:
            change(txn)


def test_a_store_that_knows_no_such_number_opens_whole(path: Path) -> None:
    pages = chain(range(20))
    tier = open_tier(path)
    put(tier, pages)
    tier.close()
    change_meta(path, lambda txn: txn.delete(b"counted"))
    assert_opens_with(path, pages)


def test_what_a_version_wrote_that_does_not_know_the_number_counts(path: Path) -> None:
    """It raises the epoch, and leaves the number where it was."""
    pages = chain(range(20))
    tier = open_tier(path)
    put(tier, pages)
    tier.close()

    def open_and_write(txn: Any) -> None:
        epoch = int.from_bytes(txn.get(b"epoch"), "little")
        assert int.from_bytes(txn.get(b"counted"), "little") == (epoch << EPOCH_BITS) + 20
        txn.put(b"counted", (epoch << EPOCH_BITS).to_bytes(8, "little"))
        txn.put(b"epoch", (epoch + 1).to_bytes(8, "little"))

    change_meta(path, open_and_write)
    assert_opens_with(path, pages)


# -- what is committed before a write --------------------------------------------------------------


def test_a_write_that_needs_what_was_freed_commits_before_it_and_not_in_the_middle(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At capacity, sets of pages that come and go: in mid-write a commit waits behind the data."""
    tier = open_tier(path, capacity_bytes=4 * CAPACITY_BYTES)
    count = tier.capacity_pages // 4
    held = [put(tier, chain(range(at * count, (at + 1) * count))) for at in range(4)]
    steps = ((Catalog, "commit"), (Catalog, "prepare"))
    appends = ((SegmentLog, "append"), (Compaction, "compact"))
    events = noted_calls(monkeypatch, *steps, *appends)
    before = 0
    for at in range(4, 16):
        tier.free(held.pop(0))
        events.clear()
        held.append(put(tier, chain(range(at * count, (at + 1) * count))))
        assert "compact" not in events
        middle = events[events.index("append") : len(events) - events[::-1].index("append")]
        assert set(middle) == {"append"}
        assert events[-2:] == ["prepare", "commit"]
        before += events[0] == "commit"
    assert 0 < before < 12, "only when segments are short"
    monkeypatch.undo()
    assert tier.check().is_clean
    tier.close()


def test_pages_for_which_places_are_left_need_no_segment_emptied(
    tier: DiskTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unwanted(*_: Any) -> None:
        raise AssertionError("a segment was emptied")

    rng = np.random.default_rng(3)
    held: list[list[int]] = []
    number = promised = 0
    for _ in range(80):
        room = tier.capacity_pages - sum(map(len, held))
        count = min(tier._log.places_left(), room)
        with monkeypatch.context() as patch:
            if count:
                patch.setattr(Compaction, "compact", unwanted)
                patch.setattr(Compaction, "_recycle_empty", unwanted)
            count = max(1, count)
            held.append(put(tier, chain(range(number, number + count))))
        number += count
        promised = max(promised, count)
        while sum(map(len, held)) > tier.capacity_pages - 5 or rng.integers(3):
            tier.free(held.pop(int(rng.integers(len(held)))))
            if not held:
                break
    assert promised > 60
    assert tier.check().is_clean
