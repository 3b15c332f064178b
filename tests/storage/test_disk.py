"""The disk tier: round trips, restarts, long reads, damage and repair."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from disk_rig import (
    PAGE_BYTES,
    assert_holds,
    buffers,
    chain,
    flip,
    key_of,
    open_tier,
    page,
    put,
    record_of,
)

from tiered_kv.errors import CorruptPageError, StoreClosedError, TierIOError
from tiered_kv.found import FIRST, LOST
from tiered_kv.storage.base import Page
from tiered_kv.storage.disk import DiskTier


@pytest.mark.parametrize("page_bytes", [1, 1000, 4096, 5000, 65536 + 512, 1 << 20])
def test_pages_of_any_length_come_back_bit_for_bit(path: Path, page_bytes: int) -> None:
    tier = open_tier(path, page_bytes=page_bytes, capacity_bytes=32 << 20)
    pages = [page(number, page_bytes) for number in range(7)]
    slots = put(tier, pages)
    assert_holds(tier, slots[::-1], pages[::-1])
    assert tier.check().is_clean
    tier.close()


def test_unaligned_buffers_are_filled_through_a_bounce(tier: DiskTier) -> None:
    memory = np.zeros(5 * (PAGE_BYTES + 1), np.uint8)
    sources = [memory[at * (PAGE_BYTES + 1) + 1 :][:PAGE_BYTES] for at in range(5)]
    pages = []
    for number, source in enumerate(sources):
        source[:] = page(number).data
        pages.append(Page(key_of(number), None, source.copy()))
    slots = put(tier, [Page(p.key, None, s) for p, s in zip(pages, sources, strict=True)])
    memory[:] = 0
    assert tier.read(slots, sources) == [None] * 5
    for source, wanted in zip(sources, pages, strict=True):
        assert np.array_equal(source, wanted.data)


def test_buffered_fallback_works_and_says_so_once(
    path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A file system without O_DIRECT (tmpfs, some network mounts) refuses it at open."""
    real_open = os.open

    def refuse_direct(name: Any, flags: int, *args: Any, **kwargs: Any) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real_open(name, flags, *args, **kwargs)

    monkeypatch.setattr(os, "open", refuse_direct)
    with caplog.at_level(logging.WARNING):
        tier = open_tier(path, page_bytes=20_000)
    assert not tier.direct_io
    assert [r for r in caplog.records if "O_DIRECT" in r.message] == caplog.records
    assert len(caplog.records) == 1
    pages = [page(number, 20_000) for number in range(40)]
    slots = put(tier, pages)
    assert_holds(tier, slots, pages)
    assert tier.check().is_clean
    tier.close()


