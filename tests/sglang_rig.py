"""SGLang's own HiCache on a CPU: its host pools, its controller, its threads; no model, no GPU.

sglang imports triton and torchvision on the way and uses neither here: stand-ins are put in their
place (the wheel of triton has 1 GB, torchvision needs a torch for GPUs). Importing sglang costs
about 10 s of CPU, so a run does all its tests in one process.
"""

from __future__ import annotations

import hashlib
import os
import sys
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from bench.peers.stand_in import stand_in

DEADLINE_S = 60.0
"""How long anything of SGLang's may take; not a pace."""


def start() -> None:
    """What a scheduler process of SGLang has done before it makes its caches: one rank of one."""
    torch.set_num_threads(1)  # OpenMP's threads spin for each other as soon as another has a core
    stand_in(("triton", "torchvision"), ("torch._dynamo", "transformers.generation"))
    # Beside the interpreter, so that a run does not compile SGLang's page hash again (25 s).
    os.environ.setdefault("TORCH_EXTENSIONS_DIR", str(Path(sys.prefix) / "torch-extensions"))
    os.environ["PATH"] = f"{Path(sys.prefix) / 'bin'}{os.pathsep}{os.environ['PATH']}"  # ninja
    store = torch._C._distributed_c10d.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    from sglang.srt.runtime_context import get_parallel

    sizes = {f"{axis}_size": 1 for axis in ("tp", "pp", "attn_tp", "attn_dp", "attn_cp")}
    ranks = {f"{axis}_rank": 0 for axis in ("tp", "pp", "attn_tp", "attn_dp", "attn_cp")}
    get_parallel().override_permanently(
        **sizes, **ranks, attn_dp_enabled=False, attn_dcp_size=1, attn_dcp_rank=0
    )


start()

from sglang.srt.managers.cache_controller import HiCacheController  # noqa: E402
from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator  # noqa: E402
from sglang.srt.mem_cache.base_prefix_cache import CacheRequestHandle  # noqa: E402
from sglang.srt.mem_cache.device_pool_info import MambaStateBufferInfo  # noqa: E402
from sglang.srt.mem_cache.hicache_storage import (  # noqa: E402
    HiCacheStorageConfig,
    PoolHitPolicy,
    PoolName,
    PoolTransfer,
)
from sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller import (  # noqa: E402
    HybridCacheController,
)
from sglang.srt.mem_cache.memory_pool import (  # noqa: E402
    DSATokenToKVPool,
    MHATokenToKVPool,
    MLATokenToKVPool,
)
from sglang.srt.mem_cache.pool_host import HostPoolGroup, PoolEntry  # noqa: E402
from sglang.srt.mem_cache.pool_host.dsa import DSAIndexerPoolHost  # noqa: E402
from sglang.srt.mem_cache.pool_host.mamba import MambaPoolHost  # noqa: E402
from sglang.srt.mem_cache.pool_host.mha import (  # noqa: E402
    AsymmetricMHATokenToKVPoolHost,
    MHATokenToKVPoolHost,
)
from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost  # noqa: E402
from sglang.srt.mem_cache.storage import StorageBackendFactory  # noqa: E402
from sglang.srt.mem_cache.utils import get_storage_hash_str  # noqa: E402

LAYERS = 4
PAGES = 64


def page_tokens(kind: str) -> int:
    """Tokens a page; the indexer of a sparse model knows only 64."""
    return 64 if kind == "dsa" else 16


def device_pool(kind: str, dtype: torch.dtype = torch.bfloat16) -> Any:
    """SGLang's KV pool of a tiny model: "mha", "asymmetric" (V narrower than K), "mla" or "dsa"."""
    common: dict[str, Any] = {
        "size": PAGES * page_tokens(kind),
        "page_size": page_tokens(kind),
        "dtype": dtype,
        "layer_num": LAYERS,
        "device": "cpu",
        "enable_memory_saver": False,
    }
    latent = {"kv_lora_rank": 96, "qk_rope_head_dim": 32}
    if kind == "dsa":
        return DSATokenToKVPool(index_head_dim=128, kv_cache_dim=128, **latent, **common)
    if kind == "mla":
        return MLATokenToKVPool(**latent, **common)
    v_head_dim = 32 if kind == "asymmetric" else 64
    return MHATokenToKVPool(head_num=2, head_dim=64, v_head_dim=v_head_dim, **common)


