"""Ctrl-C anywhere in a write, a read or a check: no more is lost than that write."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from disk_rig import PAGE_BYTES, assert_holds, buffers, chain, open_tier, put

from tiered_kv.storage.disk import DiskTier, lane, reader, runs, writes
from tiered_kv.storage.disk.log import SegmentLog
from tiered_kv.storage.disk.segment import SegmentFiles

SAMPLES = 80
PATIENCE_S = 30

pytestmark = pytest.mark.usefixtures("ahead")


def interrupted(work: Callable[[], object], at: int) -> int:
    """Do it, with a KeyboardInterrupt at the end of so manieth call in the disk tier's code.

    Returns how many calls ended: fewer than `at` if it was through before.
    """
    ended = 0

    def look(frame: FrameType, event: str, _: Any) -> None:
        nonlocal ended
        if event in ("return", "c_return") and "/storage/disk/" in frame.f_code.co_filename:
            ended += 1
            if ended == at:
                raise KeyboardInterrupt

    sys.setprofile(look)
    try:
        work()
    except KeyboardInterrupt:
        pass
    finally:
        sys.setprofile(None)
    return ended


def assert_whole(tier: DiskTier) -> None:
    """Every segment is in one place, and counted right."""
    log = tier._log
    known = [*log.free, *log.sealed, *([] if log._filling is None else [log._filling])]
    assert sorted(known) == list(range(tier._geometry.segments))
    counted, live = tier._records.recount()
    assert counted == live


@pytest.mark.parametrize("what", ["write", "writes in a group", "check", "through a ring"])
def test_an_interrupt_at_any_call_costs_no_segment_and_no_page_but_the_write(
    path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    if what == "through a ring":
        monkeypatch.setattr(writes, "RING_BYTES", 0)
    tier = open_tier(path, capacity_bytes=2 << 20)
    slots = put(tier, chain(range(tier.capacity_pages)))
    number = 1000

    def write() -> None:
        tier.write(slots, chain(range(number, number + len(slots))))

    def group() -> None:
        half, pages = len(slots) // 2, chain(range(number, number + len(slots)))
        if what == "through a ring":
            memory = buffers(len(pages))
            for place, page in zip(memory, pages, strict=True):
                place[:] = page.data
            pages = [page._replace(data=place) for page, place in zip(pages, memory, strict=True)]
        ends = [
            tier.begin_write(slots[:half], pages[:half]),
            tier.begin_write(slots[half:], pages[half:]),
        ]
        for end in ends:
            end()

    def check() -> None:
        tier.check()

    work = {"write": write, "check": check}.get(what, group)
    calls = interrupted(work, 0)
    for sample in range(SAMPLES):
        number += 1000
        write()  # all segments are emptied by the next
        tier.free(slots[:3]) if what == "check" else None
        interrupted(work, 1 + calls * sample // SAMPLES)
        assert_whole(tier)
        own = tier._log._writes  # an interrupt as `begin_write` returns leaves what has begun
        assert tier._begun or not (own._under_way or own._open)
        if what == "check":
            taken = tier.reserve(3)
            assert taken is not None and sorted(taken) == sorted(slots[:3])
    number += 1000
    write()
    assert_holds(tier, slots, chain(range(number, number + len(slots))))
    assert tier.check().problems == []
    tier.close()
    tier = open_tier(path, capacity_bytes=2 << 20)
    assert tier.recovered_pages == len(slots) and tier.check().problems == []
    tier.close()


@pytest.mark.parametrize("first_pages", [100, 7])
def test_an_interrupt_at_any_call_of_a_read_leaves_nothing_held(
    path: Path, monkeypatch: pytest.MonkeyPatch, first_pages: int
) -> None:
    for module in (runs, reader, lane):
        monkeypatch.setattr(module, "RUN_BYTES", 2 * PAGE_BYTES)
    monkeypatch.setattr(runs, "MIN_RUN_BYTES", 2 * PAGE_BYTES)
    tier = open_tier(path, capacity_bytes=2 << 20)
    pages = chain(range(30))
    slots, into = put(tier, pages), buffers(30)
    monkeypatch.setattr(reader, "FIRST_BYTES", first_pages * tier._reader.stride_bytes)
    tier.read(slots, into)  # now this thread has its lane
    calls = interrupted(lambda: tier.read(slots, into), 0)
    for sample in range(SAMPLES):
        interrupted(lambda: tier.read(slots, into), 1 + calls * sample // SAMPLES)
        own: Any = tier._reader._lane()
        assert set(tier._records._readers) == {0}
        assert tier._precedence._reads == set()
        assert not (own._under_way or own._waiting or own._arrived or own._open)
        assert not own._requests._under_way
    assert_holds(tier, slots, pages)
    tier.close()


def test_two_interrupts_leave_no_page_that_counts_later(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One in the sync, one while the writes under way are waited for."""
    tier = open_tier(path)
    before = chain(range(5))
    kept = put(tier, before)

    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    failed = tier.reserve(10)
    assert failed is not None
    with monkeypatch.context() as patch:
        patch.setattr(SegmentLog, "sync", stop)
        patch.setattr(SegmentLog, "settle", stop)
        with pytest.raises(KeyboardInterrupt):
            tier.write(failed, chain(range(100, 110)))
    after = chain(range(200, 205))
    kept += put(tier, after)
    assert tier.check().problems == []
    assert tier._catalog.entries == 10
    assert_holds(tier, kept, before + after)
    assert_whole(tier)
    tier.close()


def test_a_job_that_an_interrupt_has_orphaned_is_waited_for(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else its segment could be filled again before its bytes come, which would lie on others."""
    tier = open_tier(path)
    go, done = threading.Event(), threading.Event()
    write, submit = SegmentFiles.write, tier._log._writes._pool.submit

    def slow(*arguments: Any) -> None:
        assert go.wait(PATIENCE_S)
        write(*arguments)
        done.set()

    def interrupted_after(*arguments: Any) -> None:
        submit(*arguments)
        threading.Timer(0.05, go.set).start()
        raise KeyboardInterrupt

    monkeypatch.setattr(SegmentFiles, "write", slow)
    monkeypatch.setattr(tier._log._writes._pool, "submit", interrupted_after)
    with pytest.raises(KeyboardInterrupt):
        put(tier, chain(range(4)))
    assert done.is_set()
    monkeypatch.undo()
    pages = chain(range(10, 14))
    assert_holds(tier, put(tier, pages), pages)
    tier.close()


def test_an_interrupt_in_close_leaves_no_directory_in_use(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = open_tier(path)
    pages = chain(range(4))
    put(tier, pages)
    close = SegmentLog.close

    def interrupted_close(log: SegmentLog) -> None:
        signal.raise_signal(signal.SIGINT)
        close(log)

    with monkeypatch.context() as patch:
        patch.setattr(SegmentLog, "close", interrupted_close)
        with pytest.raises(KeyboardInterrupt):
            tier.close()
    again = open_tier(path)
    assert [page.key for page in again.pages()] == [page.key for page in pages]
    again.close()
