"""The way between host and disk: loads at once, what they take, a flush that cannot go on."""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from disk_rig import key_of, noted_calls
from store_rig import (
    PAGE_BYTES,
    PATIENCE_S,
    Rig,
    chain,
    fill_slots,
    flush_hbm,
    flush_host,
    get_pages,
    held_stream,
    index_problems,
    put_on_disk_alone,
    put_pages,
    settle,
)

import tiered_kv.flush
import tiered_kv.mover
import tiered_kv.run
from tiered_kv.plan import Move
from tiered_kv.planner import Planner
from tiered_kv.run import Run
from tiered_kv.storage.disk import DiskTier
from tiered_kv.storage.disk.log import SegmentLog
from tiered_kv.storage.disk.records import Records
from tiered_kv.streams import Ahead, Event


@pytest.mark.parametrize("is_prefetch", [True, False])
def test_batches_of_one_load_are_begun_before_the_first_has_ended(
    open_store: Rig, monkeypatch: pytest.MonkeyPatch, is_prefetch: bool
) -> None:
    """One after the other, the device had nothing to do while a batch was verified."""
    monkeypatch.setattr(tiered_kv.run, "LOAD_BATCH_BYTES", PAGE_BYTES)
    monkeypatch.setattr(tiered_kv.run, "LOADS_AHEAD", Ahead(1))
    monkeypatch.setattr(tiered_kv.run, "PREFETCHES_AHEAD", Ahead(2))
    store = open_store()
    keys = chain(store, 5)
    put_on_disk_alone(store, keys)
    store._mover.disk = store.own_disk  # those around it read one batch after the other
    events: list[str] = []
    real, numbers = DiskTier.begin_read, iter(range(5))

    def begin_read(self: DiskTier, slots: Sequence[int], into: Any) -> Any:
        number, end = next(numbers), real(self, slots, into)
        events.append(f"begin {number}")

        def ended() -> Any:
            events.append(f"end {number}")
            return end()

        return ended

    monkeypatch.setattr(DiskTier, "begin_read", begin_read)
    if is_prefetch:  # all are queued under the store's lock
        assert store.prefetch(keys).wait(PATIENCE_S) == 5
        whole = "begin 0, begin 1, begin 2, end 0, begin 3, end 1, begin 4, end 2, end 3, end 4"
    else:
        assert get_pages(store, keys) == ("disk",) * 5
        whole = "begin 0, begin 1, end 0, begin 2, end 1, begin 3, end 2, begin 4, end 3, end 4"
    monkeypatch.undo()
    assert ", ".join(events) == whole
    assert len(get_pages(store, keys)) == 5
    settle(store)
    assert store._mover._loads == [0] * len(store._mover.load_streams)


