"""Reading pages back: long runs straight into the caller's buffers, every page verified."""

from __future__ import annotations

import errno
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from tiered_kv.errors import CorruptPageError, TieredKVError, TierIOError
from tiered_kv.storage.base import PageBuffer
from tiered_kv.storage.disk.direct_io import BLOCK_BYTES, aligned_buffer, is_aligned
from tiered_kv.storage.disk.extent import Record, checksum_of
from tiered_kv.storage.disk.parts import PageParts, pieces, scatter
from tiered_kv.storage.disk.records import LOST, Records
from tiered_kv.storage.disk.runs import RUN_BYTES, Run, plan_runs
from tiered_kv.storage.disk.segment import SegmentFiles

Outcome = TieredKVError | None


class PageReader:
    """Carries out reads on its own threads. Safe to call from several threads.

    Memory of its own: one bounce buffer of a run a thread, and only where buffers of callers are
    not aligned or pages are no multiple of a block.
    """

    def __init__(
        self, files: SegmentFiles, records: Records, page_bytes: int, stride: int, threads: int
    ):
        self._files = files
        self._records = records
        self._page_bytes = page_bytes
        self._stride = stride
        self._own = threading.local()
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="tiered-kv-disk-read")

    def read(self, slots: Sequence[int], into: Sequence[PageParts]) -> list[Outcome]:
        """Fill one buffer a slot; blocks. One outcome a slot, as `Tier.read` says."""
        outcomes: list[Outcome] = [None] * len(slots)
        wanted: list[tuple[int, Record]] = []
        for position, found in enumerate(self._records.locate(slots)):
            if isinstance(found, Record):
                wanted.append((position, found))
            else:
                outcomes[position] = self._absent(slots[position], found)
        runs = plan_runs(wanted, self._stride)
        if len(runs) == 1:  # the hop to another thread costs more than it gives
            self._carry_out(runs[0], into, outcomes)
            return outcomes
        futures = [self._pool.submit(self._carry_out, run, into, outcomes) for run in runs]
        for future in futures:
            future.result()
        return outcomes

    def close(self) -> None:
        """Let reads under way finish and stop the threads."""
        self._pool.shutdown(wait=True)

    def _absent(self, slot: int, state: int) -> TieredKVError:
        if state == LOST:
            message = f"disk slot {slot}: its page was found damaged and dropped"
            return CorruptPageError(message, tier="disk")
        return TierIOError(f"disk slot {slot} holds no page", tier="disk", errno=errno.ENODATA)

    def _carry_out(self, run: Run, into: Sequence[PageParts], outcomes: list[Outcome]) -> None:
        try:
            self._fetch(run, into)
            for position, record in run.wanted:
                outcomes[position] = self._verify(record, into[position])
        except OSError as error:
            if len(run.wanted) == 1:
                position, record = run.wanted[0]
                outcomes[position] = self._failed(record, error)
                return
            for one in run.wanted:  # only the pages that cannot be read may fail
                single = Run(run.segment, one[1].offset, self._stride, [one])
                self._carry_out_single(single, into, outcomes)
        finally:
            self._records.release(run.segment, len(run.wanted))

    def _carry_out_single(
        self, run: Run, into: Sequence[PageParts], outcomes: list[Outcome]
    ) -> None:
        position, record = run.wanted[0]
        try:
            self._fetch(run, into)
            outcomes[position] = self._verify(record, into[position])
        except OSError as error:
            outcomes[position] = self._failed(record, error)

    def _fetch(self, run: Run, into: Sequence[PageParts]) -> None:
        fits = not self._files.direct_io or all(
            is_aligned(*pieces(into[at])) for at, _ in run.wanted
        )
        if not fits:
            self._fetch_bounced(run, into)
            return
        vectors: list[PageBuffer] = []
        end = run.offset
        for position, record in run.wanted:
            if record.offset > end:  # padding and the header between two extents
                vectors.extend(self._skipped(record.offset - end))
            vectors.extend(pieces(into[position]))
            end = record.offset + self._page_bytes
        self._files.read(run.segment, vectors, run.offset)

    def _skipped(self, n_bytes: int) -> list[PageBuffer]:
        scratch = self._scratch("skip", 2 * BLOCK_BYTES)
        return [scratch[:n_bytes]]

    def _fetch_bounced(self, run: Run, into: Sequence[PageParts]) -> None:
        bounce = self._scratch("bounce", max(RUN_BYTES, self._stride))
        self._files.read(run.segment, [bounce[: run.n_bytes]], run.offset)
        for position, record in run.wanted:
            start = record.offset - run.offset
            scatter(bounce[start : start + self._page_bytes], pieces(into[position]))

    def _scratch(self, name: str, n_bytes: int) -> PageBuffer:
        buffer: PageBuffer | None = getattr(self._own, name, None)
        if buffer is None:
            buffer = aligned_buffer(n_bytes)
            setattr(self._own, name, buffer)
        return buffer

    def _verify(self, record: Record, data: PageParts) -> CorruptPageError | None:
        if checksum_of(*pieces(data)) == record.checksum:
            return None
        path = self._files.path(record.segment)
        return CorruptPageError(
            f"page {record.key.hex()[:8]} on disk does not agree with its checksum ({path} at "
            f"{record.offset}): it counts as a miss; `check` with fix drops it",
            key=record.key,
            tier="disk",
            path=path,
        )

    def _failed(self, record: Record, error: OSError) -> TierIOError:
        return TierIOError(
            f"page {record.key.hex()[:8]} cannot be read from {self._files.path(record.segment)}: "
            f"{error.strerror or error}",
            tier="disk",
            errno=error.errno,
        )
