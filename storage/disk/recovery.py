"""Finding the pages again when a store is opened: from the catalog, or without it."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from tiered_kv.keys import PageKey
from tiered_kv.storage.base import PageBuffer
from tiered_kv.storage.disk.catalog import Catalog, CatalogDamagedError, check_catalog_files
from tiered_kv.storage.disk.direct_io import BLOCK_BYTES, aligned_buffer
from tiered_kv.storage.disk.directory import StoreDirectory
from tiered_kv.storage.disk.extent import (
    CODEC_RAW,
    MAGIC,
    Extent,
    Record,
    checksum_of,
    decode_header,
)
from tiered_kv.storage.disk.geometry import Geometry
from tiered_kv.storage.disk.segment import SegmentFiles

_SEARCH_BYTES = 1 << 20
_MAGIC = np.frombuffer(MAGIC, np.uint64)[0]
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Recovered:
    """What an opened store holds.

    Attributes:
        records: oldest first; no more than the store's capacity.
        epoch: of this opening, already committed.
        was_rebuilt: the catalog could not be used and was made anew.
    """

    catalog: Catalog
    records: list[Record]
    generations: dict[int, int]
    epoch: int
    was_rebuilt: bool


def recover(directory: StoreDirectory, files: SegmentFiles) -> Recovered:
    """Open the catalog, or rebuild it; reads no payload unless it must. Blocks.

    Raises:
        ConfigError: something in the directory is not ours.
        TierIOError, OSError: the medium failed.
    """
    existing = files.existing()
    try:
        return _from_catalog(directory, files, existing)
    except CatalogDamagedError as error:
        if existing:
            _log.warning(
                "%s: %s; rebuilding it from %d segments", directory.path, error, len(existing)
            )
        return _from_segments(directory, files, existing)


def _from_catalog(directory: StoreDirectory, files: SegmentFiles, existing: list[int]) -> Recovered:
    geometry = directory.marker.geometry
    check_catalog_files(directory.catalog_path, directory.catalog_bytes_before)
    with directory.reading_catalog():
        catalog = Catalog(directory.catalog_path, geometry.catalog_bytes)
        try:
            return _load(catalog, directory, set(existing))
        except BaseException:
            catalog.close()
            raise


def _load(catalog: Catalog, directory: StoreDirectory, existing: set[int]) -> Recovered:
    marker = directory.marker
    owner, epoch = catalog.identity()
    if owner != marker.store_id or not epoch:
        raise CatalogDamagedError("the disk catalog is not this store's")
    generations = catalog.generations()
    kept: list[Record] = []
    stale: list[tuple[PageKey, int]] = []
    for record, generation in catalog.records():
        is_known = record.segment in existing and generations.get(record.segment) == generation
        if is_known and is_possible(record, marker.geometry):
            kept.append(record)
        else:
            stale.append((record.key, record.sequence))
    if stale:
        _log.warning("%s: %d catalog entries name no place that exists", directory.path, len(stale))
    if len(kept) > marker.geometry.capacity_pages:
        raise CatalogDamagedError(f"the disk catalog names {len(kept)} pages, more than fit")
    catalog.commit(deleted=stale, generations={}, identity=(marker.store_id, epoch + 1))
    kept.sort(key=lambda record: record.sequence)
    return Recovered(catalog, kept, generations, epoch + 1, was_rebuilt=False)


def _from_segments(
    directory: StoreDirectory, files: SegmentFiles, existing: list[int]
) -> Recovered:
    marker = directory.marker
    extents = [
        extent
        for segment in existing
        for extent in scan(files, segment, marker.store_id, marker.geometry)
    ]
    epoch = 1 + max((max(e.generation >> 32, e.number >> 40) for e in extents), default=0)
    generations: dict[int, int] = {}
    for extent in extents:
        generations[extent.segment] = max(extent.generation, generations.get(extent.segment, 0))
    current = [e for e in extents if e.generation == generations[e.segment]]
    newest = _newest_by_key(_sound_records(files, current, marker.geometry))
    kept = keep_within(newest, marker.geometry.capacity_pages)
    kept = leave_one_empty(kept, marker.geometry.segments)
    directory.reset_catalog()
    catalog = Catalog(directory.catalog_path, marker.geometry.catalog_bytes)
    try:
        catalog.commit(added=kept, generations=generations, identity=(marker.store_id, epoch))
    except BaseException:
        catalog.close()
        raise
    if existing:
        _log.warning("%s: catalog rebuilt with %d pages", directory.path, len(kept))
    return Recovered(catalog, kept, generations, epoch, was_rebuilt=bool(existing))


def is_possible(record: Record, geometry: Geometry) -> bool:
    """Whether a record could be a page of this store, as far as numbers can tell."""
    return (
        record.codec == CODEC_RAW
        and record.stored_bytes == geometry.page_bytes
        and record.offset % BLOCK_BYTES == 0
        and BLOCK_BYTES <= record.offset <= geometry.segment_bytes - geometry.stride_bytes
    )


def scan(
    files: SegmentFiles, segment: int, store_id: bytes, geometry: Geometry
) -> Iterator[Extent]:
    """Every extent whose header is sound, in order of place, of whatever generation."""
    block = aligned_buffer(BLOCK_BYTES)
    offset = 0
    while offset + BLOCK_BYTES <= geometry.segment_bytes:
        extent = _header_at(files, segment, offset, store_id, block)
        if extent is None:
            following = _next_magic(files, segment, offset + BLOCK_BYTES, geometry)
            if following is None:
                return
            offset = following
            continue
        yield extent
        offset += max(BLOCK_BYTES, extent.n_bytes)


def _header_at(
    files: SegmentFiles, segment: int, offset: int, store_id: bytes, block: PageBuffer
) -> Extent | None:
    try:
        return decode_header(files.read_block(segment, block, offset), store_id, segment, offset)
    except OSError as error:
        _log.warning("%s at %d: %s", files.path(segment), offset, error)
        return None


def _next_magic(files: SegmentFiles, segment: int, start: int, geometry: Geometry) -> int | None:
    """Where the next block begins that could be a header: steps over what a damaged one hid."""
    window = aligned_buffer(_SEARCH_BYTES)
    for offset in range(start, geometry.segment_bytes, _SEARCH_BYTES):
        part = window[: min(_SEARCH_BYTES, geometry.segment_bytes - offset)]
        try:
            files.read(segment, [part], offset)
        except OSError:
            continue
        words = part.view(np.uint64)[:: BLOCK_BYTES // 8]
        hits = np.flatnonzero(words == _MAGIC)
        if hits.size:
            return offset + int(hits[0]) * BLOCK_BYTES
    return None


def _sound_records(
    files: SegmentFiles, extents: Iterable[Extent], geometry: Geometry
) -> Iterator[tuple[Record, int]]:
    """Records with their extent's number; payloads that a crash may have torn are verified."""
    extents = list(extents)
    durable_below = max((extent.durable_below for extent in extents), default=0)
    buffer = aligned_buffer(geometry.stride_bytes)
    for extent in extents:
        for record in extent.records:
            if not is_possible(record, geometry):
                continue
            if extent.number >= durable_below:
                try:
                    files.read(record.segment, [buffer[: geometry.stride_bytes]], record.offset)
                except OSError:
                    continue
                if checksum_of(buffer[: geometry.page_bytes]) != record.checksum:
                    continue
            yield record, extent.number


