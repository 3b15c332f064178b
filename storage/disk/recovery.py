"""Finding the pages again when a store is opened: from the catalog, or without it."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from tiered_kv.errors import TierIOError
from tiered_kv.found import beginnings_of
from tiered_kv.keys import PageKey
from tiered_kv.storage.base import PageBuffer
from tiered_kv.storage.disk.catalog import (
    Catalog,
    CatalogDamagedError,
    check_catalog_files,
    shows_damage,
)
from tiered_kv.storage.disk.columns import Column, Columns
from tiered_kv.storage.disk.direct_io import BLOCK_BYTES, aligned_buffer
from tiered_kv.storage.disk.directory import FORMAT_VERSION, StoreDirectory
from tiered_kv.storage.disk.entries import items_of, rows_from
from tiered_kv.storage.disk.extent import (
    CODEC_RAW,
    EPOCH_SHIFT,
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
        records: in any order, in columns with room for the store's capacity.
        epoch: of this opening, already committed.
        was_rebuilt: the catalog could not be used and was made anew.
    """

    catalog: Catalog
    records: Columns
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
    if directory.version_before < FORMAT_VERSION:
        raise CatalogDamagedError(f"the disk catalog is of format {directory.version_before}")
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
    capacity = marker.geometry.capacity_pages
    records = Columns.empty(capacity, marker.geometry.page_bytes)
    current, counted_below = _current(existing, generations), catalog.counted_below(epoch)
    stale: list[int] = []
    uncounted: list[int] = []
    for listed in catalog.batches():
        listed = _apart(listed, listed["sequence"] < counted_below, uncounted)
        is_current = _is_current(listed, current) & _are_possible(listed, marker.geometry)
        listed = _apart(listed, is_current, stale)
        if len(records) + len(listed) > capacity:
            raise CatalogDamagedError("the disk catalog names more pages than fit")
        records.append(listed)
    if stale:
        _log.warning("%s: %d catalog entries name no place that exists", directory.path, len(stale))
    records, older = _with_each_key_once(records, marker.geometry)
    records, given_up = _with_one_empty(records, marker.geometry)
    if given_up:
        _log.warning("%s: no segment is empty: %d pages given up", directory.path, len(given_up))
    try:  # the first to look at LMDB's list of free pages
        catalog.commit(
            deleted=stale + older + given_up + uncounted,  # before sequences of this epoch count
            generations={},
            counted_below=(epoch + 1) << EPOCH_SHIFT,
            identity=(marker.store_id, epoch + 1),
        )
    except TierIOError as error:
        if shows_damage(error):
            raise CatalogDamagedError(str(error)) from error
        raise
    return Recovered(catalog, records, generations, epoch + 1, was_rebuilt=False)


def _apart(listed: Column, is_kept: Column, others: list[int]) -> Column:
    """Entries that are kept; the sequences of the others are added to a list."""
    if is_kept.all():
        return listed
    others.extend(listed["sequence"][~is_kept].tolist())
    return listed[is_kept]


def _with_each_key_once(records: Columns, geometry: Geometry) -> tuple[Columns, list[int]]:
    """The newest record of each key, and the sequences of the others: hardly ever there are any."""
    alike = np.sort(beginnings_of(records.key[: len(records)]))
    if not (alike[1:] == alike[:-1]).any():
        return records, []
    listed = [records.record(row) for row in range(len(records))]
    newest = {record.key: record for record in listed}  # they are in order of sequence
    older = [record.sequence for record in listed if newest[record.key] is not record]
    return Columns.of([*newest.values()], geometry.capacity_pages, geometry.page_bytes), older


def _with_one_empty(records: Columns, geometry: Geometry) -> tuple[Columns, list[int]]:
    """`leave_one_empty`, and the sequences of what was given up."""
    is_held = np.zeros(geometry.segments, np.bool_)
    is_held[records.segment[: len(records)]] = True
    if not is_held.all():
        return records, []
    listed = [records.record(row) for row in range(len(records))]
    kept = leave_one_empty(listed, geometry.segments)
    keys = {record.key for record in kept}
    lost = [record.sequence for record in listed if record.key not in keys]
    return Columns.of(kept, geometry.capacity_pages, geometry.page_bytes), lost


