"""Verifying a store: every payload, every header, the catalog and the counters."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from tiered_kv.errors import TieredKVError
from tiered_kv.keys import PageKey
from tiered_kv.storage.base import CheckReport
from tiered_kv.storage.disk.catalog import Catalog, CatalogDamagedError
from tiered_kv.storage.disk.direct_io import aligned_buffer
from tiered_kv.storage.disk.extent import Record
from tiered_kv.storage.disk.geometry import Geometry
from tiered_kv.storage.disk.log import SegmentLog
from tiered_kv.storage.disk.reader import PageReader
from tiered_kv.storage.disk.records import LOST, Records
from tiered_kv.storage.disk.recovery import scan
from tiered_kv.storage.disk.segment import SegmentFiles

_BATCH_BYTES = 8 << 20


@dataclass(slots=True)
class Audit:
    """One pass over a store that nobody writes to meanwhile; readers may go on.

    Attributes:
        bad_slots: pages that cannot be had or hang from nothing: to be dropped.
        bare_segments: sealed segments with pages whose header is lost: to be written again.
    """

    log: SegmentLog
    files: SegmentFiles
    records: Records
    geometry: Geometry
    store_id: bytes
    report: CheckReport = field(default_factory=CheckReport)
    bad_slots: set[int] = field(default_factory=set)
    bare_segments: set[int] = field(default_factory=set)

    def payloads(self, reader: PageReader) -> None:
        """Read and verify every stored page."""
        page_bytes, stride = self.geometry.page_bytes, self.geometry.stride_bytes
        count = max(1, _BATCH_BYTES // stride)
        memory = aligned_buffer(count * stride)
        buffers = [memory[at * stride :][:page_bytes] for at in range(count)]
        stored = sorted(self.records.stored(), key=lambda item: (item[1].segment, item[1].offset))
        for start in range(0, len(stored), count):
            batch = stored[start : start + count]
            outcomes = reader.read([slot for slot, _ in batch], buffers[: len(batch)])
            for (slot, _), outcome in zip(batch, outcomes, strict=True):
                self.report.pages += 1
                if outcome is not None:
                    self._condemn(slot, str(outcome))

    def headers(self) -> None:
        """Every record must be described by its extent's header, or a rebuild would not find it."""
        for segment in range(self.geometry.segments):
            live = self.records.in_segment(segment)
            if not live:
                continue
            described: set[Record] = set()
            for extent in scan(self.files, segment, self.store_id, self.geometry):
                if extent.generation == self.log.generations.get(segment):
                    described.update(extent.records)
            for slot, record in live:
                if record not in described and slot not in self.bad_slots:
                    self.bare_segments.add(segment)
                    path = self.files.path(segment)
                    self.report.problems.append(
                        f"page {record.key.hex()[:8]}: no header in {path} names it"
                    )

    def orphans(self) -> None:
        """A page whose parent is missing, or an orphan itself, can never be part of a hit."""
        present: set[PageKey] = set()
        for slot, record in self.records.stored():  # parents were written before their children
            if slot in self.bad_slots:
                continue
            if record.parent is None or record.parent in present:
                present.add(record.key)
            else:
                self._condemn(
                    slot, f"page {record.key.hex()[:8]}: its parent is not stored (orphan)"
                )

    def counters(self, slots_used: int) -> None:
        """What was counted on the way must be what the table holds."""
        counted, actual = self.records.recount()
        if counted != actual:
            self.report.problems.append(
                f"live pages by segment are counted {counted}, are {actual}"
            )
        if sum(actual) > slots_used:
            self.report.problems.append(
                f"{sum(actual)} pages are stored in {slots_used} reserved slots"
            )

    def catalog(self, catalog: Catalog) -> None:
        """Every stored page must be found through the catalog, at the place we know."""
        newest = {record.key: record for _, record in self.records.stored()}
        try:
            listed = {record.key: (record, generation) for record, generation in catalog.records()}
        except CatalogDamagedError as error:
            self.report.problems.append(str(error))
            return
        for key, record in newest.items():
            expected = (record, self.log.generations[record.segment])
            if listed.pop(key, None) != expected:
                self.report.problems.append(
                    f"page {key.hex()[:8]}: the catalog does not say where it is"
                )
        self.report.problems += [
            f"page {key.hex()[:8]}: only the catalog knows it" for key in listed
        ]

    def fix(self, compact: Callable[[int], None], commit: Callable[[], None]) -> None:
        """Drop bad pages, write pages without a header again, and commit.

        Raises:
            TierIOError, OSError: the medium failed; what was found stays reported.
        """
        problems = len(self.report.problems)
        self.records.forget(self.bad_slots, LOST)
        commit()
        if self.bare_segments:
            self.log.seal()
        for segment in sorted(self.bare_segments):
            compact(segment)
        self.report.fixed = problems

    def _condemn(self, slot: int, problem: str | TieredKVError) -> None:
        self.bad_slots.add(slot)
        self.report.problems.append(str(problem))
