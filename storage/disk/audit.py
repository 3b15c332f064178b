"""Verifying a store: every payload, every header, the catalog and the counters."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import islice

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
class DiskReport(CheckReport):
    """What `DiskTier.check` found.

    Attributes:
        hanging_pages: sound pages with a page before them that is damaged or not stored. Not a
            problem: nothing hits them until that page is computed and put again, then they do.
    """

    hanging_pages: int = 0


@dataclass(slots=True)
class Audit:
    """One pass over a store that nobody writes to meanwhile; readers may go on.

    A page is reported once, for the first thing found wrong with it.

    Attributes:
        bad_slots: pages that cannot be had: to be dropped.
        bare_pages: pages whose header is lost, by segment: to be written again.
    """

    log: SegmentLog
    files: SegmentFiles
    records: Records
    geometry: Geometry
    store_id: bytes
    report: DiskReport = field(default_factory=DiskReport)
    bad_slots: set[int] = field(default_factory=set)
    bare_pages: dict[int, set[PageKey]] = field(default_factory=dict)
    _reported: set[PageKey] = field(default_factory=set)

    def payloads(self, reader: PageReader) -> None:
        """Read and verify every stored page."""
        page_bytes, stride = self.geometry.page_bytes, self.geometry.stride_bytes
        count = max(1, _BATCH_BYTES // stride)
        memory = aligned_buffer(count * stride)
        buffers = [memory[at * stride :][:page_bytes] for at in range(count)]
        slots = self.records.by_place()
        while batch := list(islice(slots, count)):
            before = [self.records.record(slot) for slot in batch]
            outcomes = reader.read(batch, buffers[: len(batch)])
            for slot, record, outcome in zip(batch, before, outcomes, strict=True):
                if record is None or self.records.record(slot) != record:
                    continue  # freed meanwhile
                self.report.pages += 1
                if outcome is not None:
                    self.bad_slots.add(slot)
                    self._report(record.key, str(outcome))

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
                    self.bare_pages.setdefault(segment, set()).add(record.key)
                    path = self.files.path(segment)
                    name = record.key.hex()[:8]
                    self._report(record.key, f"page {name}: no header in {path} names it")

    def hanging(self) -> None:
        """Count the pages that hang from one that is damaged or not stored, however far above."""
        sound = {p.key: p.parent for p in self.records.pages() if p.slot not in self.bad_slots}
        hangs: dict[PageKey, bool] = {}
        for key in sound:
            path: list[PageKey] = []
            at: PageKey | None = key
            while at is not None and at in sound and at not in hangs:
                hangs[at] = False  # until known
                path.append(at)
                at = sound[at]
            is_hanging = at is not None and hangs.get(at, True)
            hangs.update(dict.fromkeys(path, is_hanging))
        self.report.hanging_pages = sum(hangs.values())

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
        pages = {page.sequence: page for page in self.records.pages()}
        try:
            for record, generation in catalog.records():
                page = pages.pop(record.sequence, None)
                if page is None:
                    name = record.key.hex()[:8]
                    self._report(record.key, f"page {name}: only the catalog knows it")
                elif (record, generation) != self._place(page.slot):
                    self._report_unlisted(page.key)
        except CatalogDamagedError as error:
            self.report.problems.append(str(error))
            return
        for page in pages.values():
            self._report_unlisted(page.key)

    def _place(self, slot: int) -> tuple[Record | None, int]:
        record = self.records.record(slot)
        return record, -1 if record is None else self.log.generations[record.segment]

    def fix(self, compact: Callable[[int], None], commit: Callable[[], None]) -> None:
        """Drop bad pages, write pages without a header again, and commit; count what that mends.

        Pages that hang from what is dropped are sound and stay.

        Raises:
            TierIOError, OSError: the medium failed; what was found stays reported.
        """
        if self.bad_slots:
            self.records.forget(self.bad_slots, LOST)
            commit()
            self.report.fixed += len(self.bad_slots)
        if self.bare_pages:
            self.log.seal()
        for segment in sorted(self.bare_pages):
            compact(segment)
            self.report.fixed += len(self.bare_pages[segment])

    def _report_unlisted(self, key: PageKey) -> None:
        self._report(key, f"page {key.hex()[:8]}: the catalog does not say where it is")

    def _report(self, key: PageKey, problem: str) -> None:
        if key not in self._reported:
            self._reported.add(key)
            self.report.problems.append(problem)
