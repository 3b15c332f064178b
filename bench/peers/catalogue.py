"""The peers: their environments, what runs them, and what each of them does not do."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bench.peers.adapter import Adapter


@dataclass(frozen=True, slots=True)
class Peer:
    """One line of the tables.

    Attributes:
        venv: folder of its environment in the repository; None for the driver's own.
        where: module and class of its adapter, imported in that environment.
        durable: what it does before it calls a page stored on disk.
        lacks: what of checksums, fsync and crash safety it does not do.
        lookup: what its lookup asks.
        answers_prefixes: it says how much of a prefix is there, not which keys: keys that are not
            there cost it a call each.
        environment: variables of its process.
    """

    name: str
    what: str
    venv: str | None
    where: str
    durable: str
    lacks: str
    lookup: str = ""
    answers_prefixes: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def is_ours(self) -> bool:
        """Of this project."""
        return self.name.startswith("tiered-kv")

    @property
    def is_limit(self) -> bool:
        """The machine alone."""
        return self.name == RAW

    @property
    def is_durable(self) -> bool:
        """It syncs by itself; nobody need do it afterwards."""
        return self.is_ours or self.is_limit

    def adapter(self) -> type[Adapter]:
        """Its class; imports the peer."""
        module, _, name = self.where.partition(":")
        found: type[Adapter] = getattr(import_module(f"bench.peers.{module}"), name)
        return found


RAW = "raw"
_LMCACHE = {
    "LMCACHE_TRACK_USAGE": "false",
    "LMCACHE_DISABLE_BANNER": "1",
    "LMCACHE_LOG_LEVEL": "WARNING",
    "PYTHONHASHSEED": "0",
}
_VLLM = {"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "VLLM_LOGGING_LEVEL": "WARNING"}
_SYSTEM = "{venv}/system"  # libraries of the system that a wheel needs and a machine may not have
_MOONCAKE = {
    "LD_LIBRARY_PATH": f"{_SYSTEM}/usr/lib/x86_64-linux-gnu:{_SYSTEM}/lib/x86_64-linux-gnu",
    "MC_LOG_LEVEL": "ERROR",
}
_NO_FSYNC = "no checksum, no fsync"

_ALL = (
    Peer(
        RAW,
        "the machine: one-thread memcpy, O_DIRECT on one file",
        None,
        "raw:Raw",
        "fdatasync",
        "everything a store does",
    ),
    Peer(
        "tiered-kv",
        "TieredStore: host memory above disk",
        None,
        "ours:Store",
        "fdatasync + commit",
        "-",
        "match of a prefix over all tiers; absent keys one by one",
        True,
    ),
    Peer(
        "tiered-kv-disk",
        "DiskStore: disk alone, to and from the caller's memory",
        None,
        "ours:Disk",
        "fdatasync + commit",
        "-",
        "contains, an answer a key",
    ),
    Peer(
        "lmcache-local",
        "LMCache in-process: LocalCPUBackend above LocalDiskBackend, buffered",
        ".venv-lmcache",
        "lmcache_local:Local",
        "no fsync",
        f"{_NO_FSYNC}; its index is lost at a restart",
        "contains, one key a call, in memory",
        options={"use_odirect": False},
        environment=_LMCACHE,
    ),
    Peer(
        "lmcache-local-direct",
        "the same with use_odirect",
        ".venv-lmcache",
        "lmcache_local:Local",
        "no fsync",
        f"{_NO_FSYNC}; its index is lost at a restart",
        "contains, one key a call, in memory",
        options={"use_odirect": True},
        environment=_LMCACHE,
    ),
    Peer(
        "lmcache-fs-native",
        "LMCache MP: L2 adapter fs_native, O_DIRECT",
        ".venv-lmcache",
        "lmcache_l2:FsNative",
        "no fsync (rename)",
        _NO_FSYNC,
        "lookup-and-lock of a batch: files",
        environment=_LMCACHE,
    ),
    Peer(
        "lmcache-raw-block",
        "LMCache MP: L2 adapter raw_block, io_uring, O_DIRECT, on a file",
        ".venv-lmcache",
        "lmcache_l2:RawBlock",
        "no fsync; index written every 60 s when idle",
        f"{_NO_FSYNC}; pages since the last checkpoint are lost in a crash",
        "lookup-and-lock of a batch, in memory",
        environment=_LMCACHE,
    ),
    Peer(
        "sglang-file",
        "SGLang HiCache: HiCacheFile",
        ".venv-sglang",
        "sglang_file:File",
        "no fsync (rename)",
        _NO_FSYNC,
        "batch_exists of a prefix: files; absent keys one by one",
        True,
    ),
    Peer(
        "vllm-fs",
        "vLLM tiering: secondary tier fs, O_DIRECT",
        ".venv-engines",
        "vllm_fs:Fs",
        "no fsync (rename)",
        _NO_FSYNC,
        "lookup of a request's keys, asked again until its thread has answered: files",
        environment=_VLLM,
    ),
    Peer(
        "mooncake",
        "Mooncake Store: master, one client, a memory segment, SSD offload by io_uring",
        ".venv-peer-mooncake",
        "mooncake_store:Mooncake",
        "no fsync; written at its heartbeat, of 1 s",
        _NO_FSYNC,
        "batch_is_exist, asked of the master by RPC",
        options={"ssd": True},
        environment=_MOONCAKE,
    ),
    Peer(
        "mooncake-tcp",
        "the same over a TCP socket of the loopback, in memory alone",
        ".venv-peer-mooncake",
        "mooncake_store:Mooncake",
        "-",
        "no checksum",
        "batch_is_exist, asked of the master by RPC",
        options={"ssd": False},
        environment={**_MOONCAKE, "MC_STORE_MEMCPY": "0"},
    ),
)
PEERS: dict[str, Peer] = {peer.name: peer for peer in _ALL}
SMOKE = (RAW, "tiered-kv", "tiered-kv-disk")
