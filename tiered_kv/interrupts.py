"""Ctrl-C comes between two decisions, never in the middle of one.

Python raises KeyboardInterrupt between any two instructions of the main thread. In a plan half made
it would leave slots that nobody has, pages that are on their way for ever, and a `close` that waits
for them. So where the books are changed it is noted, and raised as soon as they are in order.
"""

from __future__ import annotations

import os
import signal
import threading
from _signal import getsignal  # type: ignore[import-not-found]  # as in `signal`, but 0.1 us, not 9
from _signal import signal as set_handler
from _thread import RLock
from collections.abc import Callable
from types import FrameType
from typing import Any

_SIGNALS = (int(signal.SIGINT), int(signal.SIGTERM))  # servers raise SystemExit for either


class _HeldBack:
    """What Ctrl-C or SIGTERM would do to the main thread is done where the outermost `with` ends.

    One for the process, as its signal handlers are. It takes the place of those in Python
    meanwhile, 1 us. Elsewhere than in the main thread, where none are called, and where a signal is
    ignored or ends the process, it does nothing. A handler that is installed meanwhile stays.
    """

    def __init__(self) -> None:
        self._depth = 0  # how many `with` the main thread is in; only that touches all of these
        self._thread = 0
        self._is_on = False
        self._handlers: dict[int, Callable[[int, FrameType | None], Any]] = {}
        self._noted: dict[int, FrameType | None] = {}
        self._note = self._note_or_act  # one object, to be known again

    def __enter__(self) -> None:
        thread = threading.get_ident()
        if thread != threading.main_thread().ident:
            return
        if not self._depth:
            self._thread = thread
            self._noted.clear()  # of two at once the second may have been raised on the way out
            self._is_on = True
            try:
                self._take_places()
            except BaseException:  # of a signal that came before
                self._give_back()
                raise
        self._depth += 1

    def __exit__(self, *raised: object) -> None:
        if threading.get_ident() != threading.main_thread().ident:
            return
        self._depth -= 1
        if not self._depth:
            self._give_back()  # what came before is noted first
            if self._noted:
                self._act()

    def _take_places(self) -> None:
        for number in _SIGNALS:
            handler = getsignal(number)
            if callable(handler) and handler is not self._note:
                self._handlers[number] = handler
                set_handler(number, self._note)

    def _give_back(self) -> None:
        for number, handler in self._handlers.items():
            if getsignal(number) is self._note:
                set_handler(number, handler)
        self._is_on = False

    def _act(self) -> None:
        number, frame = self._noted.popitem()
        try:
            self._handlers[number](number, frame)
        finally:
            if self._noted:
                self._act()

    def _note_or_act(self, number: int, frame: FrameType | None) -> None:
        if self._is_on:
            self._noted[number] = frame
        else:  # someone has asked for the handler meanwhile, and put this back later
            self._handlers[number](number, frame)

    def in_child(self) -> None:
        """After a fork: if another thread was the main one, its `with` never ends here."""
        if self._depth and self._thread != threading.get_ident():
            self._depth = 0
            self._noted.clear()
            self._give_back()


held_back = _HeldBack()
os.register_at_fork(after_in_child=held_back.in_child)


class BooksLock(RLock):  # type: ignore[misc]  # typeshed alone calls it final
    """A re-entrant lock that holds signals back while the main thread has it or waits for it.

    What they raise is raised where the outermost `with` ends: what was done under it has been done,
    and is the caller's to take back.
    """

    def __enter__(self) -> bool:  # type: ignore[override]
        held_back.__enter__()
        try:
            return self.acquire()
        except BaseException:  # of another signal's handler
            held_back.__exit__()
            raise

    def __exit__(self, *raised: object) -> None:
        self.release()
        held_back.__exit__()
