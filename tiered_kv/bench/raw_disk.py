"""What this machine's disk can do, with no store in the way: requests as long and as many as ours.

Reads: as long as the store's runs, by as many threads. Writes: as long as its extents, by as many
threads, then one fdatasync. Past the page cache (O_DIRECT) where the file system allows it.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path

import numpy as np

from tiered_kv.storage.disk.direct_io import probe_direct
from tiered_kv.storage.disk.runs import RUN_BYTES
from tiered_kv.storage.disk.writes import EXTENT_BYTES, WRITE_THREADS
from tiered_kv.storage.slab import Slab, align_up

_SEED = 9


def has_direct_io(directory: Path) -> bool:
    """Whether files in a directory can be read and written past the page cache."""
    folder = os.open(directory, os.O_RDONLY)
    try:
        return probe_direct(folder)
    finally:
        os.close(folder)


class RawDisk:
    """A file that is read and overwritten in sets, one region of it after the other.

    Args:
        directory: where it lies; removed with `close`.
        set_bytes: bytes of a set: what `read` and `write` move at most.
        regions: sets the file holds.
        page_bytes: no request is shorter than a page.
        read_threads: reads under way at once.
        is_direct: O_DIRECT works here.
    """

    def __init__(
        self,
        directory: Path,
        set_bytes: int,
        regions: int,
        page_bytes: int,
        *,
        read_threads: int,
        is_direct: bool,
    ) -> None:
        self._set_bytes = align_up(set_bytes)
        self._regions = regions
        self._flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | (os.O_DIRECT if is_direct else 0)
        self._run_bytes = max(RUN_BYTES, align_up(page_bytes))
        self._extent_bytes = max(EXTENT_BYTES, align_up(page_bytes))
        self._slabs = Slab(self._set_bytes), Slab(self._set_bytes)
        words = np.random.default_rng(_SEED).integers(0, 2**63, self._set_bytes // 8)
        self._slabs[0].array[:] = words.view(np.uint8)  # no device finds it easy, as zeros are
        self.path = directory / "raw"
        self._fresh_path = directory / "raw-fresh"
        self._fd = os.open(self.path, self._flags, 0o600)
        self._fresh_fd: int | None = None
        self._reader, self._writer = 0, 0
        self._fresh_end = 0
        self.bytes_written = 0
        self._readers = ThreadPoolExecutor(read_threads, thread_name_prefix="raw-read")
        self._writers = ThreadPoolExecutor(WRITE_THREADS, thread_name_prefix="raw-write")

    def fill(self) -> None:
        """Write every region once, so that none is fresh space."""
        os.posix_fallocate(self._fd, 0, self._set_bytes * self._regions)
        for _ in range(self._regions):
            self.write(self._set_bytes)

    def read(self, n_bytes: int) -> None:
        """Read the next region's leading bytes; blocks."""
        _finish(self._begin_read(n_bytes))

    def write(self, n_bytes: int) -> None:
        """Overwrite the next region's leading bytes; blocks until they are on the medium."""
        _finish(self._begin_write(self._fd, n_bytes, self._next_write()))
        os.fdatasync(self._fd)

    def mixed(self, read_bytes: int, write_bytes: int) -> None:
        """Read and write at once; blocks until both are done, the write on the medium."""
        reads = self._begin_read(read_bytes)
        self.write(write_bytes)
        _finish(reads)

    def write_fresh(self, n_bytes: int) -> None:
        """Write to space that was never written, allocated now; blocks until on the medium."""
        if self._fresh_fd is None:
            self._fresh_fd = os.open(self._fresh_path, self._flags, 0o600)
        os.posix_fallocate(self._fresh_fd, self._fresh_end, align_up(n_bytes))
        _finish(self._begin_write(self._fresh_fd, n_bytes, self._fresh_end))
        os.fdatasync(self._fresh_fd)
        self._fresh_end += align_up(n_bytes)

    def drop_fresh(self) -> None:
        """Give back what `write_fresh` has taken."""
        if self._fresh_fd is not None:
            os.close(self._fresh_fd)
            self._fresh_fd = None
            self._fresh_path.unlink()
            self._fresh_end = 0

    def _next_write(self) -> int:
        self._writer = (self._writer + 1) % self._regions
        return self._writer * self._set_bytes

    def _begin_read(self, n_bytes: int) -> list[Future[int]]:
        self._reader = (self._reader + 1) % self._regions
        base, memory = self._reader * self._set_bytes, self._slabs[1].array

        def one(at: int, length: int) -> int:
            return _whole(os.preadv(self._fd, [memory[at : at + length].data], base + at), length)

        return _begin(self._readers, one, n_bytes, self._run_bytes)

    def _begin_write(self, fd: int, n_bytes: int, base: int) -> list[Future[int]]:
        memory = self._slabs[0].array
        self.bytes_written += align_up(n_bytes)

        def one(at: int, length: int) -> int:
            return _whole(os.pwritev(fd, [memory[at : at + length].data], base + at), length)

        return _begin(self._writers, one, n_bytes, self._extent_bytes)

    def close(self) -> None:
        """Give memory, threads and files back."""
        self._readers.shutdown()
        self._writers.shutdown()
        self.drop_fresh()
        os.close(self._fd)
        self.path.unlink(missing_ok=True)
        for slab in self._slabs:
            slab.close()


def _whole(done: int, length: int) -> int:
    if done != length:
        raise OSError(errno.EIO, f"{done} of {length} bytes of a raw file were moved")
    return done


def _begin(
    pool: ThreadPoolExecutor, one: Callable[[int, int], int], n_bytes: int, step: int
) -> list[Future[int]]:
    n_bytes = align_up(n_bytes)
    return [pool.submit(one, at, min(step, n_bytes - at)) for at in range(0, n_bytes, step)]


def _finish(jobs: list[Future[int]]) -> None:
    wait(jobs)
    for job in jobs:
        job.result()
