"""Copy streams and events: CUDA streams, or threads that behave like them.

A stream is a worker that does what it is given, one thing after another, while its caller goes on.
An event fires once. The two together say everything about order: a copy that must not start before
a page has been written waits for the writer's event, and one that overwrites a page waits for its
readers'. `ThreadStream` needs no GPU, so that the asynchrony is real in every test.
"""

from __future__ import annotations

import logging
import math
import queue
import threading
from collections import deque
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch

Work = Callable[[], None]
_log = logging.getLogger(__name__)


class Event:
    """Fires once. Any number of threads may wait for it, before and after."""

    __slots__ = ("_callbacks", "_fired", "_lock", "_waiters")

    def __init__(self) -> None:
        """Much lighter than a `threading.Event`, of which a get() would make one a layer."""
        self._fired = False
        self._lock = threading.Lock()
        self._callbacks: list[Work] = []
        self._waiters: list[threading.Lock] = []  # held, each by who waits for its release

    @property
    def is_fired(self) -> bool:
        """Whether it has fired."""
        return self._fired

    def fire(self) -> None:
        """Release all who wait; run the callbacks here, in this thread. Twice is harmless.

        All of them run; what the last that broke has raised is raised here.
        """
        with self._lock:
            self._fired = True
            waiters, self._waiters = self._waiters, []
            callbacks, self._callbacks = self._callbacks, []
        for waiter in waiters:
            waiter.release()
        broke: BaseException | None = None
        for callback in callbacks:
            try:
                callback()
            except BaseException as error:  # the others wait for nothing else
                broke = error
        if broke is not None:
            raise broke

    def wait(self, timeout_s: float | None = None) -> bool:
        """Block until it fires; False if the time ran out first."""
        waiter = threading.Lock()
        waiter.acquire()
        with self._lock:
            if self._fired:
                return True
            self._waiters.append(waiter)
        try:
            waiter.acquire(timeout=-1 if timeout_s is None else max(0.0, timeout_s))
        finally:
            with self._lock:
                if not self._fired:
                    self._waiters.remove(waiter)
        return self._fired

    def on_fire(self, callback: Work) -> None:
        """Call back when it fires, in the thread that fires it; at once if it has."""
        with self._lock:
            if not self._fired:
                self._callbacks.append(callback)
                return
        callback()


def when_all(events: Sequence[Event], then: Work) -> None:
    """Call `then` once all events have fired, in the thread that fires the last of them."""
    pending = [event for event in events if not event.is_fired]
    left = len(pending)
    if left == 0:
        then()
        return
    lock = threading.Lock()

    def one_less() -> None:
        nonlocal left
        with lock:
            left -= 1
            is_last = left == 0
        if is_last:
            then()

    for event in pending:
        event.on_fire(one_less)


class Ahead(NamedTuple):
    """How much else may have begun and be left to end when work in halves begins.

    Attributes:
        halves: so many others.
        n_bytes: of so many bytes in all.
    """

    halves: int
    n_bytes: float = math.inf

    def allows(self, begun: Collection[_Begun]) -> bool:
        """Whether what has begun may be left to end."""
        return len(begun) <= self.halves and sum(one.n_bytes for one in begun) <= self.n_bytes


class _Halves(NamedTuple):
    """Work in two halves: `begin` returns the other; `done` fires after that."""

    begin: Callable[[], Work]
    n_bytes: int
    ahead: Ahead
    done: Event


class _Begun(NamedTuple):
    """The second half of what has begun."""

    end: Work
    n_bytes: int
    done: Event


_NOTHING = Ahead(0)


