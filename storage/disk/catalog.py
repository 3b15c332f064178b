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
from tiered_kv.keys import PageKey
from tiered_kv.storage.disk.columns import Column
from tiered_kv.storage.disk.entries import (
    ENTRY,
    LISTED,
    SEAL_BYTES,
    SEQUENCE_BYTES,
    Item,
    items_of,
    rows_from,
    sequences_of,
)
from tiered_kv.storage.disk.extent import EPOCH_SHIFT, HAS_PARENT, Record
from tiered_kv.storage.disk.leaves import BrokenLeavesError, read_rows

# key, parent, payload checksum, generation, offset, stored bytes, segment, codec, flags
_ENTRY = struct.Struct("<32s32s16sQQQIHH")
_SEAL = struct.Struct("<Q")  # xxh3-64 of sequence and entry
assert _ENTRY.size + _SEAL.size == ENTRY.itemsize and _SEAL.size == SEAL_BYTES
_SEQUENCE = struct.Struct(">Q")
_SEGMENT = struct.Struct(">I")
_NUMBER = struct.Struct("<Q")
_ANY = (1 << 64) - 1
_ENTRIES = b"entries"  # of format 1: "pages", by key
_BATCH_ENTRIES = 512  # more pairs alive than 700, and the collector goes over all there is
_CHANGES_AT_ONCE = 16  # in a catalog that is nearly full: twice as many leaves, three times over
_SEALED = np.dtype([("bytes", f"V{SEQUENCE_BYTES + _ENTRY.size}"), ("seal", "<u8")])
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
    """Sequence -> record, segment -> generation, and an epoch that counts openings.

    In order of sequence, not of key: what is written together lies together, and is mostly dropped
    together. By key, which is a hash, every record would lie in another page of LMDB.

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
            self._entries = self._env.open_db(_ENTRIES)
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
            return int(txn.stat(db=self._entries)["entries"])

    def batches(self) -> Iterator[Column]:
        """Every entry with its sequence (`LISTED`), in order of it; no transaction may be open.

        Raises:
            CatalogDamagedError: an entry does not agree with its seal, or the tree is broken.
        """
        last = -1
        try:
            path = self._path / "data.mdb"
            found = read_rows(path, _ENTRIES, SEQUENCE_BYTES, ENTRY.itemsize)
            for rows in self._by_cursor() if found is None else found:
                listed = rows.view(LISTED).ravel()
                _require_seals(listed)
                last = _last_in_order(listed["sequence"], last)
                yield listed
        except BrokenLeavesError as error:
            raise CatalogDamagedError(f"the disk catalog is damaged: {error}") from error

    def _by_cursor(self) -> Iterator[Column]:
        """The same rows as `read_rows` gives, of an LMDB whose pages it cannot read."""
        with self._reading() as txn:
            entries: Any = txn.cursor(db=self._entries).iternext()
            while batch := list(islice(entries, _BATCH_ENTRIES)):
                joined = [sequence + value for sequence, value in batch]
                if {*map(len, joined)} != {LISTED.itemsize}:
                    raise BrokenLeavesError("an entry has a wrong length")
                yield np.frombuffer(b"".join(joined), np.uint8).reshape(-1, LISTED.itemsize)

    def records(self) -> Iterator[tuple[Record, int]]:
        """Every record with its generation, in order of sequence.

        Raises:
            CatalogDamagedError: an entry does not agree with its seal, or the tree is broken.
        """
        with self._reading() as txn:
            for sequence, value in txn.cursor(db=self._entries):
                yield _decode(bytes(sequence), bytes(value))

    def generations(self) -> dict[int, int]:
        """The generation of every segment ever filled."""
        with self._reading() as txn:
            cursor = txn.cursor(db=self._segments)
            return {_SEGMENT.unpack(s)[0]: _NUMBER.unpack(g)[0] for s, g in cursor}

    def prepare(
        self,
        *,
        moved: Sequence[Record] = (),
        deleted: Sequence[int] = (),
        added: Sequence[Item] = (),
        generations: dict[int, int],
    ) -> None:
        """Apply everything as `commit` does, but what is added does not count yet.

        It is durable when the next commit is: a system that crashes before may not know of it.

        Raises:
            TierIOError: as `commit`.
        """
        self._change(moved, deleted, added, generations)
        self._noted |= generations

    def commit(
        self,
        *,
        moved: Sequence[Record] = (),
        deleted: Sequence[int] = (),
        added: Sequence[Item] = (),
        generations: dict[int, int],
        counted_below: int | None = None,
        identity: tuple[bytes, int] | None = None,
        when: Callable[[], None] = lambda: None,
    ) -> None:
        """Apply everything in one durable transaction, in the order of the arguments.

        Args:
            moved: new places of records; ignored where the record is not there.
            deleted: sequences to drop; ignored where there is none.
            added: new records, of higher sequences than any that is there, in order of them.
            generations: of at least the segments named by the records.
            counted_below: records with a smaller sequence count from now on.
            identity: store id and epoch to note.
            when: called when all is prepared; returns when it may be committed. What it raises
                undoes all.

        Raises:
            TierIOError: the map is full or the medium failed; nothing counts that did not before,
                but a commit that the medium failed at its very end may be found after a crash.
        """

        def end(txn: lmdb.Transaction) -> None:
            if counted_below is not None:
                txn.put(b"counted", _NUMBER.pack(counted_below), db=self._meta)
            if identity is not None:
                txn.put(b"store", identity[0], db=self._meta)
                txn.put(b"epoch", _NUMBER.pack(identity[1]), db=self._meta)
            when()

        self._change(moved, deleted, added, generations, end)
        with _told_as_failures():
            self._env.sync(True)
        self._noted |= generations

    def _change(
        self,
        moved: Sequence[Record],
        deleted: Sequence[int],
        added: Sequence[Item],
        generations: dict[int, int],
        end: Callable[[lmdb.Transaction], None] = lambda txn: None,
    ) -> None:
        """One transaction; if the map is too full for it, what may come before it does so.

        A transaction writes every page that it changes elsewhere, and the places of the old ones
        are free only two transactions later.
        """
        with _told_as_failures():
            try:
                self._apply(moved, deleted, added, generations, end)
                return
            except lmdb.MapFullError:
                if len(moved) + len(deleted) <= _CHANGES_AT_ONCE:
                    raise
            for at in range(0, max(len(moved), len(deleted)), _CHANGES_AT_ONCE):
                here = slice(at, at + _CHANGES_AT_ONCE)
                self._apply(moved[here], deleted[here], (), generations, lambda txn: None)
            self._apply((), (), added, generations, end)

    def _apply(
        self,
        moved: Sequence[Record],
        deleted: Sequence[int],
        added: Sequence[Item],
        generations: dict[int, int],
        end: Callable[[lmdb.Transaction], None],
    ) -> None:
        """One transaction, of which `end` is the last step."""
        with self._env.begin(write=True, db=self._entries) as txn:
            here = [one for one in moved if txn.get(_SEQUENCE.pack(one.sequence)) is not None]
            if here:
                with txn.cursor() as cursor:
                    cursor.putmulti(items_of(rows_from(here), generations))
            for sequence in sequences_of(np.sort(np.array(deleted, np.uint64))):
                txn.delete(sequence)
            _append(txn, added)
            self._note(txn, generations)
            end(txn)

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


def _append(txn: lmdb.Transaction, added: Sequence[Item]) -> None:
    """Put records behind all there are."""
    if added:
        with txn.cursor() as cursor:
            _, taken = cursor.putmulti(added, append=True)
        if taken != len(added):
            raise lmdb.KeyExistsError("what is to be written does not follow what is there")


def _require_seals(listed: Column) -> None:
    """Raise CatalogDamagedError unless entries (`LISTED`) are as they were sealed."""
    # 0.11 us an entry; the same hash by numpy, of all at once, took as long (Xeon, 2026-11)
    digests = map(xxhash.xxh3_64_digest, listed.view(_SEALED)["bytes"].tolist())
    seals = np.frombuffer(b"".join(digests), ">u8")
    wrong = np.flatnonzero(listed["seal"] != seals)
    if len(wrong):
        name = listed["key"][wrong[0], :4].tobytes().hex()
        raise CatalogDamagedError(f"the catalog entry of {name} does not agree with its seal")


def _last_in_order(sequences: Column, last: int) -> int:
    """The last of sequences. Raises CatalogDamagedError unless they rise from the `last` before."""
    numbers = sequences.astype(np.uint64)
    falls = np.flatnonzero(numbers[1:] <= numbers[:-1]).tolist()
    if int(numbers[0]) <= last or falls:
        at = 0 if int(numbers[0]) <= last else falls[0] + 1
        raise CatalogDamagedError(f"the disk catalog is not in order at sequence {numbers[at]}")
    return int(numbers[-1])


def _decode(sequence: bytes, value: bytes) -> tuple[Record, int]:
    entry, seal = value[: _ENTRY.size], value[_ENTRY.size :]
    digest = xxhash.xxh3_64_intdigest(sequence + entry)
    if len(sequence) != SEQUENCE_BYTES or seal != _SEAL.pack(digest):
        raise CatalogDamagedError(
            f"the catalog entry of {value[:4].hex()} does not agree with its seal"
        )
    key, parent, checksum, generation, offset, stored, segment, codec, flags = _ENTRY.unpack(entry)
    hangs_from = PageKey(parent) if flags & HAS_PARENT else None
    (number,) = _SEQUENCE.unpack(sequence)
    record = Record(PageKey(key), hangs_from, checksum, number, segment, offset, stored, codec)
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
