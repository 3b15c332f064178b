"""Turning a list of records into few long reads."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from tiered_kv.storage.disk.direct_io import BLOCK_BYTES, MAX_VECTORS
from tiered_kv.storage.disk.extent import Record

RUN_BYTES = 4 << 20  # 4 threads of 4 MiB reach the device's plateau; longer runs only add latency
RUN_RECORDS = MAX_VECTORS // 2  # a page, and what lies before it, take one vector each


@dataclass(slots=True)
class Run:
    """Records that lie side by side in one segment, at most one header block apart.

    Attributes:
        wanted: (position in the caller's list, record), in order of place.
        n_bytes: from the start of the first payload to the padded end of the last.
    """

    segment: int
    offset: int
    n_bytes: int
    wanted: list[tuple[int, Record]] = field(default_factory=list)


def plan_runs(records: Iterable[tuple[int, Record]], stride_bytes: int) -> list[Run]:
    """Group records into runs of at most `RUN_BYTES` (or one page)."""
    runs: list[Run] = []
    for position, record in sorted(records, key=lambda item: (item[1].segment, item[1].offset)):
        run = runs[-1] if runs else None
        if run is None or not _joins(run, record, stride_bytes):
            run = Run(record.segment, record.offset, 0)
            runs.append(run)
        run.wanted.append((position, record))
        run.n_bytes = record.offset + stride_bytes - run.offset
    return runs


def _joins(run: Run, record: Record, stride_bytes: int) -> bool:
    gap = record.offset - (run.offset + run.n_bytes)
    return (
        run.segment == record.segment
        and 0 <= gap <= BLOCK_BYTES
        and len(run.wanted) < RUN_RECORDS
        and record.offset + stride_bytes - run.offset <= RUN_BYTES
    )
