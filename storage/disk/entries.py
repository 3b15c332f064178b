"""Entries of the catalog, made many at once (`docs/storage-format.md`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import xxhash

from tiered_kv.keys import KEY_BYTES
from tiered_kv.storage.disk.columns import Column
from tiered_kv.storage.disk.direct_io import BLOCK_BYTES
from tiered_kv.storage.disk.extent import CHECKSUM_BYTES, HAS_PARENT, Record, key_column

ENTRY = np.dtype(
    [
        ("key", "u1", KEY_BYTES),
        ("parent", "u1", KEY_BYTES),
        ("checksum", "u1", CHECKSUM_BYTES),
        ("generation", "<u8"),
        ("offset", "<u8"),
        ("stored_bytes", "<u8"),
        ("segment", "<u4"),
        ("codec", "<u2"),
        ("flags", "<u2"),
        ("seal", "<u8"),
    ]
)
"""An entry and its seal, which is xxh3-64 of the sequence and of what stands before it."""
LISTED = np.dtype([("sequence", ">u8"), *ENTRY.descr])
"""A sequence and its entry, side by side."""
Item: TypeAlias = tuple[bytes, bytes]
"""A sequence and its sealed entry, as the catalog keeps them."""
SEQUENCE_BYTES = 8
SEAL_BYTES = 8
_SEALED_BYTES = LISTED.itemsize - SEAL_BYTES


def items_of(rows: Column, generations: dict[int, int]) -> list[Item]:
    """Entries (`LISTED`) to be stored, in order of sequence, with generation and seal."""
    count = len(rows)
    if not count:
        return []
    if (rows["sequence"][1:] < rows["sequence"][:-1]).any():
        # Stable: of a record that has moved twice the later place comes last, and counts.
        rows = rows[np.argsort(rows["sequence"], kind="stable")]
    segments, which = np.unique(rows["segment"], return_inverse=True)
    current = np.array([generations[segment] for segment in segments.tolist()], np.uint64)
    rows["generation"] = current[which]
    step = LISTED.itemsize
    starts = range(0, count * step, step)
    unsealed = memoryview(rows.tobytes())
    digest = xxhash.xxh3_64_intdigest
    rows["seal"] = [digest(unsealed[at : at + _SEALED_BYTES]) for at in starts]
    listed = rows.tobytes()
    values = [listed[at + SEQUENCE_BYTES : at + step] for at in starts]
    return list(zip(sequences_of(rows["sequence"]), values, strict=True))


def sequences_of(numbers: Column) -> list[bytes]:
    """Numbers as the catalog's keys: big-endian, so that they are in order."""
    keys: list[bytes] = np.ascontiguousarray(numbers, ">u8").view(f"V{SEQUENCE_BYTES}").tolist()
    return keys


def rows_of(records: Column, segments: Column, blocks: Column) -> Column:
    """What to say of records (`RECORD`) that lie in these places; without generation and seal."""
    rows = np.zeros(len(records), LISTED)
    for name in ("key", "parent", "checksum", "sequence", "stored_bytes", "codec", "flags"):
        rows[name] = records[name]
    rows["segment"] = segments
    rows["offset"] = blocks.astype(np.uint64) * BLOCK_BYTES
    return rows


def rows_from(records: Sequence[Record]) -> Column:
    """What to say of records that lie where they say; without generation and seal."""
    rows = np.zeros(len(records), LISTED)
    rows["key"] = key_column([record.key for record in records])
    rows["parent"] = key_column([record.parent for record in records])
    digests = b"".join([record.checksum for record in records])
    rows["checksum"] = np.frombuffer(digests, np.uint8).reshape(-1, CHECKSUM_BYTES)
    for name in ("sequence", "offset", "stored_bytes", "segment", "codec"):
        rows[name] = [getattr(record, name) for record in records]
    rows["flags"] = [0 if record.parent is None else HAS_PARENT for record in records]
    return rows