def test_direct_io_reaches_the_file_descriptors(
    tier: DiskTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    """LMCache/LMCache#1522: the option had no effect, and the page cache doubled the memory."""
    if not tier.direct_io:
        pytest.skip("this file system has no O_DIRECT")
    flags: list[int] = []

    def note_flags(call: Any) -> Any:
        def noting(fd: int, *args: Any) -> Any:
            flags.append(fcntl.fcntl(fd, fcntl.F_GETFL))
            return call(fd, *args)

        return noting

    monkeypatch.setattr(os, "preadv", note_flags(os.preadv))
    monkeypatch.setattr(os, "pwritev", note_flags(os.pwritev))
    pages = [page(number) for number in range(3)]
    slots = put(tier, pages)
    assert_holds(tier, slots, pages)
    assert len(flags) >= 2
    assert all(flag & os.O_DIRECT for flag in flags)


def test_pages_written_together_are_read_together(
    tier: DiskTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    pages = chain(range(12))
    slots = put(tier, pages[:4]) + put(tier, pages[4:])
    calls: list[int] = []
    real_preadv = os.preadv

    def counting(fd: int, vectors: Any, offset: int) -> int:
        calls.append(len(vectors))
        return real_preadv(fd, vectors, offset)

    monkeypatch.setattr(os, "preadv", counting)
    before = tier.bytes_read
    assert_holds(tier, slots, pages)
    assert calls == [13]  # one run: twelve pages and the header between the two writes
    assert tier.bytes_read - before == 12 * PAGE_BYTES + 4096


def test_reopened_tier_lists_its_pages_oldest_first(path: Path) -> None:
    tier = open_tier(path)
    pages = chain(range(20))
    put(tier, pages[:5])
    gone = put(tier, [page(99)])
    put(tier, pages[5:])
    tier.free(gone)
    tier.close()
    again = open_tier(path)
    listed = list(again.pages())
    assert [p.key for p in listed] == [p.key for p in pages]
    assert [p.parent for p in listed] == [p.parent for p in pages]
    assert sorted(p.slot for p in listed) == list(range(20))
    assert again.recovered_pages == 20
    assert not again.was_rebuilt
    assert again.used_bytes == 20 * PAGE_BYTES
    assert_holds(again, [p.slot for p in listed], pages)
    sequences = [p.sequence for p in listed]
    put(again, [page(1000)])
    assert list(again.pages())[-1].sequence > max(sequences)
    again.close()


@pytest.mark.parametrize("damage", ["missing", "cut", "garbage", "entry", "deadly"])
def test_lost_catalog_is_rebuilt_from_the_segments(
    path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    tier = open_tier(path)
    pages = chain(range(60))
    for start in range(0, 60, 7):
        put(tier, pages[start : start + 7])
    tier.close()
    file = path / "catalog" / "data.mdb"
    content = file.read_bytes()
    if damage == "missing":
        file.unlink()
    elif damage == "cut":
        file.write_bytes(content[:20000])
    elif damage == "garbage":
        file.write_bytes(np.random.default_rng(0).bytes(len(content)))
    elif damage == "deadly":  # LMDB aborted the process that opened it last
        (path / "catalog" / "reading").touch()
    else:
        file.write_bytes(content.replace(pages[3].key[8:], bytes(24)))
    with caplog.at_level(logging.WARNING):
        again = open_tier(path)
    assert again.was_rebuilt
    assert again.recovered_pages == 60
    assert "rebuilt with 60 pages" in caplog.text
    listed = list(again.pages())
    assert [(p.key, p.parent) for p in listed] == [(p.key, p.parent) for p in pages]
    assert_holds(again, [p.slot for p in listed], pages)
    assert again.check().is_clean
    again.close()


def test_rebuild_takes_the_newest_page_of_a_key_and_skips_a_torn_tail(path: Path) -> None:
    tier = open_tier(path)
    old = put(tier, [page(1)])
    tier.free(old)
    newer = Page(key_of(1), None, page(2).data)
    put(tier, [newer])
    torn = put(tier, [page(3)])
    flip(tier, torn[0], path)
    tier.close()
    (path / "catalog" / "data.mdb").unlink()
    again = open_tier(path)
    assert [p.key for p in again.pages()] == [key_of(1)]
    assert_holds(again, [0], [newer])
    again.close()


def test_rebuild_steps_over_a_damaged_header(path: Path) -> None:
    tier = open_tier(path)
    pages = chain(range(3))
    slots = [put(tier, [one])[0] for one in pages]
    flip(tier, slots[1], path, at=200 - 4096)
    report = tier.check()
    assert len(report.problems) == 1
    assert "no header" in report.problems[0]
    tier.close()
    (path / "catalog" / "data.mdb").unlink()
    again = open_tier(path)
    assert [p.key for p in again.pages()] == [pages[0].key, pages[2].key]
    again.close()


def test_flipped_bit_spoils_only_its_own_page(tier: DiskTier, path: Path) -> None:
    pages = chain(range(12))
    slots = put(tier, pages)
    flip(tier, slots[5], path)
    outcomes = tier.read(slots, buffers(12))
    error = outcomes.pop(5)
    assert isinstance(error, CorruptPageError)
    assert (error.key, error.tier) == (pages[5].key, "disk")
    assert str(error.path).endswith("00000.seg")
    assert outcomes == [None] * 11


def test_pages_freed_while_they_are_listed_are_left_out(tier: DiskTier) -> None:
    slots = put(tier, chain(range(5)))
    listed = tier.pages()
    tier.free(slots[3:4])
    first = next(listed)
    put(tier, [page(99)])
    assert [first.slot, *(found.slot for found in listed)] == [0, 1, 2, 4]


def test_what_is_found_in_columns_is_what_is_found_page_by_page(path: Path) -> None:
    """After an opening, where rows are in order of keys, and after pages came and went."""
    tier = open_tier(path)
    put(tier, [*chain(range(10)), page(50, parent=key_of(49))])
    tier.close()
    again = open_tier(path)
    for _ in range(2):
        found, listed = again.found(), sorted(again.pages(), key=lambda stored: stored.slot)
        assert found.keys == [stored.key for stored in listed]
        assert found.slot.tolist() == [stored.slot for stored in listed]
        row_of = {key: row for row, key in enumerate(found.keys)} | {None: FIRST}
        assert found.parent.tolist() == [row_of.get(stored.parent, LOST) for stored in listed]
        ordered = [found.keys[row] for row in np.argsort(found.rank)]
        assert ordered == [stored.key for stored in again.pages()]
        again.free([stored.slot for stored in listed if stored.key in (key_of(3), key_of(9))])
        put(again, [page(70, parent=key_of(8)), page(71)])
    again.close()


def test_failed_read_spoils_only_the_pages_it_cannot_have(
    tier: DiskTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    pages = chain(range(8))
    slots = put(tier, pages)
    bad_from = record_of(tier, slots[2]).offset
    real_preadv = os.preadv

    def bad_block(fd: int, vectors: Any, offset: int) -> int:
        if offset <= bad_from < offset + sum(memoryview(v).nbytes for v in vectors):
            raise OSError(errno.EIO, "Input/output error")
        return real_preadv(fd, vectors, offset)

    monkeypatch.setattr(os, "preadv", bad_block)
    outcomes = tier.read(slots, buffers(8))
    error = outcomes.pop(2)
    assert isinstance(error, TierIOError)
    assert (error.errno, error.tier) == (errno.EIO, "disk")
    assert outcomes == [None] * 7


def test_short_transfers_are_finished(tier: DiskTier, monkeypatch: pytest.MonkeyPatch) -> None:
    real_preadv, real_pwritev = os.preadv, os.pwritev
    monkeypatch.setattr(os, "preadv", lambda fd, v, at: real_preadv(fd, v[:1], at))
    monkeypatch.setattr(os, "pwritev", lambda fd, v, at: real_pwritev(fd, v[:1], at))
    pages = chain(range(5))
    slots = put(tier, pages)
    assert_holds(tier, slots, pages)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO, errno.EDQUOT])
def test_failed_write_is_rolled_back_and_the_tier_goes_on(
    path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """LMCache/LMCache#4991: a store that failed stayed visible, and the next get read junk."""
    tier = open_tier(path)
    before = chain(range(4))
    kept = put(tier, before)
    slots = tier.reserve(40)
    assert slots is not None
    real_pwritev, calls = os.pwritev, []

    def fail_second(fd: int, vectors: Any, offset: int) -> int:
        calls.append(offset)
        if len(calls) == 2:
            raise OSError(number, os.strerror(number))
        return real_pwritev(fd, vectors, offset)

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwritev", fail_second)
        with pytest.raises(TierIOError) as caught:
            tier.write(slots, chain(range(100, 140)))
    assert caught.value.errno == number
    assert all(isinstance(o, TierIOError) for o in tier.read(slots, buffers(40)))
    assert len(list(tier.pages())) == 4
    assert tier.used_bytes == 44 * PAGE_BYTES
    later = chain(range(100, 140))
    tier.write(slots, later)
    assert_holds(tier, kept + slots, before + later)
    assert tier.check().is_clean
    tier.close()
    again = open_tier(path)
    assert again.recovered_pages == 44
    again.close()


def test_rewritten_slot_holds_only_its_new_page(tier: DiskTier) -> None:
    slots = put(tier, [page(1)])
    tier.write(slots, [page(2)])
    assert_holds(tier, slots, [page(2)])
    assert [p.key for p in tier.pages()] == [key_of(2)]
    assert tier.check().is_clean


def test_one_key_in_two_slots_survives_the_loss_of_either(tier: DiskTier) -> None:
    first, second = put(tier, [page(1)]), put(tier, [page(1)])
    tier.free(first)
    put(tier, [page(2)])
    assert_holds(tier, second, [page(1)])
    assert tier.check().is_clean


def test_misuse_is_refused(tier: DiskTier) -> None:
    slots = tier.reserve(2)
    assert slots is not None
    with pytest.raises(ValueError, match="not reserved"):
        tier.write([9], [page(1)])
    with pytest.raises(ValueError, match="distinct slot"):
        tier.write([0, 0], [page(1), page(2)])
    with pytest.raises(ValueError, match="bytes"):
        tier.write([0], [page(1, PAGE_BYTES - 1)])
    with pytest.raises(ValueError, match="buffers"):
        tier.read([0, 1], buffers(1))
    assert isinstance(tier.read([0], buffers(1))[0], TierIOError)
    tier.free(slots)
    with pytest.raises(ValueError, match="not reserved"):
        tier.free([0])
    assert tier.reserve(tier.capacity_pages + 1) is None


def test_closed_tier_says_so(path: Path) -> None:
    tier = open_tier(path)
    slots = put(tier, [page(1)])
    tier.close()
    tier.close()
    for call in (
        lambda: tier.reserve(1),
        lambda: tier.free(slots),
        lambda: tier.write(slots, [page(1)]),
        lambda: tier.read(slots, buffers(1)),
        lambda: tier.check(),
        lambda: list(tier.pages()),
    ):
        with pytest.raises(StoreClosedError):
            call()


def test_readers_see_right_bytes_while_segments_are_reclaimed(path: Path) -> None:
    tier = open_tier(path, capacity_bytes=2 << 20)
    kept = [page(number) for number in range(10)]
    kept_slots: list[int] = []
    wrong: list[Any] = []
    stop = threading.Event()

    def read_on(seed: int) -> None:
        rng = np.random.default_rng(seed)
        into = buffers(4)
        while not stop.is_set():
            picks = rng.permutation(10)[:4]
            outcomes = tier.read([kept_slots[at] for at in picks], into)
            for at, got, outcome in zip(picks, into, outcomes, strict=True):
                if outcome is not None or not np.array_equal(got, kept[at].data):
                    wrong.append((at, outcome))

    for number in range(10):  # spread over the segments, so that each compaction moves some
        kept_slots += put(tier, [kept[number]])
        put(tier, [page(1000 + 10 * number + at) for at in range(4)])
    churned = sorted(set(range(50)) - set(kept_slots))
    threads = [threading.Thread(target=read_on, args=(seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()
    for number in range(100):
        slots = [churned[(3 * number + at) % len(churned)] for at in range(3)]
        tier.free(slots)
        assert tier.reserve(3) is not None
        tier.write(slots, [page(2000 + 3 * number + at) for at in range(3)])
    stop.set()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert tier.write_amplification > 1.25  # the headers alone make 1.1
    assert tier.check().is_clean
    tier.close()


def test_damage_found_by_compaction_costs_only_the_damaged_page(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tier = open_tier(path, capacity_bytes=2 << 20)
    slots = put(tier, [page(number) for number in range(tier.capacity_pages)])
    flip(tier, slots[1], path)
    flip(tier, slots[1], path, at=200)
    with caplog.at_level(logging.WARNING):
        rng = np.random.default_rng(0)
        for round_ in range(40):
            again = sorted(rng.permutation(slots[2:])[:8].tolist())
            tier.free(again)
            assert tier.reserve(8) == again
            tier.write(again, [page(1000 + 8 * round_ + at) for at in range(8)])
    assert "does not agree" in caplog.text
    outcomes = tier.read(slots, buffers(len(slots)))
    assert isinstance(outcomes[1], CorruptPageError)
    assert [at for at, outcome in enumerate(outcomes) if outcome is not None] == [1]
    assert tier.check().is_clean
    tier.close()
