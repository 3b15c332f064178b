"""The header block of an extent, in bytes (`docs/storage-format.md`)."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import xxhash

from tiered_kv.keys import KEY_BYTES, PageKey
from tiered_kv.storage.base import PageBuffer
from tiered_kv.storage.disk.direct_io import BLOCK_BYTES
from tiered_kv.storage.disk.geometry import EXTENT_RECORDS

MAGIC = b"TKVEXTNT"
HEADER_VERSION = 1
CODEC_RAW = 0
CHECKSUM_BYTES = 16

# magic, version, records, store id, segment, reserved, generation, extent number, durable below,
# own offset, extent bytes, zeros, checksum of the block with this field zeroed
_HEADER = struct.Struct("<8sII16sIIQQQQQ24s16s")
_HEADER_BYTES = 120
_CHECKSUM_AT = _HEADER_BYTES - CHECKSUM_BYTES
_RECORDS_AT = 128
# key, parent, payload checksum, sequence, offset in segment, stored bytes, codec, flags, reserved
_RECORD = struct.Struct("<32s32s16sQQQHHI")
RECORD = np.dtype(
    [
        ("key", "u1", KEY_BYTES),
        ("parent", "u1", KEY_BYTES),
        ("checksum", "u1", CHECKSUM_BYTES),
        ("sequence", "<u8"),
        ("offset", "<u8"),
        ("stored_bytes", "<u8"),
        ("codec", "<u2"),
        ("flags", "<u2"),
        ("reserved", "<u4"),
    ]
)
"""A record as it stands in a header, for writing many at once."""
HAS_PARENT = 1
EPOCH_SHIFT = 40
"""Sequences and extent numbers begin with the epoch; the lower bits count."""
_NO_KEY = bytes(KEY_BYTES)
assert _HEADER.size == _HEADER_BYTES and RECORD.itemsize == _RECORD.size
assert _RECORDS_AT + EXTENT_RECORDS * _RECORD.size <= BLOCK_BYTES


@dataclass(frozen=True, slots=True)
class Record:
    """One page as it lies on disk.

    Attributes:
        sequence: order in which pages were first written here; unique, kept when a page is moved.
        offset: where the payload starts in its segment.
    """

    key: PageKey
    parent: PageKey | None
    checksum: bytes
    sequence: int
    segment: int
    offset: int
    stored_bytes: int
    codec: int = CODEC_RAW


@dataclass(frozen=True, slots=True)
class Extent:
    """A run of records written together, and where it lies.

    Attributes:
        generation: which filling of the segment it belongs to.
        number: order of extents over the whole store; unique.
        durable_below: extents with a smaller number were on the medium when this one was written.
        n_bytes: length with header and padding; the next extent starts there.
    """

    segment: int
    generation: int
    number: int
    durable_below: int
    offset: int
    n_bytes: int
    records: tuple[Record, ...]


@dataclass(frozen=True, slots=True)
class Place:
    """Where an extent that is yet to be written will lie; the fields are those of `Extent`."""

    segment: int
    generation: int
    number: int
    durable_below: int
    offset: int
    n_bytes: int
    pages: int


def key_column(keys: Sequence[PageKey | None]) -> np.ndarray[Any, Any]:
    """Keys in rows of 32 bytes; zeros for None."""
    joined = b"".join([key or _NO_KEY for key in keys])
    return np.frombuffer(joined, np.uint8).reshape(-1, KEY_BYTES)


def name_pages(
    rows: np.ndarray[Any, Any],
    keys: Sequence[PageKey],
    parents: Sequence[PageKey | None],
    page_bytes: int,
) -> None:
    """Set what records (`RECORD`) of raw pages say but checksum, sequence and offset."""
    rows["key"], rows["parent"] = key_column(keys), key_column(parents)
    rows["stored_bytes"], rows["codec"] = page_bytes, CODEC_RAW
    rows["flags"] = [0 if parent is None else HAS_PARENT for parent in parents]


def rows_from(records: Sequence[Record]) -> np.ndarray[Any, Any]:
    """Records as they stand in a header (`RECORD`)."""
    keys, parents = [record.key for record in records], [record.parent for record in records]
    rows = np.zeros(len(records), RECORD)
    name_pages(rows, keys, parents, 0)
    digests = b"".join([record.checksum for record in records])
    rows["checksum"] = np.frombuffer(digests, np.uint8).reshape(-1, CHECKSUM_BYTES)
    for name in ("sequence", "offset", "stored_bytes", "codec"):
        rows[name] = [getattr(record, name) for record in records]
    return rows


def checksum_of(*parts: PageBuffer) -> bytes:
    """xxh3-128 of a payload in one piece or several; releases the GIL."""
    first: Any = parts[0]
    if len(parts) == 1:
        return xxhash.xxh3_128_digest(first)
    digest = xxhash.xxh3_128(first)
    for part in parts[1:]:
        following: Any = part
        digest.update(following)
    return digest.digest()


def encode_header(
    place: Place, rows: np.ndarray[Any, Any], store_id: bytes, into: PageBuffer
) -> None:
    """Write the header block of an extent, whose records are `rows` (`RECORD`), to a block."""
    block: Any = into[:BLOCK_BYTES]
    block[:] = 0
    fields = (MAGIC, HEADER_VERSION, len(rows), store_id, place.segment, 0)
    numbers = (place.generation, place.number, place.durable_below, place.offset, place.n_bytes)
    _HEADER.pack_into(block, 0, *fields, *numbers, b"", b"")
    block[_RECORDS_AT : _RECORDS_AT + rows.nbytes] = np.ascontiguousarray(rows).view(np.uint8)
    block[_CHECKSUM_AT:_HEADER_BYTES] = np.frombuffer(checksum_of(block), np.uint8)


def decode_header(block: bytes, store_id: bytes, segment: int, offset: int) -> Extent | None:
    """The extent a block describes, or None if it is no sound header of this store and place."""
    if len(block) != BLOCK_BYTES or block[:8] != MAGIC:
        return None
    fields = _HEADER.unpack_from(block)
    _, version, count, owner, own_segment, _, generation, number, durable, own_offset, n_bytes = (
        fields[:11]
    )
    zeroed = block[:_CHECKSUM_AT] + bytes(CHECKSUM_BYTES) + block[_HEADER_BYTES:]
    if xxhash.xxh3_128_digest(zeroed) != fields[-1] or version != HEADER_VERSION:
        return None
    if (
        owner != store_id
        or (own_segment, own_offset) != (segment, offset)
        or count > EXTENT_RECORDS
    ):
        return None
    starts = range(_RECORDS_AT, _RECORDS_AT + count * _RECORD.size, _RECORD.size)
    records = tuple(_decode_record(block, at, segment) for at in starts)
    return Extent(segment, generation, number, durable, offset, n_bytes, records)


def _decode_record(block: bytes, at: int, segment: int) -> Record:
    key, parent, checksum, sequence, offset, stored, codec, flags, _ = _RECORD.unpack_from(
        block, at
    )
    assert len(key) == KEY_BYTES
    hangs_from = PageKey(parent) if flags & HAS_PARENT else None
    return Record(PageKey(key), hangs_from, checksum, sequence, segment, offset, stored, codec)
