"""Turning places of pages into few long reads."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from tiered_kv.storage.disk.columns import Column
from tiered_kv.storage.disk.direct_io import BLOCK_BYTES, MAX_VECTORS

RUN_BYTES = 4 << 20  # 4 threads of 4 MiB reach the device's plateau; longer runs only add latency
MIN_RUN_BYTES = 1 << 20  # the plateau begins here: 822 MB/s of 886 with 4 threads (2026-11)
RUN_RECORDS = MAX_VECTORS // 2  # a page, and what lies before it, take one vector each


class Run(NamedTuple):
    """Pages that lie side by side in one segment, at most one header block apart.

    Attributes:
        wanted: positions in the columns given, in order of place.
        starts: offset in the segment of each.
        n_bytes: from the start of the first payload to the padded end of the last.
    """

    segment: int
    wanted: list[int]
    starts: list[int]
    n_bytes: int

    @property
    def offset(self) -> int:
        """Where it starts in its segment."""
        return self.starts[0]


def run_bytes(total_bytes: int, threads: int) -> int:
    """The length of run that gives each of so many threads a share of a read."""
    return min(RUN_BYTES, max(MIN_RUN_BYTES, total_bytes // threads))


def plan_runs(
    segment: Column, block: Column, stride_bytes: int, longest_bytes: int = RUN_BYTES
) -> list[Run]:
    """Group pages, given by segment and first block, into runs of at most so many bytes, or one."""
    order = np.lexsort((block, segment))
    segments, starts = segment[order], block[order].astype(np.int64) * BLOCK_BYTES
    gaps = np.diff(starts) - stride_bytes
    is_apart = (np.diff(segments) != 0) | (gaps < 0) | (gaps > BLOCK_BYTES)
    bounds = [0, *(np.flatnonzero(is_apart) + 1).tolist(), len(order)]
    runs: list[Run] = []
    for first, last in pairwise(bounds):
        for upto in _cuts(starts[first:last], longest_bytes - stride_bytes):
            here = slice(first, first + upto)
            first += upto
            offsets = starts[here].tolist()
            n_bytes = offsets[-1] + stride_bytes - offsets[0]
            runs.append(Run(int(segments[here.start]), order[here].tolist(), offsets, n_bytes))
    return runs


def _cuts(starts: Column, reach_bytes: int) -> Iterator[int]:
    """How many of the pages left each run takes, when its last may start so far from its first."""
    at = 0
    while at < len(starts):
        fits = int(np.searchsorted(starts[at:], starts[at] + reach_bytes, side="right"))
        count = min(max(1, fits), RUN_RECORDS)
        yield count
        at += count
