"""Entries of the catalog, made many at once (`docs/storage-format.md`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, TypeAlias

import numpy as np
import xxhash

from tiered_kv.keys import KEY_BYTES, PageKey
from tiered_kv.storage.disk.columns import Column
from tiered_kv.storage.disk.direct_io import BLOCK_BYTES
from tiered_kv.storage.disk.extent import CHECKSUM_BYTES, HAS_PARENT, Record, key_column

ENTRY = np.dtype(
    [
        ("parent", "u1", KEY_BYTES),
        ("checksum", "u1", CHECKSUM_BYTES),
        ("sequence", "<u8"),
        ("generation", "<u8"),
        ("offset", "<u8"),
        ("stored_bytes", "<u8"),
        ("segment", "<u4"),
        ("codec", "<u2"),
        ("flags", "<u2"),
        ("seal", "<u8"),
    ]
)
"""An entry and its seal, which is xxh3-64 of the key and of what stands before it."""
LISTED = np.dtype([("key", "u1", KEY_BYTES), *ENTRY.descr])
"""A key and its entry, side by side."""
Item: TypeAlias = tuple[PageKey, bytes]
"""A key and its sealed entry, as the catalog keeps them."""
SEAL_BYTES = 8
_SEALED_BYTES = ENTRY.itemsize - SEAL_BYTES


@dataclass(slots=True)
class Entries:
    """Keys and what the catalog is to say of them (`ENTRY`), without generation and seal."""

    keys: Sequence[PageKey]
    rows: Column

    def items(self, generations: dict[int, int]) -> list[Item]:
        """Keys and values to be stored, by key; of the same key in the order they were given."""
        count, rows = len(self.keys), self.rows
        if not count:
            return []
        segments, which = np.unique(rows["segment"], return_inverse=True)
        current = np.array([generations[segment] for segment in segments.tolist()], np.uint64)
        rows["generation"] = current[which]
        width = KEY_BYTES + _SEALED_BYTES
        sealed = np.empty((count, width), np.uint8)
        sealed[:, :KEY_BYTES] = key_column(self.keys)
        sealed[:, KEY_BYTES:] = rows.view(np.uint8).reshape(count, -1)[:, :_SEALED_BYTES]
        joined: Any = sealed.reshape(-1)
        flat = memoryview(joined)
        digest = xxhash.xxh3_64_intdigest
        rows["seal"] = [digest(flat[at : at + width]) for at in range(0, count * width, width)]
        values, step = rows.tobytes(), ENTRY.itemsize
        starts = range(0, count * step, step)
        items = [(k, values[at : at + step]) for k, at in zip(self.keys, starts, strict=True)]
        items.sort(key=itemgetter(0))  # neighbours in the tree, one after the other
        return items


def entries_of(
    keys: Sequence[PageKey], records: Column, segments: Column, blocks: Column
) -> Entries:
    """What to say of records (`RECORD`) that lie in these places."""
    rows = np.zeros(len(keys), ENTRY)
    for name in ("parent", "checksum", "sequence", "stored_bytes", "codec", "flags"):
        rows[name] = records[name]
    rows["segment"] = segments
    rows["offset"] = blocks.astype(np.uint64) * BLOCK_BYTES
    return Entries(keys, rows)


def entries_from(records: Sequence[Record]) -> Entries:
    """What to say of records that lie where they say."""
    rows = np.zeros(len(records), ENTRY)
    rows["parent"] = key_column([record.parent for record in records])
    digests = b"".join([record.checksum for record in records])
    rows["checksum"] = np.frombuffer(digests, np.uint8).reshape(-1, CHECKSUM_BYTES)
    for name in ("sequence", "offset", "stored_bytes", "segment", "codec"):
        rows[name] = [getattr(record, name) for record in records]
    rows["flags"] = [0 if record.parent is None else HAS_PARENT for record in records]
    return Entries([record.key for record in records], rows)
