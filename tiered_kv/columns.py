"""Columns of integers by page, in mappings of their own."""

from __future__ import annotations

import mmap
from array import array
from collections.abc import Collection
from typing import Any

import numpy as np

FIRST_PAGES = 4096
FEW = 96
"""Fewer pages than that are gone through one by one.

A step on a column of 1,024 pages takes 60 us as a loop and 25 by numpy, most of it for `numbers`,
once for several steps. Alone both take 2 us at 32 pages; but in a store, where other work has
emptied the caches in between, numpy is the faster one from about a hundred on (Python 3.11, numpy
2.4, Xeon 2.8 GHz, 2026-11).
"""

Array = np.ndarray[Any, np.dtype[Any]]


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


class Numbers(list[int]):
    """Integers of which the array is made only once; not to be changed from then on.

    Planning and publishing a put of 1,024 pages asked 33 times for it, 0.7 us a page in all.
    """

    array: Array | None = None  # of the class: an __init__ would take 0.3 us

    def __reduce__(self) -> tuple[type[Numbers], tuple[list[int]]]:
        return Numbers, (list(self),)


def numbers(pages: Collection[int]) -> Array:
    """Pages as an array that columns are indexed with: 20 ns a page, half of `np.array`."""
    if isinstance(pages, np.ndarray):
        return pages
    if not isinstance(pages, Numbers):
        return np.fromiter(pages, np.intp, len(pages))
    if pages.array is None:
        pages.array = np.fromiter(pages, np.intp, len(pages))
    return pages.array


def array_of(column: memoryview[int]) -> Array:
    """The same column for numpy; 0.3 us. Not to be kept: the column moves as it grows."""
    return np.frombuffer(column, column.format)


def leading(flags: Array) -> int:
    """How many of the first flags are true."""
    return len(flags) if flags.all() else int(flags.argmin())
