"""Reads before writes: a request waits for its pages, what is written behind it can wait."""

from __future__ import annotations

import threading
from collections.abc import Callable


class Precedence:
    """Who may use the medium next. Safe to call from several threads.

    A writer asks before each chunk (an extent, or a few) and is held back while any read is waiting
    or under way, but for no longer than reads of as many bytes as the chunk has take: so reads get
    at least half of the medium while both want it, and a read that has just come waits for the
    chunks under way alone; writes get the other half at worst, and a transfer that waits for room
    (a page leaves host for disk before another comes) ends. A bound in bytes needs no clock and
    fits any device.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._turn = threading.Lock()  # held by the chunk that goes next
        self._reads: set[object] = set()
        self._read_bytes = 0
        self._held = 0

    @property
    def held_chunks(self) -> int:
        """Chunks that have been held back so far, among them one that may still be."""
        with self._changed:
            return self._held

    @property
    def is_clear(self) -> bool:
        """Whether a chunk need not wait: there is no read, and no chunk that is held back."""
        return not self._reads and not self._turn.locked()

    # `with self._lock` there, as a signal can leave `with self._changed` locked: that is not C.

    def begin_read(self, read: object) -> None:
        """A read begins to wait."""
        with self._lock:
            self._reads.add(read)

    def end_read(self, read: object) -> None:
        """It has ended, well or not, or has not begun. Twice is harmless."""
        with self._lock:
            self._reads.discard(read)
            if not self._reads:
                self._changed.notify_all()

    def has_read(self, n_bytes: int) -> None:
        """So much of a read is done."""
        with self._lock:
            self._read_bytes += n_bytes
            self._changed.notify_all()

    def let_reads_pass(self, n_bytes: int, held: Callable[[], None] = lambda: None) -> None:
        """Block until a chunk of so many bytes may be written; one after the other, in turn.

        Before it blocks it calls `held`.
        """
        if self._reads or self._turn.locked():
            held()
        with self._turn, self._changed:
            if not self._reads:
                return
            self._held += 1
            enough = self._read_bytes + n_bytes
            self._changed.wait_for(lambda: not self._reads or self._read_bytes >= enough)
