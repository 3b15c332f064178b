"""Host to disk and back: durable writes, prefetches, gets straight to HBM, and a mix of them."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from tiered_kv.bench import page_cache
from tiered_kv.bench.content import (
    Conversation,
    Load,
    Pages,
    cut,
    get_all,
    open_store,
    page_layout,
    prefetch_all,
    wait_all,
)
from tiered_kv.bench.raw_disk import RawDisk
from tiered_kv.bench.sampling import Amounts, Way
from tiered_kv.config import StoreConfig
from tiered_kv.storage.disk.geometry import plan_geometry
from tiered_kv.storage.slab import align_up
from tiered_kv.store import TieredStore

SETS_ON_DISK = 12
"""Sets that the disk tier and the raw file hold: what is fresh space, and then is used again.

A tenth of a tier's space is slack, which so has room for a set, as that of any tier in use has.
"""

_RING_SETS = 3
_MIXED_PUT_SHARE = 0.3
_IO_THREADS = 4
_WARM_SHARE = 0.01  # of the files in the page cache: above, reads are not called cold


class Ring:
    """Sets on disk that are read in turn: by the time one comes again, host has dropped it."""

    def __init__(self, full: Load) -> None:
        self._full = full
        self._sets: deque[list[Conversation]] = deque(maxlen=_RING_SETS)
        self._singles: Iterator[Conversation] = iter(())
        self._part_pages = 0

    def add(self, made: list[Conversation]) -> None:
        """The newest set; the oldest is read no more."""
        self._sets.append(made)

    @property
    def conversations(self) -> list[Conversation]:
        """Those of all sets."""
        return [one for made in self._sets for one in made]

    def next(self, load: Load) -> list[Conversation]:
        """The set that was not read for longest, or the next part of it for a smaller load."""
        if load == self._full:
            self._singles = iter(())
            return self._next_set()
        if self._part_pages != load.transfer_pages:
            self._singles, self._part_pages = iter(()), load.transfer_pages
        one = next(self._singles, None)
        if one is None:
            self._singles = cut(self._next_set(), load.transfer_pages)
            one = next(self._singles)
        return [one]

    def others(self, wanted: list[Conversation]) -> list[list[Conversation]]:
        """The sets without these, twice: those read longest ago first."""
        keys = {key for one in wanted for key in one.keys}
        sets = [made for made in self._sets if all(keys.isdisjoint(one.keys) for one in made)]
        return sets + sets

    def _next_set(self) -> list[Conversation]:
        self._sets.rotate(-1)
        return list(self._sets[-1])


@dataclass
class DiskStage:
    """A store with a disk tier, a raw file beside it, and what was found wrong.

    Attributes:
        is_direct: the disk is read and written past the page cache.
        cached_share: the largest share of the files that was in the page cache before a read.
        failures: bytes that did not move where they should.
    """

    pages: Pages
    raw: RawDisk
    folder: Path
    page_bytes: int
    full: Load
    is_direct: bool
    ring: Ring
    cached_share: float = 0.0
    failures: list[str] = field(default_factory=list)

    @property
    def store(self) -> TieredStore:
        """The store that is measured."""
        return self.pages.store

    def go_cold(self) -> None:
        """Empty the page cache of both files, where O_DIRECT does not go past it anyway."""
        if not self.is_direct:
            self._note_cached(page_cache.drop(self._files))

    def prove_cold(self) -> None:
        """Look whether the files are in memory. O_DIRECT works on tmpfs too, and means nothing."""
        if self.is_direct:
            self._note_cached(page_cache.resident_share(self._files))

    def _note_cached(self, share: float) -> None:
        self.cached_share = max(self.cached_share, share)

    @property
    def _files(self) -> list[Path]:
        return [*self.folder.rglob("*.seg"), self.raw.path]

    @property
    def is_cold(self) -> bool:
        """Whether what was read came from the medium."""
        return self.cached_share < _WARM_SHARE

    def next_cold(self, load: Load) -> list[Conversation]:
        """The next of the ring, nothing of it on host: other sets are read till it has left.

        The first pages of a set stay longest, leaf first as host gives its pages up.
        """
        wanted = self.ring.next(load)
        for other in self.ring.others(wanted):
            if not any(self.store.match(one.keys).host_pages for one in wanted):
                break
            wait_all(prefetch_all(self.store, other))
        return wanted

    def write_set(self) -> None:
        """One more set on disk and in the ring; not timed."""
        self.pages.own()
        made = self.pages.make(self.full)
        self.pages.put(made)
        self.store.flush()
        self.ring.add(made)


def disk_bytes(page_bytes: int, set_pages: int) -> int:
    """A `disk_size` that holds twelve sets of so many pages, and hardly more."""
    pages = SETS_ON_DISK * set_pages
    size = pages * align_up(page_bytes)
    while plan_geometry(page_bytes, size).capacity_pages < pages:
        size += size // 32
    return size


@contextmanager
def disk_stage(
    page_bytes: int,
    amounts: Amounts,
    device: str,
    directory: Path,
    *,
    is_direct: bool,
    ring: Ring | None = None,
) -> Iterator[DiskStage]:
    """HBM for two sets, host for one and a half, disk for twelve.

    Args:
        ring: sets that the directory holds already, from an earlier stage.
    """
    set_pages = max(amounts.full.pages, amounts.single.pages)
    folder = directory / f"store-{page_bytes}"
    host_pages = set_pages + set_pages // 2 + 2
    config = StoreConfig.parse(
        hbm=2 * set_pages * page_bytes,
        host=host_pages * align_up(page_bytes),
        disk=folder,
        disk_size=disk_bytes(page_bytes, set_pages),
        device=device,
        io_threads=_IO_THREADS,
    )
    with open_store(page_layout(page_bytes), config) as store:
        raw = RawDisk(
            directory,
            set_pages * page_bytes,
            SETS_ON_DISK,
            page_bytes,
            read_threads=_IO_THREADS,
            is_direct=is_direct,
        )
        try:
            made = Pages(store)
            made.fill()
            ring = Ring(amounts.full) if ring is None else ring
            yield DiskStage(made, raw, folder, page_bytes, amounts.full, is_direct, ring)
        finally:
            raw.close()


class _DiskWay(Way):
    space = "steady"

    def __init__(self, stage: DiskStage) -> None:
        self.stage, self.pages, self.store, self.raw = stage, stage.pages, stage.store, stage.raw

    def bytes_of(self, load: Load) -> int:
        return load.pages * self.stage.page_bytes

    def _count(self) -> None:
        stats = self.store.stats()
        self._read_bytes = stats.bytes_read["disk"]
        self._written_bytes = stats.bytes_written["disk"]

    def _must_have_moved(self, read_pages: int, written_pages: int) -> None:
        """Since `_count`, from and to disk, or the figure is of something else."""
        stats, page_bytes = self.store.stats(), self.stage.page_bytes
        read = (stats.bytes_read["disk"] - self._read_bytes) // page_bytes
        written = (stats.bytes_written["disk"] - self._written_bytes) // page_bytes
        if (read, written) != (read_pages, written_pages):
            self.stage.failures.append(
                f"{self.path} at {page_bytes} bytes: {read} pages were read from disk and "
                f"{written} written, {read_pages} and {written_pages} should have been"
            )


class DiskPut(_DiskWay):
    """Host to disk, until durable: what is not on disk yet is flushed, commits included."""

    path = "disk-put"
    limit_name = "raw-write"

    def before(self, load: Load) -> None:
        self.pages.own()
        self._made = self.pages.make(load)
        self.pages.put(self._made)
        self._load = load
        self._count()

    def limit(self, load: Load) -> None:
        self.raw.write(self.bytes_of(load))

    def ours(self) -> None:
        self.store.flush()

    def after(self) -> None:
        self._must_have_moved(0, self._load.pages)
        if self._load == self.stage.full:
            self.stage.ring.add(self._made)


class FreshDiskPut(DiskPut):
    """The same into space that was never written."""

    space = "fresh"

    def limit(self, load: Load) -> None:
        self.raw.write_fresh(self.bytes_of(load))


class DiskGet(_DiskWay):
    """Disk to host: a prefetch."""

    path = "disk-get"
    limit_name = "raw-read"

    @property
    def is_cold(self) -> bool:
        return self.stage.is_cold

    def before(self, load: Load) -> None:
        self._wanted = self.stage.next_cold(load)
        self.stage.go_cold()
        self._count()

    def limit(self, load: Load) -> None:
        self.raw.read(self.bytes_of(load))

    def ours(self) -> None:
        wait_all(prefetch_all(self.store, self._wanted))

    def after(self) -> None:
        self._must_have_moved(sum(map(len, self._wanted)), 0)
        self.pages.check(self._wanted)


class DiskGetHbm(DiskGet):
    """Disk to HBM: a get, through host."""

    path = "disk-get-hbm"

    def before(self, load: Load) -> None:
        self.pages.own()
        super().before(load)
        self._into = self.pages.slots_for(self._wanted)

    def ours(self) -> None:
        self._came = wait_all(get_all(self.store, self._wanted, self._into))

    def after(self) -> None:
        self._must_have_moved(sum(map(len, self._wanted)), 0)
        self.pages.compare(self._wanted, self._into, self._came)


class DiskMixed(_DiskWay):
    """70 % of the bytes from disk to host and 30 % from host to disk, durable, at once."""

    path = "disk-mixed"
    limit_name = "raw-mixed"

    @property
    def is_cold(self) -> bool:
        return self.stage.is_cold

    def _pages_put(self, load: Load) -> int:
        return max(1, round(load.pages * _MIXED_PUT_SHARE))

    def _pages_got(self, load: Load) -> int:
        return max(1, load.pages - self._pages_put(load))

    def bytes_of(self, load: Load) -> int:
        return (self._pages_put(load) + self._pages_got(load)) * self.stage.page_bytes

    def before(self, load: Load) -> None:
        # First of all, for what makes room there for other sets could be what is put next.
        self._all = self.stage.next_cold(load)
        self._wanted = list(self._leading(load))
        self.pages.own()
        wanted = self._pages_put(load)
        whole, rest = divmod(wanted, load.transfer_pages)
        made = self.pages.make(Load(whole, load.transfer_pages))
        made += self.pages.make(Load(1, rest)) if rest else []
        self.pages.put(made)
        self._put = wanted
        self.stage.go_cold()
        self._count()

    def _leading(self, load: Load) -> Iterator[Conversation]:
        """The leading 70 % of a set."""
        left = self._pages_got(load)
        for one in self._all:
            if left > 0:
                yield one.part(0, left)
            left -= len(one)

    def limit(self, load: Load) -> None:
        page_bytes = self.stage.page_bytes
        self.raw.mixed(self._pages_got(load) * page_bytes, self._pages_put(load) * page_bytes)

    def ours(self) -> None:
        loads = prefetch_all(self.store, self._wanted)
        self.store.flush()
        wait_all(loads)

    def after(self) -> None:
        self._must_have_moved(sum(map(len, self._wanted)), self._put)
        self.pages.check(self._all)  # the rest too: disk gives up what is not read for long


DISK_READS = {way.path: way for way in (DiskGet, DiskGetHbm, DiskMixed)}