def host_pool(device: Any, layout: str) -> Any:
    """The host pool that mirrors a KV pool."""
    common: dict[str, Any] = {
        "page_size": device.page_size,
        "layout": layout,
        "pin_memory": False,
        "device": "cpu",
        "device_capacity_tokens": device.size,
        "start_layer": 0,
        "end_layer": LAYERS,
    }
    info = device.get_device_pool_infos()[0].buffer_info
    if isinstance(device, MLATokenToKVPool):
        return MLATokenToKVPoolHost(info, 4.0, 0, target_layer_num=LAYERS, **common)
    if device.v_head_dim != device.head_dim:
        return AsymmetricMHATokenToKVPoolHost(info, 4.0, 0, **common)
    return MHATokenToKVPoolHost(info, 4.0, 0, **common)


def indexer_pool(device: Any, host: Any) -> Any:
    """The host pool of a sparse model's index keys, which lie where the KV lies."""
    (declared,) = (d for d in device.host_pool_decls() if d.pool_name == PoolName.INDEXER)
    return DSAIndexerPoolHost(declared, host, pin_memory=False)


def mamba_pool(layout: str) -> Any:
    """A host pool of recurrent states, a slot each."""
    info = MambaStateBufferInfo(
        temporal=torch.zeros(3, 8, 4, 16, 32), conv=(torch.zeros(3, 8, 96, 4, dtype=torch.float16),)
    )
    return MambaPoolHost(info, 4.0, 0, device_capacity=8, pin_memory=False, layout=layout)


# -- what stands in pages --------------------------------------------------------------------------


def _halves(pool: Any, index: int) -> list[torch.Tensor]:
    """K and V of a page of a pool whose halves differ: SGLang has no flat form of it."""
    first, upto = index, index + pool.page_size
    if pool.layout == "page_first_direct":
        first, upto = index // pool.page_size, index // pool.page_size + 1
    return [pool.k_buffer[first:upto], pool.v_buffer[first:upto]]


def write_page(pool: Any, index: int, key: str) -> None:
    """Fill a page, by SGLang's own setter, with bytes that follow from its key."""
    if isinstance(pool, AsymmetricMHATokenToKVPoolHost):
        for part in _halves(pool, index):
            content = page_content(key, part.numel() * part.element_size())
            part.copy_(content.view(part.dtype).reshape(part.shape))
        return
    flat = pool.get_dummy_flat_data_page()
    n_bytes = flat.numel() * flat.element_size()
    pool.set_from_flat_data_page(index, page_content(key, n_bytes).view(flat.dtype))


def page_content(key: str, n_bytes: int) -> torch.Tensor:
    """What stands in the page of a key."""
    seed = int.from_bytes(hashlib.sha256(key.encode()).digest()[:7], "little")
    source = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (n_bytes,), dtype=torch.uint8, generator=source)


def holds(pool: Any, index: int, key: str) -> bool:
    """Whether a page, by SGLang's own getter, holds what stands in the page of a key."""
    if isinstance(pool, AsymmetricMHATokenToKVPoolHost):
        parts = _halves(pool, index)
    else:
        parts = [pool.get_data_page(index, flat=True)]
    rows = [part.contiguous().flatten().view(torch.uint8) for part in parts]
    return all(torch.equal(row, page_content(key, row.numel())) for row in rows)


# -- a cache of SGLang's ---------------------------------------------------------------------------


def extra_config(directory: Path | None, **changes: Any) -> dict[str, Any]:
    """What a user gives as --hicache-storage-backend-extra-config; None leaves a key out."""
    given: dict[str, Any] = {
        "backend_name": "tiered_kv",
        "module_path": "tiered_kv.plugins.sglang",
        "class_name": "TieredKVStorage",
        "interface_v1": 1,
        "directory": None if directory is None else str(directory),
        "size": "64MiB",
    }
    given.update(changes)
    return {key: value for key, value in given.items() if value is not None}


@dataclass
class Loaded:
    """What a prefetch brought.

    Attributes:
        promised: pages that the storage said it could restore.
        pages: pages that came; all of them were compared with what they must be.
        sidecars: for each pool beside the KV, whether its entries came.
    """

    promised: int
    pages: int
    sidecars: dict[str, int] = field(default_factory=dict)


