"""TieredKVConnector: vLLM's own words for the two sides of the store; see `scheduler`, `worker`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
import vllm
from vllm.config import VllmConfig
from vllm.config.compilation import CUDAGraphMode
from vllm.distributed.kv_events import KVCacheEvent
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)
from vllm.logger import init_logger
from vllm.platforms import current_platform
from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.metrics.cache_hit_source import CacheHitSource
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request

from tiered_kv.errors import ConfigError, TieredKVError
from tiered_kv.plugins.vllm.geometry import refuse_unsupported, required_layout
from tiered_kv.plugins.vllm.identity import check_hash_seed
from tiered_kv.plugins.vllm.messages import StepOrder, StepReport
from tiered_kv.plugins.vllm.metrics import TieredKVStats, build_prom_metrics, build_stats
from tiered_kv.plugins.vllm.scheduler import SchedulerSide
from tiered_kv.plugins.vllm.settings import TieredKVSettings
from tiered_kv.plugins.vllm.versions import check_version
from tiered_kv.plugins.vllm.worker import WorkerSide

if TYPE_CHECKING:
    from vllm.forward_context import ForwardContext

_log = init_logger(__name__)


class TieredKVConnector(KVConnectorBase_V1, SupportsHMA):
    """KV pages of vLLM in pinned host memory and on disk.

    Raises:
        ConfigError: another vLLM, an unknown setting, a model that is not supported.
    """

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        with _said_in_one_line():
            self._open(vllm_config, role, kv_cache_config)

    def _open(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        check_version(vllm.__version__)
        settings = _settings(vllm_config)
        refuse_unsupported(kv_cache_config)
        if settings.disk is not None:
            check_hash_seed(vllm_config)
        self._settings = settings
        self._layerwise = _is_layerwise(settings, vllm_config, kv_cache_config)
        self._scheduler: SchedulerSide | None = None
        self._worker: WorkerSide | None = None
        self._interval = TieredKVStats.counting(vllm_config.parallel_config.rank)
        if role == KVConnectorRole.SCHEDULER:
            self._scheduler = SchedulerSide(
                vllm_config, kv_cache_config, settings, layerwise=self._layerwise
            )

    @property
    def scheduler(self) -> SchedulerSide:
        """The deciding side; only in the scheduler's instance."""
        assert self._scheduler is not None
        return self._scheduler

    @property
    def worker(self) -> WorkerSide:
        """The moving side; only in a worker's instance, once the KV cache is there."""
        assert self._worker is not None
        return self._worker

    # -- both --------------------------------------------------------------------------------------

    @property
    def requires_kv_delivery(self) -> bool:
        """A cache: a page that is not stored is a later miss, no more."""
        return False

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: VllmConfig) -> str | None:
        """All layers of a block side by side, where the attention backend can."""
        with _said_in_one_line():  # a wrong setting stops the engine before it loads the model
            _settings(vllm_config)
        return required_layout(vllm_config)

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """Waiting for a layer is no work for a captured graph."""
        return TieredKVSettings.from_extra_config(extra_config).load == "layerwise"

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        """What this side has done since the last call."""
        if self._worker is not None:
            return self._interval.since_last(self._worker.stats(), self._worker.usage())
        stats = self._scheduler.stats() if self._scheduler is not None else None
        return None if stats is None else self._interval.since_last(stats, {})

    @classmethod
    def build_kv_connector_stats(
        cls, data: dict[str, Any] | None = None
    ) -> KVConnectorStats | None:
        """Stats again from what went between processes."""
        return build_stats(data)

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: dict[type[Any], type[Any]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> KVConnectorPromMetrics | None:
        """Counters that join vLLM's own on /metrics."""
        return build_prom_metrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    def shutdown(self) -> None:
        """Finish what has been started; give memory and files back."""
        if self._worker is not None:
            self._worker.close()
            self._worker = None

    # -- worker ------------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Open this rank's tiers beside the engine's KV cache."""
        with _said_in_one_line():
            self._worker = WorkerSide(
                self._vllm_config,
                self._kv_cache_config,
                self._settings,
                kv_caches,
                layerwise=self._layerwise,
            )

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        """Copy out what is about to be overwritten."""
        self._receive(kv_connector_metadata)

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """The step's order."""
        super().bind_connector_metadata(connector_metadata)
        self._receive(connector_metadata)

    def _receive(self, metadata: KVConnectorMetadata) -> None:
        assert isinstance(metadata, StepOrder)
        self.worker.receive(metadata.order)

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        """Begin the loads that this step's forward pass waits for."""
        self.worker.start_loads()

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Block until a layer is here."""
        self.worker.wait_layer(layer_name)

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Pages are copied whole when the forward pass has been queued, not layer by layer."""

    def wait_for_save(self) -> None:
        """Begin stores and other loads; they wait for the forward pass, not the engine for them."""
        self.worker.start_rest()
        step = self._get_connector_metadata()
        if isinstance(step, StepOrder) and step.is_idle:
            self.worker.pause()

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """Requests whose loads are over."""
        return self.worker.transfer_results()

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Blocks that do not hold what they should."""
        return self.worker.take_invalid_blocks()

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        """What the scheduler must know."""
        return self.worker.report()

    # -- scheduler ---------------------------------------------------------------------------------

    def bind_kv_cache_manager(self, kv_cache_manager: KVCacheManager) -> None:
        """To see which pages the engine has itself."""
        super().bind_kv_cache_manager(kv_cache_manager)
        self.scheduler.cache = kv_cache_manager

    def on_new_request(self, request: Request) -> None:
        """A request has been queued."""
        self.scheduler.on_new_request(request)

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Tokens the store has beyond those computed."""
        return self.scheduler.matched_tokens(request, num_computed_tokens)

    def get_external_cache_hit_sources(
        self, request: Request, num_external_tokens: int
    ) -> dict[CacheHitSource, int]:
        """Host or disk."""
        return self.scheduler.hit_sources(request, num_external_tokens)

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        """The request has blocks."""
        self.scheduler.after_alloc(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        """The step's order."""
        runs = scheduler_output.total_num_scheduled_tokens > 0 or self.scheduler.has_running
        return StepOrder(self.scheduler.build(scheduler_output), is_idle=not runs)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """The ranks' report."""
        step = connector_output.kv_connector_worker_meta
        if connector_output.invalid_block_ids:
            self.scheduler.disown(connector_output.invalid_block_ids)
        self.scheduler.take(step if isinstance(step, StepReport) else None)

    def request_finished(
        self, request: Request, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Its blocks may be freed: who still reads them is named in `Order.fences`."""
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """As `request_finished`."""
        self.scheduler.request_finished(request, block_ids)
        return False, None

    def has_pending_push_work(self) -> bool:
        """Whether an engine without requests should go on stepping: stores are still under way."""
        return self.scheduler.is_busy

    def take_events(self) -> Iterable[KVCacheEvent]:
        """Pages stored and removed."""
        return self.scheduler.events()

    def reset_cache(self) -> bool:
        """Forget every page."""
        self.scheduler.reset()
        return True


@contextmanager
def _said_in_one_line() -> Iterator[None]:
    """What stops the engine is logged in one line, before the tracebacks of all its processes."""
    try:
        yield
    except TieredKVError as error:
        _log.error("TieredKVConnector cannot start: %s", error)
        raise


def _settings(vllm_config: VllmConfig) -> TieredKVSettings:
    transfer = vllm_config.kv_transfer_config
    extra = transfer.kv_connector_extra_config if transfer is not None else {}
    return TieredKVSettings.from_extra_config(extra or {})


def _is_layerwise(
    settings: TieredKVSettings, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig
) -> bool:
    """Whether loads may come layer by layer into a running request.

    vLLM takes a step back whose load has failed only if it has not scheduled the next one yet; with
    several KV cache groups it can be told of a failed load only by a request that waits for it; and
    a captured CUDA graph does not wait for layers.
    """
    obstacle = ""
    if len(kv_cache_config.kv_cache_groups) > 1:
        obstacle = "a hybrid model"
    elif vllm_config.max_concurrent_batches > 1:
        obstacle = "several batches in flight (set async_scheduling=False)"
    if settings.load != "auto":
        if settings.load == "layerwise" and obstacle:
            raise ConfigError(
                f"load='layerwise' does not go with {obstacle}: use load='async' or 'auto'"
            )
        return settings.load == "layerwise"
    mode = vllm_config.compilation_config.cudagraph_mode
    is_eager = current_platform.is_cpu() or mode in (None, CUDAGraphMode.NONE)
    return is_eager and not obstacle
