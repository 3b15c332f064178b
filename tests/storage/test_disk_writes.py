"""What is written through a ring: nothing is lost, mixed up or left behind, whatever goes wrong."""

from __future__ import annotations

import errno
import logging
import os
import platform
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from disk_rig import PAGE_BYTES, assert_holds, buffers, chain, open_tier, put

from tiered_kv.errors import TierIOError
from tiered_kv.storage.base import Page
from tiered_kv.storage.disk import DiskTier, ring, writes
from tiered_kv.storage.disk.direct_io import BLOCK_BYTES
from tiered_kv.storage.disk.records import Records
from tiered_kv.storage.disk.requests import Request
from tiered_kv.storage.disk.ring import Ring, RingRequests

PATIENCE_S = 30

End = Callable[[], None]


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch) -> list[Request]:
    """Every chunk goes to the ring, however short; those that have begun there."""
    if not ring.is_ring_allowed():
        pytest.skip("io_uring is not allowed here")
    monkeypatch.setattr(writes, "RING_BYTES", 0)
    requests: list[Request] = []
    begin = RingRequests.begin

    def noted(self: RingRequests, request: Request) -> None:
        if self._operation == ring._WRITEV:
            requests.append(request)
        begin(self, request)

    monkeypatch.setattr(RingRequests, "begin", noted)
    return requests


def aligned(numbers: range) -> list[Page]:
    """Pages that can be written where they are."""
    pages = chain(numbers)
    memory = buffers(len(pages))
    for page, place in zip(pages, memory, strict=True):
        place[:] = page.data
    return [page._replace(data=place) for page, place in zip(pages, memory, strict=True)]


def begin(tier: DiskTier, pages: list[Page]) -> tuple[list[int], End]:
    slots = tier.reserve(len(pages))
    assert slots is not None
    return slots, tier.begin_write(slots, pages)


def assert_idle(tier: DiskTier) -> None:
    """Nothing is under way, and nothing is held for it."""
    own = tier._log._writes
    assert not own._under_way and not own._open and not own._retired
    assert isinstance(own._ring, RingRequests) and not own._ring._under_way


def end_as(monkeypatch: pytest.MonkeyPatch, *results: int) -> None:
    """The first writes end so, whatever the medium says."""
    real, wanted = RingRequests._is_done, iter(results)

    def is_done(self: RingRequests, request: Request, result: int) -> bool:
        if self._operation == ring._WRITEV:
            result = next(wanted, result)
        return real(self, request, result)

    monkeypatch.setattr(RingRequests, "_is_done", is_done)


@pytest.mark.parametrize("has_ring", [True, False])
def test_pages_come_back_as_they_were_written(
    path: Path, monkeypatch: pytest.MonkeyPatch, begun: list[Request], has_ring: bool
) -> None:
    if not has_ring:
        monkeypatch.setattr(writes, "is_ring_allowed", lambda: False)
    tier = open_tier(path, capacity_bytes=64 << 20)
    pages = aligned(range(40))
    slots = put(tier, pages)
    assert_holds(tier, slots, pages)
    assert tier.bytes_written == 40 * PAGE_BYTES + 2 * BLOCK_BYTES  # extents of 35 and 5
    assert bool(begun) == has_ring
    assert tier.check().is_clean
    tier.close()
    tier = open_tier(path, capacity_bytes=64 << 20)
    assert_holds(tier, [page.slot for page in tier.pages()], pages)
    tier.close()


def test_a_full_tier_is_written_over_in_many_segments(tier: DiskTier, begun: list[Request]) -> None:
    slots = put(tier, aligned(range(tier.capacity_pages)))
    for number in (1000, 2000):
        pages = aligned(range(number, number + len(slots)))
        tier.write(slots, pages)
    assert_holds(tier, slots, pages)
    assert len({request.fd for request in begun}) and len(begun) > 6
    assert_idle(tier)
    assert tier.check().is_clean


def test_a_short_write_alone_and_memory_that_is_not_aligned_are_for_threads(
    path: Path, monkeypatch: pytest.MonkeyPatch, begun: list[Request]
) -> None:
    tier = open_tier(path)
    odd = buffers(1, PAGE_BYTES + 1)[0][1:]
    page = aligned(range(1))[0]
    odd[:] = page.data
    slots = put(tier, [page._replace(data=odd)])
    assert begun == []
    monkeypatch.setattr(writes, "RING_BYTES", 2 * PAGE_BYTES)
    more = aligned(range(10, 11))
    slots += put(tier, more)
    assert begun == []
    assert_holds(tier, slots, [page, *more])
    tier.close()


def test_while_a_read_waits_a_chunk_is_held_back_by_a_thread(
    tier: DiskTier, begun: list[Request]
) -> None:
    read = object()
    tier._precedence.begin_read(read)
    pages = aligned(range(4))
    slots, end = begin(tier, pages)  # does not block
    assert begun == []
    tier._precedence.end_read(read)
    end()
    assert_holds(tier, slots, pages)


def test_no_more_is_under_way_than_a_read_may_wait_for(
    path: Path, monkeypatch: pytest.MonkeyPatch, begun: list[Request]
) -> None:
    tier = open_tier(path, capacity_bytes=64 << 20)
    most_bytes = 2 * (8 * PAGE_BYTES + BLOCK_BYTES)
    monkeypatch.setattr(writes, "_MOST_BYTES", most_bytes)
    own, under_way = tier._log._writes, []
    submit = RingRequests.submit

    def noted(self: RingRequests) -> None:
        under_way.append(sum(request.n_bytes for request in own._under_way))
        submit(self)

    monkeypatch.setattr(RingRequests, "submit", noted)
    sets = [aligned(range(at, at + 8)) for at in range(0, 80, 8)]
    made = [begin(tier, pages) for pages in sets]
    assert len(begun) == 10 and max(under_way) <= most_bytes
    for (slots, end), pages in zip(made, sets, strict=True):
        end()
        assert_holds(tier, slots, pages)
    tier.close()


