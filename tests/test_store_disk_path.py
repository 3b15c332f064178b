"""The way between host and disk: loads at once, what they take, a flush that cannot go on."""

from __future__ import annotations

import threading
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


def test_batches_of_one_load_are_read_at_the_same_time(
    open_store: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One after the other, the device had nothing to do while a batch was verified."""
    monkeypatch.setattr(tiered_kv.run, "LOAD_BATCH_BYTES", PAGE_BYTES)
    store = open_store()
    keys = chain(store, 3)
    put_on_disk_alone(store, keys)
    together = threading.Barrier(3, timeout=PATIENCE_S)
    real = DiskTier.read

    def read(self: DiskTier, slots: Sequence[int], into: Any) -> Any:
        together.wait()
        return real(self, slots, into)

    monkeypatch.setattr(DiskTier, "read", read)
    assert store.prefetch(keys).wait(PATIENCE_S) == 3
    monkeypatch.undo()
    assert len(get_pages(store, keys)) == 3
    settle(store)
    assert store._mover._loads == [0] * len(store._mover.load_streams)


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
    monkeypatch.setattr(tiered_kv.store, "_FLUSH_BYTES", PAGE_BYTES)
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