def _newest_by_key(records: Iterable[tuple[Record, int]]) -> list[Record]:
    newest: dict[PageKey, tuple[int, int, Record]] = {}
    for record, number in records:
        rank = (record.sequence, number, record)
        present = newest.get(record.key)
        if present is None or rank[:2] > present[:2]:
            newest[record.key] = rank
    return sorted((found[2] for found in newest.values()), key=lambda record: record.sequence)


def keep_within(records: list[Record], limit: int) -> list[Record]:
    """At most `limit` records, oldest first: the newest branches whole, leaves given up first.

    A segment that is not yet filled again still shows pages that were freed; without a catalog they
    count as stored, and there may be more of them than the store holds.
    """
    if len(records) <= limit:
        return records
    latest = {record.key: record.sequence for record in records}
    for record in reversed(records):  # children come after their parents
        if record.parent in latest:
            latest[record.parent] = max(latest[record.parent], latest[record.key])
    ranked = sorted(records, key=lambda record: (-latest[record.key], record.sequence))
    return sorted(ranked[:limit], key=lambda record: record.sequence)


def leave_one_empty(records: list[Record], segments: int) -> list[Record]:
    """Give up the emptiest segment's pages, and what hangs from them, if no segment is empty.

    Compaction needs an empty segment to copy into. With a catalog there always is one; without it,
    the pages freed from that segment before show again.
    """
    held = Counter(record.segment for record in records)
    if len(held) < segments:
        return records
    emptiest = min(held, key=lambda segment: held[segment])
    dropped: set[PageKey | None] = set()
    kept: list[Record] = []
    for record in records:  # oldest first: a parent comes before its children
        if record.segment == emptiest or record.parent in dropped:
            dropped.add(record.key)
        else:
            kept.append(record)
    return kept
