"""DiskTier: pages in segment files on a local disk, found again after a restart."""

from __future__ import annotations

import errno
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

from tiered_kv.errors import StoreClosedError, TieredKVError, TierIOError
from tiered_kv.found import FoundPages
from tiered_kv.interrupts import held_back
from tiered_kv.keys import KEY_BYTES
from tiered_kv.slots import SlotPool
from tiered_kv.storage.base import Page, Tier
from tiered_kv.storage.disk.audit import Audit, DiskReport
from tiered_kv.storage.disk.batch import Batch
from tiered_kv.storage.disk.compaction import Compaction
from tiered_kv.storage.disk.direct_io import probe_direct
from tiered_kv.storage.disk.directory import SESSIONS, StoreDirectory, no_space
from tiered_kv.storage.disk.entries import items_of
from tiered_kv.storage.disk.geometry import Geometry
from tiered_kv.storage.disk.log import SegmentLog
from tiered_kv.storage.disk.parts import PageParts, PartedPage, require_pages
from tiered_kv.storage.disk.precedence import Precedence
from tiered_kv.storage.disk.reader import PageReader
from tiered_kv.storage.disk.records import NO_CHANGES, Records, StoredPage
from tiered_kv.storage.disk.recovery import Recovered, recover
from tiered_kv.storage.disk.segment import SegmentFiles

_SMALL_PAGE_BYTES = 16 << 10
# From so many pages and bytes on the catalog hears of a write ahead. Of 64 MiB in pages of 64 KiB
# 4 ms of commit are left after the data instead of 7, in a store of 12,000 pages; of 256 KiB 0.6
# instead of 1.9. 32 MiB: no difference; 16: 0.5 ms slower (virtio disk, 2026-11).
_AHEAD_PAGES = 128
_AHEAD_BYTES = 32 << 20
_LOST = "a page was lost before it was durable"
_log = logging.getLogger(__name__)


