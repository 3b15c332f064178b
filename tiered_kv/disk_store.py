"""DiskStore: pages by key on disk alone, for engines that keep a host tier of their own.

The bytes are the disk tier's, the decisions the index's: nothing is promoted, nothing is kept in
memory. Every call that moves bytes blocks; the caller brings the threads.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, TypeAlias

import numpy as np

from tiered_kv.counters import Counters, StoreStats
from tiered_kv.errors import CorruptPageError, StoreClosedError, TieredKVError
from tiered_kv.found import FoundPages
from tiered_kv.index import Index, TierState
from tiered_kv.interrupts import BooksLock, held_back
from tiered_kv.keys import PageKey
from tiered_kv.plan import DISK
from tiered_kv.room import Room
from tiered_kv.storage.base import PageBuffer
from tiered_kv.storage.disk import DiskTier
from tiered_kv.storage.disk.parts import PageParts, PartedPage, pieces
from tiered_kv.tier_index import RESIDENT

PageBytes: TypeAlias = "PageBuffer | memoryview | Sequence[PageBuffer | memoryview]"
"""A page as a caller has it: one contiguous row of bytes, or parts that follow one another."""

_QUIET_S = 10.0
_log = logging.getLogger(__name__)


class _Found(NamedTuple):
    """Pages that a `get` reads, in columns: their places in the call, in the index, on disk."""

    positions: list[int]
    pages: list[int]
    slots: list[int]


@dataclass(slots=True)
class _Share:
    """What one `put` has taken upon itself, and what became of each of its keys."""

    stored: dict[PageKey, bool] = field(default_factory=dict)
    new: dict[PageKey, tuple[int, int]] = field(default_factory=dict)  # page, slot
    awaited: list[PageKey] = field(default_factory=list)  # another put is writing them


class DiskStore:
    """Pages of one size on disk, found again after a restart. Safe to call from several threads.

    Bounded: the directory never takes more than its size, metadata included; a full store gives up
    pages by its policy. Durable: what `put` acknowledged outlives a crash. Verified: a page comes
    back as it was put or not at all. A failing medium is a miss and a line in the log, at most one
    every ten seconds. Ctrl-C in the main thread is raised when the call has ended.

    Args:
        tier: where the bytes go; the store closes it. What it holds already can be had at once.
        policy: the order in which a full store gives pages up.

    Raises:
        ConfigError: no such policy.
    """

    def __init__(self, tier: DiskTier, policy: str = "lru") -> None:
        self.page_bytes = tier.page_bytes
        self._tier = tier
        self._index = Index([DISK], policy)
        self._disk = self._index.by_name[DISK]
        self._room = Room(self._index, {DISK: tier}, {DISK: tier.capacity_pages})
        self._counters = Counters()
        self._changed = threading.Condition(BooksLock())
        self._under_way = 0
        self._is_closed = False
        self._complained_at = -_QUIET_S
        self._adopt(tier.found())

    @classmethod
    def open(
        cls,
        directory: str | Path,
        size: int,
        page_bytes: int,
        fingerprint: str,
        *,
        io_threads: int = 4,
        policy: str = "lru",
    ) -> DiskStore:
        """Open a directory or make it. Blocks; reads no pages unless the catalog is damaged.

        Args:
            directory: made with mode 0700 if missing; nothing else may live in it.
            size: bytes, a bound on all the directory takes. May grow from one opening to the next.
            page_bytes: of every page; a multiple of 4096 is fastest.
            fingerprint: of what the pages mean (model, dtype, layout); must be what it was.
            io_threads: reads of up to 4 MiB under way at once; as many more are queued behind them.
            policy: as for the class.

        Raises:
            ConfigError: no such policy; a directory not writable, too small, in use or not ours.
            LayoutMismatchError: it holds pages of another size or fingerprint.
            TierIOError: the medium failed.
        """
        Index([DISK], policy)  # a wrong policy is said before a directory is made
        tier = DiskTier.open(directory, page_bytes, size, fingerprint, io_threads=io_threads)
        try:
            return cls(tier, policy)
        except BaseException:
            tier.close()
            raise

    def __enter__(self) -> DiskStore:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    # -- questions ---------------------------------------------------------------------------------

    def contains(self, keys: Sequence[PageKey]) -> list[bool]:
        """Which pages can be had now; no I/O, and nothing is promoted by asking."""
        with self._changed:
            self._require_open()
            if len(self._index) == self._disk.resident:  # none on its way: 14 M keys/s, else 5 M
                return self._index.knows(keys)
            return [self._is_here(self._index.find(key)) for key in keys]

    def why_missing(self, key: PageKey) -> str:
        """Why a page is not here: never_stored, evicted, removed, corrupt or failed."""
        with self._changed:
            return self._index.why_missing(key)

    def usage(self) -> tuple[int, int]:
        """(payload bytes of the pages held, the configured size in bytes)."""
        return self._tier.used_bytes, self._tier.capacity_bytes

    @property
    def capacity_pages(self) -> int:
        """How many pages fit."""
        return self._tier.capacity_pages

    def stats(self) -> StoreStats:
        """Counters since the store was opened, and the pages it holds now.

        `not_stored_pages` counts those that found no room, `failed_writes` those whose write
        failed; pages that were there already are counted by `put_pages` alone.
        """
        with self._changed:
            resident = self._disk.resident
        return self._counters.snapshot({DISK: resident})

    # -- use ---------------------------------------------------------------------------------------

    def touch(self, keys: Sequence[PageKey]) -> None:
        """Mark pages as used now: consecutive pages of a prefix, the deepest as the oldest."""
        with self._changed:
            self._require_open()
            pages = (self._index.find(key) for key in keys)
            self._index.touch([page for page in pages if self._is_here(page)])

    def get(self, keys: Sequence[PageKey], into: Sequence[PageBytes]) -> list[bool]:
        """Fill one buffer a key; blocks. Each page found is verified and counts as used.

        A page that comes back wrong, or not at all, is dropped, so that it can be put again.

        Args:
            keys: consecutive pages of a prefix, or any pages.
            into: writable memory, `page_bytes` a key, the store's until the call returns. Filled
                without a copy where every part lies on a 4096-byte boundary and is a multiple of
                that long.

        Returns:
            For each key whether its buffer holds the page. If not, what it holds is undefined.

        Raises:
            ValueError: not one buffer a key, or a buffer of another size or not writable.
        """
        parts = [_parts(page) for page in into]
        self._check(keys, parts)
        if not all(part.flags.writeable for page in parts for part in pieces(page)):
            raise ValueError(
                "into= must be writable memory: the system would write to it all the same"
            )
        with held_back, self._at_work():
            with self._changed:
                found = self._pin(keys)
            began = time.monotonic()
            try:
                wanted = [parts[position] for position in found.positions]
                outcomes = self._tier.read(found.slots, wanted)
            except BaseException:
                self._unpin(found, [None] * len(found.pages))
                raise
            self._unpin(found, outcomes)
            return self._count(keys, found, outcomes, time.monotonic() - began)

    def put(
        self,
        keys: Sequence[PageKey],
        pages: Sequence[PageBytes],
        parents: Sequence[PageKey | None] | None = None,
    ) -> list[bool]:
        """Store pages; blocks until they are durable, in one group commit.

        Where room is short, the first of the batch are stored and the last are not. What must leave
        for them leaves by policy, nothing that is being read.

        Args:
            keys: of the pages. One that is stored already is not written again.
            pages: their bytes, `page_bytes` each; the caller's, unchanged until the call returns.
                Written without a copy where aligned as `get` says.
            parents: the key of the page before each, None for the first of a prompt or one that is
                not known. While a parent is here it does not leave before its children.

        Returns:
            For each key whether it is stored; False where there was no room or the medium failed.

        Raises:
            ValueError: not one page a key, or a page of another size.
        """
        parts = [_parts(page) for page in pages]
        self._check(keys, parts)
        if parents is not None and len(parents) != len(keys):
            raise ValueError(f"{len(parents)} parents for {len(keys)} keys")
        with held_back, self._at_work():
            self._counters.add("total", "put", len(keys))
            above = dict(zip(keys, parents or [None] * len(keys), strict=True))
            with self._changed:
                share = self._take(above)
            if share.new:
                self._write(share, dict(zip(keys, parts, strict=True)))
            self._await_others(share)
        return [share.stored[key] for key in keys]

    def remove(self, keys: Sequence[PageKey]) -> None:
        """Drop pages; those being read go when their readers are done. No I/O."""
        with self._changed:
            self._require_open()
            self._drop((self._index.find(key) for key in keys), "removed")

    def clear(self) -> None:
        """Drop every page; one that is being put meanwhile may stay. No I/O."""
        with self._changed:
            self._require_open()
            self._drop(list(self._index), "removed")

    def close(self) -> None:
        """Let what is under way end, then give the directory back. Twice is harmless."""
        with held_back:
            with self._changed:
                self._is_closed = True
                self._changed.wait_for(lambda: not self._under_way)
            self._tier.close()

    # -- inside ------------------------------------------------------------------------------------

    def _adopt(self, found: FoundPages) -> None:
        """Take over what the directory holds; a lost parent is no parent."""
        self._room.claim(DISK, len(found))
        self._index.restore(self._disk, found.uprooted())

    def _require_open(self) -> None:
        if self._is_closed:
            raise StoreClosedError("the disk store is closed")

    @contextmanager
    def _at_work(self) -> Iterator[None]:
        """Hold `close` off; StoreClosedError after it."""
        with self._changed:
            self._require_open()
            self._under_way += 1
        try:
            yield
        finally:
            with self._changed:
                self._under_way -= 1
                self._changed.notify_all()

    def _check(self, keys: Sequence[PageKey], pages: Sequence[PageParts]) -> None:
        if len(keys) != len(pages):
            raise ValueError(f"{len(pages)} pages for {len(keys)} keys: they must be one to one")
        for page in pages:
            n_bytes = sum([part.nbytes for part in pieces(page)])
            if n_bytes != self.page_bytes:
                raise ValueError(f"a page has {self.page_bytes} bytes, not {n_bytes}")

    def _is_here(self, page: int) -> bool:
        return page >= 0 and self._disk.is_resident(page)

    def _pin(self, keys: Sequence[PageKey]) -> _Found:
        """What is here, pinned and marked as used; the slots are its own until `_unpin`."""
        known = [(at, page) for at, page in enumerate(map(self._index.find, keys)) if page >= 0]
        states = self._disk.states([page for _, page in known])
        here = [one for one, state in zip(known, states, strict=True) if state == RESIDENT]
        pages = [page for _, page in here]
        self._index.pin(self._disk, pages)
        self._index.touch(pages)
        return _Found([position for position, _ in here], pages, self._disk.slots(pages))

    def _unpin(self, found: _Found, outcomes: Sequence[TieredKVError | None]) -> None:
        with self._changed:
            for page, outcome in zip(found.pages, outcomes, strict=True):
                if outcome is not None:
                    self._drop([page], _reason(outcome))
            self._room.free(DISK, self._index.unpin(self._disk, found.pages))

    def _count(
        self,
        keys: Sequence[PageKey],
        found: _Found,
        outcomes: Sequence[TieredKVError | None],
        seconds: float,
    ) -> list[bool]:
        came = [False] * len(keys)
        for position, outcome in zip(found.positions, outcomes, strict=True):
            came[position] = outcome is None
            if outcome is not None:
                self._complain(f"a page is lost: {outcome}")
        with self._changed:
            reasons = [
                self._index.why_missing(key)
                for key, is_here in zip(keys, came, strict=True)
                if not is_here
            ]
        for reason in reasons:
            self._counters.add("miss", reason, 1)
        corrupt = sum(isinstance(outcome, CorruptPageError) for outcome in outcomes)
        self._counters.add("hit", DISK, sum(came))
        self._counters.add("read", DISK, sum(came) * self.page_bytes)
        self._counters.add("total", "verified", sum(came) + corrupt)
        self._counters.add("total", "corrupt", corrupt)
        self._counters.loaded(DISK, sum(came), seconds)
        return came

    def _take(self, above: dict[PageKey, PageKey | None]) -> _Share:
        """Decide what to write: slots for what is new, as far as there is room, in order."""
        share = _Share()
        wanted: list[PageKey] = []
        refused = 0
        used: dict[PageKey, int] = {}
        for key in above:
            page = self._index.find(key)
            share.stored[key] = self._is_here(page)
            if share.stored[key]:
                used[key] = page
            elif page >= 0 and self._disk.state[page] == TierState.ARRIVING:
                share.awaited.append(key)
            elif page in self._disk.doomed:  # its bad copy is still being read
                refused += 1
            else:
                wanted.append(key)
        slots = self._slots(len(wanted), keep=[*used, *filter(None, above.values())])
        taken = wanted[: len(slots)]
        pages = self._begin(taken, above, slots)
        used.update(zip(taken, pages, strict=True))
        share.new.update(zip(taken, zip(pages, slots, strict=True), strict=True))
        self._index.touch([used[key] for key in above if key in used])
        self._counters.add("total", "not_stored", refused + len(wanted) - len(slots))
        return share

    def _slots(self, n: int, keep: Iterable[PageKey]) -> list[int]:
        """Up to n slots; what leaves for them is dropped, but nothing of `keep`."""
        kept = {page for key in keep if self._is_here(page := self._index.find(key))}
        with self._room.held(self._disk, list(kept)):
            while (slots := self._room.exactly(DISK, n)) is None:
                n = self._room.free_pages[DISK] + len(self._index.victims(self._disk, n))
        return slots

    def _begin(
        self, keys: list[PageKey], above: dict[PageKey, PageKey | None], slots: list[int]
    ) -> list[int]:
        """The pages of keys, each on its way into its slot."""
        pages: list[int] = []
        for run in _runs(keys, above):  # at once: 1 us a page; one after the other it is 9
            made = self._index.add(run, self._parent(above[run[0]]))
            self._index.begin(self._disk, made, slots[len(pages) :][: len(made)])
            pages += made
        return pages

    def _parent(self, key: PageKey | None) -> int:
        """The page to hang from, if it is here or on its way; -1 if not."""
        page = -1 if key is None else self._index.find(key)
        return page if page >= 0 and self._disk.state[page] else -1

    def _write(self, share: _Share, rows: dict[PageKey, PageParts]) -> None:
        """Write what was taken; whatever happens, the index hears how it ended."""
        with self._changed:
            keys, parents = self._index.links([page for page, _ in share.new.values()])
        pages = [
            PartedPage(key, above, pieces(rows[key]))
            for key, above in zip(keys, parents, strict=True)
        ]
        is_written = False
        try:
            self._tier.write([slot for _, slot in share.new.values()], pages)
            is_written = True
        except TieredKVError as error:
            self._counters.add("total", "write_failed", len(pages))
            self._complain(f"{len(pages)} pages are not stored: {error}")
        finally:
            with self._changed:
                self._settle(share, is_written)
        if is_written:
            self._counters.add("written", DISK, len(pages) * self.page_bytes)

    def _settle(self, share: _Share, is_written: bool) -> None:
        pages = [page for page, _ in share.new.values()]
        share.stored.update(dict.fromkeys(share.new, is_written))
        if is_written:
            self._index.finish(self._disk, pages)
        else:
            for page in pages:
                self._free(self._index.abort(self._disk, page))
        self._changed.notify_all()

    def _await_others(self, share: _Share) -> None:
        """Wait for what other puts are writing: how that ends holds for this one too."""
        with self._changed:
            for key in share.awaited:
                while self._is_arriving(key):
                    self._changed.wait()
                share.stored[key] = self._is_here(self._index.find(key))

    def _is_arriving(self, key: PageKey) -> bool:
        page = self._index.find(key)
        return page >= 0 and self._disk.state[page] == TierState.ARRIVING

    def _drop(self, pages: Iterable[int], reason: str) -> None:
        """Let no one find these pages from now on; their slots are free when nobody reads them."""
        for page in pages:
            if self._is_here(page):
                self._free(self._index.condemn(self._disk, page, reason))

    def _free(self, slot: int | None) -> None:
        if slot is not None:
            self._room.free(DISK, [slot])

    def _complain(self, text: str) -> None:
        with self._changed:
            now = time.monotonic()
            if now - self._complained_at < _QUIET_S:
                return
            self._complained_at = now
        _log.warning("%s (as often as it happens; said every %.0f s at most)", text, _QUIET_S)


def _runs(keys: Sequence[PageKey], above: dict[PageKey, PageKey | None]) -> Iterator[list[PageKey]]:
    """Keys cut where one does not hang from that before it."""
    run: list[PageKey] = []
    for key in keys:
        if run and above[key] != run[-1]:
            yield run
            run = []
        run.append(key)
    if run:
        yield run


def _reason(error: TieredKVError) -> str:
    return "corrupt" if isinstance(error, CorruptPageError) else "failed"


def _parts(page: PageBytes) -> PageParts:
    if isinstance(page, np.ndarray):
        return page
    if isinstance(page, memoryview):
        return np.frombuffer(page, np.uint8)
    return [
        np.frombuffer(part, np.uint8) if isinstance(part, memoryview) else part for part in page
    ]
