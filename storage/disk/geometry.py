"""How a disk budget is divided: segments, catalog, small files. Pure arithmetic, no I/O."""

from __future__ import annotations

from dataclasses import dataclass

from tiered_kv.errors import ConfigError
from tiered_kv.storage.disk.direct_io import BLOCK_BYTES, round_up

MAX_SEGMENT_BYTES = 256 << 20
EXTENT_RECORDS = 35  # what one header block describes
MIN_SEGMENTS = 3
_SPARE_SEGMENTS = 2  # one being filled, one kept empty for compaction
_LIVE_SHARE = 0.9
_CATALOG_BASE_BYTES = 256 << 10
# An entry takes 138 bytes of a tree page. Pages are full if entries are dropped in the order of
# writing, half full if at random; copy-on-write keeps up to three versions of what changes.
_CATALOG_PAGE_BYTES = 1 << 10
_FIXED_BYTES = 64 << 10  # directories, lock, marker and its replacement, probe
_SEGMENT_EXTRA_BYTES = BLOCK_BYTES + 64  # a block of file system extents, a directory entry
_SESSION_SHARE = 256  # of the capacity, a token's id being 4 bytes and its K and V kilobytes
_MAX_SESSION_BYTES = 256 << 20


@dataclass(frozen=True, slots=True)
class Geometry:
    """Where the bytes of a store go. Everything is bounded by `capacity_bytes`, metadata included.

    Attributes:
        page_bytes: bytes of one page as its owner sees it.
        capacity_bytes: the configured bound on what `du` counts.
        segment_bytes: length of one segment file, fully allocated when first used.
        segments: how many segment files there may be.
        catalog_bytes: the most the LMDB map may take; sparse at first.
    """

    page_bytes: int
    capacity_bytes: int
    segment_bytes: int
    segments: int
    catalog_bytes: int

    @property
    def stride_bytes(self) -> int:
        """Bytes from one page's payload to the next in an extent."""
        return round_up(self.page_bytes)

    @property
    def segment_live_pages(self) -> int:
        """The fullest that the emptiest sealed segment can be: what bounds write amplification."""
        return _segment_live_pages(self.segment_bytes, self.stride_bytes)

    @property
    def capacity_pages(self) -> int:
        """Pages the store promises to hold; the rest is room for compaction to make progress."""
        return (self.segments - _SPARE_SEGMENTS) * self.segment_live_pages

    @property
    def session_bytes(self) -> int:
        """What the pages leave for the token ids of sessions; none in a store older than these."""
        pages = self.segments * (self.segment_bytes + _SEGMENT_EXTRA_BYTES)
        left = self.capacity_bytes - pages - self.catalog_bytes - _FIXED_BYTES
        return max(0, min(_session_bytes(self.capacity_bytes), left))


def _session_bytes(capacity_bytes: int) -> int:
    return min(capacity_bytes // _SESSION_SHARE, _MAX_SESSION_BYTES)


def _segment_live_pages(segment_bytes: int, stride_bytes: int) -> int:
    alone = segment_bytes // (stride_bytes + BLOCK_BYTES)  # every page in an extent of its own
    packed = segment_bytes * EXTENT_RECORDS // (stride_bytes * EXTENT_RECORDS + BLOCK_BYTES)
    return min(alone - 1, int(packed * _LIVE_SHARE))


def _catalog_bytes(capacity_bytes: int, stride_bytes: int) -> int:
    return round_up(_CATALOG_BASE_BYTES + capacity_bytes // stride_bytes * _CATALOG_PAGE_BYTES)


def _fill(page_bytes: int, capacity_bytes: int, segment_bytes: int) -> Geometry:
    catalog_bytes = _catalog_bytes(capacity_bytes, round_up(page_bytes))
    room = capacity_bytes - catalog_bytes - _FIXED_BYTES - _session_bytes(capacity_bytes)
    segments = max(0, room // (segment_bytes + _SEGMENT_EXTRA_BYTES))
    return Geometry(page_bytes, capacity_bytes, segment_bytes, segments, catalog_bytes)


def minimum_capacity_bytes(page_bytes: int) -> int:
    """The smallest `capacity_bytes` that holds one page."""
    stride = round_up(page_bytes)
    segments = MIN_SEGMENTS * (2 * (stride + BLOCK_BYTES) + _SEGMENT_EXTRA_BYTES)
    wanted = segments + _CATALOG_BASE_BYTES + _FIXED_BYTES + 2 * BLOCK_BYTES
    shared = _CATALOG_PAGE_BYTES + stride // _SESSION_SHARE + 1  # grow with the capacity
    return round_up(wanted * stride // (stride - shared) + BLOCK_BYTES)


def plan_geometry(page_bytes: int, capacity_bytes: int) -> Geometry:
    """Choose the segment size for a new store.

    Small segments waste less on the two that are kept spare, large ones give longer reads: the
    largest size is taken that costs at most 3 % of the pages the best one would hold.

    Raises:
        ConfigError: not even one page fits.
    """
    if page_bytes < 1:
        raise ConfigError(f"page_bytes must be at least 1, not {page_bytes}")
    minimum = minimum_capacity_bytes(page_bytes)
    if capacity_bytes < minimum:
        raise ConfigError(
            f"disk_size={capacity_bytes}: too small for pages of {page_bytes} bytes; "
            f"give at least {minimum}"
        )
    place = round_up(page_bytes) + BLOCK_BYTES
    largest = max(2, MAX_SEGMENT_BYTES // place)
    sizes = sorted({max(2, int(2**step)) for step in (i / 4 for i in range(4, 65))} | {largest})
    plans = [_fill(page_bytes, capacity_bytes, n * place) for n in sizes if n <= largest]
    best = max(plan.capacity_pages for plan in plans)
    return [plan for plan in plans if plan.capacity_pages >= 0.97 * best][-1]


def grow_geometry(present: Geometry, capacity_bytes: int) -> Geometry:
    """The same store with a larger budget: more segments of the same size.

    Raises:
        ConfigError: the budget is smaller than the present one.
    """
    if capacity_bytes < present.capacity_bytes:
        raise ConfigError(
            f"the disk store was made with a capacity of {present.capacity_bytes} bytes and cannot "
            f"shrink to {capacity_bytes}: ask for at least as much, or use another directory"
        )
    grown = _fill(present.page_bytes, capacity_bytes, present.segment_bytes)
    return grown if grown.segments >= present.segments else present
