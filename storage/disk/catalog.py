"""The catalog: an LMDB that says where each page lies. It can be rebuilt from the segments."""

from __future__ import annotations

import errno
import os
import stat
import struct
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

import lmdb
import numpy as np
import xxhash

from tiered_kv.errors import ConfigError, TieredKVError, TierIOError
from tiered_kv.keys import KEY_BYTES, PageKey
from tiered_kv.storage.disk.extent import Record

# parent, payload checksum, sequence, generation, offset, stored bytes, segment, codec, flags
_ENTRY = struct.Struct("<32s16sQQQQIHH")
ENTRY = np.dtype(
    [
        ("parent", "u1", KEY_BYTES),
        ("checksum", "u1", 16),
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
"""An entry and its seal, for reading many at once."""
_SEAL = struct.Struct("<Q")  # xxh3-64 of key and entry
HAS_PARENT = 1
_SEGMENT = struct.Struct(">I")
_NUMBER = struct.Struct("<Q")
_BATCH_ENTRIES = 1024


class CatalogDamagedError(TieredKVError):
    """The catalog cannot be trusted and is to be rebuilt from the segments; stays in the tier."""


class Catalog:
    """Key -> record, segment -> generation, and an epoch that counts openings.

    Not locked: the tier calls it from one thread at a time, under the store's own directory lock.
    LMDB's reader table is not used, so no lock file of its own exists.
    """

    def __init__(self, path: Path, map_bytes: int) -> None:
        """Open or create; blocks. The file has its full length at once, but is sparse.

        Allocating it would take 1.6 % of a large store before its first page is written.

        Raises:
            CatalogDamagedError: what is there is no LMDB.
        """
        self._path, self._map_bytes = path, map_bytes
        self._open()
        fd = os.open(path / "data.mdb", os.O_RDWR | os.O_NOFOLLOW)
        try:
            if os.fstat(fd).st_size < map_bytes:
                os.ftruncate(fd, map_bytes)
        finally:
            os.close(fd)

    def _open(self) -> None:
        try:
            self._env = lmdb.open(
                str(self._path), map_size=self._map_bytes, lock=False, mode=0o600, max_dbs=3
            )
            self._pages = self._env.open_db(b"pages")
            self._segments = self._env.open_db(b"segments")
            self._meta = self._env.open_db(b"meta")
        except lmdb.Error as error:
            if "No space left" in str(error):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)) from error
            raise CatalogDamagedError(f"the disk catalog cannot be opened: {error}") from error

    def identity(self) -> tuple[bytes, int]:
        """The store id and epoch last committed; (b"", 0) in a catalog that was never completed."""
        with self._reading() as txn:
            epoch = txn.get(b"epoch", db=self._meta)
            owner = txn.get(b"store", db=self._meta) or b""
        return bytes(owner), _NUMBER.unpack(epoch)[0] if epoch else 0

    @property
    def entries(self) -> int:
        """How many pages are listed."""
        with self._reading() as txn:
            return int(txn.stat(db=self._pages)["entries"])

    def batches(self) -> Iterator[tuple[list[PageKey], np.ndarray[Any, Any]]]:
        """Every entry (`ENTRY`) with its key, in key order; no transaction may be open meanwhile.

        The map is made anew after each batch: what was read through it would count as the
        process's memory, 210 bytes a page (1 M entries, LMDB 0.9.33, 2026-11).

        Raises:
            CatalogDamagedError: an entry does not agree with its seal, or the tree is broken.
        """
        after = b""
        while True:
            keys, values = self._read_after(after)
            if not keys:
                return
            yield keys, _decode_all(keys, values)
            after = keys[-1]
            self._env.close()
            self._open()

    def _read_after(self, after: bytes) -> tuple[list[PageKey], list[bytes]]:
        with self._reading() as txn:
            cursor = txn.cursor(db=self._pages)
            is_there = cursor.set_range(after) if after else cursor.first()
            if is_there and after and cursor.key() == after:
                is_there = cursor.next()
            rows = list(islice(cursor.iternext(), _BATCH_ENTRIES)) if is_there else []
        return [PageKey(bytes(key)) for key, _ in rows], [bytes(value) for _, value in rows]

    def records(self) -> Iterator[tuple[Record, int]]:
        """Every record with its generation, in key order.

        Raises:
            CatalogDamagedError: an entry does not agree with its seal, or the tree is broken.
        """
        with self._reading() as txn:
            for key, value in txn.cursor(db=self._pages):
                yield _decode(bytes(key), bytes(value))

    def record(self, key: PageKey) -> tuple[Record, int] | None:
        """The record of one key and its generation, or None."""
        with self._reading() as txn:
            value = txn.get(key, db=self._pages)
            return None if value is None else _decode(key, bytes(value))

    def generations(self) -> dict[int, int]:
        """The generation of every segment ever filled."""
        with self._reading() as txn:
            cursor = txn.cursor(db=self._segments)
            return {_SEGMENT.unpack(s)[0]: _NUMBER.unpack(g)[0] for s, g in cursor}

    def commit(
        self,
        *,
        moved: Iterable[Record] = (),
        deleted: Iterable[tuple[PageKey, int]] = (),
        added: Iterable[Record] = (),
        generations: dict[int, int],
        identity: tuple[bytes, int] | None = None,
    ) -> None:
        """Apply everything in one durable transaction, in the order of the arguments.

        Args:
            moved: new places of records; ignored where the key now has another sequence.
            deleted: keys to drop with the sequence they had; ignored where it is another by now.
            added: new records; they replace what the key had.
            generations: of at least the segments named by the records.
            identity: store id and epoch to note.

        Raises:
            TierIOError: the map is full or the medium failed; nothing was applied.
        """
        try:
            with self._env.begin(write=True, db=self._pages) as txn:
                for record in moved:
                    if _sequence_of(txn, record.key) == record.sequence:
                        txn.put(record.key, _encode(record, generations[record.segment]))
                for key, sequence in deleted:
                    if _sequence_of(txn, key) == sequence:
                        txn.delete(key)
                for record in added:
                    txn.put(record.key, _encode(record, generations[record.segment]))
                for segment, generation in generations.items():
                    name, value = _SEGMENT.pack(segment), _NUMBER.pack(generation)
                    if txn.get(name, db=self._segments) != value:
                        txn.put(name, value, db=self._segments)
                if identity is not None:
                    txn.put(b"store", identity[0], db=self._meta)
                    txn.put(b"epoch", _NUMBER.pack(identity[1]), db=self._meta)
        except lmdb.MapFullError as error:
            raise TierIOError(
                "the catalog of the disk tier is full: nothing of this batch was stored",
                tier="disk",
                errno=errno.ENOSPC,
            ) from error
        except lmdb.Error as error:
            number = errno.ENOSPC if isinstance(error, lmdb.DiskError) else errno.EIO
            message = f"the catalog of the disk tier failed: {error}"
            raise TierIOError(message, tier="disk", errno=number) from error

    def close(self) -> None:
        """Give the map back."""
        self._env.close()

    @contextmanager
    def _reading(self) -> Iterator[lmdb.Transaction]:
        try:
            with self._env.begin(buffers=False) as txn:
                yield txn
        except (lmdb.Error, struct.error) as error:
            raise CatalogDamagedError(f"the disk catalog is damaged: {error}") from error


