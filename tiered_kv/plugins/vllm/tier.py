"""TieredKVTier: our disk tier under vLLM's own host tier (`TieringOffloadingSpec`).

vLLM keeps pinned host memory, its policy and all copies to and from the GPU; what goes to disk and
comes back is ours: bounded, checksummed, found again after a restart. Runs in the scheduler's
process and never blocks it: all I/O is on threads of its own.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import vllm
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import (
    OffloadingConnectorStats,
)
from vllm.v1.kv_offload.base import (
    Locality,
    LookupResult,
    Medium,
    OffloadingCounterMetadata,
    OffloadingEvent,
    OffloadingGaugeMetadata,
    OffloadingMetricMetadata,
    OffloadingSpec,
    OffloadKey,
    ReqContext,
    RequestOffloadingContext,
    get_offload_group_idx,
)
from vllm.v1.kv_offload.tiering.backpressure import BackpressureDetector
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager, TransferJob

from tiered_kv.counters import StoreStats
from tiered_kv.disk_store import DiskStore
from tiered_kv.errors import ConfigError, TieredKVError
from tiered_kv.keys import PageKey
from tiered_kv.plugins.vllm.identity import model_files
from tiered_kv.plugins.vllm.tier_chunks import RequestChunks, place_of
from tiered_kv.plugins.vllm.tier_events import Announcements
from tiered_kv.plugins.vllm.tier_jobs import Ended, TierJobs
from tiered_kv.plugins.vllm.tier_settings import TierSettings
from tiered_kv.plugins.vllm.versions import check_version

_CLOSE_S = 30.0
_PREFIX = "vllm:tiered_kv_tier_"
_METRICS: dict[str, OffloadingMetricMetadata] = {
    f"{_PREFIX}used_bytes": OffloadingGaugeMetadata("Bytes of the pages on disk.", ("disk",)),
    f"{_PREFIX}capacity_bytes": OffloadingGaugeMetadata(
        "Bytes that the directory may take, metadata included.", ("disk",)
    ),
    f"{_PREFIX}missed_pages": OffloadingCounterMetadata(
        "Pages that a lookup promised and a load did not bring, by reason.", ("disk", "why")
    ),
    f"{_PREFIX}corrupt_pages": OffloadingCounterMetadata(
        "Pages whose bytes did not agree with their checksum; counted as missed too.", ("disk",)
    ),
    f"{_PREFIX}not_stored_pages": OffloadingCounterMetadata(
        "Pages that found no room on disk.", ("disk",)
    ),
    f"{_PREFIX}failed_writes": OffloadingCounterMetadata(
        "Pages whose write to disk failed.", ("disk",)
    ),
}
_log = logging.getLogger(__name__)


class TieredKVTier(SecondaryTierManager):
    """The disk tier of an entry in `secondary_tiers`, with the keys of `TierSettings`.

    `{"type": "TieredKVTier", "module_path": "tiered_kv.plugins.vllm", "disk": "/mnt/nvme/kv",
    "disk_size": "1TiB"}`.

    A page is one row of vLLM's host tier: a chunk of one KV cache group, of all ranks together. Its
    key is vLLM's own chained hash, under the model and how it is run. A page that is gone, fails to
    load or comes back with a wrong checksum is a miss, and vLLM computes it.

    Raises:
        ConfigError: a setting unknown or out of range, a model nobody could tell from another, a
            directory that is not ours, in use or not writable; one line.
        LayoutMismatchError: the directory holds pages of another shape.
        TierIOError: the disk failed.
    """

    medium: ClassVar[Medium] = Medium.STORAGE

    def __init__(
        self,
        offloading_spec: OffloadingSpec,
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: BackpressureDetector | None = None,
        **settings: Any,
    ) -> None:
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        self.locality = Locality.LOCAL
        self._chunk_tokens = {
            group.group_id: group.tokens_per_block * offloading_spec.blocks_per_chunk
            for group in offloading_spec.config.groups
        }
        try:
            check_version(vllm.__version__)
            self._root, self._store, self._label = _open(
                offloading_spec, self.block_size_bytes, settings
            )
        except TieredKVError as error:  # in one line, before the tracebacks of all processes
            _log.error("TieredKVTier cannot start: %s", error)
            raise
        self._jobs = TierJobs(self._store, np.asarray(primary_kv_view).view(np.uint8))
        self._submitted: dict[int, list[OffloadKey]] = {}
        has_events = offloading_spec.kv_events_config.enable_kv_cache_events
        self._announcements = Announcements(self._holds) if has_events else None
        self._told: StoreStats | None = None
        _log.info("disk tier %s: room for %d pages", self._label, self._store.capacity_pages)

    # -- what vLLM asks ----------------------------------------------------------------------------

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        """Whether the page is on disk; no I/O, and asking changes nothing."""
        return LookupResult.HIT if self._holds([key])[0] else LookupResult.MISS

    def submit_store(self, job_metadata: TransferJob) -> None:
        """Queue pages for the disk; many jobs become durable in one commit."""
        keys, rows = self._accept(job_metadata)
        request = job_metadata.req_context
        chunks = RequestChunks.of(request)
        parents = [
            chunks.parent(key, request, self._chunk_tokens[get_offload_group_idx(key)])
            for key in keys
        ]
        self._jobs.save(
            job_metadata.job_id,
            [self._page(key) for key in keys],
            rows,
            [None if parent is None else self._page(parent) for parent in parents],
        )

    def submit_load(self, job_metadata: TransferJob) -> None:
        """Queue pages to be read into vLLM's host tier; loads do not wait for stores."""
        keys, rows = self._accept(job_metadata)
        self._jobs.load(job_metadata.job_id, [self._page(key) for key in keys], rows)

    def get_finished_jobs(self) -> Iterable[JobResult]:
        """The jobs that ended since the last call, with what each of them brought or stored."""
        return [self._result(ended) for ended in self._jobs.ended()]

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        """Chunks as they are computed; a prefix already stored is not offered again."""
        return RequestOffloadingContext()

    def touch(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        """Mark pages as used, in the background."""
        self._jobs.touch([self._page(key) for key in keys])

    def on_request_finished(self, req_context: ReqContext) -> None:
        """Mark all pages of the request as used: hits in vLLM's host tier are never seen here."""
        for keys in RequestChunks.of(req_context).by_group():
            self.touch(keys, req_context)

    def drain_jobs(self) -> None:
        """Block until every job submitted has ended."""
        self._jobs.drain()

    def take_events(self) -> Iterable[OffloadingEvent]:
        """Pages stored on disk, and pages announced so that are gone."""
        return self._announcements.take() if self._announcements else ()

    def shutdown(self) -> None:
        """Store what is queued, for up to 30 s, and give the directory back. Twice is harmless.

        Raises:
            TierIOError: the disk hangs; vLLM then keeps the memory that it may still write to.
        """
        self._jobs.close(_CLOSE_S)
        self._store.close()

    # -- metrics -----------------------------------------------------------------------------------

    @classmethod
    def build_metric_definitions(
        cls, extra_config: dict[str, Any]
    ) -> dict[str, OffloadingMetricMetadata]:
        """Ours, beside what vLLM counts of every tier."""
        return dict(_METRICS)

    def get_stats(self) -> OffloadingConnectorStats | None:
        """What changed since the last call, as plain numbers: it crosses processes."""
        now, before = self._store.stats(), self._told
        if now == before:
            return None
        self._told = now
        stats = OffloadingConnectorStats()
        used_bytes, capacity_bytes = self._store.usage()
        stats.set_gauge(f"{_PREFIX}used_bytes", used_bytes, (self._label,))
        stats.set_gauge(f"{_PREFIX}capacity_bytes", capacity_bytes, (self._label,))
        told = {} if before is None else _counts(before)
        for (name, *labels), count in _counts(now).items():
            if more := count - told.get((name, *labels), 0):
                stats.increase_counter(name, more, (self._label, *labels))
        return stats

    # -- inside ------------------------------------------------------------------------------------

    def _page(self, key: OffloadKey) -> PageKey:
        return PageKey(hashlib.sha256(self._root + key).digest())

    def _holds(self, keys: Sequence[OffloadKey]) -> list[bool]:
        return self._store.contains([self._page(key) for key in keys])

    def _accept(self, job: TransferJob) -> tuple[list[OffloadKey], list[int]]:
        """Keys and rows of a job in prompt order: parents first, neighbours side by side."""
        both = zip(job.keys, job.chunk_ids.tolist(), strict=True)
        ordered = sorted(both, key=lambda pair: place_of(pair[0], job.req_context))
        keys = [key for key, _ in ordered]
        self._submitted[job.job_id] = keys
        return keys, [row for _, row in ordered]

    def _result(self, ended: Ended) -> JobResult:
        keys = self._submitted.pop(ended.job_id)
        done = [key for key, is_done in zip(keys, ended.done, strict=True) if is_done]
        if self._announcements is not None:
            if ended.is_load:
                self._announcements.gone(keys)
            else:
                self._announcements.stored(done)
        return JobResult(
            job_id=ended.job_id,
            success=len(done) == len(keys),
            successful_keys=done if ended.is_load else None,
            transfer_time=ended.seconds,
            transfer_bytes=len(keys) * self.block_size_bytes,
        )


def _open(
    spec: OffloadingSpec, row_bytes: int, given: Mapping[str, Any]
) -> tuple[bytes, DiskStore, str]:
    """(root of all keys, store, its directory)."""
    parallel = spec.config.parallel
    settings = TierSettings.parse(given).of_replica(
        parallel.data_parallel_index, parallel.data_parallel_size
    )
    geometry = _geometry(spec, row_bytes)
    root = _root(spec, settings, geometry)
    store = DiskStore.open(
        settings.disk,
        int(settings.disk_size),
        row_bytes,
        geometry,
        io_threads=settings.io_threads,
        policy=settings.policy,
    )
    return root, store, str(settings.disk)


def _counts(stats: StoreStats) -> dict[tuple[str, ...], int]:
    """Our counters by name and labels."""
    return {
        **{(f"{_PREFIX}missed_pages", why): n for why, n in stats.why_miss.items()},
        (f"{_PREFIX}corrupt_pages",): stats.checksums_failed,
        (f"{_PREFIX}not_stored_pages",): stats.not_stored_pages,
        (f"{_PREFIX}failed_writes",): stats.failed_writes,
    }


def _geometry(spec: OffloadingSpec, row_bytes: int) -> str:
    """What the bytes of a page mean: a directory keeps pages of one geometry."""
    config = spec.config
    parallel = config.parallel
    facts = {
        "row_bytes": row_bytes,
        "dtype": config.model.dtype,
        "layout": config.kv_cache_layout,
        "is_canonical": config.canonical_layout,
        "is_replicated": config.replicated_layout,
        "tokens_per_hash": config.cache.tokens_per_hash,
        "blocks_per_chunk": config.cache.blocks_per_chunk,
        "groups": [
            [group.group_id, group.tokens_per_block, *group.layer_names] for group in config.groups
        ],
        "ranks": [parallel.tp_size, parallel.pp_size, parallel.pcp_size, parallel.dcp_size],
    }
    return _digest(facts).hex()[:16]


def _root(spec: OffloadingSpec, settings: TierSettings, geometry: str) -> bytes:
    """What every key starts with: who made the KV. A hash says its own algorithm and seed.

    Raises:
        ConfigError: nothing says which weights they were.
    """
    name = spec.config.model.name
    weights = model_files(Path(name))
    if not weights and not settings.model_name:
        raise ConfigError(
            f"secondary_tiers: nothing says which weights {name!r} stands for (it is no local "
            "directory): give TieredKVTier a model_name, and a new one when they change"
        )
    facts = {
        "format": "tiered-kv/vllm-tier/1",
        "vllm": vllm.__version__,
        "model": weights or name,
        "model_name": settings.model_name,
        "geometry": geometry,
    }
    return _digest(facts)


def _digest(facts: dict[str, Any]) -> bytes:
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).digest()
