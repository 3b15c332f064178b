"""What a storage has moved and was asked for: for SGLang's metrics, and for a line in the log."""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from dataclasses import dataclass, field

REPORT_S = 60.0
_MAX_SAMPLES = 4096  # should nobody collect them


@dataclass(slots=True)
class Moved:
    """Batches since they were last collected: pages of each, and GB/s of each."""

    pages: deque[int] = field(default_factory=lambda: deque(maxlen=_MAX_SAMPLES))
    gb_per_s: deque[float] = field(default_factory=lambda: deque(maxlen=_MAX_SAMPLES))


class Meter:
    """Safe to use from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._moved = {"read": Moved(), "written": Moved()}
        self._asked = 0
        self._there = 0
        self._missing: Counter[str] = Counter()
        self._reported_at = time.monotonic()

    def moved(self, way: str, pages: int, n_bytes: int, seconds: float) -> None:
        """Pages were "read" or "written" in so many seconds."""
        if pages:
            with self._lock:
                self._moved[way].pages.append(pages)
                self._moved[way].gb_per_s.append(n_bytes / max(seconds, 1e-9) / 1e9)

    def asked(self, pages: int, there: int, why_missing: str) -> None:
        """A prompt of so many pages was asked for; `why_missing` is about the first that lacks."""
        with self._lock:
            self._asked += pages
            self._there += there
            if there < pages:
                self._missing[why_missing] += 1

    def collect(self) -> tuple[Moved, Moved]:
        """(what was read, what was written) since the last call."""
        with self._lock:
            taken, self._moved = self._moved, {"read": Moved(), "written": Moved()}
        return taken["read"], taken["written"]

    def questions(self) -> dict[str, int]:
        """Pages asked for and there, and why prompts ended, since the start."""
        with self._lock:
            return {"asked_pages": self._asked, "there_pages": self._there, **self._missing}

    def is_due(self) -> bool:
        """Whether it is time for another line; True once in `REPORT_S`."""
        with self._lock:
            now = time.monotonic()
            if now - self._reported_at < REPORT_S:
                return False
            self._reported_at = now
            return True
