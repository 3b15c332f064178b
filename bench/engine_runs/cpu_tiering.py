"""vLLM's `TieringOffloadingSpec` on a CPU, for the benchmark: the stock one copies on GPUs alone.

What the engine keeps in its KV cache is host memory here, so a copy to or from the host tier is a
memcpy, done when it is submitted. All else is vLLM's own: scheduler side, host tier, the files
below it, cascades and promotions. Imported by vLLM, as `spec_module_path`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from vllm.v1.kv_offload.base import CanonicalKVCaches, OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

Pages = np.ndarray[Any, np.dtype[np.int8]]


class CpuTieringSpec(TieringOffloadingSpec):  # type: ignore[misc]
    """`spec_name` of the variants; chunks of one block."""

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
    """Rows [block] of the engine's tensors to and from rows [chunk] of the region's, both int8."""

    def __init__(self, kv_caches: CanonicalKVCaches, region: SharedOffloadRegion) -> None:
        self._region = region
        (self._refs,) = kv_caches.group_data_refs  # models with one kind of attention alone
        tensors = kv_caches.tensors
        self._engine: list[Pages] = [one.tensor.numpy() for one in tensors]
        self._host: list[Pages] = [
            region.create_next_worker_view(one.page_size_bytes).numpy() for one in tensors
        ]
        self._finished: list[TransferResult] = []

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        """Copy blocks out."""
        pairs = list(zip(src_spec.block_ids.tolist(), dst_spec.chunk_ids.tolist(), strict=True))
        for ref in self._refs:
            engine, host = self._engine[ref.tensor_idx], self._host[ref.tensor_idx]
            for block, chunk in pairs:
                host[chunk] = engine[block]
        return self._done(job_id, len(pairs))

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        """Copy chunks in."""
        pairs = list(zip(dst_spec.block_ids.tolist(), src_spec.chunk_ids.tolist(), strict=True))
        for ref in self._refs:
            engine, host = self._engine[ref.tensor_idx], self._host[ref.tensor_idx]
            for block, chunk in pairs:
                engine[block] = host[chunk]
        return self._done(job_id, len(pairs))

    def _done(self, job_id: int, blocks: int) -> bool:
        moved = blocks * sum(ref.page_size_bytes for ref in self._refs)
        self._finished.append(TransferResult(job_id, True, moved, 0.0))
        return True

    def get_finished(self) -> list[TransferResult]:
        """Jobs done since the last call."""
        finished, self._finished = self._finished, []
        return finished

    def wait(self, job_ids: set[int]) -> None:
        """Every copy is done when it has been submitted."""

    def shutdown(self) -> None:
        """Give the region back."""
        self._host.clear()
        self._region.cleanup()
