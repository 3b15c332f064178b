"""Is a file in the page cache? And out of it, where O_DIRECT cannot go past it."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np


def drop(paths: Iterable[Path]) -> float:
    """Write files out and empty their share of the page cache; which share of them is left in it.

    0.0 is proof that a read to come is cold. A file system in memory (tmpfs) keeps all.
    """
    files = list(paths)
    for path in files:
        with _opened(path) as fd:
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    return resident_share(files)


def resident_share(paths: Iterable[Path]) -> float:
    """Which share of some files is in the page cache, in whole pages of memory."""
    resident = total = 0
    for path in paths:
        with _opened(path) as fd:
            flags = _resident(fd, os.fstat(fd).st_size)
        resident += int(np.count_nonzero(flags))
        total += len(flags)
    return resident / total if total else 0.0


@contextmanager
def _opened(path: Path) -> Iterator[int]:
    fd = os.open(path, os.O_RDONLY)
    try:
        yield fd
    finally:
        os.close(fd)


def _resident(fd: int, n_bytes: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """1 for every page of a file that is in memory (mincore)."""
    flags: np.ndarray[Any, np.dtype[np.uint8]]
    flags = np.zeros(-(-n_bytes // mmap.PAGESIZE), dtype=np.uint8)
    if not n_bytes:
        return flags
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    address = libc.mmap(None, n_bytes, mmap.PROT_READ, mmap.MAP_SHARED, fd, 0)
    if address == ctypes.c_void_p(-1).value:
        raise OSError(ctypes.get_errno(), "mmap")
    try:
        if libc.mincore(address, n_bytes, flags.ctypes.data):
            raise OSError(ctypes.get_errno(), "mincore")
    finally:
        libc.munmap(address, n_bytes)
    flags &= 1
    return flags
