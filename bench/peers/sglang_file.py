"""SGLang's file backend of HiCache, called as its controller calls it: a batch of pages a call.

Its host tier is no part of this: the copies to and from it are SGLang's CUDA kernels.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import version
from typing import Any

import torch

from bench.peers.adapter import Adapter, Setup, require
from bench.peers.stand_in import stand_in

# The wheels of both are made for GPUs; neither is used here.
stand_in(("triton", "torchvision"), ("torch._dynamo", "transformers.generation"))

from sglang.srt.mem_cache.hicache_storage import HiCacheFile, HiCacheStorageConfig  # noqa: E402

_BATCH_PAGES = 128  # the controller's STORAGE_BATCH_SIZE


class File(Adapter):
    """HiCacheFile: one file a page, one page after the other."""

    operations = ("put_durable", "get_cold", "lookup_present", "lookup_absent")

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        torch.set_num_threads(1)
        self._from = [torch.from_numpy(page) for page in self.sources()]
        self._into = [torch.from_numpy(page) for page in self.targets()]
        self._extra = {
            "file_storage_path": str(setup.folder / "hicache"),
            "enable_metadata_cache": True,
            "metadata_ttl": 3600.0,
        }
        config = HiCacheStorageConfig(
            tp_rank=0,
            tp_size=1,
            pp_rank=0,
            pp_size=1,
            attn_cp_rank=0,
            attn_cp_size=1,
            is_mla_model=False,
            enable_storage_metrics=False,
            is_page_first_layout=True,
            model_name="bench",
            extra_config=self._extra,
        )
        self._file = HiCacheFile(config)

    def configuration(self) -> dict[str, Any]:
        shown = {**self._extra, "file_storage_path": "hicache"}
        return {"extra_config": shown, "pages a call": _BATCH_PAGES}

    def versions(self) -> dict[str, str]:
        return {package: version(package) for package in ("sglang", "torch")}

    def name(self, digest: bytes) -> str:
        return digest.hex()

    def put_durable(self) -> None:
        for part in self._parts():
            if not self._file.batch_set(self.keys[part], self._from[part]):
                raise RuntimeError("a page was not stored")

    def get_cold(self) -> None:
        came = 0
        for part in self._parts():
            found = self._file.batch_get(self.keys[part], self._into[part])
            came += sum(page is not None for page in found)
        require(came, self.setup.pages, "loaded")

    def _parts(self) -> list[slice]:
        return [slice(at, at + _BATCH_PAGES) for at in range(0, self.setup.pages, _BATCH_PAGES)]

    def lookup(self, keys: Sequence[Any]) -> int:
        found: int = self._file.batch_exists(list(keys))
        if found:
            return found
        return sum(self._file.batch_exists([key]) for key in keys)

    def clear(self) -> None:
        self._file.clear()

    def close(self) -> None:
        self._file.clear()
