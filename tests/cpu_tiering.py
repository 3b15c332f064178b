"""vLLM's `TieringOffloadingSpec` on a CPU, where the stock one refuses to copy.

The "GPU" cache is memory like the host tier, so the worker copies at once, block by block. All else
is vLLM's own: its scheduler side, host tier, cascades and promotions.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.v1.kv_offload.base import CanonicalKVCaches, OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec


class CpuTieringSpec(TieringOffloadingSpec):  # type: ignore[misc]
    """`spec_name` of the tests' `kv_connector_extra_config`; chunks of one block only."""

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        """Where the stock spec asks for CUDA or XPU."""
        assert self.blocks_per_chunk == 1
        region = SharedOffloadRegion(
            engine_id=self._engine_id,
            num_chunks=self.num_chunks,
            rank=0,
            kv_bytes_per_chunk=self.kv_bytes_per_chunk,
            cpu_page_size=self.cpu_page_size_per_worker,
        )
        return _MemcpyWorker(kv_caches, region)


class _MemcpyWorker(OffloadingWorker):  # type: ignore[misc]
    def __init__(self, kv_caches: CanonicalKVCaches, region: SharedOffloadRegion) -> None:
        self._region = region
        self._groups = kv_caches.group_data_refs
        self._device = [tensor.tensor for tensor in kv_caches.tensors]
        self._host = [
            region.create_next_worker_view(tensor.page_size_bytes) for tensor in kv_caches.tensors
        ]
        self._finished: list[TransferResult] = []

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        return self._copy(job_id, src_spec, dst_spec, to_host=True)

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        return self._copy(job_id, dst_spec, src_spec, to_host=False)

    def _copy(self, job_id: int, blocks: Any, chunks: Any, *, to_host: bool) -> bool:
        groups = [
            group
            for group, n in zip(self._groups, blocks.group_sizes, strict=True)
            for _ in range(n)
        ]
        moved = 0
        for block, chunk, group in zip(blocks.block_ids, chunks.chunk_ids, groups, strict=True):
            for ref in group:
                device = self._device[ref.tensor_idx][block].view(torch.int8).flatten()
                host = self._host[ref.tensor_idx][chunk]
                n_bytes = ref.page_size_bytes
                source, target = (device, host) if to_host else (host, device)
                target[:n_bytes].copy_(source[:n_bytes])
                moved += n_bytes
        self._finished.append(TransferResult(job_id, True, moved, 0.0))
        return True

    def get_finished(self) -> list[TransferResult]:
        finished, self._finished = self._finished, []
        return finished

    def wait(self, job_ids: set[int]) -> None:
        """Every copy is done when it is submitted."""

    def shutdown(self) -> None:
        self._host.clear()
        self._region.cleanup()
