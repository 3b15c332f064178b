"""Traffic: pages between host pools and their stores, by SGLang's keys, and what it came to."""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Sequence
from typing import Any

import torch

from tiered_kv.counters import StoreStats
from tiered_kv.keys import KEY_BYTES, PageKey
from tiered_kv.plugins.sglang.hits import Hits, leading, restorable_hits
from tiered_kv.plugins.sglang.meter import Meter
from tiered_kv.plugins.sglang.pages import bytes_of
from tiered_kv.plugins.sglang.stores import PoolStores
from tiered_kv.storage.base import PageBuffer

KV = "kv"
_MAX_INCOMPLETE = 65_536
_TOUCHED_PAGES = 1024  # of a prefix, which SGLang names anew with every batch
_log = logging.getLogger(__name__)


def page_key(key: str) -> PageKey:
    """Our key of SGLang's: its chained SHA-256 in hex, or any other text."""
    try:
        raw = bytes.fromhex(key)
    except ValueError:
        raw = b""
    return PageKey(raw if len(raw) == KEY_BYTES else hashlib.sha256(key.encode()).digest())


def text_of(name: Any) -> str:
    """An enum of SGLang's, or the text that stands for it."""
    return str(getattr(name, "value", name))


class Traffic:
    """What `TieredKVStorage` does with pages. Safe to call from several threads; raises freely.

    Pages of a pool of which every page must be there ("all_pages") commit with the KV or not at
    all: SGLang stores them first, and a page of which one was not stored is refused by `save_kv`.
    """

    def __init__(self, stores: PoolStores) -> None:
        self._stores = stores
        self.meter = Meter()
        self._all_pages_pools: set[str] = set()
        self._incomplete: set[PageKey] = set()  # pages of which something was not stored

    # -- by host indices ---------------------------------------------------------------------------

    def load(
        self, pool: str, keys: Sequence[str], indices: torch.Tensor, prefix: Sequence[str] = ()
    ) -> list[bool]:
        """Read pages into a pool; blocks. For each key whether its page is there now.

        Args:
            pool: its name.
            keys: consecutive pages of a prompt.
            indices: host indices of the pool, a page's for each key.
            prefix: keys of the pages before, as far as they are known; the last of them count as
                used too.

        Raises:
            KeyError: no such pool.
            ValueError: not as many indices as the pages have.
        """
        pages, store = self._stores[pool]
        pages.check(indices, len(keys))
        names = [page_key(key) for key in keys]
        targets = pages.targets(indices)
        began = time.monotonic()
        came = store.get(names, targets)
        pages.deliver(indices, targets, came)
        self._note("read", sum(came), pages.page_bytes, began)
        if prefix:
            store.touch([*(page_key(key) for key in prefix[-_TOUCHED_PAGES:]), *names])
        return came

    def save(
        self, pool: str, keys: Sequence[str], indices: torch.Tensor, prefix: Sequence[str] = ()
    ) -> list[bool]:
        """Store pages of a pool; blocks until they are durable. For each key whether it is.

        Takes and raises what `load` does.
        """
        pages, store = self._stores[pool]
        pages.check(indices, len(keys))
        names = [page_key(key) for key in keys]
        before = page_key(prefix[-1]) if prefix else None
        began = time.monotonic()
        stored = store.put(names, pages.sources(indices), [before, *names[:-1]][: len(names)])
        self._note("written", sum(stored), pages.page_bytes, began)
        return stored

    def save_kv(
        self, keys: Sequence[str], indices: torch.Tensor, prefix: Sequence[str] = ()
    ) -> list[bool]:
        """Store pages of the KV pool, but none of which something else was not stored.

        Nor those after it, which could not be reached. What was stored for pages whose KV is not
        there now goes.
        """
        names = [page_key(key) for key in keys]
        count = leading([name not in self._incomplete for name in names])
        self._incomplete.difference_update(names)
        width = self._stores[KV][0].page_tokens
        stored = self.save(KV, keys[:count], indices[: count * width], prefix) if count else []
        stored += [False] * (len(keys) - count)
        if not all(stored):
            has = self.contains(KV, names)
            lost = [name for name, is_here in zip(names, has, strict=True) if not is_here]
            for pool in self._all_pages_pools.intersection(self._stores):
                self._stores[pool][1].remove(lost)
        return stored

    def note_sidecars(self, pool: str, keys: Sequence[str], stored: Sequence[bool]) -> None:
        """A pool of which every page must be there has stored these, or has not."""
        if pool == KV:
            return
        self._all_pages_pools.add(pool)
        for key, is_stored in zip(keys, stored, strict=True):
            if not is_stored:
                self._incomplete.add(page_key(key))
        if len(self._incomplete) > _MAX_INCOMPLETE:  # of operations SGLang gave up
            self._incomplete.clear()

    # -- in SGLang's flat form ---------------------------------------------------------------------

    def load_flat(
        self, keys: Sequence[str], targets: Sequence[torch.Tensor] | None
    ) -> list[torch.Tensor | None]:
        """Read pages into contiguous tensors, or new ones of bytes; None for what is missing."""
        pages, store = self._stores[KV]
        if targets is None:
            targets = [torch.empty(pages.page_bytes, dtype=torch.uint8) for _ in keys]
        began = time.monotonic()
        came = store.get([self.flat_key(key) for key in keys], [_writable(t) for t in targets])
        self._note("read", sum(came), pages.page_bytes, began)
        return [target if is_here else None for target, is_here in zip(targets, came, strict=True)]

    def save_flat(self, keys: Sequence[str], values: Sequence[torch.Tensor]) -> list[bool]:
        """Store pages; blocks until they are durable. For each key whether it is."""
        pages, store = self._stores[KV]
        names = [self.flat_key(key) for key in keys]
        began = time.monotonic()
        parents = [None, *names[:-1]][: len(names)]
        stored = store.put(names, [bytes_of(value) for value in values], parents)
        self._note("written", sum(stored), pages.page_bytes, began)
        return stored

    def flat_key(self, key: str) -> PageKey:
        """Of a page in flat form: another key where that orders the bytes otherwise."""
        if self._stores[KV][0].is_one_order:
            return page_key(key)
        return PageKey(hashlib.sha256(b"flat page\0" + page_key(key)).digest())

    # -- questions ---------------------------------------------------------------------------------

    def contains(self, pool: str, names: Sequence[PageKey]) -> list[bool]:
        """Which pages a pool has; none if there is no such pool. No I/O, changes nothing."""
        if pool not in self._stores:
            return [False] * len(names)
        return self._stores[pool][1].contains(names)

    def reach(self, names: Sequence[PageKey]) -> int:
        """How many pages of the KV pool are there from the first on."""
        count = leading(self.contains(KV, names))
        self._note_question(names, count, count)
        return count

    def hits(self, keys: Sequence[str], transfers: Sequence[Any]) -> Hits:
        """How long a prefix can be restored with all that SGLang's `PoolTransfer`s name.

        Raises:
            ValueError: a hit policy that is not known here.
        """
        names = [page_key(key) for key in keys]

        def present(transfer: Any, pages: int) -> list[bool]:
            if text_of(transfer.hit_policy) != "block_groups":
                return self.contains(text_of(transfer.name), names[:pages])
            own = [page_key(key) for key in transfer.keys or ()]
            return self.contains(text_of(transfer.name), own)

        hits = restorable_hits(self.contains(KV, names), transfers, present)
        self._note_question(names, hits.pages, hits.by_pool.get(KV, 0))
        return hits

    def stats(self) -> dict[str, StoreStats]:
        """Counters of each pool since the start."""
        return {pool: self._stores[pool][1].stats() for pool in self._stores}

    def report(self) -> None:
        """What there is and what it came to, in the log: a line a pool, a line about questions."""
        for pool, stats in self.stats().items():
            _log.info(
                "%s %s: %d of %d pages held; %d given, %d not stored; %d read, %d missed %s",
                self._stores.directory,
                pool,
                stats.resident_pages["disk"],
                self._stores[pool][1].capacity_pages,
                stats.put_pages,
                stats.not_stored_pages + stats.failed_writes,
                stats.hit_pages["disk"],
                stats.missed_pages,
                stats.why_miss,
            )
        _log.info("%s was asked for: %s", self._stores.directory, self.meter.questions())

    def _note_question(self, names: Sequence[PageKey], restorable: int, kv: int) -> None:
        """Count a question; what ends a prompt's hit is its first page that is not there."""
        why = ""
        if restorable < kv:
            why = "no_sidecar"
        elif kv < len(names):
            why = self._stores[KV][1].why_missing(names[kv])
        self.meter.asked(len(names), restorable, why)

    def _note(self, way: str, pages: int, page_bytes: int, began: float) -> None:
        self.meter.moved(way, pages, pages * page_bytes, time.monotonic() - began)
        if self.meter.is_due():
            self.report()


def _writable(target: torch.Tensor) -> PageBuffer:
    if not target.is_contiguous():
        raise ValueError("a page is read into a contiguous tensor")
    return bytes_of(target)
