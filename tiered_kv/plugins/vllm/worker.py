"""The worker's side of the connector: one rank's tiers, and what moves pages in and out of vLLM."""

from __future__ import annotations

import torch
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults
from vllm.v1.kv_cache_interface import KVCacheConfig

from tiered_kv.carrier import Carrier, Loaded
from tiered_kv.counters import StoreStats
from tiered_kv.orders import Order, Report
from tiered_kv.plugins.vllm.geometry import attach, layers_of, layout_of
from tiered_kv.plugins.vllm.messages import StepReport
from tiered_kv.plugins.vllm.settings import TieredKVSettings
from tiered_kv.storage.attached import unpack_blocks
from tiered_kv.storage.disk import DiskTier
from tiered_kv.storage.host import HostTier


class WorkerSide:
    """Opens this rank's tiers and carries out the scheduler's orders.

    Args:
        kv_caches: the engine's tensors, by layer name.
        layerwise: loads come layer by layer.

    Raises:
        ConfigError: a tier too small, a directory that is not ours or in use, a model whose KV
            cache is not supported.
        LayoutMismatchError: the directory holds pages of another model, dtype or layout.
    """

    def __init__(
        self,
        vllm_config: VllmConfig,
        kv_cache_config: KVCacheConfig,
        settings: TieredKVSettings,
        kv_caches: dict[str, torch.Tensor],
        *,
        layerwise: bool,
    ) -> None:
        parallel = vllm_config.parallel_config
        sizes = settings.per_rank(parallel.world_size)
        layout = layout_of(kv_cache_config, vllm_config)
        self._rank = parallel.rank
        self._blocks = kv_cache_config.num_blocks
        self._groups = len(kv_cache_config.kv_cache_groups)
        self._layer = {layer.name: at for at, layer in enumerate(layers_of(kv_cache_config))}
        hbm = attach(kv_caches, kv_cache_config, layerwise=layerwise)
        assert hbm.page_bytes == layout.page_bytes, (hbm.page_bytes, layout)
        host = HostTier(
            hbm.page_bytes,
            sizes.host,
            pin=hbm.device.type == "cuda",
            with_staging=sizes.disk is not None,
        )
        disk = None
        if sizes.disk is not None and sizes.disk_size is not None:
            try:
                disk = DiskTier.open(
                    sizes.disk / rank_directory(vllm_config),
                    hbm.page_bytes,
                    sizes.disk_size,
                    layout.fingerprint,
                    settings.io_threads,
                )
            except BaseException:
                host.close()
                raise
        self._carrier = Carrier(
            hbm,
            host,
            disk,
            ranks=parallel.world_size,
            load_deadline_s=settings.load_deadline_s,
            write_back=settings.write_policy == "back",
        )
        self._has_introduced_itself = False
        self._received: Order | None = None
        self._invalid_blocks: set[int] = set()

    # -- one step, in vLLM's order -----------------------------------------------------------------

    def receive(self, order: Order) -> None:
        """An order, and what must happen before blocks are overwritten. Twice is harmless."""
        if order is not self._received:
            self._received = order
            self._carrier.receive(order)
            self._carrier.fence(order.fences)

    def start_loads(self) -> None:
        """Begin the loads for requests of this step; returns at once."""
        self._carrier.start_running()

    def wait_layer(self, name: str) -> None:
        """Block until this layer's pages for requests of this step are here, or have failed.

        A layer that is not ours reads the KV of one before it, which has been waited for.
        """
        layer = self._layer.get(name)
        if layer is not None and self._carrier.is_loading:
            self._carrier.wait_layer(layer)

    def start_rest(self) -> None:
        """After the forward pass: begin all else, but no store if a load of this step failed."""
        self._finish_running()
        self._carrier.start()

    def pause(self) -> None:
        """In a step in which no request runs: let the copying threads have the interpreter."""
        self._carrier.wait_for_news()

    def transfer_results(self) -> KVConnectorTransferResults:
        """Requests whose loads are over."""
        self._finish_running()  # before the step's failures are asked for, whatever comes later
        results = KVConnectorTransferResults()
        for loaded in self._carrier.finished_waiting():
            results.finished_recving.add(loaded.job.owner)
            if not loaded.failed_slots:
                continue
            if self._groups == 1:
                self._note_failed(loaded)
            else:
                results.failed_recving.add(loaded.job.owner)
        return results

    def _finish_running(self) -> None:
        for loaded in self._carrier.finish_running():
            self._note_failed(loaded)

    def _note_failed(self, loaded: Loaded) -> None:
        for slot in loaded.failed_slots:
            self._invalid_blocks.update(unpack_blocks(slot, self._groups, self._blocks))

    def take_invalid_blocks(self) -> set[int]:
        """Blocks that do not hold what they should, since the last call."""
        blocks, self._invalid_blocks = self._invalid_blocks, set()
        return blocks

    def report(self) -> StepReport | None:
        """What the scheduler must know; None if there is nothing new."""
        report = self._carrier.report()
        if self._has_introduced_itself:
            return None if report is None else StepReport(report)
        self._has_introduced_itself = True
        return StepReport(report or Report(), {self._rank: self._carrier.facts()})

    # -- care --------------------------------------------------------------------------------------

    def stats(self) -> StoreStats:
        """What this rank has moved so far."""
        return self._carrier.stats()

    def usage(self) -> dict[str, tuple[int, int]]:
        """(used, capacity) bytes of this rank's tiers."""
        return self._carrier.usage()

    def close(self) -> None:
        """Finish what has been started; give memory and files back."""
        self._carrier.close()


def rank_directory(vllm_config: VllmConfig) -> str:
    """The directory of one rank below the configured one: every rank has pages of its own."""
    parallel = vllm_config.parallel_config
    replica = f"dp{parallel.data_parallel_rank}-" if parallel.data_parallel_size > 1 else ""
    return f"{replica}rank{parallel.rank}"
