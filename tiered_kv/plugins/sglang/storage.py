"""TieredKVStorage: the disk under SGLang's HiCache.

SGLang keeps GPU and host memory, and says what goes to disk and what comes back; how it lies there
is ours: bounded, checksummed, found again after a restart. SGLang brings one thread that reads, one
that writes and one that asks; each batch of theirs is carried out by several of ours.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

import torch
from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorage,
    HiCacheStorageConfig,
    HiCacheStorageExtraInfo,
    PoolTransfer,
    PoolTransferResult,
)
from sglang.srt.observability.metrics_collector import StorageMetrics
from sglang.srt.runtime_context import get_model, get_parallel

from tiered_kv.counters import StoreStats
from tiered_kv.plugins.sglang.meter import REPORT_S
from tiered_kv.plugins.sglang.pages import HostPages
from tiered_kv.plugins.sglang.rank import Rank
from tiered_kv.plugins.sglang.settings import StorageSettings
from tiered_kv.plugins.sglang.stores import PoolStores
from tiered_kv.plugins.sglang.traffic import KV, Traffic, page_key, text_of

_Method = TypeVar("_Method", bound=Callable[..., Any])
_log = logging.getLogger(__name__)


def _or(miss: Callable[..., Any]) -> Callable[[_Method], _Method]:
    """Whatever goes wrong in a call on the data path is a miss (`miss(*arguments)`) and a line."""

    def around(method: _Method) -> _Method:
        @functools.wraps(method)
        def guarded(self: TieredKVStorage, *arguments: Any, **named: Any) -> Any:
            try:
                return method(self, *arguments, **named)
            except Exception as error:  # an engine must outlive its cache
                self._complain(f"{method.__name__} counts as a miss: {error!r}")
                return miss(*arguments, *named.values())

        return cast("_Method", guarded)

    return around


def _none_of(keys: Sequence[str], *_: Any) -> list[bool]:
    return [False] * len(keys)


def _nothing_of(transfers: Sequence[PoolTransfer], *_: Any) -> dict[str, list[bool]]:
    return {transfer.name: [False] * len(transfer.keys or []) for transfer in transfers}


class TieredKVStorage(HiCacheStorage):
    """HiCache storage on a local disk; SGLang's backend "dynamic", with `StorageSettings`.

    Pages go between the host pools' memory and disk without a copy where their layout allows it.
    No call on the data path raises: what fails is a miss. What a model keeps of a page beside its
    KV (an indexer, a draft model's KV) commits with the page or not at all.

    Args:
        storage_config: SGLang's.
        kwargs: SGLang's; not used.

    Raises:
        ConfigError: a setting unknown or out of range, or a directory that holds something else;
            one line. What is wrong with its disk is said by `on_host_pools_registered`.
    """

    def __init__(
        self, storage_config: HiCacheStorageConfig, kwargs: dict[str, Any] | None = None
    ) -> None:
        given = dict(storage_config.extra_config or {})
        settings = StorageSettings.parse(given)
        rank = Rank.of(storage_config, get_parallel())
        self._is_zero_copy = bool(given.get("interface_v1"))
        self._has_metrics = bool(storage_config.enable_storage_metrics)
        self._stores = PoolStores(
            rank.directory(settings.directory),
            int(settings.size) // rank.ranks_here,
            (storage_config.model_name or "", _kv_cache_dtype(), rank.topology, rank.name),
            settings.io_threads,
            settings.policy,
        )
        self._traffic = Traffic(self._stores)
        self._complained_at = -REPORT_S
        self._is_attached = False
        if not self._is_zero_copy:
            _log.warning('without "interface_v1": 1 SGLang copies every page once more, one by one')
        if storage_config.is_mla_model and storage_config.tp_size > 1:
            _log.info("the KV is the same on all ranks; each of them keeps it on disk for itself")
            storage_config.is_mla_model = False  # or SGLang lets none but the first rank write

    # -- the pools ---------------------------------------------------------------------------------

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """Take note of the KV pool; SGLang calls this first.

        Raises:
            ConfigError: SGLang gives no access to its pages.
        """
        super().register_mem_pool_host(mem_pool_host)
        self._stores.add(HostPages(KV, mem_pool_host))

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        """Take note of a pool; one that comes late (a draft model's) is opened at once.

        Raises:
            ConfigError, LayoutMismatchError, TierIOError: as `on_host_pools_registered`.
        """
        super().register_mem_host_pool_v2(host_pool, host_pool_name)
        self._stores.add(HostPages(text_of(host_pool_name), host_pool))
        if self._is_attached:
            self._stores.open()

    def on_host_pools_registered(self) -> None:
        """Open the stores; blocks. Raising here stops the engine's start, or the attaching.

        Raises:
            ConfigError: the directory cannot be used, is in use, or has no room; one line.
            LayoutMismatchError: it holds pages of another model, dtype or layout.
            TierIOError: the disk failed.
        """
        self._stores.open()
        self._is_attached = True

    # -- pages by pointer (v1) ---------------------------------------------------------------------

    @_or(_none_of)
    def batch_get_v1(
        self,
        keys: list[str],
        host_indices: torch.Tensor,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> list[bool]:
        """Read pages into the KV pool; blocks. For each key whether its page is there now."""
        return self._traffic.load(KV, keys, host_indices, _prefix(extra_info))

    @_or(_none_of)
    def batch_set_v1(
        self,
        keys: list[str],
        host_indices: torch.Tensor,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> list[bool]:
        """Store pages of the KV pool; blocks until they are durable. For each key whether it is."""
        return self._traffic.save_kv(keys, host_indices, _prefix(extra_info))

    # -- pages of several pools (v2) ---------------------------------------------------------------

    @_or(lambda *_: PoolTransferResult.empty())
    def batch_exists_v2(
        self,
        keys: list[str],
        pool_transfers: list[PoolTransfer] | None = None,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> PoolTransferResult:
        """How long a prefix can be restored with all that goes with it; no I/O, changes nothing."""
        hits = self._traffic.hits(keys, pool_transfers or [])
        return PoolTransferResult(hits.pages, dict(hits.by_pool), hits.restorable)

    @_or(_nothing_of)
    def batch_get_v2(
        self, transfers: list[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[str, list[bool]]:
        """Read pages into their pools; blocks. For each pool and key whether it is there now."""
        return {t.name: self._move(self._traffic.load, t, extra_info) for t in transfers}

    @_or(_nothing_of)
    def batch_set_v2(
        self, transfers: list[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[str, list[bool]]:
        """Store pages of several pools; blocks until they are durable."""
        results = {}
        for transfer in transfers:
            stored = self._move(self._traffic.save, transfer, extra_info)
            results[transfer.name] = stored
            if text_of(transfer.hit_policy) == "all_pages":
                self._traffic.note_sidecars(text_of(transfer.name), transfer.keys or [], stored)
        return results

    def _move(
        self,
        call: Callable[..., list[bool]],
        transfer: PoolTransfer,
        extra_info: HiCacheStorageExtraInfo | None,
    ) -> list[bool]:
        """Load or save one pool; its failure is not the others'."""
        keys = transfer.keys or []
        try:
            return call(text_of(transfer.name), keys, transfer.host_indices, _prefix(extra_info))
        except Exception as error:  # as in `_or`
            self._complain(f"pages of the {transfer.name} pool count as missed: {error!r}")
            return [False] * len(keys)

    # -- flat pages --------------------------------------------------------------------------------

    @_or(lambda *_: None)
    def get(
        self, key: str, target_location: Any | None = None, target_sizes: Any | None = None
    ) -> torch.Tensor | None:
        """Read one page into a tensor of its size, or a new one of bytes; None if it is missing."""
        targets = None if target_location is None else [target_location]
        return self._traffic.load_flat([key], targets)[0]

    @_or(lambda keys, *_: [None] * len(keys))
    def batch_get(
        self,
        keys: list[str],
        target_locations: Any | None = None,
        target_sizes: Any | None = None,
    ) -> list[torch.Tensor | None]:
        """Read pages into contiguous tensors of their size; None for those that are missing."""
        return self._traffic.load_flat(keys, target_locations)

    @_or(lambda *_: False)
    def set(
        self,
        key: str,
        value: Any | None = None,
        target_location: Any | None = None,
        target_sizes: Any | None = None,
    ) -> bool:
        """Store one page; blocks until it is durable."""
        page: Any = target_location if value is None else value
        return self._traffic.save_flat([key], [page]) == [True]

    @_or(lambda *_: False)
    def batch_set(
        self,
        keys: list[str],
        values: Any | None = None,
        target_locations: Any | None = None,
        target_sizes: Any | None = None,
    ) -> bool:
        """Store pages; blocks until they are durable. Whether all of them are."""
        pages: Any = target_locations if values is None else values
        return all(self._traffic.save_flat(keys, pages))

    @_or(lambda *_: False)
    def exists(self, key: str) -> bool:
        """Whether a page is there, whichever way it was stored; no I/O, changes nothing."""
        return any(self._traffic.contains(KV, [page_key(key), self._traffic.flat_key(key)]))

    @_or(lambda *_: 0)
    def batch_exists(
        self, keys: list[str], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> int:
        """How many pages are there from the first on; no I/O, changes nothing."""
        name = page_key if self._is_zero_copy else self._traffic.flat_key
        return self._traffic.reach([name(key) for key in keys])

    # -- care --------------------------------------------------------------------------------------

    def clear(self) -> None:
        """Drop every page of this rank."""
        for pool in self._stores:
            self._stores[pool][1].clear()

    def get_stats(self) -> StorageMetrics | None:
        """What SGLang's metrics ask for: batches since the last call; None if it has them off."""
        if not self._has_metrics:
            return None
        read, written = self._traffic.meter.collect()
        return StorageMetrics(
            prefetch_pgs=list(read.pages),
            backup_pgs=list(written.pages),
            prefetch_bandwidth=list(read.gb_per_s),
            backup_bandwidth=list(written.gb_per_s),
        )

    def stats(self) -> dict[str, StoreStats]:
        """Counters of each pool since the start."""
        return self._traffic.stats()

    def close(self) -> None:
        """Finish what is under way and give the directory back. Twice is harmless."""
        self._traffic.report()
        self._is_attached = False
        self._stores.close()

    def _complain(self, text: str) -> None:
        now = time.monotonic()
        if now - self._complained_at >= REPORT_S:
            self._complained_at = now
            _log.warning("%s (said every %.0f s at most)", text, REPORT_S)


def _prefix(extra_info: HiCacheStorageExtraInfo | None) -> list[str]:
    return (extra_info.prefix_keys or []) if extra_info is not None else []


def _kv_cache_dtype() -> str:
    """As the engine was told: the two kinds of fp8 are the same bytes to its pools."""
    try:
        return str(get_model().kv_cache_dtype)
    except (AttributeError, RuntimeError, ValueError):
        return ""
