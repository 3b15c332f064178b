"""Ctrl-C comes between two decisions, never in the middle of one.

Python raises KeyboardInterrupt between any two instructions of the main thread. In a plan half made
it would leave slots that nobody has, pages that are on their way for ever, and a `close` that waits
for them. So where the books are changed it is noted, and raised as soon as they are in order.
"""

from __future__ import annotations

import signal
import threading
from _signal import getsignal  # type: ignore[import-not-found]  # as in `signal`, but 0.1 us, not 9
from _signal import signal as set_handler
from _thread import RLock
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any


class _HeldBack:
    """What Ctrl-C would do to the main thread is done at the end of the outermost `with`.

    One for the process, as its signal handlers are. It takes the place of the handler of SIGINT
    meanwhile, 1 us. Elsewhere than in the main thread, where none are called, and where SIGINT is
    ignored or ends the process, it does nothing.
    """

    def __init__(self) -> None:
        self._depth = 0  # how many `with` the main thread is in; only that touches all of these
        self._handler: Callable[[int, FrameType | None], Any] | None = None
        self._noted: tuple[int, FrameType | None] | None = None

    def __enter__(self) -> None:
        if threading.get_ident() != threading.main_thread().ident:
            return
        if not self._depth:
            handler = getsignal(signal.SIGINT)
            self._handler = handler if callable(handler) else None
            self._noted = None  # of two at once the second may have been raised on the way out
            if self._handler is not None:
                set_handler(signal.SIGINT, self._note)
        self._depth += 1

    def __exit__(
        self,
        kind: type[BaseException] | None = None,
        error: BaseException | None = None,
        trace: TracebackType | None = None,
    ) -> None:
        if threading.get_ident() != threading.main_thread().ident:
            return
        self._depth -= 1
        if self._depth or self._handler is None:
            return
        set_handler(signal.SIGINT, self._handler)  # what came before is noted first
        if self._noted is not None:
            noted, self._noted = self._noted, None
            self._handler(*noted)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._noted = number, frame


held_back = _HeldBack()


class BooksLock(RLock):  # type: ignore[misc]  # typeshed alone calls it final
    """A re-entrant lock that holds Ctrl-C back while the main thread has it or waits for it.

    The interrupt is raised where the outermost `with` ends: what was done under it has been done,
    and is the caller's to take back.
    """

    def __enter__(self) -> bool:  # type: ignore[override]
        held_back.__enter__()
        return self.acquire()

    def __exit__(
        self,
        kind: type[BaseException] | None = None,
        error: BaseException | None = None,
        trace: TracebackType | None = None,
    ) -> None:
        self.release()
        held_back.__exit__()