class Stream:
    """One worker thread with a queue: first in, first out among work that waits for nothing.

    Work that names events is queued when the last of them fires, so that nothing behind it is held
    up and no two streams can wait for each other.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._queue: queue.SimpleQueue[Any] = queue.SimpleQueue()  # of Work; None: the end
        self._thread = threading.Thread(target=self._serve, name=f"tiered-kv-{name}", daemon=True)
        self._thread.start()

    def submit(self, work: Work, after: Sequence[Event] = ()) -> Event:
        """Do `work` on the stream once all events have fired; returns at once.

        The event returned fires when the work has been done *and* what it enqueued on the device is
        through. `work` must not raise: what fails is its own to report, and here is only logged.
        """
        done = Event()

        def run() -> None:
            try:
                with self._context():
                    work()
                self.drain()
            finally:
                done.fire()

        when_all(after, lambda: self._queue.put(run))
        return done

    def record(self) -> Event:
        """An event that fires when all work queued so far has been done."""
        return self.submit(lambda: None)

    def synchronize(self) -> None:
        """Block until all work queued so far has been done."""
        self.record().wait()

    def close(self) -> None:
        """Finish what is queued and end the worker."""
        self._queue.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def mark(self) -> Any:
        """Called by work on the stream: a device event for what it has enqueued so far, or None."""
        return None

    def _serve(self) -> None:
        while (run := self._queue.get()) is not None:
            self._do(run)

    def _do(self, run: Work) -> None:
        try:
            run()
        except BaseException:  # a stream that ends would leave all who wait for it for ever
            _log.exception("work on stream %s broke", self.name)

    def _context(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def drain(self) -> None:
        """Called by work on the stream: block until the device is through with what it enqueued."""


class ThreadStream(Stream):
    """A stream on a machine without CUDA: the worker thread itself does the copying."""


class HalvesStream(Stream):
    """A stream whose work may come in two halves: it begins the next few before it ends the first.

    So a medium has something to do while what came from it is dealt with, by one thread. Halves end
    in the order they began in; work in one piece runs when all that was begun before it has ended.
    """

    def submit_halves(
        self,
        begin: Callable[[], Work],
        ahead: Ahead,
        after: Sequence[Event] = (),
        *,
        n_bytes: int = 0,
    ) -> Event:
        """Do `begin`, and later what it returns, once all events have fired; returns at once.

        The event returned fires when both are done. Neither may raise, as in `submit`.

        Args:
            ahead: what may be left to end meanwhile.
            n_bytes: what it counts, by that of others.
        """
        done = Event()
        when_all(after, lambda: self._queue.put(_Halves(begin, n_bytes, ahead, done)))
        return done

    def _serve(self) -> None:
        begun: deque[_Begun] = deque()
        while True:
            try:
                run = self._queue.get(block=not begun)
            except queue.Empty:
                self._end(begun)
                continue
            ahead = run.ahead if isinstance(run, _Halves) else _NOTHING
            while begun and not ahead.allows(begun):
                self._end(begun)
            if run is None:
                return
            if isinstance(run, _Halves):
                begun.append(_Begun(self._begin(run), run.n_bytes, run.done))
            else:
                self._do(run)

    def _begin(self, halves: _Halves) -> Work:
        try:
            return halves.begin()
        except BaseException:
            _log.exception("work on stream %s broke", self.name)
            return lambda: None

    def _end(self, begun: deque[_Begun]) -> None:
        end, _, done = begun.popleft()

        def run() -> None:
            try:
                end()
            finally:
                done.fire()

        self._do(run)


class CudaStream(Stream):
    """A CUDA stream fed by a worker thread, which also waits for it: the caller never blocks."""

    def __init__(self, name: str, device: torch.device) -> None:
        self._device = device
        self._cuda = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        super().__init__(name)

    def mark(self) -> Any:
        """A CUDA event for what this stream has been given so far."""
        event: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(self._cuda)
        return event

    def _context(self) -> AbstractContextManager[Any]:
        return torch.cuda.stream(self._cuda)

    def drain(self) -> None:
        """Block until the device is through; raises what its copies broke with."""
        self._cuda.synchronize()


def open_stream(name: str, device: torch.device) -> Stream:
    """The stream that fits a device."""
    return CudaStream(name, device) if device.type == "cuda" else ThreadStream(name)


def caller_event(device: torch.device, after: Event | Any | None) -> tuple[list[Event], Any]:
    """What a copy must wait for so as not to race its caller: (events of ours, CUDA event or None).

    Args:
        device: where the pages are.
        after: an `Event`, a torch.cuda.Event, or None: on a GPU all work the caller has queued on
            its current stream so far, on a CPU nothing, for there its work has been done.
    """
    if isinstance(after, Event):
        return [after], None
    if after is not None:
        return [], after
    if device.type != "cuda":
        return [], None
    event: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(device))
    return [], event
