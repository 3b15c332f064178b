"""Carriers in hard places: loads that fail or hang, stores in a hurry, ranks that differ."""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from disk_rig import buffers, open_tier
from disk_rig import chain as disk_pages
from split_rig import LAYOUT, Engine, Rank, chain

import tiered_kv.carrier
from tiered_kv.decider import Hit
from tiered_kv.errors import TierIOError
from tiered_kv.manifest import DiskSlots
from tiered_kv.orders import Order
from tiered_kv.plan import DISK, HOST
from tiered_kv.storage.disk import DiskTier
from tiered_kv.storage.disk.log import SegmentLog
from tiered_kv.storage.hbm import HbmTier

Rig = Callable[..., Engine]


@pytest.fixture
def engine() -> Iterator[Rig]:
    opened: list[Engine] = []

    def open_engine(**settings: Any) -> Engine:
        opened.append(Engine(**settings))
        return opened[-1]

    yield open_engine
    for one in opened:
        one.close()


def break_loads(rank: Rank, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: object) -> None:
        raise TierIOError("gone", tier="hbm", errno=5)

    monkeypatch.setattr(rank.hbm, "write_layers", broken)


def hold(monkeypatch: pytest.MonkeyPatch, owner: type, verb: str) -> threading.Event:
    """Hold up every call of a method until the event is set."""
    is_open, through = threading.Event(), getattr(owner, verb)

    def held_up(self: object, *args: object) -> object:
        is_open.wait()
        return through(self, *args)

    monkeypatch.setattr(owner, verb, held_up)
    return is_open


def begin(rig: Engine, order: Order) -> None:
    """The first half of a step, to the end of its forward pass."""
    for rank in rig.ranks:
        rank.carrier.receive(order)
        rank.carrier.fence(order.fences)
        rank.carrier.start_running()
        for layer in range(LAYOUT.layers):
            rank.carrier.wait_layer(layer)


def finish(rig: Engine) -> None:
    """The second half."""
    for rank in rig.ranks:
        rank.carrier.finish_running()
        rank.carrier.start()
    for rank in rig.ranks:
        if (report := rank.carrier.report()) is not None:
            rig.decider.take(report)


