"""Segment files: fixed length, fully allocated, written with O_DIRECT where that works."""

from __future__ import annotations

import errno
import os
import stat
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

from tiered_kv.errors import ConfigError
from tiered_kv.storage.base import PageBuffer
from tiered_kv.storage.disk.direct_io import BLOCK_BYTES, read_exact, write_exact
from tiered_kv.storage.disk.directory import SEGMENTS, StoreDirectory


def segment_name(segment: int) -> str:
    """File name of a segment."""
    return f"{segment:05d}.seg"


class SegmentFiles:
    """The files of a store and the bytes moved to and from them. Safe to call from several threads.

    A file is opened when it is read or written (8 us against 0.2 ms and more for the run itself),
    so that a store of thousands of segments does not use up the process's descriptors.

    Attributes:
        bytes_read: moved from the medium, headers and padding included.
        bytes_written: moved to the medium, headers, padding and compaction included.
    """

    def __init__(self, directory: StoreDirectory, direct_io: bool) -> None:
        self._directory = directory
        self._geometry = directory.marker.geometry
        self._lock = threading.Lock()
        self._open = partial(os.open, dir_fd=directory.segments_fd)
        self._made: set[int] = set()  # files whose names are not known to be on the medium
        self.direct_io = direct_io
        self.bytes_read = 0
        self.bytes_written = 0

    def path(self, segment: int) -> str:
        """Where a segment lies, for messages."""
        return str(self._directory.path / SEGMENTS / segment_name(segment))

    def existing(self) -> list[int]:
        """Segments that have a file, put back to their full length if they were cut or grown.

        Raises:
            ConfigError: something in the folder is not a segment of this store.
        """
        found: list[int] = []
        for name in sorted(os.listdir(self._directory.segments_fd)):
            number = int(name[:-4]) if name.endswith(".seg") and name[:-4].isdigit() else -1
            status = os.lstat(name, dir_fd=self._directory.segments_fd)
            known = 0 <= number < self._geometry.segments and name == segment_name(number)
            if not known or not stat.S_ISREG(status.st_mode):
                raise ConfigError(
                    f"{self._directory.path / SEGMENTS / name} is not a segment of ours"
                )
            if status.st_size != self._geometry.segment_bytes:
                self.create(number)
            found.append(number)
        return found

    def create(self, segment: int) -> None:
        """Make a segment's file and take all of its space; durable after its first `sync`.

        Raises:
            OSError: no space within the budget or on the medium; then no file is left behind.
        """
        length = self._geometry.segment_bytes
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        folder = self._directory.segments_fd
        fd = os.open(segment_name(segment), flags, 0o600, dir_fd=folder)
        was_empty = os.fstat(fd).st_size == 0
        try:
            os.ftruncate(fd, min(length, os.fstat(fd).st_size))
            missing = length - os.fstat(fd).st_blocks * 512
            if self._directory.disk_usage_bytes() + missing > self._geometry.capacity_bytes:
                raise OSError(errno.ENOSPC, "the disk tier's capacity is used up")
            os.posix_fallocate(fd, 0, length)
            with self._lock:
                self._made.add(segment)
        except OSError:
            if was_empty:
                os.unlink(segment_name(segment), dir_fd=folder)
            raise
        finally:
            os.close(fd)

    def read(self, segment: int, vectors: Sequence[PageBuffer], offset: int) -> None:
        """Fill buffers from consecutive bytes; with `direct_io` all of them must be aligned."""
        with self._opened(segment, os.O_RDONLY) as fd:
            self.has_read(fd, offset, read_exact(fd, vectors, offset))

    def open_for_reads(self, segment: int, into: dict[int, int]) -> None:
        """Note a descriptor of a segment, for the caller to close; tell `has_read` what came.

        One call of C from opening to noting: no signal leaves a descriptor that is nobody's.
        """
        self._open_into(into, segment, os.O_RDONLY)

    def open_for_writes(self, segment: int, into: dict[int, int]) -> None:
        """The same for writing; tell `has_written` what has gone."""
        self._open_into(into, segment, os.O_RDWR)

    def _open_into(self, into: dict[int, int], segment: int, access: int) -> None:
        named = partial(self._open, flags=self._flags(access))
        into.update(zip((segment,), map(named, (segment_name(segment),)), strict=True))

    def has_read(self, fd: int, offset: int, n_bytes: int) -> None:
        """Count what was read, and drop it from the page cache if it went through that."""
        if not self.direct_io and n_bytes:
            os.posix_fadvise(fd, offset, n_bytes, os.POSIX_FADV_DONTNEED)
        with self._lock:
            self.bytes_read += n_bytes

    def write(
        self,
        segment: int,
        vectors: Sequence[PageBuffer],
        offset: int,
        begun: Callable[[], None] = lambda: None,
    ) -> None:
        """Write buffers to consecutive bytes; with `direct_io` all of them must be aligned.

        It calls `begun` when nothing is left to be done but the system call.
        """
        assert offset + sum(v.nbytes for v in vectors) <= self._geometry.segment_bytes
        with self._opened(segment, os.O_RDWR) as fd:
            begun()
            done = write_exact(fd, vectors, offset)
        self.has_written(done)

    def has_written(self, n_bytes: int) -> None:
        """Count what was written."""
        with self._lock:
            self.bytes_written += n_bytes

    def sync(self, segment: int) -> None:
        """Block until all that was written to a segment is on the medium."""
        with self._opened(segment, os.O_RDWR) as fd:
            os.fdatasync(fd)
            if not self.direct_io:
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        if segment in self._made:  # its name too, before anything says that pages are there
            os.fsync(self._directory.segments_fd)
            with self._lock:
                self._made.discard(segment)

    def read_block(self, segment: int, block: PageBuffer, offset: int) -> bytes:
        """One block through an aligned buffer of the caller."""
        self.read(segment, [block[:BLOCK_BYTES]], offset)
        return block[:BLOCK_BYTES].tobytes()

    @contextmanager
    def _opened(self, segment: int, flags: int) -> Iterator[int]:
        fd = self._open(segment_name(segment), flags=self._flags(flags))
        try:
            yield fd
        finally:
            os.close(fd)

    def _flags(self, flags: int) -> int:
        return flags | os.O_NOFOLLOW | os.O_CLOEXEC | (os.O_DIRECT if self.direct_io else 0)
