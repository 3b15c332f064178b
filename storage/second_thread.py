"""A second thread that does half of a copy, on another core than the first."""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress


class SecondThread:
    """Halves the time of a copy in host memory, of which one thread reaches 0.6.

    It is told which cores to wake up on: all but that of who calls. Left to the kernel it mostly
    woke up on the caller's own though the other was idle, and waited 4 ms for half of a copy that
    takes 6 (2 cores, Linux 6.18 under KVM, 2026-11; there a halted core may not count as idle).
    """

    def __init__(self) -> None:
        self._native_id = 0
        self._cores: set[int] = set()  # that it may wake up on
        self._executor = ThreadPoolExecutor(1, "tiered-kv-copy", self._note_id)

    def _note_id(self) -> None:
        self._native_id = threading.get_native_id()

    def both_halves(self, n: int, copy: Callable[[int, int], None], sleeping: int = 0) -> None:
        """Call `copy(0, n // 2)` here and `copy(n // 2, n)` there; returns when both have.

        Where no core has nothing to do, `copy(0, n)` here: half of a copy would take the time of
        somebody who computes.

        Args:
            sleeping: threads that will need a core as soon as they wake up.
        """
        if _runnable_threads() + sleeping >= (os.cpu_count() or 1):
            copy(0, n)
            return
        self._keep_away()
        other = self._executor.submit(copy, n // 2, n)
        try:
            copy(0, n // 2)
        finally:
            other.result()

    def _keep_away(self) -> None:
        if not self._native_id or not hasattr(os, "sched_setaffinity"):
            return
        cores = os.sched_getaffinity(0) - {_core()}
        if cores and cores != self._cores:
            self._cores = cores
            with suppress(OSError):  # not allowed here: it wakes up where the kernel likes
                os.sched_setaffinity(self._native_id, cores)

    def close(self) -> None:
        """End the thread."""
        self._executor.shutdown()


def _core() -> int:
    """The core this thread runs on, or -1 where the C library does not say."""
    return int(_LIBC.sched_getcpu()) if hasattr(_LIBC, "sched_getcpu") else -1


def _runnable_threads() -> int:
    """How many threads of the whole machine run or could; 0 where that is not to be had. 6 us."""
    try:
        with open("/proc/loadavg", "rb", buffering=0) as file:
            return int(file.read(128).split()[3].split(b"/")[0])
    except OSError:
        return 0


_LIBC = ctypes.CDLL(None)