def _sequence_of(txn: lmdb.Transaction, key: PageKey) -> int | None:
    value = txn.get(key)
    return None if value is None else int(_ENTRY.unpack_from(value)[2])


def _encode(record: Record, generation: int) -> bytes:
    entry = _ENTRY.pack(
        record.parent or b"",
        record.checksum,
        record.sequence,
        generation,
        record.offset,
        record.stored_bytes,
        record.segment,
        record.codec,
        0 if record.parent is None else HAS_PARENT,
    )
    return entry + _SEAL.pack(xxhash.xxh3_64_intdigest(record.key + entry))


def _decode_all(keys: list[PageKey], values: list[bytes]) -> np.ndarray[Any, Any]:
    for key, value in zip(keys, values, strict=True):
        if len(key) != KEY_BYTES or len(value) != ENTRY.itemsize:
            raise CatalogDamagedError(f"the catalog entry of {key.hex()[:8]} has a wrong length")
    entries = np.frombuffer(b"".join(values), ENTRY)
    seals = [
        xxhash.xxh3_64_intdigest(key + value[: _ENTRY.size])
        for key, value in zip(keys, values, strict=True)
    ]
    bad = np.flatnonzero(entries["seal"] != np.array(seals, np.uint64))
    if len(bad):
        name = keys[int(bad[0])].hex()[:8]
        raise CatalogDamagedError(f"the catalog entry of {name} does not agree with its seal")
    return entries


def _decode(key: bytes, value: bytes) -> tuple[Record, int]:
    entry, seal = value[: _ENTRY.size], value[_ENTRY.size :]
    if len(key) != KEY_BYTES or seal != _SEAL.pack(xxhash.xxh3_64_intdigest(key + entry)):
        raise CatalogDamagedError(
            f"the catalog entry of {key.hex()[:8]} does not agree with its seal"
        )
    parent, checksum, sequence, generation, offset, stored, segment, codec, flags = _ENTRY.unpack(
        entry
    )
    hangs_from = PageKey(parent) if flags & HAS_PARENT else None
    record = Record(PageKey(key), hangs_from, checksum, sequence, segment, offset, stored, codec)
    return record, generation


def check_catalog_files(path: Path, map_bytes: int) -> None:
    """Look at a catalog before LMDB maps it: a file cut short would raise SIGBUS later.

    Raises:
        CatalogDamagedError: missing, or shorter than it was made.
        ConfigError: a symlink stands in its place.
    """
    for part in (path, path / "data.mdb"):
        try:
            status = os.lstat(part)
        except FileNotFoundError:
            raise CatalogDamagedError(f"{part.name} is missing") from None
        if stat.S_ISLNK(status.st_mode):
            raise ConfigError(f"{part} is a symlink: a disk store follows none")
    if status.st_size < map_bytes:
        raise CatalogDamagedError(f"the catalog is cut to {status.st_size} of {map_bytes} bytes")
