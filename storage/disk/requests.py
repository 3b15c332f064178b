"""Requests to the medium that are under way at once: one interface, carried out in two ways."""

from __future__ import annotations

import queue
import threading
from abc import ABC, abstractmethod
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field

import numpy as np

from tiered_kv.storage.base import PageBuffer
from tiered_kv.storage.disk.columns import Column
from tiered_kv.storage.disk.direct_io import read_exact

MOST_REQUESTS = 64
"""Requests that one thread may have under way."""

_HAND_OVER_S = 2e-4


@dataclass(slots=True, eq=False)
class Request:
    """Consecutive bytes of a file, to be read into buffers, which are the medium's till it is done.

    Or to be written from them, in a ring that is for writing.

    Attributes:
        table: address and length of each buffer (uint64, one row a buffer), as an iovec has them.
        done: bytes moved so far.
        error: why it ended early; None while it is under way and when all has come.
    """

    fd: int
    vectors: Sequence[PageBuffer]
    table: Column
    offset: int
    done: int = 0
    error: OSError | None = None
    n_bytes: int = field(init=False)

    def __post_init__(self) -> None:
        self.n_bytes = int(self.table[:, 1].sum())

    @property
    def has_ended(self) -> bool:
        """Whether it is done, well or not."""
        return self.error is not None or self.done >= self.n_bytes

    def rest(self) -> Column:
        """The rows of `table` that have not been filled, the first of them from where it is."""
        ends = np.cumsum(self.table[:, 1])
        first = int(np.searchsorted(ends, self.done, side="right"))
        rest = self.table[first:].copy()
        into = self.done - int(ends[first - 1] if first else 0)
        rest[0] += np.array([into, -into], np.int64).astype(np.uint64)
        return rest


class Requests(ABC):
    """The requests of one thread, which alone may call: it begins them, then waits for any."""

    @abstractmethod
    def begin(self, request: Request) -> None:
        """Take a request on; of at most `MOST_REQUESTS`. It may begin only with the next call."""

    @abstractmethod
    def submit(self) -> None:
        """See to it that all that was taken on is under way; does not block."""

    @abstractmethod
    def wait(self) -> list[Request]:
        """Block until some of what was taken on is done, well or not, and return it."""

    @abstractmethod
    def poll(self) -> list[Request]:
        """What is done by now; does not block."""

    @abstractmethod
    def drain(self) -> None:
        """Block until nothing is under way, and forget it: no buffer is written to after that.

        What was taken on and is not under way yet never will be. An interrupt is raised after that.

        Raises:
            OSError: that cannot be waited for: close these, and use them no more.
        """

    @abstractmethod
    def close(self) -> None:
        """Give back what the kernel holds for them; nothing is under way. Twice is harmless."""


class ThreadRequests(Requests):
    """Each request is a `preadv` by a thread of a pool, which others use too."""

    def __init__(self, pool: ThreadPoolExecutor, threads: int) -> None:
        self._pool = pool
        self._threads = threads
        self._under_way: dict[Request, Future[None]] = {}
        self._done: queue.SimpleQueue[Request] = queue.SimpleQueue()

    def begin(self, request: Request) -> None:
        begun, future = threading.Event(), Future[None]()
        self._under_way[request] = future  # before: a signal may come after any call
        self._pool.submit(self._carry_out, request, future, begun)
        if len(self._under_way) <= self._threads:  # a thread may be free, and needs the lock of
            begun.wait(_HAND_OVER_S)  # the interpreter: going on, we would keep it from that 5 ms

    def submit(self) -> None:
        """They are."""

    def wait(self) -> list[Request]:
        first = self._done.get()
        self._under_way.pop(first).result()
        return [first, *self.poll()]

    def poll(self) -> list[Request]:
        done: list[Request] = []
        while not self._done.empty():
            request = self._done.get()
            self._under_way.pop(request).result()
            done.append(request)
        return done

    def drain(self) -> None:
        broke = None
        while self._under_way:
            try:
                wait([future for future in self._under_way.values() if not future.cancel()])
                self._under_way.clear()
            except BaseException as error:  # threads still write
                broke = error
        self._done = queue.SimpleQueue()
        if broke is not None:
            raise broke

    def close(self) -> None:
        """The pool is another's."""

    def _carry_out(self, request: Request, future: Future[None], begun: threading.Event) -> None:
        begun.set()
        if not future.set_running_or_notify_cancel():
            return
        failure: BaseException | None = None
        try:
            request.done = read_exact(request.fd, request.vectors, request.offset)
        except OSError as error:
            request.error = error
        except BaseException as error:
            failure = error
        self._done.put(request)
        if failure is None:
            future.set_result(None)
        else:
            future.set_exception(failure)
