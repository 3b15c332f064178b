"""Reads of the disk tier go before its writes, and writes do not starve."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from disk_rig import PAGE_BYTES, assert_holds, buffers, chain, put

from tiered_kv.storage.disk import DiskTier
from tiered_kv.storage.disk.precedence import Precedence

PATIENCE_S = 30


@contextmanager
def reading(precedence: Precedence) -> Iterator[None]:
    read = object()
    precedence.begin_read(read)
    try:
        yield
    finally:
        precedence.end_read(read)


def until(is_true: Callable[[], bool]) -> None:
    """Look again and again; for what no event tells."""
    deadline = time.monotonic() + PATIENCE_S
    while not is_true():
        assert time.monotonic() < deadline, "it never came to that"


class Chunks:
    """Writers in threads of their own, each with one chunk of 100 bytes."""

    def __init__(self, precedence: Precedence, count: int) -> None:
        self.passed = threading.Semaphore(0)
        self._precedence = precedence
        self._threads = [threading.Thread(target=self._write) for _ in range(count)]
        for thread in self._threads:
            thread.start()

    def _write(self) -> None:
        self._precedence.let_reads_pass(100)
        self.passed.release()

    def join(self) -> None:
        for thread in self._threads:
            thread.join(PATIENCE_S)
            assert not thread.is_alive()


def test_a_chunk_passes_at_once_when_nobody_reads() -> None:
    precedence = Precedence()
    with reading(precedence):
        pass
    precedence.let_reads_pass(1 << 30)
    assert precedence.held_chunks == 0


def test_a_chunk_waits_till_the_last_read_has_ended() -> None:
    precedence = Precedence()
    with reading(precedence):
        with reading(precedence):
            chunks = Chunks(precedence, 1)
            until(lambda: precedence.held_chunks == 1)
        assert not chunks.passed.acquire(blocking=False)
    assert chunks.passed.acquire(timeout=PATIENCE_S)
    chunks.join()


def test_a_chunk_waits_for_no_more_bytes_of_reads_than_it_has() -> None:
    precedence = Precedence()
    with reading(precedence):  # it never ends
        precedence.has_read(1000)  # before the chunk came: does not count
        chunks = Chunks(precedence, 1)
        until(lambda: precedence.held_chunks == 1)
        precedence.has_read(99)
        assert not chunks.passed.acquire(blocking=False)
        precedence.has_read(1)
        assert chunks.passed.acquire(timeout=PATIENCE_S)
        chunks.join()


def test_each_chunk_waits_in_turn() -> None:
    """Three writing threads must not all go when one chunk's worth has been read."""
    precedence = Precedence()
    with reading(precedence):
        chunks = Chunks(precedence, 3)
        for number in (1, 2, 3):
            until(lambda wanted=number: precedence.held_chunks == wanted)  # type: ignore[misc]
            assert not chunks.passed.acquire(blocking=False)
            precedence.has_read(100)
            assert chunks.passed.acquire(timeout=PATIENCE_S)
        chunks.join()


class HeldReads:
    """Every preadv waits for `gate`; `calls` says in which order system calls were begun."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.gate, self.begun = threading.Event(), threading.Event()
        self.calls: list[str] = []
        real_read, real_write = os.preadv, os.pwritev

        def preadv(fd: int, vectors: Any, offset: int) -> int:
            self.begun.set()
            assert self.gate.wait(PATIENCE_S)
            self.calls.append("read")
            return real_read(fd, vectors, offset)

        def pwritev(fd: int, vectors: Any, offset: int) -> int:
            self.calls.append("write")
            return real_write(fd, vectors, offset)

        monkeypatch.setattr(os, "preadv", preadv)
        monkeypatch.setattr(os, "pwritev", pwritev)


def in_thread(work: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=work)
    thread.start()
    return thread


def join(thread: threading.Thread) -> None:
    thread.join(PATIENCE_S)
    assert not thread.is_alive()


def test_a_write_waits_for_a_read_that_is_under_way(
    tier: DiskTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = chain(range(4)), chain(range(10, 14))
    slots, into = put(tier, first), buffers(4)
    more = tier.reserve(4)
    assert more is not None
    held = HeldReads(monkeypatch)
    reading = in_thread(lambda: tier.read(slots, into))
    assert held.begun.wait(PATIENCE_S)
    writing = in_thread(lambda: tier.write(more, second))
    until(lambda: tier._precedence.held_chunks == 1)
    assert held.calls == []
    held.gate.set()
    join(reading)
    join(writing)
    assert held.calls == ["read", "write"]
    assert_holds(tier, slots + more, first + second)


def test_compaction_waits_for_a_read_that_is_under_way(
    tier: DiskTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    pages = chain(range(tier.capacity_pages))
    slots = put(tier, pages)
    victim = tier._log.sealed[0]
    last = slots[-1:]
    record = tier._records.record(last[0])
    assert record is not None and record.segment != victim
    into = buffers(1)
    held = HeldReads(monkeypatch)
    reading = in_thread(lambda: tier.read(last, into))
    assert held.begun.wait(PATIENCE_S)
    compacting = in_thread(lambda: tier._compaction.compact(victim))
    until(lambda: tier._precedence.held_chunks == 1)
    assert held.calls == []
    held.gate.set()
    join(reading)
    join(compacting)
    assert "write" in held.calls and held.calls[0] == "read"
    assert tier.check().is_clean
    assert_holds(tier, slots, pages)


def test_a_read_that_fails_lets_writes_go_on(
    tier: DiskTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    slots = put(tier, chain(range(4)))

    def broken(fd: int, vectors: Any, offset: int) -> int:
        raise OSError(5, "broken")

    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", broken)
        assert all(tier.read(slots, buffers(4)))
    with pytest.raises(ValueError, match=f"row of {PAGE_BYTES} bytes"):
        tier.read(slots, buffers(4, 4096))
    put(tier, chain(range(10, 14)))
    assert tier._precedence.held_chunks == 0
