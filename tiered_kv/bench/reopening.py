"""Opening a store that holds many pages, beside a bare scan of the same LMDB; and asking it.

The directory is a store's own in all that opening one reads: marker, catalog and segment files of
full length. The catalog is written through `Catalog.commit`, in the order in which a store would
have stored the pages. The segments are sparse: opening a store reads no payload, so a million pages
of 16 KiB take 150 MB of disk, which is their catalog, and nothing of the pages is ever read.
"""

from __future__ import annotations

import gc
import itertools
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import lmdb

from tiered_kv.bench.deciding import chains
from tiered_kv.config import StoreConfig
from tiered_kv.errors import ConfigError
from tiered_kv.keys import KeyChain, PageKey
from tiered_kv.layout import KVLayout
from tiered_kv.plan import DISK, HOST
from tiered_kv.planner import Planner
from tiered_kv.room import Slots
from tiered_kv.slots import SlotPool
from tiered_kv.storage.disk import DiskTier
from tiered_kv.storage.disk.catalog import Catalog
from tiered_kv.storage.disk.direct_io import BLOCK_BYTES
from tiered_kv.storage.disk.directory import StoreDirectory
from tiered_kv.storage.disk.entries import items_of, rows_from
from tiered_kv.storage.disk.extent import CHECKSUM_BYTES, Record
from tiered_kv.storage.disk.geometry import EXTENT_RECORDS, Geometry
from tiered_kv.storage.disk.segment import segment_name
from tiered_kv.store import TieredStore

PAGE_BYTES = 16 << 10
_CAPACITY_BYTES = 2 * PAGE_BYTES  # a page, with room for what a store keeps free
_COMMIT_PAGES = 1 << 17
_KEPT_CHAINS = 64
_FIRST = 1 << 40  # sequences and generations begin where those of a first opening do


@dataclass(slots=True)
class Directory:
    """A store directory that holds `pages` pages, and some of its long conversations."""

    path: Path
    layout: KVLayout
    pages: int
    long: list[KeyChain] = field(default_factory=list)

    @property
    def capacity_bytes(self) -> int:
        """What it was made with."""
        return max(1 << 20, self.pages * _CAPACITY_BYTES)

    def open(self) -> DiskTier:
        """The disk tier in it."""
        fingerprint = self.layout.fingerprint
        return DiskTier.open(self.path, PAGE_BYTES, self.capacity_bytes, fingerprint)

    def open_store(self) -> TieredStore:
        """A whole store over it."""
        config = StoreConfig.parse(
            hbm=PAGE_BYTES,
            host=16 * PAGE_BYTES,
            disk=self.path,
            disk_size=self.capacity_bytes,
            device="cpu",
        )
        return TieredStore.open(self.layout, config)


@dataclass(slots=True)
class Reopened:
    """Seconds, by wall clock and of this process's CPU, of scans and openings in turn."""

    scan_s: list[float] = field(default_factory=list)
    reopen_s: list[float] = field(default_factory=list)
    scan_cpu_s: list[float] = field(default_factory=list)
    reopen_cpu_s: list[float] = field(default_factory=list)


