"""`bench tiers`: pages between tiers, each path beside what the machine can do without a store."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from tiered_kv.bench.amounts import (
    SINGLE_BYTES,
    amounts_of,
    needed_bytes,
    needed_memory_bytes,
    page_sizes,
    transfer_bytes_of,
)
from tiered_kv.bench.content import LAYERS, Load, Pages, get_all, wait_all
from tiered_kv.bench.disk_paths import (
    DISK_READS,
    SETS_ON_DISK,
    DiskPut,
    DiskStage,
    FreshDiskPut,
    disk_stage,
)
from tiered_kv.bench.host_paths import HOST_WAYS, host_stage
from tiered_kv.bench.limits import Memcpy
from tiered_kv.bench.raw_disk import RawDisk, has_direct_io
from tiered_kv.bench.report import BenchReport, finished, machine, sample_name
from tiered_kv.bench.sampling import (
    Amounts,
    Samples,
    Way,
    quantile_note,
    row_of,
    samples_of,
    take_latencies,
    take_rates,
)
from tiered_kv.bench.settings import Show, TiersSettings
from tiered_kv.bench.software import BATCHES, software
from tiered_kv.bench.statistics import ci95, median
from tiered_kv.bench.steps import Steps
from tiered_kv.bench.tables import size_text
from tiered_kv.bench.workspace import refuse_too_much_memory, workspace
from tiered_kv.errors import ConfigError, TieredKVError, TierIOError
from tiered_kv.store import resolve_device

_TRIED_SHARE = 8  # of a set, written to see how fast the disk is
_LESS = "smaller pages or a smaller --set-bytes"
_SET_S = 0.35  # a set takes no longer on disk: a slow one is given smaller sets
_STEADY_SETS = 2  # written over the oldest before steady is called so
_SOFTWARE_REPEATS = 40
_STAMP_BYTES = 8


def measure(settings: TiersSettings, show: Show) -> BenchReport:
    """Measure every path at every page size; blocks, and leaves no files.

    Raises:
        ConfigError: a device or a directory that cannot be used, a page of an odd size, or more
            memory or disk than there is.
        TierIOError: the disk failed or is full.
    """
    settings = settings.in_effect()
    device = resolve_device(settings.device)
    for size in settings.page_bytes:
        if size % (LAYERS * _STAMP_BYTES):
            raise ConfigError(
                f"page_bytes={size}: is not a multiple of {LAYERS * _STAMP_BYTES} bytes, "
                f"{_STAMP_BYTES} for each of {LAYERS} layers"
            )
    sizes = page_sizes(settings)
    refuse_too_much_memory(needed_memory_bytes(settings, sizes))
    room = workspace(settings.directory, needed_bytes(settings, sizes), less=_LESS)
    with room as folder, _one_thread():
        bench = TiersBench(settings, device, folder, show)
        try:
            bench.run(sizes)
        except OSError as error:
            if isinstance(error, TieredKVError):
                raise
            what = f"measuring in {folder.parent} failed: {error.strerror or error}"
            raise TierIOError(what, tier="disk", errno=error.errno) from error
        return finished(bench.report())


@contextmanager
def _one_thread() -> Iterator[None]:
    """Checksums are made in one thread: torch's others would spin beside what is timed next."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@dataclass
