"""What is compared: an engine without offloading, with ours, and with the others that run here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from bench.engine_runs.conversations import Workload
from bench.engine_runs.models import ModelSize

BLOCK_TOKENS = 32
BASELINE = "none"
LMCACHE_CHUNK_TOKENS = 64  # its default of 256 would leave up to 255 tokens to recompute

KvTransfer = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much room each level gets, the same for every variant.

    Attributes:
        engine_tokens: of the engine's own KV cache: one conversation, not all of them.
        host_bytes: a host tier that holds all conversations.
        small_host_bytes: one before a disk: of any conversation nothing is left when it returns.
        disk_bytes: bound of a disk tier, where it has one.
    """

    engine_tokens: int
    all_tokens: int
    host_bytes: int
    small_host_bytes: int
    disk_bytes: int

    @classmethod
    def of(cls, workload: Workload, model: ModelSize) -> Sizes:
        """For these conversations of this model."""
        longest, total = workload.longest_tokens, workload.total_tokens
        per_token = model.kv_bytes_per_token
        mib = 1 << 20
        return cls(
            engine_tokens=_up(longest + longest // 4, BLOCK_TOKENS),
            all_tokens=_up(total + 2 * longest, BLOCK_TOKENS),
            host_bytes=_up(2 * total * per_token + 16 * mib, mib),
            small_host_bytes=_up(2 * longest * per_token + mib, mib),
            disk_bytes=_up(3 * total * per_token + 64 * mib, mib),
        )


def _up(count: int, step: int) -> int:
    return -(-count // step) * step


@dataclass(frozen=True, slots=True)
class Setup:
    """What one run of a variant is given."""

    sizes: Sizes
    folder: Path
    port: int


def _tiered(setup: Setup, **extra: Any) -> KvTransfer:
    return {
        "kv_connector": "TieredKVConnector",
        "kv_connector_module_path": "tiered_kv.plugins.vllm",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": extra,
    }


def _tiered_host(setup: Setup) -> KvTransfer:
    return _tiered(setup, host=setup.sizes.host_bytes)


def _tiered_disk(setup: Setup) -> KvTransfer:
    return _tiered(
        setup,
        host=setup.sizes.small_host_bytes,
        disk=str(setup.folder),
        disk_size=setup.sizes.disk_bytes,
    )


def _example(setup: Setup) -> KvTransfer:
    return {
        "kv_connector": "ExampleConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": str(setup.folder)},
    }


def _offloading(cpu_bytes: int, secondary: list[dict[str, Any]]) -> KvTransfer:
    return {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "spec_name": "CpuTieringSpec",
            "spec_module_path": "bench.engine_runs.cpu_tiering",
            "cpu_bytes_to_use": cpu_bytes,
            "offload_prompt_only": False,
            "secondary_tiers": secondary,
        },
    }


def _vllm_host(setup: Setup) -> KvTransfer:
    return _offloading(setup.sizes.host_bytes, [])


def _vllm_disk(setup: Setup) -> KvTransfer:
    tier = {"type": "fs", "root_dir": str(setup.folder)}
    return _offloading(setup.sizes.small_host_bytes, [tier])


def _lmcache(setup: Setup) -> KvTransfer:
    return {
        "kv_connector": "LMCacheMPConnector",
        "kv_connector_module_path": "lmcache.integration.vllm.lmcache_mp_connector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "lmcache.mp.host": "tcp://localhost",
            "lmcache.mp.port": setup.port,
            "lmcache.mp.mp_transfer_mode": "lmcache_driven",
        },
    }


@dataclass(frozen=True, slots=True)
class Variant:
    """One of what is compared.

    Attributes:
        kv_transfer: fields of vLLM's `KVTransferConfig`; None where the engine has no connector.
        venv: which environment its engine runs in.
        restarts: whether the engine is restarted halfway, with an empty page cache of its files.
        keeps_all: whether the engine's own KV cache holds all conversations.
        rounds: at most so many; None: as many as there are.
        turns: the same of turns; two show what never hits.
        server: the tiers of a server that runs beside the engine.
    """

    name: str
    what: str
    kv_transfer: Callable[[Setup], KvTransfer] | None = None
    venv: Literal["engines", "lmcache"] = "engines"
    restarts: bool = False
    keeps_all: bool = False
    rounds: int | None = None
    turns: int | None = None
    server: Literal["host", "disk"] | None = None

    @property
    def is_ours(self) -> bool:
        """Not the engine alone, not a peer."""
        return self.name.startswith("tiered-kv")

    @property
    def is_peer(self) -> bool:
        """Something else that keeps KV outside the engine."""
        return self.kv_transfer is not None and not self.is_ours


VARIANTS = {
    one.name: one
    for one in (
        Variant(BASELINE, "vLLM alone: what does not fit its KV cache is recomputed"),
        Variant("tiered-kv-host", "ours, host tier", _tiered_host),
        Variant("tiered-kv-disk", "ours, disk tier, after a restart", _tiered_disk, restarts=True),
        Variant("vllm-host", "vLLM's tiering, host tier, with a CPU worker", _vllm_host),
        Variant(
            "lmcache-host",
            "LMCache server, L1 in host memory",
            _lmcache,
            venv="lmcache",
            server="host",
        ),
        Variant(
            "vllm-disk",
            "vLLM's tiering, fs tier, after a restart",
            _vllm_disk,
            restarts=True,
            rounds=1,
        ),
        Variant(
            "lmcache-disk",
            "LMCache server, L2 fs_native, after a restart of engine and server",
            _lmcache,
            venv="lmcache",
            restarts=True,
            rounds=1,
            server="disk",
        ),
        Variant("vllm-example", "vLLM's ExampleConnector", _example, rounds=1, turns=2),
        Variant(
            "resident",
            "vLLM alone with a KV cache that holds all: the floor",
            keeps_all=True,
            rounds=1,
        ),
    )
}
"""By name, in the order in which they run within a round."""
