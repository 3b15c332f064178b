"""The catalog: an LMDB that says where each page lies. It can be rebuilt from the segments."""

from __future__ import annotations

import errno
import os
import stat
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

import lmdb
import numpy as np
import xxhash

from tiered_kv.errors import ConfigError, TieredKVError, TierIOError
from tiered_kv.keys import KEY_BYTES, PageKey
from tiered_kv.storage.disk.columns import Column
from tiered_kv.storage.disk.entries import ENTRY, LISTED, Item, entries_from
from tiered_kv.storage.disk.extent import EPOCH_SHIFT, HAS_PARENT, Record
from tiered_kv.storage.disk.leaves import BrokenLeavesError, read_rows

# parent, payload checksum, sequence, generation, offset, stored bytes, segment, codec, flags
_ENTRY = struct.Struct("<32s16sQQQQIHH")
_SEQUENCE_AT = 48
_SEAL = struct.Struct("<Q")  # xxh3-64 of key and entry
assert _ENTRY.size + _SEAL.size == ENTRY.itemsize
_SEGMENT = struct.Struct(">I")
_NUMBER = struct.Struct("<Q")
_ANY = (1 << 64) - 1
_BATCH_ENTRIES = 512  # more pairs alive than 700, and the collector goes over all there is
_SEALED = np.dtype([("bytes", f"V{KEY_BYTES + _ENTRY.size}"), ("seal", "<u8")])
assert _SEALED.itemsize == LISTED.itemsize


_DAMAGE = (
    lmdb.CorruptedError,
    lmdb.CursorFullError,
    lmdb.InvalidError,
    lmdb.PageFullError,
    lmdb.PageNotFoundError,
    lmdb.PanicError,
)


class CatalogDamagedError(TieredKVError):
    """The catalog cannot be trusted and is to be rebuilt from the segments; stays in the tier."""