def make_directory(path: Path, pages: int, long_pages: int, page_tokens: int) -> Directory:
    """A store of so many pages, in conversations as `chains` makes them. Blocks.

    Raises:
        ConfigError: a file system that keeps no sparse files.
    """
    made = Directory(path, KVLayout.uniform(PAGE_BYTES, page_tokens), pages)
    made.open().close()
    fingerprint = made.layout.fingerprint
    directory = StoreDirectory(path, PAGE_BYTES, made.capacity_bytes, fingerprint)
    try:
        geometry = directory.marker.geometry
        assert geometry.capacity_pages >= pages, "it is made with room for them"
        segments = range(-(-pages // geometry.segment_live_pages))
        generations = {segment: (1 << 32) + segment for segment in segments}
        catalog = Catalog(directory.catalog_path, geometry.catalog_bytes)
        try:
            records = _records(made, geometry, long_pages)
            while batch := list(itertools.islice(records, _COMMIT_PAGES)):
                added = items_of(rows_from(batch), generations)
                counted = batch[-1].sequence + 1
                catalog.commit(added=added, generations=generations, counted_below=counted)
        finally:
            catalog.close()
        for segment in segments:
            _make_sparse(path / "segments" / segment_name(segment), geometry.segment_bytes)
    finally:
        directory.close()
    return made


def _records(made: Directory, geometry: Geometry, long_pages: int) -> Iterator[Record]:
    stride, per_segment = geometry.stride_bytes, geometry.segment_live_pages
    number = 0
    for keys in chains(made.pages, long_pages):
        if len(keys) == long_pages and len(made.long) < _KEPT_CHAINS:
            made.long.append(keys)
        parent: PageKey | None = keys.parent
        for key in keys:
            segment, at = divmod(number, per_segment)
            headers = at // EXTENT_RECORDS + 1
            offset = headers * BLOCK_BYTES + at * stride
            sequence = _FIRST + number
            yield Record(key, parent, bytes(CHECKSUM_BYTES), sequence, segment, offset, PAGE_BYTES)
            parent, number = key, number + 1


def _make_sparse(path: Path, n_bytes: int) -> None:
    with path.open("wb") as file:
        file.truncate(n_bytes)
    path.chmod(0o600)
    refuse_unless_sparse(path, n_bytes)


def refuse_unless_sparse(path: Path, n_bytes: int) -> None:
    """Raise ConfigError if a file of nothing takes space."""
    if path.stat().st_blocks * 512 > n_bytes // 2:
        raise ConfigError(
            f"--dir {path.parent}: its file system keeps no sparse files, and the store that is "
            "opened here is made of them; name a directory on ext4, xfs, btrfs or tmpfs"
        )


def reopen(directory: Directory, repeats: int, within_s: float) -> Reopened:
    """Scans and openings in turn (A B A B), after a scan that does not count.

    An opening is `DiskTier.open` and `Planner.adopt`, as a store does both; a scan goes over all
    entries with an LMDB cursor, reads key and value of each, and keeps neither. All of it comes
    from the page cache.

    Args:
        repeats: samples of each, fewer if they would take longer than `within_s` seconds, but 3.
    """
    found = Reopened()
    _scan(directory)
    started = time.perf_counter()
    for done in range(repeats):
        if done >= 3 and (time.perf_counter() - started) * (done + 1) / done > within_s:
            break
        for work, wall, cpu in (
            (_scan, found.scan_s, found.scan_cpu_s),
            (_open_once, found.reopen_s, found.reopen_cpu_s),
        ):
            taken = work(directory)
            wall.append(taken[0])
            cpu.append(taken[1])
    return found


def _scan(directory: Directory) -> tuple[float, float]:
    begun = time.perf_counter(), time.process_time()
    env = lmdb.open(str(directory.path / "catalog"), readonly=True, lock=False, max_dbs=3)
    try:
        entries = 0
        database = env.open_db(b"entries", create=False)
        with env.begin() as txn:
            for _ in txn.cursor(db=database):
                entries += 1
    finally:
        env.close()
    ended = time.perf_counter(), time.process_time()
    assert entries == directory.pages, "every page has an entry"
    return ended[0] - begun[0], ended[1] - begun[1]


def _open_once(directory: Directory) -> tuple[float, float]:
    gc.collect()
    begun = time.perf_counter(), time.process_time()
    tier = directory.open()
    try:
        pools: dict[str, Slots] = {HOST: SlotPool(1), DISK: tier}
        planner = Planner(pools, {HOST: 1, DISK: tier.capacity_pages})
        planner.adopt(DISK, tier.found())
        ended = time.perf_counter(), time.process_time()
        assert len(planner.index) == directory.pages, "every page is found and has its parent"
    finally:
        tier.close()
    return ended[0] - begun[0], ended[1] - begun[1]


def match_s(store: TieredStore, long: Sequence[KeyChain], repeats: int, calls: int) -> list[float]:
    """Seconds a page of `store.match`, on conversations at random, all of whose pages it holds.

    Args:
        repeats: samples.
        calls: of a sample, each with all keys of one conversation.
    """
    source = random.Random(0)
    found = []
    for _ in range(repeats + 1):
        asked = [source.choice(long) for _ in range(calls)]
        started = time.thread_time()
        pages = sum([store.match(keys).pages for keys in asked])
        taken = time.thread_time() - started
        assert pages == sum(map(len, asked)), "all of them are stored"
        found.append(taken / pages)
    return found[1:]
