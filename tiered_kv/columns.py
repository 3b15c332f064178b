"""Columns of integers by page, in mappings of their own."""

from __future__ import annotations

import mmap
from array import array

FIRST_PAGES = 4096


def column(typecode: str, pages: int = FIRST_PAGES) -> memoryview[int]:
    """A column of zeros, one integer a page, in a mapping of its own.

    Only what is used becomes resident, and growing gives all of the old one back: arrays that are
    appended to left 30 bytes a page behind in malloc's heap (1 M pages, glibc 2.36, 2026-11).
    """
    n_bytes = pages * array(typecode).itemsize
    mapping = mmap.mmap(-1, n_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    made: memoryview[int] = memoryview(mapping).cast(typecode)  # type: ignore[call-overload]
    return made


def longer(old: memoryview[int], pages: int) -> memoryview[int]:
    """A copy of a column with room for so many pages."""
    new = column(old.format, pages)
    new[: len(old)] = old
    return new