def test_a_rank_that_failed_before_does_not_hide_the_first_failure_of_another(
    engine: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each failure is its own: a count of failures, of the worst rank, would say that all of the
    second rank's are known already.
    """
    rig = engine(ranks=2)
    known, new = chain("a", "b"), chain("a", "b", "c", "d")
    rig.store(known, [0, 1])
    for rank in rig.ranks:
        with monkeypatch.context() as patch:
            break_loads(rank, patch)
            rig.decider.get(known, [10, 11])
            rig.decider.put(new[2:], [12, 13])  # computed over what did not come
            rig.step()
        rig.settle()
        assert rig.decider.match(new) == Hit(2, 2, 2), rank.rank


def test_a_put_decided_before_the_failure_was_heard_is_void(
    engine: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request that is aborted while it runs is done with before the step's report is read."""
    rig = engine()
    known, new = chain("a", "b"), chain("a", "b", "c", "d")
    rig.store(known, [0, 1])
    with monkeypatch.context() as patch:
        break_loads(rig.ranks[0], patch)
        rig.decider.get(known, [10, 11])
        begin(rig, rig.decider.order())
        rig.decider.put(new[2:], [12, 13])
        finish(rig)
    order = rig.decider.order()
    assert [job.is_void for job in order.jobs] == [True]
    assert len(order.heard) == 1
    begin(rig, order)
    finish(rig)
    rig.settle()
    assert rig.decider.match(new) == Hit(2, 2, 2)
    rig.store(new, [0, 1, 2, 3])
    assert rig.decider.match(new) == Hit(4, 4, 4)


def test_a_void_put_leaves_no_page_without_a_place(
    engine: Rig, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """To make room for it pages were to leave host: they stay, on one rank; on several they go."""
    for ranks in (1, 2):
        rig = engine(ranks=ranks, host_pages=4, disk=tmp_path / str(ranks), write_through=False)
        known, new = chain(*"abcd"), chain(*"wxyz")
        rig.store(known, range(4))
        with monkeypatch.context() as patch:
            break_loads(rig.ranks[0], patch)
            rig.decider.get(known[:1], [10])
            rig.decider.put(new, [12, 13, 14, 15])
            rig.step()
        rig.settle()
        assert rig.decider.match(new).pages == 0
        pages = rig.decider.match(known).ready
        assert pages == (4 if ranks == 1 else 1)
        rig.wipe()
        rig.decider.get(known[:pages], range(20, 20 + pages), is_awaited=True)
        rig.settle()
        assert rig.holds(known[:pages], range(20, 20 + pages))


def test_a_load_that_hangs_is_reported_at_its_deadline_and_ends_later(
    engine: Rig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = engine(disk=tmp_path, load_deadline_s=0.05)
    keys = chain("a", "b")
    rig.store(keys, [0, 1])
    rig.close()
    rig = engine(disk=tmp_path, load_deadline_s=0.05)
    is_open = hold(monkeypatch, DiskTier, "begin_read")
    job = rig.decider.get(keys, [10, 11], "me", is_awaited=True)
    rig.step()
    while job.id not in rig.arrived:
        rig.step()
    assert rig.arrived[job.id] == 0
    assert rig.decider.jobs_in_flight == 1  # its pages are pinned, and its buffers not free
    rig.wipe()
    is_open.set()
    rig.settle()
    assert all((tensor.numpy() == 0xEE).all() for tensor in rig.ranks[0].hbm.layers)


def test_whose_load_failed_is_known_with_the_report(
    engine: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = engine()
    keys = chain("a")
    rig.store(keys, [0])
    break_loads(rig.ranks[0], monkeypatch)
    rig.decider.get(keys, [10], "me", is_awaited=True)
    begin(rig, rig.decider.order())
    rig.ranks[0].carrier.start()
    (flight,) = rig.ranks[0].carrier._waiting
    assert flight.transfer.settled.wait(30)
    rig.ranks[0].carrier.finished_waiting()
    report = rig.ranks[0].carrier.report()
    assert report is not None
    assert rig.decider.failed_owners(report) == {"me"}
    rig.decider.take(report)
    assert rig.decider.failed_owners(report) == set()


def test_a_load_may_want_pages_that_a_put_of_the_same_order_brings(
    engine: Rig, tmp_path: Path
) -> None:
    """The put has been decided first, as a request ended; so it must be started first."""
    rig = engine(disk=tmp_path)
    keys = chain(*"abc")
    for rank in rig.ranks:
        rank.compute(keys, range(3))
    rig.decider.put(keys, range(3))
    rig.decider.get(keys, range(10, 13), is_awaited=True)
    rig.step()
    rig.settle()
    assert rig.holds(keys, range(10, 13))


def test_a_fence_starts_the_puts_that_the_fenced_one_hangs_from(
    engine: Rig, tmp_path: Path
) -> None:
    """Both were decided as requests ended; the blocks of the second are given away first."""
    rig = engine(disk=tmp_path)
    keys = chain(*"abcd")
    (rank,) = rig.ranks
    rank.compute(keys, range(4))
    first, _ = rig.decider.put(keys[:2], [0, 1])
    second, _ = rig.decider.put(keys[2:], [2, 3])
    assert first is not None and second is not None
    order = rig.decider.order([second.id])
    rank.carrier.receive(order)
    rank.carrier.fence(order.fences)
    assert not rank.carrier._queued
    for tensor in rank.hbm.layers:
        tensor[2:4] = 0xEE  # the blocks of the fenced one are others' now
    rig.settle()
    assert rig.decider.match(keys) == Hit(4, 4, 4)
    rig.decider.get(keys, range(10, 14), is_awaited=True)
    rig.settle()
    assert rig.holds(keys, range(10, 14))


def test_a_fenced_put_that_is_too_slow_is_not_stored(
    engine: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiered_kv.carrier, "FENCE_S", 0.05)
    rig = engine()
    keys = chain("a", "b")
    is_open = hold(monkeypatch, HbmTier, "read")
    blocker, _ = rig.decider.put(chain("z"), [9])
    job, _ = rig.decider.put(keys, [0, 1])
    assert blocker is not None and job is not None
    begin(rig, rig.decider.order())
    finish(rig)
    rank = rig.ranks[0]
    begin(rig, rig.decider.order([job.id]))  # returns though the first is still being copied
    rig.wipe()
    is_open.set()
    finish(rig)
    (ended,) = [end for end in rig.settle() if end.job.id == job.id]
    assert ended.not_stored == (0, 1)
    assert rig.decider.match(keys).pages == 0
    assert not rank.carrier._flights


def test_only_what_has_arrived_is_promised(engine: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """A page on its way may never come, and the request it was promised to would have failed."""
    rig = engine()
    keys = chain(*"abc")
    rig.store(keys[:1], [0])
    rig.decider.put(keys[1:], [1, 2])
    assert rig.decider.match(keys) == Hit(3, 1, 1)
    rig.step(compute=(keys[1:], [1, 2]))
    rig.settle()
    assert rig.decider.match(keys) == Hit(3, 3, 3)


@pytest.mark.parametrize("disk_size", [16 << 20, 1 << 20], ids=["fits", "too-small"])
def test_what_is_on_host_alone_is_written_when_the_carrier_is_closed(
    engine: Rig, disk_size: int, tmp_path: Path
) -> None:
    """Write-back: root first, as much as fits, so that all of it can hit."""
    settings = {
        "disk": tmp_path,
        "disk_size": disk_size,
        "host_pages": 48,
        "write_through": False,
    }
    keys, branch = chain(*"a" * 40), chain(*"a" * 20, "x")
    first = engine(write_back=True, **settings)
    capacity = first.decider.capacity_pages[DISK]
    first.store(keys, range(40))
    first.store(branch[20:], [40])
    assert first.decider.stats().resident_pages == {HOST: 41, DISK: 0}
    first.close()
    rig = engine(**settings)
    found = rig.decider.match(keys).ready
    assert rig.decider.stats().resident_pages[DISK] == min(41, capacity)
    assert found == min(40, capacity)
    if capacity > 40:
        assert rig.decider.match(branch).ready == 21
    rig.step()
    rig.decider.get(keys[:found], range(found), is_awaited=True)
    rig.settle()
    assert rig.holds(keys[:found], range(found))


def test_a_disk_that_fails_does_not_keep_the_carrier_from_closing(
    engine: Rig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(self: DiskTier, slots: object, pages: object) -> None:
        raise TierIOError("no space left (injected)", tier=DISK, errno=28)

    rig = engine(disk=tmp_path, write_through=False, write_back=True)
    rig.store(chain("a", "b"), [0, 1])
    monkeypatch.setattr(DiskTier, "write", full)
    rig.close()
    assert "pages on host alone are lost: no space left" in caplog.text
    monkeypatch.undo()
    assert engine(disk=tmp_path).decider.match(chain("a", "b")).pages == 0


def test_a_disk_that_hangs_does_not_keep_the_carrier_from_closing(
    engine: Rig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tiered_kv.carrier, "CLOSE_S", 0.05)
    rig = engine(disk=tmp_path, write_through=False, write_back=True)
    rig.store(chain("a", "b"), [0, 1])
    is_open = hold(monkeypatch, DiskTier, "write")
    rig.close()
    assert "has not ended" in caplog.text
    is_open.set()


def test_writes_go_on_once_a_disk_has_room_again(
    engine: Rig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A page whose write failed is the parent of others: with it, they can be written now."""
    rig = engine(disk=tmp_path)
    keys = chain(*"abcd")

    def full(self: DiskTier, slots: object, pages: object) -> None:
        raise TierIOError("no space left (injected)", tier=DISK, errno=28)

    with monkeypatch.context() as patch:
        patch.setattr(DiskTier, "begin_write", full)
        rig.store(keys, range(4))
    assert rig.decider.stats().resident_pages == {HOST: 4, DISK: 0}
    rig.decider.clear()
    rig.store(keys, range(4))
    assert rig.decider.stats().resident_pages == {HOST: 4, DISK: 4}


def test_a_reset_leaves_what_is_under_way_to_end(engine: Rig, tmp_path: Path) -> None:
    rig = engine(disk=tmp_path)
    keys = chain(*"abc")
    rig.store(keys[:2], [0, 1])
    rig.decider.put(keys[2:], [2])
    rig.decider.get(keys[:2], [10, 11], is_awaited=True)
    rig.decider.clear()
    rig.step(compute=(keys[2:], [2]))
    rig.settle()
    assert rig.holds(keys[:2], [10, 11])
    rig.decider.clear()
    assert rig.decider.stats().resident_pages == {HOST: 0, DISK: 0}


def test_pages_that_hang_from_a_lost_one_are_missed_for_that(engine: Rig) -> None:
    rig = engine()
    keys = chain(*"abcd")
    rig.store(keys, range(4))
    index = rig.decider._planner.index
    index.condemn(index.by_name[HOST], index.find(keys[1]), "corrupt")
    rig.decider.count_misses(keys[1:], "not_worth_loading")
    assert rig.decider.stats().why_miss == {"corrupt": 1, "no_parent": 2}


def test_a_write_that_fails_at_its_end_leaves_no_slot_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two writes of a group: the tier numbers the pages as it likes, and has its slots back."""
    tier = open_tier(tmp_path / "store")
    slots = DiskSlots(tier)
    pages = disk_pages(range(6))

    def broken(*_: object) -> None:
        raise OSError(errno.EIO, "the medium broke")

    with monkeypatch.context() as patch:
        patch.setattr(SegmentLog, "sync", broken)
        ends = [slots.begin_write([7, 3, 5], pages[:3]), slots.begin_write([0, 1, 2], pages[3:])]
        for end in ends:
            with pytest.raises(TierIOError, match="the medium broke"):
                end()
    assert tier.used_bytes == 0
    assert not any(map(slots.has, range(8)))
    slots.begin_write([7, 3, 5], pages[:3])()
    assert [slot for slot in range(8) if slots.has(slot)] == [3, 5, 7]
    into = buffers(3)
    assert slots.read([5, 7, 3], into) == [None] * 3
    for got, at in zip(into, (2, 0, 1), strict=True):
        assert (got == pages[at].data).all()
    tier.close()


def test_a_full_disk_is_written_over_on_every_rank(
    engine: Rig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slots of pages given up go to others at once: no order says that they are free."""
    rig = engine(ranks=2, host_pages=8, disk=tmp_path, disk_size=1 << 20)
    disks = [rank.disk for rank in rig.ranks if isinstance(rank.disk, DiskTier)]
    full = disks[0].capacity_pages
    assert full == 25

    def used() -> list[int]:
        return [disk.used_bytes // disk.page_bytes for disk in disks]

    for prompt in "ABCDEFGHIJ":
        rig.store(chain(prompt, "b", "c", "d"), range(4))
    assert rig.decider.stats().resident_pages[DISK] == full
    assert used() == [full, full]
    assert [rank.carrier.stats().failed_writes for rank in rig.ranks] == [0, 0]

    def broken(*_: object) -> None:
        raise TierIOError("the medium broke (injected)", tier=DISK, errno=5)

    with monkeypatch.context() as patch:
        patch.setattr(DiskTier, "begin_write", broken)
        rig.store(chain("K", "b", "c", "d"), range(4))
    assert rig.decider.stats().resident_pages[DISK] == full - 4
    assert used() == [full - 4, full - 4]
