"""How the disk tier reaches its medium: by io_uring where it may, otherwise by threads."""

from __future__ import annotations

import logging
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor

from tiered_kv.storage.disk.requests import Requests, ThreadRequests
from tiered_kv.storage.disk.ring import RingRequests, is_ring_allowed

_log = logging.getLogger(__name__)


class Medium:
    """Makes the `Requests` of each thread that reads. Safe to call from several threads.

    io_uring is often forbidden: by Docker's seccomp profile, by `kernel.io_uring_disabled`, by an
    old kernel. It is tried once, here.

    Args:
        threads: of the pool that reads where io_uring cannot.

    Attributes:
        has_ring: whether io_uring is used.
    """

    def __init__(self, threads: int) -> None:
        self.has_ring = is_ring_allowed()
        self._threads = threads
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="tiered-kv-disk-read")
        self._lock = threading.Lock()
        self._made: weakref.WeakSet[Requests] = weakref.WeakSet()  # a thread's go when it ends

    def requests(self) -> Requests:
        """New ones, for the calling thread alone."""
        made = self._new()
        with self._lock:
            self._made.add(made)
        return made

    def close(self) -> None:
        """Close all that were made; none has anything under way."""
        self._pool.shutdown(wait=True)
        with self._lock:
            for made in self._made:
                made.close()

    def _new(self) -> Requests:
        if self.has_ring:
            try:
                return RingRequests()
            except OSError as error:  # out of descriptors, or of memory that may be locked
                _log.warning("no io_uring for one more thread (%s): it reads with others", error)
        return ThreadRequests(self._pool, self._threads)
