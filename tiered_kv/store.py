"""TieredStore: the face. Batches of keys in, futures out."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from types import TracebackType
from typing import Any

import numpy as np
import torch

from tiered_kv.config import StoreConfig
from tiered_kv.counters import Counters, StoreStats
from tiered_kv.errors import ConfigError, CorruptPageError, StoreClosedError
from tiered_kv.flush import Flush
from tiered_kv.found import FoundPages
from tiered_kv.hbm_pages import HbmPages
from tiered_kv.interrupts import BooksLock, held_back
from tiered_kv.keys import KeyChain, Multimodal, Namespace, PageKey, page_keys
from tiered_kv.layout import KVLayout
from tiered_kv.mover import Mover
from tiered_kv.plan import DISK, HBM, HOST, LOAD_ALL, Gate
from tiered_kv.planner import Planner
from tiered_kv.run import Run
from tiered_kv.session import Session, open_transcripts
from tiered_kv.storage.base import CheckReport, Tier
from tiered_kv.storage.disk import DiskTier
from tiered_kv.storage.hbm import HbmTier
from tiered_kv.storage.host import HostTier
from tiered_kv.streams import Event, caller_event
from tiered_kv.transfer import Transfer


class PageState(Enum):
    """What a match found."""

    MISS = "miss"
    PENDING = "pending"
    HIT = "hit"


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """The longest stored prefix of a prompt, each page counted in the fastest tier that has it.

    `pending_pages` of them are still arriving there.
    """

    pages: int
    tokens: int
    hbm_pages: int
    host_pages: int
    disk_pages: int
    pending_pages: int

    @property
    def state(self) -> PageState:
        """MISS for no page at all, PENDING while any is arriving, else HIT."""
        if not self.pages:
            return PageState.MISS
        return PageState.PENDING if self.pending_pages else PageState.HIT


_NO_MATCH = PrefixMatch(0, 0, 0, 0, 0, 0)


class TieredStore:
    """KV pages of one model, one rank, over HBM, host memory and disk.

    Safe to call from several threads. No call but `flush`, `check` and `close` waits for bytes:
    what takes time returns a `Transfer`. Use it as a context manager, or call `close`.

    Args:
        layout: geometry of a page.
        config: sizes and rules.
        disk: a tier to use in place of the disk tier that `config.disk` names; the store closes it.
            What it holds already is not looked for.

    Raises:
        ConfigError: a tier cannot hold a page, or the directory is not ours to open.
        LayoutMismatchError: the directory holds pages of another geometry.
    """

    def __init__(self, layout: KVLayout, config: StoreConfig, *, disk: Tier | None = None) -> None:
        self.layout = layout
        self.config = config
        device = resolve_device(config.device)
        self._lock = BooksLock()
        self._closing = threading.RLock()
        self._is_closed = self._is_ending = self._is_given_back = False
        self._key_layout = replace(layout, tp_rank=0).fingerprint  # every rank makes the same keys
        self._counters = Counters()
        has_disk = disk is not None or config.disk is not None
        self._hbm_tier = HbmTier(layout, int(config.hbm), device)
        self._host = HostTier(
            layout.page_bytes,
            int(config.host),
            pin=self._hbm_tier.device.type == "cuda",
            with_staging=has_disk,
        )
        found: Callable[[], FoundPages] | None = None
        if disk is None and config.disk is not None:
            disk, found = self._open_disk(layout, config)
        self._disk = disk
        self._transcripts = open_transcripts(disk, int(config.host))
        self._planner = Planner(
            {tier.name: tier for tier in self._tiers()},
            self.capacity_pages(),
            policy=config.policy,
            write_through=config.write_policy == "through",
        )
        if found is not None:
            self._adopt(found)
        self._mover = Mover(
            self._planner, self._lock, self._hbm_tier, self._host, self._disk, self._counters
        )
        self._hbm_tier.leave_cores_to(self._mover.loading)
        self.hbm = HbmPages(self._hbm_tier, self._planner.room, self._mover, self._lock)

    @classmethod
    def open(cls, layout: KVLayout, config: StoreConfig) -> TieredStore:
        """A store by its configuration; what its directory holds already can hit at once."""
        return cls(layout, config)

    def _open_disk(
        self, layout: KVLayout, config: StoreConfig
    ) -> tuple[Tier, Callable[[], FoundPages]]:
        assert config.disk is not None and config.disk_size is not None
        try:
            disk = DiskTier.open(
                config.disk,
                layout.page_bytes,
                int(config.disk_size),
                layout.fingerprint,
                io_threads=config.io_threads,
            )
        except BaseException:
            self._host.close()
            self._hbm_tier.close()
            raise
        return disk, disk.found

    def _adopt(self, found: Callable[[], FoundPages]) -> None:
        """Take over what the directory holds already."""
        try:
            self._planner.adopt(DISK, found())
        except BaseException:
            for tier in self._tiers():
                tier.close()
            raise

    # -- questions ---------------------------------------------------------------------------------

    def keys(
        self,
        token_ids: Any,
        *,
        salt: str = "",
        lora: str = "",
        multimodal: Sequence[Multimodal] = (),
    ) -> KeyChain:
        """Keys of the full pages of a prompt. Takes no lock.

        Args:
            token_ids: list, numpy array or torch tensor of one dimension.
            salt: tenant; two salts never share a page.
            lora: adapter the KV is computed with.
            multimodal: images and sounds in the prompt.
        """
        namespace = self._namespace(salt, lora)
        return page_keys(token_ids, self.layout.page_tokens, namespace, multimodal=multimodal)

    def session(self, session_id: str, *, salt: str = "", lora: str = "") -> Session:
        """A conversation by its id, with what was kept of it; reads a small file."""
        namespace = self._namespace(salt, lora)
        return Session(session_id, namespace, self._transcripts, self.layout.page_tokens)

    def _namespace(self, salt: str, lora: str) -> Namespace:
        return Namespace(self.config.model_name or self.layout.model, self._key_layout, salt, lora)

    def match(self, keys: Sequence[PageKey]) -> PrefixMatch:
        """The longest stored prefix of `keys`. Moves nothing, changes nothing."""
        with self._lock:
            self._check_open()
            index = self._planner.index
            pages = index.match(keys)
            if not pages:
                return _NO_MATCH
            spread = index.spread(pages)
        none = (0, 0)
        return PrefixMatch(
            pages=len(pages),
            tokens=len(pages) * self.layout.page_tokens,
            hbm_pages=spread.get(HBM, none)[0],
            host_pages=spread.get(HOST, none)[0],
            disk_pages=spread.get(DISK, none)[0],
            pending_pages=sum(arriving for _, arriving in spread.values()),
        )

    def stats(self) -> StoreStats:
        """Counters since the store was opened, and the pages in each tier now."""
        with self._lock:
            resident = {tier.name: tier.resident for tier in self._planner.index.tiers}
        return self._counters.snapshot(resident)

    def capacity_pages(self) -> dict[str, int]:
        """Pages that each tier holds when full."""
        return {tier.name: tier.capacity_pages for tier in self._tiers()}

    def usage(self) -> dict[str, tuple[int, int]]:
        """(used bytes, capacity bytes) of each tier."""
        return {tier.name: (tier.used_bytes, tier.capacity_bytes) for tier in self._tiers()}

    def _tiers(self) -> list[Tier]:
        return [self._hbm_tier, self._host] + ([self._disk] if self._disk else [])

    # -- the three verbs ---------------------------------------------------------------------------

    def get(
        self,
        keys: Sequence[PageKey],
        *,
        into: Sequence[int] | None = None,
        after: Any = None,
        deadline_s: float | None = None,
    ) -> Transfer:
        """Bring the longest stored prefix of `keys` into HBM; returns at once.

        Without `into`, pages are found in HBM where they are or brought to slots of the store's
        choice, and leased: call `release` on the transfer when the last reader is through. A prefix
        longer than HBM has room for ends there; call again with the keys that are left after
        releasing.

        Args:
            keys: all pages wanted; those not stored are counted as misses.
            into: slots of `store.hbm.allocate`, one a key, that remain the caller's.
            after: an event of the last user of `into`; it is not overwritten before. Default: on a
                GPU all work queued on the current stream so far.
            deadline_s: overrides the configured one.

        Raises:
            ValueError: fewer slots than keys, or slots that are not the caller's.
        """
        if into is not None:
            if len(into) < len(keys):
                raise ValueError(f"into= has {len(into)} slots for {len(keys)} keys")
            self.hbm.check_owned(into)
        deadline_s = self.config.deadline_s if deadline_s is None else deadline_s
        events, device_event = caller_event(self.hbm.device, after)
        transfer: Transfer | None = None
        try:
            with self._lock:
                self._check_open()
                plan = self._planner.plan_get(keys, gate=self._gate(), into=into)
                transfer = Transfer(
                    plan,
                    layers=len(self.hbm.layers),
                    deadline_s=deadline_s,
                    release=None if into is not None else self._release,
                )
                if into is not None:
                    events += self.hbm.lend(into[: len(plan.pages)], transfer.settled)
                self._start_get(transfer, events, device_event)
            return transfer
        except BaseException:  # a signal's: nobody else will end the lease
            if transfer is not None:
                transfer.release()
            raise

    def put(self, keys: KeyChain, pages: Sequence[int], *, after: Any = None) -> Transfer:
        """Give the store pages that stand in HBM; returns at once.

        The slots belong to the store from now on. `wait` on the transfer says how many leading
        pages have reached host; with write policy "through" a page that disk has room for must
        have reached disk too. A page that finds no room is not stored; that is no error.

        Args:
            keys: their keys, consecutive; `keys.parent` must be stored, or None.
            pages: their slots, from `store.hbm.allocate`.
            after: an event of the writer of the pages; they are not read before. Default: on a GPU
                all work queued on the current stream so far.

        Raises:
            ValueError: not one slot a key, or slots that are not the caller's.
            TypeError: keys that do not say where they hang.
        """
        if not isinstance(keys, KeyChain):
            raise TypeError(
                "put() needs a KeyChain, as store.keys() makes: it says where keys hang"
            )
        if len(keys) != len(pages):
            raise ValueError(f"{len(keys)} keys and {len(pages)} pages: they must be one to one")
        if len(set(keys)) < len(keys):
            raise ValueError("a key is named twice: keys must be those of consecutive pages")
        events, device_event = caller_event(self.hbm.device, after)
        with self._lock:
            self._check_open()
            lent = self.hbm.disown(pages)
            plan = self._planner.plan_put(keys, pages)
            self._counters.add("total", "put", len(keys))
            self._counters.add("total", "not_stored", plan.not_stored)
            transfer = Transfer(plan)
            Run(self._mover, transfer, ready=events + lent, device_event=device_event).start()
        return transfer

    def prefetch(self, keys: Sequence[PageKey], *, deadline_s: float | None = None) -> Transfer:
        """Bring what of the longest stored prefix is on disk alone up to host; returns at once."""
        with self._lock:
            self._check_open()
            plan = self._planner.plan_prefetch(keys, gate=self._gate())
            deadline_s = self.config.deadline_s if deadline_s is None else deadline_s
            transfer = Transfer(plan, deadline_s=deadline_s)
            Run(self._mover, transfer).start()
        return transfer

    def hint(self, keys: Sequence[PageKey], priority: int) -> int:
        """Advise which pages to keep when room is short; soft, and never a pin.

        Args:
            keys: pages from the first of a prompt on; those not stored are left out.
            priority: 0 (give up first) to 100 (keep longest), 50 for none. It counts as if the
                pages had been used up to one turnover of the store earlier or later: it fades.

        Returns:
            How many pages it was noted for. Policy "fifo" does not look at it.

        Raises:
            ValueError: a priority outside 0..100.
        """
        if not 0 <= priority <= 100:
            raise ValueError(f"priority={priority}: give 0 to 100, 50 for none")
        with self._lock:
            self._check_open()
            pages = self._planner.index.match(keys)
            self._planner.index.hint(pages, priority)
        return len(pages)

    # -- care --------------------------------------------------------------------------------------

    def flush(self) -> int:
        """Write every host page to disk that is not there yet; blocks. How many were written."""
        with self._lock:
            self._check_open()
        return self._flush()

    def _flush(self) -> int:
        return Flush(self._planner, self._mover, self._host.capacity_pages).run()

    def check(self, fix: bool = False) -> CheckReport:
        """Verify the index, and every page on disk against its checksum.

        Waits for what is in flight now, then reads the whole disk tier without holding the store's
        lock.

        Args:
            fix: drop the pages that are bad; the next match no longer counts them.
        """
        self._mover.wait_present()
        with self._lock:
            self._check_open()
            report = CheckReport(len(self._planner.index), self._planner.index.check())
            disk = self._planner.index.by_name.get(DISK)
            on_disk = [page for page in self._planner.index if disk and disk.is_resident(page)]
        for page in on_disk:
            with held_back:  # while it is pinned
                self._verify(page, report, fix)
        return report

    def close(self) -> None:
        """Finish what is in flight, write what is not on disk yet, give everything back.

        Twice is harmless, and goes on with what an interrupt has cut off.
        """
        with self._closing:
            if self._is_given_back:
                return
            with self._lock:
                self._is_closed = True
                self.hbm.close()
                self._transcripts.close()
            try:
                if not self._is_ending:
                    self._mover.wait_idle()
                    self._flush()
            finally:
                self._is_ending = True  # its streams take nothing more
                self._mover.close()
                with held_back:
                    for tier in self._tiers()[::-1]:
                        tier.close()
                    self._is_given_back = True

    def __enter__(self) -> TieredStore:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    # -- inside ------------------------------------------------------------------------------------

    def _start_get(self, transfer: Transfer, ready: list[Event], device_event: Any) -> None:
        run = Run(
            self._mover,
            transfer,
            ready=ready,
            device_event=device_event,
            on_settled=self._count_get,
        )
        run.start()

    def _check_open(self) -> None:
        if self._is_closed:
            raise StoreClosedError("the store is closed: open it again with TieredStore.open()")

    def _gate(self) -> Gate:
        config, page_tokens = self.config, self.layout.page_tokens
        min_pages = -(-config.min_load_tokens // page_tokens)
        if config.prefill_tokens_per_s is None:
            return Gate(min_pages) if min_pages else LOAD_ALL
        compute_s = page_tokens / config.prefill_tokens_per_s
        return Gate(min_pages, compute_s, self._counters.load_s_per_page())

    def _release(self, transfer: Transfer, after: Any) -> None:
        events, device_event = caller_event(self.hbm.device, after)

        def unpin() -> None:
            with self._lock:
                self._planner.release(transfer.plan.pages)

        def when_settled() -> None:
            self._mover.after(events, device_event, unpin)

        transfer.settled.on_fire(when_settled)

    def _count_get(self, run: Run) -> None:
        transfer, plan = run.transfer, run.transfer.plan
        count = transfer.arrived_pages
        for source, pages in Counter(plan.sources[:count]).items():
            self._counters.add("hit", source, pages)
        for reason, pages in plan.misses:
            self._counters.add("miss", reason, pages)
        after = "no_parent" if run.why_lost.get(count, "in_flight") != "in_flight" else "in_flight"
        for at in range(count, len(plan.pages)):  # what has come was too late, or hangs from a miss
            self._counters.add("miss", run.why_lost.get(at, after), 1)

    def _verify(self, page: int, report: CheckReport, fix: bool) -> None:
        assert self._disk is not None
        index = self._planner.index
        tier = index.by_name[DISK]
        buffer = np.empty(self.layout.page_bytes, dtype=np.uint8)
        with self._lock:
            if not tier.is_resident(page):
                return
            slot = tier.slot[page]
            index.pin(tier, [page])
        (error,) = self._disk.read([slot], [buffer])
        with self._lock:
            if error is not None:
                report.problems.append(f"page {index.key(page).hex()[:12]}: {error}")
                report.fixed += fix
                if fix and tier.is_resident(page) and tier.slot[page] == slot:
                    reason = "corrupt" if isinstance(error, CorruptPageError) else "failed"
                    index.condemn(tier, page, reason)
            self._planner.room.free(DISK, index.unpin(tier, [page]))


def resolve_device(name: str) -> str:
    """A torch device by name, with "auto" decided.

    Raises:
        ConfigError: none of auto, cpu, cuda and cuda:N, or not on this machine.
    """
    has_cuda = torch.cuda.is_available()
    if name == "auto":
        return "cuda" if has_cuda else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"device={name}: expected auto, cpu, cuda or cuda:N") from error
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"device={name}: expected auto, cpu, cuda or cuda:N")
    count = torch.cuda.device_count() if has_cuda else 0
    if device.type == "cuda" and (device.index or 0) >= count:
        found = f"cuda:0 to cuda:{count - 1}" if count else "cpu alone"
        raise ConfigError(f"device={name}: not on this machine, which has {found}")
    return name
