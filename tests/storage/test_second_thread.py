"""SecondThread: both halves of a copy, each once, whatever the machine lets it choose."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator

import pytest

from tiered_kv.storage import second_thread
from tiered_kv.storage.second_thread import SecondThread


@pytest.fixture
def second(monkeypatch: pytest.MonkeyPatch) -> Iterator[SecondThread]:
    """On a machine with nothing else to do, of two cores or more."""
    monkeypatch.setattr(second_thread, "_runnable_threads", lambda: 1)
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    made = SecondThread()
    yield made
    made.close()


@pytest.mark.parametrize("n", [0, 1, 2, 7])
def test_every_page_is_copied_once_and_by_two_threads(second: SecondThread, n: int) -> None:
    done: list[tuple[int, int, int]] = []
    for _ in range(3):  # from the second time on it is told where to wake up
        done.clear()
        second.both_halves(n, lambda *part: done.append((*part, threading.get_ident())))
        assert sorted(done)[0][:2] == (0, n // 2)
        assert sorted(part[:2] for part in done) == sorted([(0, n // 2), (n // 2, n)])
        assert len({thread for *_, thread in done}) == 2


@pytest.mark.parametrize("broken", [0, 4])
def test_a_half_that_breaks_is_raised_when_the_other_has_ended(
    second: SecondThread, broken: int
) -> None:
    ended = []

    def copy(first: int, last: int) -> None:
        if first == broken:
            raise ValueError(f"page {first}")
        ended.append((first, last))

    with pytest.raises(ValueError, match=f"page {broken}"):
        second.both_halves(8, copy)
    assert len(ended) == 1


@pytest.mark.parametrize(
    ("runnable", "sleeping", "cores", "threads"),
    [(1, 0, 2, 2), (2, 0, 2, 1), (1, 0, 1, 1), (1, 1, 2, 1), (1, 1, 3, 2), (1, 2, 3, 1)],
)
def test_it_takes_no_core_from_who_computes(
    second: SecondThread,
    monkeypatch: pytest.MonkeyPatch,
    runnable: int,
    sleeping: int,
    cores: int,
    threads: int,
) -> None:
    """Half of a copy on the core of a matmul took a fifth of its rate (2 cores, 1 GB/s)."""
    monkeypatch.setattr(second_thread, "_runnable_threads", lambda: runnable)
    monkeypatch.setattr(os, "cpu_count", lambda: cores)
    done: list[tuple[int, int]] = []
    second.both_halves(6, lambda first, last: done.append((first, last)), sleeping)
    assert sorted(done) == ([(0, 6)] if threads == 1 else [(0, 3), (3, 6)])


def test_how_many_threads_run_is_asked_of_the_kernel_where_it_says_so() -> None:
    runnable = second_thread._runnable_threads()
    assert runnable >= 1 if os.path.exists("/proc/loadavg") else runnable == 0


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="Linux tells and sets the core")
def test_it_keeps_away_from_the_core_of_its_caller(
    second: SecondThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[set[int]] = []
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {3, 5, 7})
    monkeypatch.setattr(os, "sched_setaffinity", lambda pid, cores: told.append(set(cores)))
    for core in (3, 3, 5, -1):
        monkeypatch.setattr(second_thread, "_core", lambda core=core: core)
        second.both_halves(2, lambda first, last: None)
    assert told == [{5, 7}, {3, 7}, {3, 5, 7}]  # not before it has begun, nor twice the same


def test_with_one_core_or_without_a_say_in_it_nothing_is_set(
    second: SecondThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    second.both_halves(2, lambda first, last: None)
    monkeypatch.setattr(second_thread, "_core", lambda: 0)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0}, raising=False)
    monkeypatch.setattr(os, "sched_setaffinity", None, raising=False)  # a call would raise
    second.both_halves(2, lambda first, last: None)
    monkeypatch.delattr(os, "sched_setaffinity")
    second.both_halves(2, lambda first, last: None)


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="Linux sets the core")
def test_a_core_that_may_not_be_chosen_is_no_error(
    second: SecondThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(pid: int, cores: set[int]) -> None:
        raise PermissionError(1, "sandboxed")

    monkeypatch.setattr(os, "sched_setaffinity", refuse)
    done: list[int] = []
    for _ in range(2):
        second.both_halves(2, lambda first, last: done.append(first))
    assert sorted(done) == [0, 0, 1, 1]
