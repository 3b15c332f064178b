"""The header block of an extent, in bytes (`docs/storage-format.md`)."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any

import xxhash

from tiered_kv.keys import KEY_BYTES, PageKey
from tiered_kv.storage.base import PageBuffer
from tiered_kv.storage.disk.direct_io import BLOCK_BYTES, aligned_buffer
from tiered_kv.storage.disk.geometry import EXTENT_RECORDS

MAGIC = b"TKVEXTNT"
FORMAT_VERSION = 1
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
_HAS_PARENT = 1
assert _HEADER.size == _HEADER_BYTES
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


def encode_header(extent: Extent, store_id: bytes, into: PageBuffer | None = None) -> PageBuffer:
    """The header block of an extent, in `into` or in aligned memory of its own."""
    block = bytearray(BLOCK_BYTES)
    fields = (MAGIC, FORMAT_VERSION, len(extent.records), store_id, extent.segment, 0)
    numbers = (
        extent.generation,
        extent.number,
        extent.durable_below,
        extent.offset,
        extent.n_bytes,
    )
    _HEADER.pack_into(block, 0, *fields, *numbers, b"", b"")
    at = _RECORDS_AT
    for record in extent.records:
        flags = 0 if record.parent is None else _HAS_PARENT
        where = (record.sequence, record.offset, record.stored_bytes, record.codec, flags, 0)
        _RECORD.pack_into(block, at, record.key, record.parent or b"", record.checksum, *where)
        at += _RECORD.size
    block[_CHECKSUM_AT:_HEADER_BYTES] = xxhash.xxh3_128_digest(block)
    target = aligned_buffer(BLOCK_BYTES) if into is None else into
    target[:BLOCK_BYTES] = memoryview(block)
    return target


def decode_header(block: bytes, store_id: bytes, segment: int, offset: int) -> Extent | None:
    """The extent a block describes, or None if it is no sound header of this store and place."""
    if len(block) != BLOCK_BYTES or block[:8] != MAGIC:
        return None
    fields = _HEADER.unpack_from(block)
    _, version, count, owner, own_segment, _, generation, number, durable, own_offset, n_bytes = (
        fields[:11]
    )
    zeroed = block[:_CHECKSUM_AT] + bytes(CHECKSUM_BYTES) + block[_HEADER_BYTES:]
    if xxhash.xxh3_128_digest(zeroed) != fields[-1] or version != FORMAT_VERSION:
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
    hangs_from = PageKey(parent) if flags & _HAS_PARENT else None
    return Record(PageKey(key), hangs_from, checksum, sequence, segment, offset, stored, codec)