class TiersBench:
    """One run: what was measured so far."""

    settings: TiersSettings
    device: str
    folder: Path
    show: Show
    rows: list[dict[str, Any]] = field(default_factory=list)
    samples: dict[str, list[float]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    compared: list[Pages] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.machine = machine(self.folder)
        self.is_direct = has_direct_io(self.folder)
        self.machine["disk"]["direct_io"] = self.is_direct
        self.set_bytes = int(self.settings.set_bytes)
        self._written_bytes = 0

    @property
    def _has_disk(self) -> bool:
        return any(path.startswith("disk") for path in self.settings.paths)

    def run(self, sizes: list[int]) -> None:
        """Everything, one page size after the other."""
        paths = self.settings.paths
        has_software = any(path.startswith("software") for path in paths)
        per_size = sum(not path.startswith("software") for path in paths)
        per_size += "disk-put" in paths  # fresh space and used
        self.steps = Steps(self.show, max(1, per_size * len(sizes) + has_software))
        if self._has_disk:
            self._fit_to_the_disk()
        for at, size in enumerate(sizes):
            amounts = amounts_of(self.settings, size, self.set_bytes)
            self._host(size, amounts, is_first=at == 0)
            self._disk(size, amounts)
        if has_software:
            self._software()

    def report(self) -> BenchReport:
        """All of it."""
        lost = sum(pages.lost for pages in self.compared)
        if lost:
            self.failures.append(f"{lost} pages did not come back")
        return BenchReport(
            kind="tiers",
            machine=self.machine,
            settings=self.settings.told(),
            rows=self.rows,
            notes=[*self._standing_notes(), *self.notes],
            samples=self.samples,
            checksum={
                "verified": sum(pages.verified for pages in self.compared),
                "failed": sum(pages.failed for pages in self.compared),
            },
            failures=self.failures,
        )

    # -- parts -------------------------------------------------------------------------------------

    def _host(self, page_bytes: int, amounts: Amounts, *, is_first: bool) -> None:
        wanted = [way for path, way in HOST_WAYS.items() if path in self.settings.paths]
        if not wanted:
            return
        with host_stage(page_bytes, amounts, self.device) as stage:
            self.compared.append(stage.pages)
            self._check_cold(stage.pages, amounts.full)
            if is_first and isinstance(stage.limit, Memcpy):
                self._large_copy(stage.limit, amounts.repeats)
            for make in wanted:
                self._measure(make(stage), page_bytes, amounts)

    def _disk(self, page_bytes: int, amounts: Amounts) -> None:
        paths = self.settings.paths
        if not any(path.startswith("disk") for path in paths):
            return
        place = (page_bytes, amounts, self.device, self.folder)
        with disk_stage(*place, is_direct=self.is_direct) as stage:
            self.compared.append(stage.pages)
            self._check_cold(stage.pages, amounts.full)
            self._writes(stage, amounts)
            if not self.settings.cold:
                self._reads(stage, amounts)
            self._close(stage)
        if self.settings.cold:
            with disk_stage(*place, is_direct=self.is_direct, ring=stage.ring) as again:
                self.compared.append(again.pages)
                again.raw.fill()
                self._check_all_on_disk(again)
                self._reads(again, amounts)
                self._close(again)
        _remove(stage.folder)

    def _writes(self, stage: DiskStage, amounts: Amounts) -> None:
        """Fresh space, then the same space again and again."""
        size, is_wanted = stage.page_bytes, "disk-put" in self.settings.paths
        fresh_sets = min(SETS_ON_DISK, amounts.repeats + 1)
        if is_wanted:
            fresh = replace(amounts, repeats=fresh_sets - 1)
            self._measure(FreshDiskPut(stage), size, fresh, with_latency=False)
            stage.raw.drop_fresh()
        stage.raw.fill()
        for _ in range(SETS_ON_DISK + _STEADY_SETS - (fresh_sets if is_wanted else 0)):
            stage.write_set()
        if is_wanted:
            self._measure(DiskPut(stage), size, amounts, latency_first=True)

    def _reads(self, stage: DiskStage, amounts: Amounts) -> None:
        stage.prove_cold()
        for path, make in DISK_READS.items():
            if path in self.settings.paths:
                self._measure(make(stage), stage.page_bytes, amounts)

    def _close(self, stage: DiskStage) -> None:
        self.failures += dict.fromkeys(stage.failures)
        self._written_bytes += stage.raw.bytes_written
        self._written_bytes += stage.store.stats().bytes_written["disk"]
        self._note_cache(stage)

    def _note_cache(self, stage: DiskStage) -> None:
        """How cold the reads were."""
        place, share = self.folder.parent, f"{stage.cached_share:.0%}"
        if not stage.is_cold:
            found = f"reads in {place} were not cold: {share} of the files were in the page cache"
            (self.failures if self.settings.cold else self.notes).append(found)
        elif not stage.is_direct:
            self.notes.append(
                f"no O_DIRECT in {place}: reads went through the page cache, emptied before each "
                f"({share} of the files stayed in it at most)"
            )

    def _measure(
        self,
        way: Way,
        page_bytes: int,
        amounts: Amounts,
        *,
        with_latency: bool = True,
        latency_first: bool = False,
    ) -> None:
        samples = Samples()
        parts: list[Callable[..., None]] = [take_rates]
        if with_latency:
            parts.insert(0 if latency_first else 1, take_latencies)
        planned = amounts.repeats + (amounts.singles if with_latency else 0)
        self.steps.begin(f"{way.path} at {size_text(page_bytes)}", planned)
        for take in parts:
            take(way, amounts, samples, self.steps.tick)
        row = row_of(way, page_bytes, amounts, samples)
        self.rows.append(row)
        self.samples |= samples_of(row, samples)
        self.steps.end()

    def _large_copy(self, limit: Memcpy, repeats: int) -> None:
        rates = []
        for repeat in range(repeats + 1):
            started = time.perf_counter()
            n_bytes = limit.large()
            if repeat:
                rates.append(n_bytes / (time.perf_counter() - started))
        interval = ci95(rates)
        row = {
            "path": "memcpy-large",
            "page_bytes": n_bytes,
            "space": None,
            "bytes_per_s": median(rates),
            "bytes_per_s_ci95": interval and list(interval),
            "n": len(rates),
            "cold": False,
        }
        empty = ("limit", "limit_bytes_per_s", "ratio", "ci95", "p50_s", "p95_s", "p99_s")
        self.rows.append(row | dict.fromkeys((*empty, "cpu_s_per_gb")))
        self.samples[sample_name(row, "bytes_per_s")] = rates

    def _software(self) -> None:
        self.steps.begin("software", len(BATCHES))
        repeats = 2 if self.settings.smoke else _SOFTWARE_REPEATS
        rows, samples, compared = software(repeats, self.device, self.steps.tick)
        self.rows += [row for row in rows if row["path"] in self.settings.paths]
        self.samples |= samples
        self.compared += compared
        self.steps.end()

    # -- checks and words --------------------------------------------------------------------------

    def _check_cold(self, pages: Pages, load: Load) -> None:
        """Keys that were never put hit nothing."""
        if not self.settings.cold:
            return
        pages.own()
        made = pages.make(load)
        matched = sum(pages.store.match(one.keys).pages for one in made)
        came = sum(wait_all(get_all(pages.store, made, [one.slots for one in made])))
        counted = sum(pages.store.stats().hit_pages.values())
        pages.free += [slot for one in made for slot in one.slots]
        if matched or came or counted:
            self.failures.append(
                f"not cold: of {load.pages} keys never put {matched} matched, {came} came back and "
                f"{counted} counted as hits"
            )

    def _check_all_on_disk(self, stage: DiskStage) -> None:
        """After opening it again, what is to be read is on disk and nowhere else."""
        found = [stage.store.match(one.keys) for one in stage.ring.conversations]
        elsewhere = sum(one.hbm_pages + one.host_pages for one in found)
        missing = sum(map(len, stage.ring.conversations)) - sum(one.pages for one in found)
        if elsewhere or missing:
            self.failures.append(
                f"not cold: opened again, {elsewhere} pages were not on disk alone and {missing} "
                "had gone"
            )

    def _fit_to_the_disk(self) -> None:
        """Smaller sets for a slow disk, unless their size was asked for."""
        if "set_bytes" in self.settings.model_fields_set:
            return
        tried_bytes = self.set_bytes // _TRIED_SHARE
        probe = RawDisk(
            self.folder, tried_bytes, 2, 1 << 20, read_threads=1, is_direct=self.is_direct
        )
        taken = []
        try:
            for _ in range(2):  # the faster one: either may meet with other work of the disk
                started = time.perf_counter()
                probe.write(tried_bytes)
                taken.append(time.perf_counter() - started)
        finally:
            probe.close()
        fitting = int(_SET_S / min(taken)) * tried_bytes
        if fitting < self.set_bytes:
            self.set_bytes = max(2 * tried_bytes, fitting)
            self.notes.append(
                f"the disk is slow: sets of {size_text(self.set_bytes)}, so that the run ends soon"
            )

    def _standing_notes(self) -> list[str]:
        notes = []
        if self.settings.smoke:
            notes.append("smoke sizes: this shows that it works, its rates mean nothing")
        if self.device == "cpu":
            notes.append(
                "HBM is simulated in host memory: rates to and from it say nothing of a GPU or PCIe"
            )
        transfer, single = (
            size_text(size) for size in (transfer_bytes_of(self.settings), SINGLE_BYTES)
        )
        notes.append(
            f"a rate moves {size_text(self.set_bytes)} (at least one page) by puts or gets of "
            f"{transfer}, in flight together if there are several; a latency is of one of {single} "
            "alone, at least one page and at most one of those"
        )
        if any(row["path"].startswith("disk") for row in self.rows):
            notes.append(
                f"{self._written_bytes / 1e9:.1f} GB were written to the disk, limits included"
            )
        refused = quantile_note(self.rows)
        return notes + ([refused] if refused else [])


def _remove(folder: Path) -> None:
    """Make room for the next store."""
    shutil.rmtree(folder, ignore_errors=True)