class Cache:
    """Host pools and SGLang's controller over them, with our storage behind.

    Stands where SGLang's radix cache stands: gives the controller host pages to back up, takes its
    hits, allocates for them, and drains its acknowledgements.
    """

    def __init__(
        self,
        directory: Path | None,
        *,
        kind: str = "mha",
        layout: str = "page_first",
        dtype: torch.dtype = torch.bfloat16,
        model: str = "models/tiny",
        metrics: bool = False,
        **extra: Any,
    ) -> None:
        self.page_tokens = page_tokens(kind)
        device = device_pool(kind, dtype)
        self.pool = host_pool(device, layout)
        self.sidecars: dict[Any, Any] = {}
        arguments: dict[str, Any] = {
            "token_to_kv_pool_allocator": PagedTokenToKVPoolAllocator(
                device.size, self.page_tokens, dtype, "cpu", device, False
            ),
            "page_size": self.page_tokens,
            "tp_group": torch.distributed.group.WORLD,
            "load_cache_event": threading.Event(),
            "io_backend": "kernel",
            "storage_backend": "dynamic",
            "prefetch_threshold": self.page_tokens,
            "model_name": model,
            "storage_backend_extra_config": extra_config(directory, **extra),
            "enable_storage_metrics": metrics,
        }
        if kind == "dsa":
            self.sidecars[PoolName.INDEXER] = indexer_pool(device, self.pool)
            self.sidecars[PoolName.MAMBA] = mamba_pool("page_first")
            entries = [PoolEntry(PoolName.KV, self.pool, device, int, is_primary_index_anchor=True)]
            entries += [PoolEntry(n, p, device, int) for n, p in self.sidecars.items()]
            self.group: Any = HostPoolGroup(entries)
            self.controller: Any = HybridCacheController(mem_pool_host=self.group, **arguments)
        else:
            self.group = self.pool
            self.controller = HiCacheController(mem_pool_host=self.pool, **arguments)
        self._requests = 0

    @property
    def storage(self) -> Any:
        """Our storage, or SGLang's fault injector around it."""
        return self.controller.storage_backend

    def close(self) -> None:
        """What SGLang does when its process ends, or when a storage is detached at runtime."""
        self.controller.detach_storage_backend()

    def keys(self, tokens: Sequence[int]) -> list[str]:
        """SGLang's page hashes."""
        hashes: list[str] = get_storage_hash_str(list(tokens), None, page_size=self.page_tokens)
        return hashes

    def prompt(self, conversation: int, pages: int) -> list[int]:
        """Tokens of which the first pages are the same however many are asked for."""
        return [conversation * 7919 + at for at in range(pages * self.page_tokens)]

    # -- backing up --------------------------------------------------------------------------------

    def begin_backup(
        self, tokens: Sequence[int], *, start: int = 0, prefix_keys: bool = False
    ) -> tuple[Any, Any]:
        """Queue the pages of a prompt from `start` on; returns what `end_backup` wants."""
        keys = self.keys(tokens)[start:]
        before = self.keys(tokens)[:start] if prefix_keys else None
        indices = self.group.alloc(len(keys) * self.page_tokens)
        for at, key in enumerate(keys):
            write_page(self.pool, int(indices[at * self.page_tokens]), key)
        extra: dict[str, Any] = {}
        if self.sidecars:
            extra["extra_pools"] = self._sidecars_to_back_up(keys, indices)
        self.controller.write_storage(
            indices, list(tokens)[start * self.page_tokens :], keys, before, **extra
        )
        return indices, extra.get("extra_pools", [])

    def end_backup(self, begun: tuple[Any, Any]) -> int:
        """Wait for the backup queued first: how many pages SGLang counts as stored."""
        done = self.controller.ack_backup_queue.get(timeout=DEADLINE_S)
        indices, transfers = begun
        self.group.free(indices)
        for transfer in transfers:
            if transfer.indices_from_pool is None:
                self.sidecars[transfer.name].free(transfer.host_indices)
        return int(done.completed_tokens) // self.page_tokens

    def backup(self, tokens: Sequence[int], **how: Any) -> int:
        """Store the pages of a prompt; blocks. How many pages SGLang counts as stored."""
        return self.end_backup(self.begin_backup(tokens, **how))

    def _sidecars_to_back_up(self, keys: list[str], indices: torch.Tensor) -> list[Any]:
        """Index keys of every page, and the state after the last."""
        indexer, mamba = self.sidecars[PoolName.INDEXER], self.sidecars[PoolName.MAMBA]
        for at, key in enumerate(keys):
            write_page(indexer, int(indices[at * self.page_tokens]), f"indexer {key}")
        slot = mamba.alloc(1)
        write_page(mamba, int(slot[0]), f"mamba {keys[-1]}")
        return [
            PoolTransfer(PoolName.INDEXER, indices_from_pool=PoolName.KV),
            PoolTransfer(
                PoolName.MAMBA,
                host_indices=slot,
                keys=keys[-1:],
                hit_policy=PoolHitPolicy.TRAILING_PAGES,
            ),
        ]

    # -- bringing back -----------------------------------------------------------------------------

    def begin_prefetch(self, tokens: Sequence[int]) -> Any:
        """Ask for a prompt."""
        self._requests += 1
        name = f"request-{self._requests}"
        if not self.sidecars:
            return self.controller.prefetch(name, list(tokens))
        wanted = [
            PoolTransfer(PoolName.INDEXER, indices_from_pool=PoolName.KV),
            PoolTransfer(PoolName.MAMBA, keys=[""], hit_policy=PoolHitPolicy.TRAILING_PAGES),
        ]
        return self.controller.prefetch(
            CacheRequestHandle(name, 0), list(tokens), extra_pools=wanted
        )

    def end_prefetch(self) -> Loaded:
        """Carry the prefetch asked for first to its end, and compare every page that came.

        Raises:
            AssertionError: a page that counts as loaded is not what it must be.
        """
        operation = self.controller.prefetch_hit_queue.get(timeout=DEADLINE_S)
        promised = operation.storage_hit_count // self.page_tokens
        if not promised:
            return Loaded(0, 0)
        operation.host_indices = self.group.alloc(operation.storage_hit_count)
        self._blank(self.pool, operation.host_indices[:: self.page_tokens])
        for transfer in getattr(operation, "pool_transfers", None) or []:
            if transfer.indices_from_pool is None:
                transfer.host_indices = self.sidecars[transfer.name].alloc(1)
                self._blank(self.sidecars[transfer.name], transfer.host_indices)
        self.controller.prefetch_buffer.put(operation)
        tokens = 0
        pool_hits: dict[str, int] = {}
        while True:
            ack = self.controller.ack_prefetch_queue.get(timeout=DEADLINE_S)
            tokens = ack.completed_tokens if ack.completed_tokens is not None else tokens
            pool_hits = ack.pool_hits if ack.pool_hits is not None else pool_hits
            if ack.completed_req:
                break
        loaded = Loaded(promised, tokens // self.page_tokens)
        self._compare(operation, loaded, pool_hits)
        return loaded

    def prefetch(self, tokens: Sequence[int]) -> Loaded:
        """Bring the stored prefix of a prompt back; blocks."""
        self.begin_prefetch(tokens)
        return self.end_prefetch()

    def _blank(self, pool: Any, indices: Iterable[Any]) -> None:
        for index in indices:
            write_page(pool, int(index), "what stood there before")

    def _compare(self, operation: Any, loaded: Loaded, pool_hits: dict[str, int]) -> None:
        indices = operation.host_indices
        for at, key in enumerate(operation.hash_value[: loaded.pages]):
            index = int(indices[at * self.page_tokens])
            assert holds(self.pool, index, key), f"page {at} is wrong"
            if self.sidecars:
                indexer = self.sidecars[PoolName.INDEXER]
                assert holds(indexer, index, f"indexer {key}"), f"index keys of page {at} are wrong"
        self.group.free(indices)
        for transfer in getattr(operation, "pool_transfers", None) or []:
            if transfer.indices_from_pool is not None:
                continue
            loaded.sidecars[transfer.name.value] = pool_hits.get(transfer.name.value, 0)
            if loaded.sidecars[transfer.name.value]:
                name, key = transfer.name.value, operation.hash_value[-1]
                slot = int(transfer.host_indices[0])
                assert holds(self.sidecars[transfer.name], slot, f"{name} {key}"), (
                    f"{name} is wrong"
                )
            self.sidecars[transfer.name].free(transfer.host_indices)


class Opener:
    """Opens caches over one directory, one after the other or at once."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._opened: list[Cache] = []

    def __call__(self, **how: Any) -> Cache:
        cache = Cache(how.pop("directory", self.directory), **how)
        self._opened.append(cache)
        return cache

    def close(self) -> None:
        """As if every process ended."""
        for cache in self._opened:
            cache.close()
        self._opened.clear()


def make_storage(
    directory: Path, pool: Any, config: dict[str, Any], **extra: Any
) -> tuple[Any, Any]:
    """Our storage by SGLang's factory, attached to one pool, as a rank of some engine; its config.

    Args:
        config: what SGLang's `HiCacheStorageConfig` shall say else than for one rank alone.
    """
    ranks: dict[str, Any] = {
        "tp_rank": 0,
        "tp_size": 1,
        "pp_rank": 0,
        "pp_size": 1,
        "attn_cp_rank": 0,
        "attn_cp_size": 1,
        "is_mla_model": False,
        "enable_storage_metrics": False,
        "is_page_first_layout": True,
        "model_name": "models/tiny",
    }
    given = HiCacheStorageConfig(**(ranks | config), extra_config=extra_config(directory, **extra))
    storage = StorageBackendFactory.create_backend("dynamic", given, pool)
    storage.register_mem_pool_host(pool)
    storage.on_host_pools_registered()
    return storage, given