def test_a_write_that_has_begun_in_a_thread_that_ended_ends_in_another(
    tier: DiskTier, begun: list[Request]
) -> None:
    pages, made = aligned(range(60)), []
    thread = threading.Thread(target=lambda: made.append(begin(tier, pages)))
    thread.start()
    thread.join(PATIENCE_S)
    slots, end = made[0]
    end()
    assert begun
    assert_holds(tier, slots, pages)
    assert_idle(tier)


def test_a_short_write_goes_on_where_it_ended(
    tier: DiskTier, monkeypatch: pytest.MonkeyPatch, begun: list[Request]
) -> None:
    push, pushed = Ring.push, []

    def first_alone(self: Ring, operation: int, fd: int, address: int, *rest: int) -> int:
        length, offset = rest
        if operation == ring._WRITEV:
            pushed.append(length)
            length = min(length, 3)
        return push(self, operation, fd, address, length, offset)

    monkeypatch.setattr(Ring, "push", first_alone)
    pages = aligned(range(10))
    assert_holds(tier, put(tier, pages), pages)
    assert pushed == [11, 8, 5, 2]  # a header and ten pages
    assert_idle(tier)


@pytest.mark.parametrize("number", [errno.EAGAIN, errno.ECANCELED, errno.EOPNOTSUPP])
def test_what_the_ring_cannot_do_now_a_system_call_does(
    tier: DiskTier, monkeypatch: pytest.MonkeyPatch, begun: list[Request], number: int
) -> None:
    write, calls = os.pwritev, []
    end_as(monkeypatch, -number)

    def noted(*arguments: Any) -> int:
        calls.append(arguments[2])
        return write(*arguments)

    monkeypatch.setattr(os, "pwritev", noted)
    pages = aligned(range(10))
    assert_holds(tier, put(tier, pages), pages)
    assert calls == [request.offset for request in begun]


@pytest.mark.parametrize("result", [-errno.EIO, 0])
def test_a_failing_medium_fails_all_that_have_begun(
    tier: DiskTier, monkeypatch: pytest.MonkeyPatch, begun: list[Request], result: int
) -> None:
    before = aligned(range(5))
    kept = put(tier, before)
    with monkeypatch.context() as patch:
        end_as(patch, 5 * PAGE_BYTES + BLOCK_BYTES, result)
        made = [begin(tier, aligned(range(at, at + 5))) for at in (100, 200, 300)]
        for _, end in made:
            with pytest.raises(TierIOError, match="writing 5 pages failed: Input/output") as told:
                end()
            assert told.value.errno == errno.EIO
    for slots, _ in made:
        assert all(isinstance(one, TierIOError) for one in tier.read(slots, buffers(5)))
    assert_idle(tier)
    again = aligned(range(400, 405))
    tier.write(made[0][0], again)
    assert_holds(tier, [*kept, *made[0][0]], [*before, *again])
    assert tier.check().is_clean


@pytest.mark.parametrize("vectors", [1024, 3])
def test_a_write_that_cannot_begin_leaves_those_in_the_ring_whole(
    tier: DiskTier, monkeypatch: pytest.MonkeyPatch, begun: list[Request], vectors: int
) -> None:
    monkeypatch.setattr(ring, "MAX_VECTORS", vectors)  # 3: it is cut off in the middle
    pages = aligned(range(60))
    slots, end = begin(tier, pages)

    def broken(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "none left")

    with monkeypatch.context() as patch:
        patch.setattr(Records, "put", broken)
        with pytest.raises(TierIOError, match="none left"):
            begin(tier, aligned(range(100, 104)))
    end()
    assert_holds(tier, slots, pages)
    assert_idle(tier)
    assert tier.check().is_clean


def test_an_interrupt_while_a_failure_is_dealt_with_leaves_threads_to_write(
    tier: DiskTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    own = tier._log._writes
    with monkeypatch.context() as patch:
        patch.setattr(writes, "_threads", interrupted)
        with pytest.raises(KeyboardInterrupt):
            own.abandon()
    own.settle()
    pages = chain(range(5))  # not aligned: a thread's
    assert_holds(tier, put(tier, pages), pages)


def test_no_place_is_written_again_while_the_kernel_keeps_what_failed(
    tier: DiskTier, monkeypatch: pytest.MonkeyPatch, begun: list[Request]
) -> None:
    pages = aligned(range(5))
    kept = put(tier, pages)
    failed, end = begin(tier, aligned(range(100, 160)))
    tier.free(failed)

    def broken(*_: Any) -> None:
        raise OSError(errno.EBADF, "no such ring")

    with monkeypatch.context() as patch:
        patch.setattr(RingRequests, "drain", broken)
        with pytest.raises(TierIOError, match="cannot be waited for: no such ring"):
            end()
        with pytest.raises(TierIOError, match="cannot be waited for: no such ring"):
            put(tier, aligned(range(200, 204)))
    more = aligned(range(300, 304))
    assert_holds(tier, [*kept, *put(tier, more)], [*pages, *more])
    assert_idle(tier)
    assert tier.check().is_clean


def test_only_where_loads_are_never_reordered_do_threads_share_a_ring(
    tier: DiskTier,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    begun: list[Request],
) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    with caplog.at_level(logging.INFO):
        pages = aligned(range(10))
        assert_holds(tier, put(tier, pages), pages)
    assert begun == [] and "writes with threads" in caplog.text