class DiskTier(Tier):
    """A tier on disk. Open it with `DiskTier.open`; close it to let another process in.

    A slot is a logical number: where its page lies is decided when it is written. `write` returns
    when its pages are durable. `free` does no I/O: the record is dropped from the catalog with the
    next write, or at `close`, and only then may its space be used again. After a crash in between
    the page is found again, which is harmless: a key names its content.

    Attributes:
        recovered_pages: pages found when the store was opened.
        was_rebuilt: the catalog was missing or damaged then, and was made anew from the segments.
    """

    name = "disk"

    @classmethod
    def open(
        cls,
        path: str | Path,
        page_bytes: int,
        capacity_bytes: int,
        fingerprint: str,
        io_threads: int = 4,
    ) -> DiskTier:
        """Open a store directory or make one; blocks, reads no payload unless the catalog is gone.

        Args:
            path: the directory; made with mode 0700 if missing. Nothing else should live in it.
            page_bytes: bytes of a page; any number, a multiple of 4096 is fastest.
            capacity_bytes: bound on all the directory takes on disk, as `du` counts it. May grow
                from one opening to the next, not shrink.
            fingerprint: of the page layout (`KVLayout.fingerprint`); must be what it was.
            io_threads: reads of up to 4 MiB under way at once; as many more are queued behind them.

        Raises:
            ConfigError: not writable, too small, in use, foreign, newer, a symlink. Nothing in it
                was touched.
            LayoutMismatchError: the directory holds pages of another layout.
            TierIOError: the medium failed.
        """
        directory = StoreDirectory(Path(path), page_bytes, capacity_bytes, fingerprint)
        try:
            files = SegmentFiles(directory, probe_direct(directory.fd))
            recovered = recover(directory, files)
            directory.update_marker()
            if directory.is_new and page_bytes < _SMALL_PAGE_BYTES:
                _warn_of_small_pages(directory.marker.geometry)
            return cls(directory, files, recovered, io_threads)
        except OSError as error:
            is_full = error.errno in (errno.ENOSPC, errno.EDQUOT) or not directory.has_space
            directory.give_up()
            if is_full and (directory.is_new or not isinstance(error, TieredKVError)):
                raise TierIOError(no_space(Path(path)), tier="disk", errno=errno.ENOSPC) from error
            if isinstance(error, TieredKVError):
                raise
            raise _failure(f"opening the disk store at {path}", error) from error
        except BaseException:
            directory.give_up()
            raise

    def __init__(
        self, directory: StoreDirectory, files: SegmentFiles, recovered: Recovered, io_threads: int
    ) -> None:
        """Use `DiskTier.open`."""
        geometry = directory.marker.geometry
        self.page_bytes = geometry.page_bytes
        self._geometry = geometry
        self._directory = directory
        self._files = files
        self._catalog = recovered.catalog
        self._slots = SlotPool(geometry.capacity_pages)
        self._slots.take_first(len(recovered.records))
        self._records = Records(recovered.records, geometry.segments)
        self.recovered_pages = len(recovered.records)
        self.was_rebuilt = recovered.was_rebuilt
        store_id = directory.marker.store_id
        reads_first = self._precedence = Precedence()
        self._log = SegmentLog(
            files,
            self._records,
            geometry,
            store_id,
            recovered.epoch,
            recovered.generations,
            reads_first,
        )
        self._compaction = Compaction(
            self._log, files, self._records, geometry, self._commit, reads_first
        )
        self._reader = PageReader(files, self._records, geometry, max(1, io_threads), reads_first)
        self._slots_lock = threading.Lock()
        self._write_lock = threading.Lock()
        self._written_user_bytes = 0
        self._begun: list[Batch] = []  # and not ended, in order; guarded by the write lock
        self._has_failed = False  # the last write
        self._is_closed = False

    @property
    def capacity_pages(self) -> int:
        """How many pages fit, whatever the order of writes and frees."""
        return self._geometry.capacity_pages

    @property
    def capacity_bytes(self) -> int:
        """The configured bound; `disk_usage_bytes` never exceeds it."""
        return self._geometry.capacity_bytes

    @property
    def used_bytes(self) -> int:
        """Payload bytes of reserved slots."""
        with self._slots_lock:
            return self._slots.used * self.page_bytes

    @property
    def disk_usage_bytes(self) -> int:
        """What `du` counts now; looks at every file. Segments count in full when first used."""
        return self._directory.disk_usage_bytes()

    @property
    def session_folder(self) -> tuple[Path, int]:
        """Where the token ids of sessions may be kept, and how many bytes they may take there."""
        return self._directory.path / SESSIONS, self._geometry.session_bytes

    @property
    def direct_io(self) -> bool:
        """Whether I/O goes past the page cache (O_DIRECT)."""
        return self._files.direct_io

    @property
    def bytes_read(self) -> int:
        """Moved from the medium since opening, compaction and padding included."""
        return self._files.bytes_read

    @property
    def bytes_written(self) -> int:
        """Moved to segment files since opening, headers, padding and compaction included."""
        return self._files.bytes_written

    @property
    def bytes_written_user(self) -> int:
        """Payload of pages that `write` acknowledged since opening."""
        return self._written_user_bytes

    @property
    def write_amplification(self) -> float:
        """`bytes_written` over `bytes_written_user`; bounded as `docs/storage-format.md` says."""
        user = self._written_user_bytes
        return self.bytes_written / user if user else 1.0

    def pages(self) -> Iterator[StoredPage]:
        """Every page stored now, in the order they were written; no I/O.

        A parent mostly comes before its children, but not one that was found damaged and written
        again. Pages freed before their turn are left out. Iterating keeps 4 bytes a page.
        """
        self._require_open()
        yield from self._records.pages()

    def found(self) -> FoundPages:
        """Every page stored now, in columns, for whoever takes over all of them; no I/O.

        Blocks writers and readers for 0.2 s a million pages.
        """
        self._require_open()
        return self._records.found()

    def reserve(self, n: int) -> list[int] | None:
        self._require_open()
        with self._slots_lock:
            return self._slots.reserve(n)

    def free(self, slots: Sequence[int]) -> None:
        self._require_open()
        with self._slots_lock:
            self._slots.free(slots)
            self._records.forget(slots)

    def write(self, slots: Sequence[int], pages: Sequence[Page | PartedPage]) -> None:
        """Store pages and wait until they are durable: data, fdatasync, then a catalog commit.

        All of them become so at once, or none does. A slot that held a page loses it, also when
        this raises. Writes that several threads begin meanwhile share the commit. A key is in one
        slot: free the one that has it before it is written to another.

        Raises:
            TierIOError: the medium failed or is full (`errno`); the tier remains usable.
            ValueError: a slot that is not reserved or named twice, or a page of another length.
        """
        batch = Batch.of(slots, pages, self.page_bytes)
        try:
            self._begin(slots, batch)
            self._end(batch)
        except BaseException as error:
            self._leave(batch, error)
            raise

    def begin_write(
        self, slots: Sequence[int], pages: Sequence[Page | PartedPage]
    ) -> Callable[[], None]:
        """As `Tier.begin_write`: hashes the pages and hands them to the threads that write them.

        Blocks while there is no segment to write to, and for a commit that goes before.
        """
        batch = Batch.of(slots, pages, self.page_bytes)
        try:
            self._begin(slots, batch)
        except BaseException as error:
            self._leave(batch, error)
            raise
        return partial(self._end, batch)

    def _begin(self, slots: Sequence[int], batch: Batch) -> None:
        with self._write_lock:
            self._require_open()
            self._validate_write(slots, batch)
            if not slots:
                return
            self._records.forget(slots)
            self._drop_lost()
            self._make_ready(len(slots))
            try:
                self._begun.append(batch)
                self._append(batch)
            except BaseException as error:
                self._fail([batch], error)
                if isinstance(error, OSError) and not isinstance(error, TieredKVError):
                    raise _told(batch) from error
                raise

    def _end(self, batch: Batch) -> None:
        """Make a batch durable with all that have begun, unless that has been done."""
        with self._write_lock:
            if batch in self._begun:
                self._end_begun()
        if batch.failure is not None:
            raise _told(batch) from batch.failure

    def _end_begun(self) -> None:
        """Make all batches durable that have begun. If that fails, the `end` of each says so."""
        self._drop_lost()
        if not self._begun:
            return
        try:
            batch = Batch.joined(self._begun)
            self._make_durable(batch)
            self._written_user_bytes += len(batch) * self.page_bytes
            self._begun.clear()
        except BaseException as error:
            self._fail(list(self._begun), error)
            if not isinstance(error, OSError):
                raise

    def _drop_lost(self) -> None:
        """Fail a batch whose slots were freed or written again before its end, and those after it.

        So also if a page of it came back damaged: what was begun later may hang from that.
        """
        for at, batch in enumerate(self._begun):
            if not self._records.holds(batch):
                self._fail(self._begun[at:], OSError(errno.EIO, _LOST))
                return

    def _leave(self, batch: Batch, error: BaseException) -> None:
        """Nobody will end a batch that an interrupt has cut off: if it has begun, it fails."""
        with self._write_lock:
            if batch in self._begun:
                self._fail([batch], error)

    def _fail(self, batches: Sequence[Batch], error: BaseException) -> None:
        """Take batches that have begun back."""
        self._has_failed = True
        for batch in batches:
            batch.failure = error
            # First: what the catalog was told ahead must not count.
            self._records.forget(self._records.held_by(batch))
        self._begun = [batch for batch in self._begun if batch.failure is None]
        self._log.abandon()

    def _make_ready(self, pages: int) -> None:
        """Commit what is better committed before a write than in the middle of it.

        After a failure: what the catalog was told ahead of it, before sequences above count.
        """
        if self._has_failed:
            self._log.settle()
            self._commit()
            self._has_failed = False
        self._log.retry_creating()
        self._compaction.make_ready(pages)

    def _append(self, batch: Batch) -> None:
        done = 0
        while done < len(batch):
            self._compaction.make_room()
            done = self._log.append(batch, done)

    def _make_durable(self, batch: Batch) -> None:
        """Commit a batch whose data are being written, once they are on the medium.

        What is freed meanwhile, or after a failure in between, waits for the next commit.
        """
        rows = self._records.written(batch)
        if rows is None:
            raise OSError(errno.EIO, _LOST)
        generations = self._log.generations
        added = items_of(rows, generations)
        unsaved = changes = self._records.unsaved()
        if len(batch) >= _AHEAD_PAGES and len(batch) * self.page_bytes >= _AHEAD_BYTES:
            self._catalog.prepare(
                moved=changes.moved, deleted=changes.deleted, added=added, generations=generations
            )
            changes, added = NO_CHANGES, []
        self._catalog.commit(
            moved=changes.moved,
            deleted=changes.deleted,
            added=added,
            generations=generations,
            counted_below=self._log.next_sequence,
            when=lambda: self._log.sync(batch),
        )
        self._records.publish(batch.slots)
        self._records.saved(unsaved)
        self._compaction.reuse(unsaved.empty)

    def _validate_write(self, slots: Sequence[int], batch: Batch) -> None:
        if len(slots) != len(batch) or len(set(slots)) != len(slots):
            raise ValueError(
                f"{len(batch)} pages for slots {list(slots)}: one distinct slot a page"
            )
        with self._slots_lock:
            if not self._slots.are_taken(slots):
                slot = next(slot for slot in slots if not self._slots.is_taken(slot))
                raise ValueError(f"disk slot {slot} is not reserved")
        require_pages(
            [page.parts if isinstance(page, PartedPage) else page.data for page in batch.pages],
            self.page_bytes,
        )
        wrong = {*map(len, batch.keys), *map(len, filter(None, batch.parents))} - {KEY_BYTES}
        if wrong:
            raise ValueError(f"a page key has {KEY_BYTES} bytes, not {min(wrong)}")

    def read(self, slots: Sequence[int], into: Sequence[PageParts]) -> list[TieredKVError | None]:
        """Fill one buffer a slot, which may be in parts; blocks. Aligned: without a copy."""
        self._validate_read(slots, into)
        return self._reader.read(slots, into)

    def begin_read(
        self, slots: Sequence[int], into: Sequence[PageParts]
    ) -> Callable[[], list[TieredKVError | None]]:
        self._validate_read(slots, into)
        return self._reader.begin(slots, into)

    def _validate_read(self, slots: Sequence[int], into: Sequence[PageParts]) -> None:
        self._require_open()
        if len(slots) != len(into):
            raise ValueError(f"{len(into)} buffers for {len(slots)} slots")
        require_pages(into, self.page_bytes)

    def check(self, fix: bool = False) -> DiskReport:
        """Verify every page, header and counter; reads the whole store. Only writers wait.

        With `fix`, pages that cannot be had are dropped: their slots stay reserved and read as
        `CorruptPageError` until they are freed. What hangs from them stays. Pages whose header is
        lost are written again; what else is wrong is only reported.
        """
        with self._write_lock:
            self._require_open()
            self._end_begun()
            self._commit()
            store_id = self._directory.marker.store_id
            audit = Audit(self._log, self._files, self._records, self._geometry, store_id)
            audit.payloads(self._reader)
            audit.headers()
            audit.hanging()
            with self._slots_lock:
                audit.counters(self._slots.used)
            audit.catalog(self._catalog)
            usage = self.disk_usage_bytes
            if usage > self.capacity_bytes:
                audit.report.problems.append(
                    f"{usage} bytes on disk of {self.capacity_bytes} allowed"
                )
            if fix:
                self._log.retry_creating()
                try:
                    audit.fix(self._compaction.compact, self._commit)
                except OSError as error:
                    if isinstance(error, TieredKVError):
                        raise
                    raise _failure("repairing the store", error) from error
            return audit.report

    def close(self) -> None:
        """Commit what was freed, wait for reads under way, release the directory.

        Ctrl-C in the main thread is raised when that is done.
        """
        with held_back, self._write_lock:
            if self._is_closed:
                return
            self._end_begun()
            self._is_closed = True
            self._records.close()
            self._reader.close()
            self._log.close()
            try:
                self._commit()
            except TierIOError as error:  # freed pages will be found again: harmless
                _log.warning("closing the disk store: %s", error)
            finally:
                self._catalog.close()
                self._directory.close()

    def _commit(self) -> None:
        """Make what was moved and freed durable in the catalog."""
        unsaved = self._records.unsaved()
        if unsaved.moved or unsaved.deleted:
            self._catalog.commit(
                moved=unsaved.moved, deleted=unsaved.deleted, generations=self._log.generations
            )
            self._records.saved(unsaved)
        self._compaction.reuse(unsaved.empty)

    def _require_open(self) -> None:
        if self._is_closed:
            raise StoreClosedError("the disk tier is closed")


def _warn_of_small_pages(geometry: Geometry) -> None:
    share = geometry.capacity_pages * geometry.page_bytes / geometry.capacity_bytes
    _log.warning(
        "pages of %d bytes fill only %.0f %% of the disk store's %d bytes, the rest is headers, "
        "padding and catalog: give a page more tokens, to make it 16 KiB or more",
        geometry.page_bytes,
        100 * share,
        geometry.capacity_bytes,
    )


def _told(batch: Batch) -> TierIOError:
    """What the end of a batch that has failed raises."""
    error = batch.failure
    if isinstance(error, TierIOError):  # anew: several ends may raise it, in threads of their own
        return TierIOError(str(error), tier="disk", errno=error.errno)
    if not isinstance(error, OSError):
        error = OSError(errno.EINTR, "a write that was to be committed with it was interrupted")
    return _failure(f"writing {len(batch)} pages", error)


def _failure(doing: str, error: OSError) -> TierIOError:
    return TierIOError(
        f"{doing} failed: {error.strerror or error}; the disk tier remains usable",
        tier="disk",
        errno=error.errno,
    )
