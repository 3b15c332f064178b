"""Reading and writing whole runs of blocks, past the page cache where the file system allows it."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import logging
import mmap
import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from tiered_kv.storage.base import PageBuffer

BLOCK_BYTES = 4096
"""Alignment of every header and payload: enough for O_DIRECT on sectors of 512 and 4096 bytes."""

MAX_VECTORS = 1024
"""Linux's IOV_MAX: buffers one preadv or pwritev may name."""

_PROBE_NAME = "probe.tmp"
_log = logging.getLogger(__name__)


def round_up(n_bytes: int) -> int:
    """The next multiple of a block."""
    return -(-n_bytes // BLOCK_BYTES) * BLOCK_BYTES


def aligned_buffer(n_bytes: int) -> PageBuffer:
    """Zeroed private memory in whole blocks, at least n_bytes long, that starts on a block."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    return np.frombuffer(mmap.mmap(-1, round_up(max(n_bytes, 1)), flags=flags), dtype=np.uint8)


def is_aligned(*buffers: PageBuffer) -> bool:
    """Whether O_DIRECT can move these buffers as they are."""
    for buffer in buffers:
        if buffer.nbytes % BLOCK_BYTES or _address_of(buffer) % BLOCK_BYTES:
            return False
    return True


def iovecs(buffers: Sequence[PageBuffer]) -> np.ndarray[Any, np.dtype[np.uint64]]:
    """Address and length of each buffer, one row a buffer, as the kernel's iovec has them."""
    table = np.empty((len(buffers), 2), np.uint64)
    table[:, 0] = [_address_of(buffer) for buffer in buffers]
    table[:, 1] = [buffer.nbytes for buffer in buffers]
    return table


def _address_of(buffer: PageBuffer) -> int:
    memory: Any = buffer
    try:  # 0.7 us against 2.3 the other way, a page (2026-11)
        return ctypes.addressof(ctypes.c_char.from_buffer(memory))
    except (TypeError, ValueError):  # not writable, or empty
        return int(buffer.__array_interface__["data"][0])


def _remaining(vectors: Sequence[PageBuffer], done: int) -> list[Any]:
    rest: list[Any] = []
    for vector in vectors:
        view: Any = vector
        if done >= vector.nbytes:
            done -= vector.nbytes
        else:
            rest.append(memoryview(view)[done:])
            done = 0
        if len(rest) == MAX_VECTORS:
            break
    return rest


def read_exact(fd: int, vectors: Sequence[PageBuffer], offset: int) -> int:
    """Fill every vector from consecutive bytes of a file; returns the bytes read.

    Raises:
        OSError: the medium failed, or the file ends too early (EIO).
    """
    total = sum(v.nbytes for v in vectors)
    buffers: Any = vectors[:MAX_VECTORS]
    done = os.preadv(fd, buffers, offset)
    while done < total:
        more = os.preadv(fd, _remaining(vectors, done), offset + done)
        if more == 0:
            raise OSError(errno.EIO, f"short read: {done} of {total} bytes at offset {offset}")
        done += more
    return total


def write_exact(fd: int, vectors: Sequence[PageBuffer], offset: int) -> int:
    """Write every vector to consecutive bytes of a file; returns the bytes written.

    Raises:
        OSError: the medium failed or is full.
    """
    total = sum(v.nbytes for v in vectors)
    buffers: Any = vectors[:MAX_VECTORS]
    done = os.pwritev(fd, buffers, offset)
    while done < total:
        more = os.pwritev(fd, _remaining(vectors, done), offset + done)
        if more == 0:
            raise OSError(errno.EIO, f"short write: {done} of {total} bytes at offset {offset}")
        done += more
    return total


def probe_direct(directory_fd: int) -> bool:
    """Whether files in this directory can be used with O_DIRECT; logs a warning if not."""
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | getattr(os, "O_DIRECT", 0)
    try:
        if not hasattr(os, "O_DIRECT"):
            raise OSError(errno.EINVAL, "this platform has no O_DIRECT")
        fd = os.open(_PROBE_NAME, flags, 0o600, dir_fd=directory_fd)
        try:
            block = aligned_buffer(BLOCK_BYTES)
            write_exact(fd, [block], 0)
            read_exact(fd, [block], 0)
        finally:
            os.close(fd)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            return True  # a full device says nothing against O_DIRECT; who writes will hear of it
        _log.warning(
            "O_DIRECT does not work here (%s): the disk tier reads and writes through the page "
            "cache, which it empties after each run; expect double memory traffic",
            error.strerror,
        )
        return False
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(_PROBE_NAME, dir_fd=directory_fd)
    return True
