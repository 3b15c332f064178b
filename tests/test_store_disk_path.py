"""The way between host and disk: loads at once, what they take, a flush that cannot go on."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import pytest
from store_rig import (
    PAGE_BYTES,
    PATIENCE_S,
    Rig,
    chain,
    get_pages,
    put_on_disk_alone,
    put_pages,
    settle,
)

import tiered_kv.run
import tiered_kv.store
from tiered_kv.storage.disk import DiskTier
from tiered_kv.streams import Event


def test_batches_of_one_load_are_begun_before_the_first_has_ended(
    open_store: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One after the other, the device had nothing to do while a batch was verified."""
    monkeypatch.setattr(tiered_kv.run, "LOAD_BATCH_BYTES", PAGE_BYTES)
    monkeypatch.setattr(tiered_kv.run, "LOADS_AHEAD", 2)
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
    assert store.prefetch(keys).wait(PATIENCE_S) == 5  # all are queued under the store's lock
    monkeypatch.undo()
    whole = "begin 0, begin 1, begin 2, end 0, begin 3, end 1, begin 4, end 2, end 3, end 4"
    assert ", ".join(events) == whole
    assert len(get_pages(store, keys)) == 5
    settle(store)
    assert store._mover._loads == [0] * len(store._mover.load_streams)


def test_a_small_load_does_not_queue_behind_a_long_one(
    open_store: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiered_kv.run, "LOAD_BATCH_BYTES", PAGE_BYTES)
    mover = open_store()._mover
    with mover.lock:
        streams = [mover.loader(Event()) for _ in range(10)]
    first, second = mover.load_streams
    assert streams == [first] * 8 + [second] * 2


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
    monkeypatch.setattr(tiered_kv.store, "WRITE_BATCH_BYTES", PAGE_BYTES)
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


def test_a_flush_never_pins_more_than_half_of_host(
    open_store: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A put meanwhile would find no room, not for want of it but for all being written."""
    store = open_store()
    capacity = store.capacity_pages()["host"]
    for prompt in range(capacity):
        put_pages(store, chain(store, 1, prompt))
    settle(store)
    batches: list[int] = []
    write = store.own_disk.write

    def noted(slots: Sequence[int], pages: Any) -> None:
        batches.append(len(slots))
        write(slots, pages)

    monkeypatch.setattr(store.own_disk, "write", noted)
    assert store.flush() == capacity
    assert batches == [capacity // 2] * 2