class Catalog:
    """Key -> record, segment -> generation, and an epoch that counts openings.

    A record counts if its sequence is below a number that stands here too: so records can be put in
    ahead (`prepare`), and all of them count from one small transaction on, or none does.

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
        self._noted: dict[int, int] = {}  # generations known to be in the catalog
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
                str(self._path),
                map_size=self._map_bytes,
                lock=False,
                mode=0o600,
                max_dbs=3,
                metasync=False,  # by `_env.sync`, where it has to be durable
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

    def counted_below(self, epoch: int) -> int:
        """Records with a smaller sequence count, if the last epoch was this one.

        All do in a store that was made or last opened by a version that did not know the number.
        """
        with self._reading() as txn:
            value = txn.get(b"counted", db=self._meta)
            number = _NUMBER.unpack(value)[0] if value else 0
            return int(number) if number >> EPOCH_SHIFT == epoch else _ANY

    @property
    def entries(self) -> int:
        """How many pages are listed."""
        with self._reading() as txn:
            return int(txn.stat(db=self._pages)["entries"])

    def batches(self) -> Iterator[Column]:
        """Every entry with its key (`LISTED`), in order of keys; no transaction may be open.

        Raises:
            CatalogDamagedError: an entry does not agree with its seal, or the tree is broken.
        """
        last = b""
        try:
            found = read_rows(self._path / "data.mdb", b"pages", KEY_BYTES, ENTRY.itemsize)
            for rows in self._by_cursor() if found is None else found:
                listed = rows.view(LISTED).ravel()
                _require_seals(listed)
                _require_order(listed["key"], last)
                last = listed["key"][-1].tobytes()
                yield listed
        except BrokenLeavesError as error:
            raise CatalogDamagedError(f"the disk catalog is damaged: {error}") from error

    def _by_cursor(self) -> Iterator[Column]:
        """The same rows as `read_rows` gives, of an LMDB whose pages it cannot read."""
        with self._reading() as txn:
            entries: Any = txn.cursor(db=self._pages).iternext()
            while batch := list(islice(entries, _BATCH_ENTRIES)):
                joined = [key + value for key, value in batch]
                if {*map(len, joined)} != {LISTED.itemsize}:
                    raise BrokenLeavesError("an entry has a wrong length")
                yield np.frombuffer(b"".join(joined), np.uint8).reshape(-1, LISTED.itemsize)

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

    def prepare(
        self,
        *,
        moved: Sequence[Record] = (),
        deleted: Sequence[tuple[PageKey, int]] = (),
        added: Sequence[Item] = (),
        generations: dict[int, int],
    ) -> list[Item]:
        """Apply everything as `commit` does, but what is added does not count yet.

        It is durable when the next commit is: a system that crashes before may not know of it.

        Returns:
            What was not added, because it would replace an entry that counts: for the commit.

        Raises:
            TierIOError: as `commit`.
        """
        with self._changing() as txn:
            self._apply(txn, moved, deleted, generations)
            items = list(added)
            with txn.cursor() as cursor:
                given, taken = cursor.putmulti(items, overwrite=False)
            late = []
            if taken < given:
                late = [item for item in items if txn.get(item[0]) != item[1]]
            self._note(txn, generations)
        self._noted |= generations
        return late

    def commit(
        self,
        *,
        moved: Sequence[Record] = (),
        deleted: Sequence[tuple[PageKey, int]] = (),
        added: Sequence[Item] = (),
        generations: dict[int, int],
        counted_below: int | None = None,
        identity: tuple[bytes, int] | None = None,
        when: Callable[[], None] = lambda: None,
    ) -> None:
        """Apply everything in one durable transaction, in the order of the arguments.

        Args:
            moved: new places of records; ignored where the key now has another sequence.
            deleted: keys to drop with the sequence they had; ignored where it is another by now.
            added: new records; they replace what the key had.
            generations: of at least the segments named by the records.
            counted_below: records with a smaller sequence count from now on.
            identity: store id and epoch to note.
            when: called when all is prepared; returns when it may be committed. What it raises
                undoes all.

        Raises:
            TierIOError: the map is full or the medium failed; nothing counts that did not before,
                but a commit that the medium failed at its very end may be found after a crash.
        """
        with self._changing() as txn:
            self._apply(txn, moved, deleted, generations)
            if added:
                with txn.cursor() as cursor:
                    cursor.putmulti(added)
            self._note(txn, generations)
            if counted_below is not None:
                txn.put(b"counted", _NUMBER.pack(counted_below), db=self._meta)
            if identity is not None:
                txn.put(b"store", identity[0], db=self._meta)
                txn.put(b"epoch", _NUMBER.pack(identity[1]), db=self._meta)
            when()
        with _told_as_failures():
            self._env.sync(True)
        self._noted |= generations

    @contextmanager
    def _changing(self) -> Iterator[lmdb.Transaction]:
        with _told_as_failures(), self._env.begin(write=True, db=self._pages) as txn:
            yield txn

    def _apply(
        self,
        txn: lmdb.Transaction,
        moved: Sequence[Record],
        deleted: Sequence[tuple[PageKey, int]],
        generations: dict[int, int],
    ) -> None:
        here = [record for record in moved if _sequence_of(txn, record.key) == record.sequence]
        with txn.cursor() as cursor:
            if here:
                cursor.putmulti(entries_from(here).items(generations))
            for key, sequence in sorted(deleted):
                value = cursor.pop(key)  # looked up and then deleted: 2.9 us, not 1.9 (2026-11)
                if value is not None and _sequence_in(value) != sequence:
                    cursor.put(key, value)

    def _note(self, txn: lmdb.Transaction, generations: dict[int, int]) -> None:
        if generations == self._noted:
            return
        for segment, generation in generations.items():
            if self._noted.get(segment) != generation:
                txn.put(_SEGMENT.pack(segment), _NUMBER.pack(generation), db=self._segments)

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


@contextmanager
def _told_as_failures() -> Iterator[None]:
    try:
        yield
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


def _sequence_of(txn: lmdb.Transaction, key: PageKey) -> int | None:
    value = txn.get(key)
    return None if value is None else _sequence_in(value)


def _sequence_in(value: bytes | memoryview) -> int:
    return int(_NUMBER.unpack_from(value, _SEQUENCE_AT)[0])


def _require_seals(listed: Column) -> None:
    """Raise CatalogDamagedError unless entries (`LISTED`) are as they were sealed."""
    # 0.11 us an entry; the same hash by numpy, of all at once, took as long (Xeon, 2026-11)
    digests = map(xxhash.xxh3_64_digest, listed.view(_SEALED)["bytes"].tolist())
    seals = np.frombuffer(b"".join(digests), ">u8")
    wrong = np.flatnonzero(listed["seal"] != seals)
    if len(wrong):
        name = listed["key"][wrong[0], :4].tobytes().hex()
        raise CatalogDamagedError(f"the catalog entry of {name} does not agree with its seal")


def _require_order(keys: Column, last: bytes) -> None:
    """Raise CatalogDamagedError unless keys rise from the `last` before them: none comes twice."""
    begins = np.ascontiguousarray(keys[:, :8]).view(">u8").ravel()
    doubtful = np.flatnonzero(begins[1:] <= begins[:-1]).tolist()
    pairs = [(keys[at].tobytes(), keys[at + 1].tobytes()) for at in doubtful]
    for before, after in [(last, keys[0].tobytes()), *pairs]:
        if before >= after:
            raise CatalogDamagedError(f"the disk catalog is not in order at {after.hex()[:8]}")


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


def shows_damage(error: TierIOError) -> bool:
    """Whether a commit failed because of what LMDB found in its file, not of the medium."""
    return isinstance(error.__cause__, _DAMAGE)


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