def _current(existing: set[int], generations: dict[int, int]) -> Column:
    """By number of a segment its generation, and 0, which is none, if there is no such segment."""
    current = np.zeros(max(existing, default=0) + 2, np.uint64)
    for segment in existing:
        current[segment] = generations.get(segment, 0)
    return current


def _is_current(entries: Column, current: Column) -> Column:
    """Which entries name a segment that exists, as it was filled last."""
    wanted = current[np.minimum(entries["segment"], len(current) - 1)]
    is_current: Column = (wanted != 0) & (wanted == entries["generation"])
    return is_current


def _from_segments(
    directory: StoreDirectory, files: SegmentFiles, existing: list[int]
) -> Recovered:
    marker = directory.marker
    extents = [
        extent
        for segment in existing
        for extent in scan(files, segment, marker.store_id, marker.geometry)
    ]
    epoch = 1 + max((max(e.generation >> 32, e.number >> EPOCH_SHIFT) for e in extents), default=0)
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
        catalog.commit(
            added=items_of(rows_from(kept), generations),
            generations=generations,
            counted_below=epoch << EPOCH_SHIFT,
            identity=(marker.store_id, epoch),
        )
    except BaseException:
        catalog.close()
        raise
    if existing:
        _log.warning("%s: catalog rebuilt with %d pages", directory.path, len(kept))
    records = Columns.of(kept, marker.geometry.capacity_pages, marker.geometry.page_bytes)
    return Recovered(catalog, records, generations, epoch, was_rebuilt=bool(existing))


def is_possible(record: Record, geometry: Geometry) -> bool:
    """Whether a record could be a page of this store, as far as numbers can tell."""
    return (
        record.codec == CODEC_RAW
        and record.stored_bytes == geometry.page_bytes
        and record.offset % BLOCK_BYTES == 0
        and BLOCK_BYTES <= record.offset <= geometry.segment_bytes - geometry.stride_bytes
    )


def _are_possible(entries: Column, geometry: Geometry) -> Column:
    """`is_possible`, of many entries at once."""
    offset = entries["offset"].copy()  # side by side: half the time
    possible: Column = (
        (entries["codec"] == CODEC_RAW)
        & (entries["stored_bytes"] == geometry.page_bytes)
        & (offset & (BLOCK_BYTES - 1) == 0)
        & (offset >= BLOCK_BYTES)
        & (offset <= geometry.segment_bytes - geometry.stride_bytes)
    )
    return possible


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
    parents = {record.key: record.parent for record in records}
    rank: dict[PageKey, tuple[int, int]] = {}  # newest page below, steps up from it
    for record in sorted(records, key=lambda record: -record.sequence):
        key: PageKey | None = record.key
        steps = 0
        while key is not None and key in parents and key not in rank:
            rank[key] = (-record.sequence, -steps)
            key, steps = parents[key], steps + 1
    ranked = sorted(records, key=lambda record: rank[record.key])
    return sorted(ranked[:limit], key=lambda record: record.sequence)


def leave_one_empty(records: list[Record], segments: int) -> list[Record]:
    """Give up the emptiest segment's pages, and what hangs from them, if no segment is empty.

    Compaction needs an empty segment to copy into. With a catalog there is one, unless an older
    version left the store without; if it is lost, pages freed from that segment show again.
    """
    held = Counter(record.segment for record in records)
    if len(held) < segments:
        return records
    emptiest = min(held, key=lambda segment: held[segment])
    falls = {record.key: record.segment == emptiest for record in records}
    parents = {record.key: record.parent for record in records}
    settled: set[PageKey] = set()
    for record in records:  # a page written again is newer than what hangs from it
        path: list[PageKey] = []
        key: PageKey | None = record.key
        while key is not None and key in falls and key not in settled:
            settled.add(key)
            path.append(key)
            key = parents[key]
        falling = key is not None and falls.get(key, False)
        for below in reversed(path):
            falling = falls[below] = falls[below] or falling
    return [record for record in records if not falls[record.key]]
