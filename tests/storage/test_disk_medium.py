"""Reading by io_uring and by threads: the same pages, the same faults, nothing left under way."""

from __future__ import annotations

import errno
import logging
import os
import platform
import threading
import time
from collections.abc import Callable, Iterator
from itertools import accumulate
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
    open_tier,
    page,
    put,
    raising_once,
    record_of,
)
from hypothesis import given
from hypothesis import strategies as st

from tiered_kv.errors import CorruptPageError, StoreClosedError, TieredKVError, TierIOError
from tiered_kv.storage.base import PageBuffer
from tiered_kv.storage.disk import DiskTier, lane, medium, reader, ring, runs
from tiered_kv.storage.disk.direct_io import aligned_buffer, iovecs
from tiered_kv.storage.disk.parts import PartedPage
from tiered_kv.storage.disk.records import Records
from tiered_kv.storage.disk.requests import Request, Requests, ThreadRequests
from tiered_kv.storage.disk.ring import Ring, RingRequests

PATIENCE_S = 30
RUN_PAGES = 2


@pytest.fixture(params=["ring", "threads"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> type[Requests]:
    """What carries reads out; runs are of two pages."""
    for module in (runs, reader, lane):
        monkeypatch.setattr(module, "RUN_BYTES", RUN_PAGES * PAGE_BYTES)
    monkeypatch.setattr(runs, "MIN_RUN_BYTES", RUN_PAGES * PAGE_BYTES)
    monkeypatch.setattr(lane, "LEAST_REACH_BYTES", RUN_PAGES * PAGE_BYTES)
    if request.param == "threads":
        monkeypatch.setattr(medium, "is_ring_allowed", lambda: False)
        return ThreadRequests
    if not ring.is_ring_allowed():
        pytest.skip("io_uring is not allowed here")
    return RingRequests


@pytest.fixture
def tier(way: type[Requests], tmp_path: Path) -> Iterator[DiskTier]:
    tier = open_tier(tmp_path / "store", capacity_bytes=64 << 20)  # 40 pages lie in one segment
    assert tier._reader.medium.has_ring == (way is RingRequests)
    yield tier
    tier.close()


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch, way: type[Requests]) -> list[Request]:
    """Every request that is begun."""
    requests: list[Request] = []
    begin = way.begin

    def noted(self: Any, request: Request) -> None:
        requests.append(request)
        begin(self, request)

    monkeypatch.setattr(way, "begin", noted)
    return requests


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def path_of(tier: DiskTier, slot: int) -> str:
    return tier._files.path(record_of(tier, slot).segment)


def lane_of(tier: DiskTier) -> Any:
    """The calling thread's."""
    return tier._reader._lane()


def assert_idle(tier: DiskTier) -> None:
    own = lane_of(tier)
    assert (own._under_way, own._under_way_bytes, own._waiting_bytes) == ({}, 0, 0)
    assert not (own._waiting or own._arrived)
    assert not own._requests._under_way
    assert tier._precedence._reads == set()
    assert not any(tier._records._readers)


# -- what comes ------------------------------------------------------------------------------------


def test_many_runs_come_back_as_they_were(tier: DiskTier, taken: list[Request]) -> None:
    pages = chain(range(101))
    slots = put(tier, pages)
    for _ in range(4):  # more requests than a ring has entries
        order = np.random.default_rng(0).permutation(101).tolist()
        assert_holds(tier, [slots[at] for at in order], [pages[at] for at in order])
    assert len(taken) >= 4 * 50
    assert {request.error for request in taken} == {None}
    assert_idle(tier)


def watched(tier: DiskTier, way: type[Requests], monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """(bytes left, bytes under way) after each request that begins from now on."""
    own, begin_real = lane_of(tier), way.begin
    seen: list[tuple[int, int]] = []

    def begin(self: Any, request: Request) -> None:
        begin_real(self, request)
        seen.append((own._waiting_bytes + own._under_way_bytes, own._under_way_bytes))

    monkeypatch.setattr(way, "begin", begin)
    return seen


def read_all(tier: DiskTier, slots: list[int], is_begun: bool) -> list[TieredKVError | None]:
    """In one go, or begun and then ended."""
    into = buffers(len(slots))
    return tier.begin_read(slots, into)() if is_begun else tier.read(slots, into)


@pytest.mark.parametrize("is_begun", [False, True])
def test_the_less_is_left_the_less_is_under_way_at_once(
    tier: DiskTier, way: type[Requests], monkeypatch: pytest.MonkeyPatch, is_begun: bool
) -> None:
    """What comes last is verified while nothing is read: it must not be all of a long reach."""
    run_bytes, part = RUN_PAGES * PAGE_BYTES, 1 / 2 if is_begun else 3 / 4
    slots = put(tier, chain(range(24)))
    seen = watched(tier, way, monkeypatch)
    assert read_all(tier, slots, is_begun) == [None] * 24
    most = {False: 8, True: 6}[is_begun]  # of 12 in all; the part of the first would allow 9
    assert max(under_way for _, under_way in seen) == most * run_bytes
    assert seen[-1][1] <= run_bytes
    assert all(under_way <= max(left * part, run_bytes) for left, under_way in seen)


def test_the_first_that_begins_is_under_way_before_the_next_is_made_ready(
    tier: DiskTier, way: type[Requests], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The medium may have nothing to do meanwhile."""
    slots = put(tier, chain(range(24)))
    assert tier.read(slots, buffers(24)) == [None] * 24  # now this thread has its requests
    steps: list[str] = []
    begin_real, submit_real = way.begin, way.submit

    def begin(self: Any, request: Request) -> None:
        steps.append("begin")
        begin_real(self, request)

    def submit(self: Any) -> None:
        steps.append("submit")
        submit_real(self)

    monkeypatch.setattr(way, "begin", begin)
    monkeypatch.setattr(way, "submit", submit)
    end = tier.begin_read(slots, buffers(24))
    assert steps == ["begin", "submit", *["begin"] * 5, "submit"]
    assert end() == [None] * 24


@pytest.mark.parametrize("is_more", [False, True])
def test_of_a_long_read_the_first_part_begins_before_the_rest_is_looked_up(
    tier: DiskTier, way: type[Requests], monkeypatch: pytest.MonkeyPatch, is_more: bool
) -> None:
    pages = chain(range(8 + is_more))
    slots = put(tier, pages)
    tier.free(slots[3:4])  # what is not there keeps its place among the outcomes
    taken = tier.reserve(1)
    assert taken == slots[3:4]
    monkeypatch.setattr(reader, "FIRST_BYTES", 8 * tier._reader.stride_bytes + 1)
    steps: list[Any] = []
    locate_real, begin_real = Records.locate, way.begin

    def locate(self: Records, wanted: Any, held: Any) -> Any:
        steps.append(list(wanted))
        return locate_real(self, wanted, held)

    def begin(self: Any, request: Request) -> None:
        steps.append("begin")
        begin_real(self, request)

    monkeypatch.setattr(Records, "locate", locate)
    monkeypatch.setattr(way, "begin", begin)
    into = buffers(len(slots))
    outcomes = tier.read(slots, into)
    assert [at for at, outcome in enumerate(outcomes) if outcome is not None] == [3]
    for at in (*range(3), *range(4, len(slots))):
        assert np.array_equal(into[at], pages[at].data)
    assert [step for step in steps if step != "begin"] == [slots[:8], *([slots[8:]] * is_more)]
    if is_more:
        assert "begin" in steps[: steps.index(slots[8:])]
    assert_idle(tier)


@pytest.mark.parametrize("page_bytes", [PAGE_BYTES, 20_000])
@pytest.mark.parametrize("shift", [0, 64])
def test_callers_buffers_need_not_be_aligned(
    way: type[Requests], tmp_path: Path, page_bytes: int, shift: int
) -> None:
    tier = open_tier(tmp_path / "store", page_bytes=page_bytes)
    pages = [page(number, page_bytes) for number in range(40)]
    slots = put(tier, pages)
    memory = aligned_buffer(40 * 24576 + shift)
    into = [memory[at * 24576 + shift :][:page_bytes] for at in range(40)]
    assert tier.read(slots, into) == [None] * 40
    assert all(np.array_equal(got, wanted.data) for got, wanted in zip(into, pages, strict=True))
    assert len(lane_of(tier)._detours) <= 12  # no more than can be under way
    tier.close()


def test_a_run_of_more_pieces_than_one_request_may_name(
    way: type[Requests], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (runs, reader, lane):
        monkeypatch.setattr(module, "RUN_BYTES", 8 << 20)
    monkeypatch.setattr(runs, "MIN_RUN_BYTES", 8 << 20)
    n_bytes = 160 * 4096
    tier = open_tier(tmp_path / "store", page_bytes=n_bytes, capacity_bytes=64 << 20)
    memory = np.random.default_rng(0).integers(0, 256, 24 * n_bytes, dtype=np.uint8)
    rows = aligned_buffer(24 * n_bytes)
    rows[:] = memory
    parted = [list(row.reshape(160, 4096)) for row in rows.reshape(24, n_bytes)]
    slots = tier.reserve(24)
    assert slots is not None
    keys = [page.key for page in chain(range(24))]
    tier.write(
        slots, [PartedPage(key, None, parts) for key, parts in zip(keys, parted, strict=True)]
    )
    rows[:] = 0
    assert tier.read(slots, parted) == [None] * 24
    assert np.array_equal(rows, memory)
    tier.close()


def test_through_the_page_cache_it_works_too(
    way: type[Requests], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tiered_kv.storage.disk.tier.probe_direct", lambda fd: False)
    tier = open_tier(tmp_path / "store", page_bytes=20_000)
    pages = [page(number, 20_000) for number in range(40)]
    slots = put(tier, pages)
    assert_holds(tier, slots, pages)
    assert not tier.direct_io
    tier.close()


@pytest.mark.parametrize("is_begun", [False, True])
def test_no_more_is_under_way_than_io_threads_say(
    way: type[Requests], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_begun: bool
) -> None:
    """So many runs are read, and as many are queued behind them."""
    tier = open_tier(tmp_path / "store", io_threads=3)
    slots = put(tier, chain(range(60)))
    seen = watched(tier, way, monkeypatch)
    assert read_all(tier, slots, is_begun) == [None] * 60
    assert max(under_way for _, under_way in seen) == 6 * RUN_PAGES * PAGE_BYTES
    tier.close()


# -- reads that are begun and ended later ----------------------------------------------------------


def test_reads_that_were_begun_end_in_any_order(tier: DiskTier) -> None:
    pages = chain(range(60))
    slots = put(tier, pages)
    into = [buffers(20) for _ in range(3)]
    ends = [tier.begin_read(slots[at * 20 :][:20], into[at]) for at in range(3)]
    for at in (2, 0, 1):
        assert ends[at]() == [None] * 20
        for got, wanted in zip(into[at], pages[at * 20 :], strict=False):
            assert np.array_equal(got, wanted.data)
    assert_idle(tier)


def test_a_write_waits_for_reads_that_were_begun(tier: DiskTier) -> None:
    pages = chain(range(40))
    slots = put(tier, pages)
    more = tier.reserve(40)
    assert more is not None
    into = buffers(40)
    end = tier.begin_read(slots, into)
    writing = threading.Thread(target=lambda: tier.write(more, chain(range(100, 140))))
    writing.start()
    deadline = time.monotonic() + PATIENCE_S
    while not tier._precedence.held_chunks:
        assert time.monotonic() < deadline
    assert end() == [None] * 40
    writing.join(PATIENCE_S)
    assert not writing.is_alive()
    assert_holds(tier, slots + more, pages + chain(range(100, 140)))


def test_close_waits_for_reads_that_were_begun(way: type[Requests], tmp_path: Path) -> None:
    tier = open_tier(tmp_path / "store")
    pages = chain(range(40))
    slots, into = put(tier, pages), buffers(40)
    end = tier.begin_read(slots, into)
    closing = threading.Thread(target=tier.close)
    closing.start()
    deadline = time.monotonic() + PATIENCE_S
    while not tier._is_closed:
        assert time.monotonic() < deadline
    with pytest.raises(StoreClosedError):
        tier.begin_read(slots, into)
    assert closing.is_alive()
    assert end() == [None] * 40
    closing.join(PATIENCE_S)
    assert not closing.is_alive()
    assert all(np.array_equal(got, wanted.data) for got, wanted in zip(into, pages, strict=True))


def test_a_begun_read_of_nothing_ends(tier: DiskTier) -> None:
    slots = tier.reserve(2)
    assert slots is not None
    outcomes = tier.begin_read(slots, buffers(2))()
    assert [type(outcome) for outcome in outcomes] == [TierIOError] * 2
    assert tier._precedence._reads == set()


# -- what goes wrong -------------------------------------------------------------------------------


def test_only_pages_that_cannot_be_read_fail(tier: DiskTier) -> None:
    """The file ends in the middle of a page, as after a crash of the file system."""
    pages = chain(range(40))
    slots = put(tier, pages)
    os.truncate(path_of(tier, slots[0]), record_of(tier, slots[30]).offset + 4096)
    into = buffers(40)
    outcomes = tier.read(slots, into)
    assert outcomes[:30] == [None] * 30
    for outcome in outcomes[30:]:
        assert isinstance(outcome, TierIOError) and outcome.errno == errno.EIO
    assert all(np.array_equal(into[at], pages[at].data) for at in range(30))
    assert_idle(tier)


def test_a_damaged_page_spoils_no_other_of_its_run(tier: DiskTier, tmp_path: Path) -> None:
    slots = put(tier, chain(range(40)))
    flip(tier, slots[7], tmp_path / "store")
    outcomes = tier.read(slots, buffers(40))
    assert isinstance(outcomes.pop(7), CorruptPageError)
    assert outcomes == [None] * 39


def test_a_segment_that_cannot_be_opened_is_an_error_of_its_pages(tier: DiskTier) -> None:
    slots = put(tier, chain(range(40)))
    os.rename(path_of(tier, slots[0]), f"{path_of(tier, slots[0])}.gone")
    outcomes = tier.read(slots, buffers(40))
    assert {getattr(outcome, "errno", 0) for outcome in outcomes} == {errno.ENOENT}
    os.rename(f"{path_of(tier, slots[0])}.gone", path_of(tier, slots[0]))
    assert tier.read(slots, buffers(40)) == [None] * 40
    assert_idle(tier)


def test_requests_that_end_early_are_gone_on_with(
    tier: DiskTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    pushed, push, preadv = [], Ring.push, os.preadv

    def short_push(self: Ring, op: int, fd: int, address: int, length: int, offset: int) -> int:
        pushed.append(length)
        return push(self, op, fd, address, 1, offset)

    monkeypatch.setattr(Ring, "push", short_push)
    monkeypatch.setattr(os, "preadv", lambda fd, v, at: preadv(fd, v[:1], at))
    pages = chain(range(40))
    slots = put(tier, pages)
    assert_holds(tier, slots, pages)
    assert len(pushed) == (40 if tier._reader.medium.has_ring else 0), "one page at a time"


@pytest.mark.parametrize("way", ["ring"], indirect=True)
@pytest.mark.parametrize("number", [errno.EAGAIN, errno.EINTR, errno.EINVAL, errno.EOPNOTSUPP])
def test_what_a_ring_cannot_do_a_system_call_does(
    tier: DiskTier, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    pages = chain(range(40))
    slots = put(tier, pages)
    real, calls = Ring.next_completion, 0

    def next_completion(self: Ring) -> tuple[int, int] | None:
        nonlocal calls
        completion = real(self)
        if completion is None:
            return None
        calls += 1
        return (completion[0], -number) if calls % 3 == 0 else completion

    monkeypatch.setattr(Ring, "next_completion", next_completion)
    assert_holds(tier, slots, pages)
    assert calls >= 20
    assert_idle(tier)


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
@pytest.mark.parametrize("where", ["wait", "begin", "poll", "verify"])
def test_what_breaks_in_between_leaves_nothing_under_way(
    tier: DiskTier,
    way: type[Requests],
    monkeypatch: pytest.MonkeyPatch,
    error: type[BaseException],
    where: str,
) -> None:
    """Ctrl-C, or want of memory: the kernel must not write to buffers that were given back."""
    pages = chain(range(60))
    slots = put(tier, pages)
    assert_holds(tier, slots, pages)
    open_before = descriptors()
    owner: Any = reader if where == "verify" else way
    name = "checksum_of" if where == "verify" else where
    other = tier.begin_read(slots[:20], buffers(20))  # of the same thread: it is given up too
    real = getattr(owner, name)
    monkeypatch.setattr(owner, name, raising_once(real, error))
    with pytest.raises(error):
        tier.read(slots, buffers(60))
    with pytest.raises(error):
        other()
    monkeypatch.setattr(owner, name, real)
    assert_idle(tier)
    assert descriptors() == open_before
    assert_holds(tier, slots, pages)
    assert tier.check().is_clean


@pytest.mark.parametrize("way", ["ring"], indirect=True)
def test_a_second_interrupt_does_not_end_the_wait_for_what_is_under_way(
    tier: DiskTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    slots = put(tier, chain(range(60)))
    real, look, calls = Ring.enter, Ring.next_completion, 0

    def interrupted(self: Ring, wait: int) -> None:
        nonlocal calls
        calls += 1
        real(self, wait)
        if calls in (2, 3):
            raise KeyboardInterrupt

    def late(self: Ring) -> tuple[int, int] | None:
        return look(self) if calls >= 3 else None  # or there may be nothing left to wait for

    monkeypatch.setattr(Ring, "enter", interrupted)
    monkeypatch.setattr(Ring, "next_completion", late)
    with pytest.raises(KeyboardInterrupt):
        tier.read(slots, buffers(60))
    assert calls >= 3
    assert_idle(tier)


# -- which of the two ------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.EPERM, errno.ENOMEM])
def test_where_io_uring_is_forbidden_threads_read(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    number: int,
) -> None:
    """Docker's seccomp profile answers EPERM, an old kernel ENOSYS."""

    def refuse(self: Ring, entries: int, parameters: Any) -> int:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(Ring, "_setup", refuse)
    monkeypatch.setattr(runs, "RUN_BYTES", PAGE_BYTES)
    with caplog.at_level(logging.INFO, "tiered_kv.storage.disk.ring"):
        tier = open_tier(tmp_path / "store")
    (record,) = caplog.records
    assert os.strerror(number) in record.message and "uses threads" in record.message
    pages = chain(range(40))
    slots = put(tier, pages)
    assert_holds(tier, slots, pages)
    assert isinstance(lane_of(tier)._requests, ThreadRequests)
    tier.close()


def test_a_kernel_that_knows_no_flags_gets_a_ring_without(
    way: type[Requests], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before 6.1, where no core posts completions out of order."""
    asked: list[int] = []
    real = Ring._setup

    def setup(self: Ring, entries: int, parameters: Any) -> int:
        asked.append(parameters.flags)
        if parameters.flags:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return real(self, entries, parameters)

    monkeypatch.setattr(Ring, "_setup", setup)
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    tier = open_tier(tmp_path / "store")
    pages = chain(range(40))
    assert_holds(tier, put(tier, pages), pages)
    assert asked.count(0) == (2 if way is RingRequests else 0)
    tier.close()
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    assert not ring.is_ring_allowed()


def test_a_kernel_whose_rings_lie_apart_is_not_asked_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    before, real = descriptors(), Ring._setup

    def setup(self: Ring, entries: int, parameters: Any) -> int:
        made = real(self, entries, parameters)
        parameters.features &= ~1
        return made

    monkeypatch.setattr(Ring, "_setup", setup)
    with caplog.at_level(logging.INFO):
        assert not ring.is_ring_allowed()
    assert "no io_uring" in caplog.text
    assert descriptors() == before


def test_a_thread_that_gets_no_ring_reads_with_the_pool(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(self: RingRequests) -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(medium, "is_ring_allowed", lambda: True)
    monkeypatch.setattr(RingRequests, "__init__", refuse)
    monkeypatch.setattr(runs, "RUN_BYTES", PAGE_BYTES)
    tier = open_tier(tmp_path / "store")
    pages = chain(range(40))
    slots = put(tier, pages)
    assert_holds(tier, slots, pages)
    assert "Too many open files" in caplog.text
    tier.close()


def test_a_thread_that_ends_leaves_no_descriptor_behind(tier: DiskTier) -> None:
    pages = chain(range(40))
    slots = put(tier, pages)

    def read() -> None:
        assert_holds(tier, slots, pages)

    def in_threads(work: Callable[[], None]) -> int:
        for _ in range(8):
            thread = threading.Thread(target=work)
            thread.start()
            thread.join(PATIENCE_S)
        return descriptors()

    assert in_threads(read) == in_threads(read)


def test_threads_read_at_the_same_time(tier: DiskTier) -> None:
    pages = chain(range(60))
    slots = put(tier, pages)
    wrong: list[int] = []

    def read(first: int) -> None:
        into = buffers(30)
        for _ in range(10):
            outcomes = tier.read(slots[first : first + 30], into)
            came = zip(into, pages[first:], strict=False)
            if outcomes != [None] * 30 or not all(np.array_equal(a, b.data) for a, b in came):
                wrong.append(first)

    threads = [threading.Thread(target=read, args=(first,)) for first in (0, 10, 20, 30)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
        assert not thread.is_alive()
    assert wrong == []


def test_closing_gives_the_rings_back(way: type[Requests], tmp_path: Path) -> None:
    before = descriptors()
    for number in range(3):
        tier = open_tier(tmp_path / str(number))
        pages = chain(range(40))
        assert_holds(tier, put(tier, pages), pages)
        tier.close()
        assert descriptors() == before


# -- requests --------------------------------------------------------------------------------------


@given(
    lengths=st.lists(st.integers(0, 9), min_size=1, max_size=8).filter(any),
    share=st.floats(0, 1, exclude_max=True),
)
def test_the_rest_of_a_request_is_what_has_not_come(lengths: list[int], share: float) -> None:
    memory = np.zeros(100, np.uint8)
    starts = [0, *accumulate(length + 1 for length in lengths)]
    vectors: list[PageBuffer] = [
        memory[at:][:length] for at, length in zip(starts, lengths, strict=False)
    ]
    table = iovecs(vectors)
    request = Request(-1, vectors, table, 0)
    request.done = int(share * request.n_bytes)
    base = memory.__array_interface__["data"][0]
    whole = [a - base + i for a, n in table.tolist() for i in range(n)]
    rest = [a - base + i for a, n in request.rest().tolist() for i in range(n)]
    assert rest == whole[request.done :]


def test_iovecs_name_where_buffers_are() -> None:
    memory = aligned_buffer(8192)
    read_only = np.frombuffer(bytes(16), np.uint8)
    table = iovecs([memory[:4096], memory[4096:], memory[:0], read_only])
    base = memory.__array_interface__["data"][0]
    other = read_only.__array_interface__["data"][0]
    assert table[:2].tolist() == [[base, 4096], [base + 4096, 4096]]
    assert table[2].tolist()[1] == 0
    assert table[3].tolist() == [other, 16]
