"""Transfer: a plan being carried out. A future with an event per layer."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from types import TracebackType
from typing import Any

import torch

from tiered_kv.errors import TieredKVError
from tiered_kv.interrupts import held_back
from tiered_kv.plan import Plan
from tiered_kv.streams import Event


class Transfer:
    """Pages on their way. Made by a store; safe to use from several threads.

    The pages that count are always a prefix: one that fails or comes too late turns itself and all
    after it into misses. Until `settled` fires the transfer owns every buffer it was given, also
    after `wait` has given up on it.

    Attributes:
        plan: what is being done.
        settled: fires when nothing moves any more.
    """

    def __init__(
        self,
        plan: Plan,
        *,
        layers: int = 0,
        deadline_s: float | None = None,
        release: Callable[[Transfer, Any], None] | None = None,
    ) -> None:
        self.plan = plan
        self.settled = Event()
        self._deadline = None if deadline_s is None else time.monotonic() + deadline_s
        self._release = release
        self._lock = threading.Lock()
        self._is_here = [False] * len(plan.pages)  # pages that have come, all layers
        self._is_lost = [False] * len(plan.pages)
        self._sources_known = Event()
        self._layers = [Event() for _ in range(layers)]
        self._marks: list[list[Any]] = [[] for _ in range(layers)]
        self._final: int | None = None
        self._error: BaseException | None = None
        self._is_cancelled = False
        self._is_released = False

    # -- for whoever waits -------------------------------------------------------------------------

    @property
    def is_done(self) -> bool:
        """Whether `wait` would return at once."""
        return self._final is not None or self.settled.is_fired

    @property
    def is_cancelled(self) -> bool:
        """Whether moves that have not begun are to be left out."""
        return self._is_cancelled

    def wait(self, timeout_s: float | None = None) -> int:
        """Block until all pages are here, or the deadline has passed; how many leading pages count.

        Args:
            timeout_s: give up after this time, in seconds, if it ends before the transfer's own
            deadline.

        Raises:
            TieredKVError: a copy broke, not a page that could not be had: that is a miss.
        """
        if self._final is None and not self.settled.wait(self._time_left(timeout_s)):
            self._give_up()
        return self._outcome()

    def wait_layer(self, layer: int) -> int:
        """Block until one layer of all pages that count is here; how many pages those are.

        On a GPU the caller's current stream is made to wait, not the caller, once the copies are
        queued. A number smaller than an earlier layer's means that time ran out: recompute from
        there.

        Raises:
            TieredKVError: a copy broke.
            IndexError: no such layer.
        """
        arrived = self._layers[layer]
        if self._final is None:
            in_time = self._sources_known.wait(self._time_left(None))
            if not (in_time and arrived.wait(self._time_left(None))):
                self._give_up()
        for mark in self._marks[layer]:
            torch.cuda.current_stream().wait_event(mark)
        if self._final is not None or self.settled.is_fired:
            return self._outcome()
        if self._error is not None:
            self._raise()
        return self._prefix(self._is_lost, False)

    def cancel(self) -> None:
        """Leave out what has not begun. What has is finished; `settled` fires when it is."""
        self._is_cancelled = True

    @property
    def slots(self) -> list[int]:
        """HBM slots of the pages that count; known once `wait` or a `wait_layer` has returned."""
        return list(self.plan.slots[: self._count()])

    @property
    def tiers(self) -> tuple[str, ...]:
        """Which tier each page that counts came from."""
        return self.plan.sources[: self._count()]

    def release(self, after: Any = None) -> None:
        """Give the leased HBM pages back: they stay cached, and may be evicted from now on.

        Args:
            after: an event of the last reader; the pages are kept until it fires. Default: on a GPU
                all work queued on the current stream so far; on a CPU nothing.
        """
        with held_back:
            with self._lock:
                is_first, self._is_released = not self._is_released, True
            if is_first and self._release is not None:
                self._release(self, after)

    def __enter__(self) -> Transfer:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.release()

    # -- for whoever moves -------------------------------------------------------------------------

    def here(self, positions: Iterable[int]) -> None:
        """Pages at these positions have come whole."""
        with self._lock:
            for at in positions:
                self._is_here[at] = True

    def lost(self, positions: Sequence[int]) -> None:
        """Pages at these positions will not come."""
        with self._lock:
            for at in positions:
                self._is_lost[at] = True

    def sources_known(self) -> None:
        """From now on no page is lost for want of its source."""
        self._sources_known.fire()

    def layer_here(self, layer: int, marks: Sequence[Any]) -> None:
        """A layer of all pages not lost has come, or will with the device events given."""
        self._marks[layer] = [mark for mark in marks if mark is not None]
        self._layers[layer].fire()

    def broke(self, error: BaseException) -> None:
        """A copy raised; the first such error surfaces at `wait`."""
        if self._error is None:
            self._error = error

    @property
    def arrived_pages(self) -> int:
        """Leading pages that count as things stand; final once given up on or settled."""
        with self._lock:
            return self._prefix(self._is_here, True) if self._final is None else self._final

    def settle(self) -> None:
        """Nothing moves any more."""
        with self._lock:
            if self._final is None:
                self._final = self._prefix(self._is_here, True)
        self._sources_known.fire()
        for layer in self._layers:
            if not layer.is_fired:
                layer.fire()
        self.settled.fire()

    # -- inside ------------------------------------------------------------------------------------

    def _time_left(self, timeout_s: float | None) -> float | None:
        if self._deadline is None:
            return timeout_s
        left = max(0.0, self._deadline - time.monotonic())
        return left if timeout_s is None else min(left, timeout_s)

    def _give_up(self) -> None:
        """The pages that are here now are all that will count."""
        with self._lock:
            if self._final is None:
                self._final = self._prefix(self._is_here, True)
        self._is_cancelled = True

    def _outcome(self) -> int:
        if self._error is not None:
            self._raise()
        return self._count()

    def _raise(self) -> None:
        raise TieredKVError(f"a copy broke: {self._error}") from self._error

    def _count(self) -> int:
        if self._final is not None:
            return self._final
        return self._prefix(self._is_lost, False)

    @staticmethod
    def _prefix(flags: list[bool], value: bool) -> int:
        """How many leading flags have this value."""
        other = not value
        return flags.index(other) if other in flags else len(flags)
