"""Cold means cold: files that are on disk and not in the page cache, and the proof of it."""

from __future__ import annotations

import ctypes
import mmap
import os
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]


def sync(folder: Path) -> float:
    """Have all that was written to its file system on the medium; the seconds it took.

    One call for all files is the cheapest way to sync what a peer has not.
    """
    fd = os.open(folder, os.O_RDONLY)
    try:
        began = time.perf_counter()
        if _libc.syncfs(fd):
            raise OSError(ctypes.get_errno(), "syncfs failed")
        return time.perf_counter() - began
    finally:
        os.close(fd)


def drop(folder: Path) -> int:
    """Have the page cache forget every file under a folder; the bytes that it still holds.

    Sync first: what has not been written stays. So does what a process has mapped.
    """
    return sum(_drop_file(path) for path in list(_files(folder)))


def cached_bytes(path: Path) -> int:
    """How much of a file is in the page cache, by `mincore`."""
    n_bytes = path.stat().st_size
    if not n_bytes:
        return 0
    pages = -(-n_bytes // mmap.PAGESIZE)
    resident = np.zeros(pages, dtype=np.uint8)
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        view = np.frombuffer(mapped, dtype=np.uint8)
        failed = _libc.mincore(view.ctypes.data, n_bytes, resident.ctypes.data)
        del view  # or the mapping cannot be closed
        if failed:
            raise OSError(ctypes.get_errno(), f"mincore failed for {path.name}")
    return int((resident & 1).sum()) * mmap.PAGESIZE


def can_be_cold(folder: Path) -> bool:
    """Whether files here leave the page cache at all; they do not where it is all there is."""
    probe = folder / ".cold-probe"
    try:
        probe.write_bytes(bytes(1 << 20))
        sync(folder)
        return _drop_file(probe) == 0
    finally:
        probe.unlink(missing_ok=True)


def _drop_file(path: Path) -> int:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)
    return cached_bytes(path)


def _files(folder: Path) -> Iterator[Path]:
    for path in folder.rglob("*"):
        if path.is_file() and not path.is_symlink():
            yield path