def test_copies_to_hbm_wait_for_their_own_load_batch(
    open_store: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pages that host has go up at once, the others batch by batch as they are read."""
    monkeypatch.setattr(tiered_kv.run, "LOAD_BATCH_BYTES", 2 * PAGE_BYTES)
    store = open_store()
    keys = chain(store, 7)
    put_on_disk_alone(store, keys)
    assert store.prefetch(keys[:2]).wait(PATIENCE_S) == 2
    settle(store)
    filled: list[Sequence[Any]] = []
    real = Run._fill

    def fill(self: Run, batch: Sequence[Move]) -> Sequence[Move]:
        filled.append([move.key for move in batch])
        return real(self, batch)

    monkeypatch.setattr(Run, "_fill", fill)
    assert get_pages(store, keys) == ("host",) * 2 + ("disk",) * 5
    filled.sort(key=lambda batch: keys.index(batch[0]))
    assert filled == [list(keys[at:upto]) for at, upto in ((0, 2), (2, 4), (4, 6), (6, 7))]


def test_a_small_load_does_not_queue_behind_a_long_one(open_store: Rig) -> None:
    mover = open_store()._mover
    assert mover.loading() == 0
    with mover.lock:
        streams = [mover.loader([Event()]) for _ in range(7)]
        assert mover.loading() == 1
        streams += [mover.loader([Event()] * 3), mover.loader([Event()])]  # a transfer is not split
        assert mover.loading() == 2
        streams += [mover.loader([Event()] * 11), mover.loader([Event()])]
    first, second = mover.load_streams
    assert streams == [first] * 8 + [second] * 2 + [first]


def test_copies_to_hbm_leave_a_core_to_the_thread_that_reads(open_store: Rig) -> None:
    store = open_store()
    assert store._hbm_tier._sleeping() == 0
    loaded = Event()
    with store._mover.lock:
        store._mover.loader([loaded])
    assert store._hbm_tier._sleeping() == 1
    loaded.fire()
    assert store._hbm_tier._sleeping() == 0


def test_loads_at_once_share_the_time_they_take(
    open_store: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each one's whole time, counted for each, made disk look three times as slow to the gate."""
    mover = open_store()._mover
    now = iter((10.0, 11.0, 13.5, 20.0))
    monkeypatch.setattr(time, "perf_counter", lambda: next(now))
    assert [mover.load_seconds(began) for began in (4.0, 5.0, 6.0, 18.0)] == [6.0, 1.0, 2.5, 2.0]


def test_a_flush_to_a_failing_disk_ends_with_its_first_batch(
    open_store: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiered_kv.flush, "WRITE_BATCH_BYTES", PAGE_BYTES)
    store = open_store()
    for first in range(1, 6):
        put_pages(store, chain(store, 1, first))
    settle(store)
    asked: list[int] = []

    def fail(slots: Sequence[int]) -> bool:
        asked.append(len(slots))
        return True

    store.faulty.fail_write = fail
    assert store.flush() == 0
    assert asked == [1]
    store.faulty.fail_write = lambda slots: False
    assert store.flush() == 5


def test_a_flush_never_pins_more_than_three_quarters_of_host(
    open_store: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A put meanwhile would find no room, not for want of it but for all being written."""
    store = open_store()
    capacity = store.capacity_pages()["host"]
    for prompt in range(capacity):
        put_pages(store, chain(store, 1, prompt))
    settle(store)
    under_way: list[int] = []
    real = store.own_disk.begin_write

    def begin_write(slots: Sequence[int], pages: Any) -> Callable[[], None]:
        end = real(slots, pages)
        under_way.append(sum(under_way[-1:]) + len(slots))

        def ended() -> None:
            end()
            under_way.append(under_way[-1] - len(slots))

        return ended

    monkeypatch.setattr(store.own_disk, "begin_write", begin_write)
    assert store.flush() == capacity
    assert max(under_way) == capacity * 3 // 4
    assert under_way[-1] == 0


def count_commits(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The pages of each write that the catalog commits."""
    commits: list[int] = []
    real = Records.publish

    def publish(self: Records, slots: Any) -> None:
        commits.append(len(slots))
        real(self, slots)

    monkeypatch.setattr(Records, "publish", publish)
    return commits


def test_a_flush_in_parts_is_committed_once(
    open_store: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each part is planned when the one before has begun: the medium need not wait for the plan."""
    monkeypatch.setattr(tiered_kv.flush, "_FIRST_PAGES", 1)
    monkeypatch.setattr(tiered_kv.flush, "_PART_PAGES", 3)
    store = open_store(host=24)
    prompts = [chain(store, 6, 1), chain(store, 6, 2)]
    for keys in prompts:
        assert put_pages(store, keys) == 6
    events = noted_calls(monkeypatch, (Planner, "plan_flush"), (DiskTier, "begin_write"))
    commits = count_commits(monkeypatch)
    assert store.flush() == 12
    assert events == ["plan_flush", "begin_write"] * 5
    assert commits == [12]
    monkeypatch.undo()
    assert store.flush() == 0
    assert index_problems(store, idle=True) == []
    flush_hbm(store)
    flush_host(store)
    for keys in prompts:
        assert get_pages(store, keys) == ("disk",) * 6


@pytest.fixture
def page_by_page(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each page is a part of its own."""
    monkeypatch.setattr(tiered_kv.flush, "_FIRST_PAGES", 1)
    monkeypatch.setattr(tiered_kv.flush, "_PART_PAGES", 1)


@pytest.mark.usefixtures("page_by_page")
def test_parts_of_a_flush_fail_together_and_can_be_flushed_again(
    open_store: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store()
    keys = chain(store, 4)
    put_pages(store, keys)

    def broken(*_: Any) -> None:
        raise OSError(errno.EIO, "the medium broke")

    with monkeypatch.context() as patch:
        patch.setattr(SegmentLog, "sync", broken)
        assert store.flush() == 0
    assert store.stats().failed_writes == 4
    assert store.stats().resident_pages["disk"] == 0
    assert index_problems(store, idle=True) == []
    assert store.flush() == 4
    assert index_problems(store, idle=True) == []


@pytest.mark.usefixtures("page_by_page")
def test_a_part_that_fails_to_begin_ends_the_flush_and_those_before_it_count(
    open_store: Rig,
) -> None:
    store = open_store()
    keys = chain(store, 4)
    put_pages(store, keys)
    asked = iter((False, False, True))
    store.faulty.fail_write = lambda slots: next(asked)
    assert store.flush() == 2
    assert next(asked, None) is None
    store.faulty.fail_write = lambda slots: False
    assert store.match(keys).pages == 4
    assert store.stats().resident_pages["disk"] == 2
    assert index_problems(store, idle=True) == []
    assert store.flush() == 2


def test_an_interrupted_flush_leaves_nothing_under_way(
    open_store: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was begun is finished by the stream, and what was not is left for the next flush."""
    monkeypatch.setattr(tiered_kv.flush, "WRITE_BATCH_BYTES", 3 * PAGE_BYTES)
    monkeypatch.setattr(tiered_kv.flush, "_FIRST_PAGES", 1)
    store = open_store()
    keys = chain(store, 10)
    put_pages(store, keys)

    class Interrupted(Event):
        __slots__ = ()

        def wait(self, timeout_s: float | None = None) -> bool:
            raise KeyboardInterrupt

    def submit(work: Any, after: Sequence[Event] = ()) -> Event:
        real(work, after)
        return Interrupted()

    real = store._mover.write_stream.submit
    with monkeypatch.context() as patch:
        patch.setattr(store._mover.write_stream, "submit", submit)
        with pytest.raises(KeyboardInterrupt):
            store.flush()
    settle(store)
    assert store.stats().resident_pages["disk"] == 3
    assert len(store._mover.arrivals) == 0
    assert index_problems(store, idle=True) == []
    assert store.flush() == 7
    assert store.check().is_clean


def test_a_flush_waits_for_a_page_that_a_put_still_brings(
    open_store: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its child is on host already: disk stays prefix-closed, and the write stream goes on."""
    started = threading.Event()

    class Started(Run):
        def start(self) -> None:
            super().start()
            started.set()

    store, writer = open_store(), Event()
    keys, other = chain(store, 2, 1), chain(store, 3, 2)
    first = store.put(keys[:1], fill_slots(store, keys[:1]), after=writer)
    assert put_pages(store, keys[1:]) == 1
    assert put_pages(store, other) == 3
    monkeypatch.setattr(tiered_kv.flush, "Run", Started)
    monkeypatch.setattr(tiered_kv.flush, "_FIRST_PAGES", 1)
    with ThreadPoolExecutor(1) as pool:
        flushed = pool.submit(store.flush)
        assert started.wait(PATIENCE_S)
        store._mover.write_stream.synchronize()
        assert not flushed.done()
        writer.fire()
        assert flushed.result(PATIENCE_S) == 5
    assert first.wait(PATIENCE_S) == 1
    settle(store)
    assert store.stats().resident_pages["disk"] == 5
    assert index_problems(store, idle=True) == []


def test_small_puts_that_are_written_through_share_a_commit(
    open_store: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    commits = count_commits(monkeypatch)
    store = open_store(write_policy="through")
    with held_stream(store._mover.write_stream):
        prompts = [chain(store, 2, number) for number in range(1, 6)]
        puts = [store.put(keys, fill_slots(store, keys)) for keys in prompts]
        store._mover.store_stream.synchronize()
        assert not any(put.is_done for put in puts)
    assert [put.wait(PATIENCE_S) for put in puts] == [2] * 5
    assert commits == [10]
    assert store.stats().resident_pages["disk"] == 10


def test_writes_ahead_are_no_more_than_one_batch_of_demotions(open_store: Rig) -> None:
    """Loads wait for the room that a commit leaves."""
    mover = open_store()._mover
    moves = [Move(page, key_of(page), None, "host", page, "disk", page) for page in range(5)]
    first, last = mover.write_tasks(moves, 3 * PAGE_BYTES, lambda batch: list)
    assert [len(task.batch) for task in (first, last)] == [3, 2]
    for task in (first, last):
        assert task.n_bytes == len(task.batch) * PAGE_BYTES
        assert task.n_bytes + task.ahead.n_bytes == tiered_kv.mover.DEMOTE_BATCH_BYTES
