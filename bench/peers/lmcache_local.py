"""LMCache in-process: its pool of host memory, and one file a page under it.

As its cache engine does: a page is copied into an object of the pool, which then is in the hot
cache; the disk backend writes it from there and reads it back into a new object of the pool. The
copies between the caller and the pool are one thread's, as everywhere here.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from importlib.metadata import version
from typing import Any

import numpy as np
import torch
from lmcache.utils import CacheEngineKey
from lmcache.v1.config import LMCacheEngineConfig
from lmcache.v1.memory_management import MemoryFormat
from lmcache.v1.metadata import LMCacheMetadata
from lmcache.v1.storage_backend.local_cpu_backend import LocalCPUBackend
from lmcache.v1.storage_backend.local_disk_backend import LocalDiskBackend

from bench.peers.adapter import Adapter, Setup, require

_TOKENS = 16
_WAIT_S = 100.0
_ALIGNMENT = 4096
_POOL_SETS = 2.25  # one cached, one being read, and what its allocator may waste
_DISK_GIB = 1000.0  # a bound by its own books alone, which do not go down when pages are removed


class Local(Adapter):
    """LocalCPUBackend above LocalDiskBackend."""

    operations = ("put", "get_host", "put_durable", "get_cold", "lookup_present", "lookup_absent")

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        torch.set_num_threads(1)
        self._shape = torch.Size((2, 1, _TOKENS, setup.page_bytes // (2 * 2 * _TOKENS)))
        self._settings: dict[str, Any] = {
            "chunk_size": _TOKENS,
            "local_cpu": True,
            "max_local_cpu_size": _POOL_SETS * setup.set_bytes / (1 << 30),
            "local_disk": f"{setup.folder}/lmcache/",
            "max_local_disk_size": _DISK_GIB,
            "extra_config": {
                "use_odirect": setup.options["use_odirect"],
                "local_cpu.pinned_align_bytes": _ALIGNMENT,
            },
        }
        config: Any = LMCacheEngineConfig.from_defaults(**self._settings)
        metadata = LMCacheMetadata(
            model_name="bench",
            world_size=1,
            local_world_size=1,
            worker_id=0,
            local_worker_id=0,
            kv_dtype=torch.bfloat16,
            kv_shape=(1, 2, _TOKENS, 1, self._shape[-1]),
        )
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._cpu = LocalCPUBackend(config, metadata, dst_device="cpu")
        self._disk = LocalDiskBackend(config, self._loop, self._cpu, dst_device="cpu")

    def configuration(self) -> dict[str, Any]:
        return {**self._settings, "local_disk": "lmcache", "disk_io_threads": "4 (default)"}

    def versions(self) -> dict[str, str]:
        return {package: version(package) for package in ("lmcache", "torch", "numpy")}

    def name(self, digest: bytes) -> Any:
        number = int.from_bytes(digest[:8], "little", signed=True)
        return CacheEngineKey("bench", 1, 0, number, torch.bfloat16)

    def put(self) -> None:
        """Allocate, copy, submit; a page that is evicted for another is not there any more."""
        for key, source in zip(self.keys, self.sources(), strict=True):
            held = self._cpu.allocate(self._shape, torch.bfloat16, MemoryFormat.KV_2LTD)
            np.copyto(_bytes(held), source)
            self._cpu.submit_put_task(key, held)
            held.ref_count_down()

    def get_host(self) -> None:
        for key, target in zip(self.keys, self.targets(), strict=True):
            held = self._cpu.get_blocking(key)
            if held is None:
                raise RuntimeError("a page is not in the hot cache")
            np.copyto(target, _bytes(held))
            held.ref_count_down()

    def put_durable(self) -> None:
        """From the pool to files, until every one is closed."""
        written = threading.Semaphore(0)
        held = [self._cpu.get_blocking(key) for key in self.keys]
        self._disk.batched_submit_put_task(
            self.keys, held, on_complete_callback=lambda _: written.release()
        )
        for one in held:
            one.ref_count_down()
        came = sum(written.acquire(timeout=_WAIT_S) for _ in self.keys)
        require(came, self.setup.pages, "written")

    def empty_host(self) -> None:
        self._cpu.clear()

    def get_cold(self) -> None:
        """Files to the pool, four at a time; then to the caller."""
        came = self._disk.batched_get_blocking(self.keys)
        for held, target in zip(came, self.targets(), strict=True):
            if held is None:
                raise RuntimeError("a page did not come from disk")
            np.copyto(target, _bytes(held))
            held.ref_count_down()

    def lookup(self, keys: Sequence[Any]) -> int:
        contains = self._disk.contains
        return sum(contains(key) for key in keys)

    def clear(self) -> None:
        self._cpu.clear()
        for key in self.keys:
            self._disk.remove(key)

    def close(self) -> None:
        self._disk.close()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._cpu.clear()


def _bytes(held: Any) -> Any:
    return np.frombuffer(held.byte_array, dtype=np.uint8)
