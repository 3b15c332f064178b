"""Mooncake Store on one machine: a master process and one client with a segment of memory.

Without RDMA. Between a client and its own segment Mooncake copies in memory; `MC_STORE_MEMCPY=0`
sends the same over a TCP socket of the loopback, as between two machines. With SSD offload the
client writes what the master tells it to at a heartbeat, of which the shortest interval is 1 s:
that wait is in `put_durable`, and no other way leads to its disk.
"""

from __future__ import annotations

import os
import socket
import subprocess
import time
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import mooncake
from mooncake.store import MooncakeDistributedStore

from bench.peers.adapter import Adapter, Setup, require

_HOST = "127.0.0.1"
_START_S, _WAIT_S, _POLL_S = 30.0, 60.0, 0.01
_LEASE_MS = 1000  # a key that was looked at neither loses a replica nor is removed before
_BUCKETS = 4  # a set: it writes full ones alone, so they must divide it
_SEGMENT_SETS = 3


class Mooncake(Adapter):
    """`batch_put_from` and `batch_get_into`, zero-copy on registered memory."""

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self._has_ssd = bool(setup.options["ssd"])
        self.operations = ("put", "get_host", "lookup_present", "lookup_absent")
        if self._has_ssd:
            self.operations += ("put_durable", "get_cold")
        self._files = setup.folder / "ssd"
        self._files.mkdir()
        self._variables = self._offload() if self._has_ssd else {}
        os.environ.update(self._variables)
        self._port = _free_port()
        self._flags = [f"--default_kv_lease_ttl={_LEASE_MS}", "--rpc_address=127.0.0.1"]
        self._flags += ["--metrics_host=127.0.0.1", "--enable_metric_reporting=false"]
        self._flags += ["--enable_offload=true"] * self._has_ssd
        self._master = self._start_master()
        try:
            self._store = self._open()
        except BaseException:
            self._stop_master()
            raise
        self._from = [page.ctypes.data for page in self.sources()]
        self._into = [page.ctypes.data for page in self.targets()]
        for first in (self._from[0], self._into[0]):
            _require_ok(self._store.register_buffer(first, setup.set_bytes), "register_buffer")
        self._sizes = [setup.page_bytes] * setup.pages

    def _offload(self) -> dict[str, str]:
        pages, set_bytes = self.setup.pages, self.setup.set_bytes
        return {
            "MOONCAKE_OFFLOAD_FILE_STORAGE_PATH": str(self._files),
            "MOONCAKE_OFFLOAD_STORAGE_BACKEND_DESCRIPTOR": "bucket_storage_backend",
            "MOONCAKE_OFFLOAD_BUCKET_KEYS_LIMIT": str(max(1, pages // _BUCKETS)),
            "MOONCAKE_OFFLOAD_BUCKET_SIZE_LIMIT_BYTES": str(2 * set_bytes),
            "MOONCAKE_OFFLOAD_BUCKET_MAX_TOTAL_SIZE": str(5 * set_bytes // 2),
            "MOONCAKE_OFFLOAD_BUCKET_EVICTION_POLICY": "fifo",
            "MOONCAKE_OFFLOAD_LOCAL_BUFFER_SIZE_BYTES": str(4 * set_bytes),
            "MOONCAKE_OFFLOAD_HEARTBEAT_INTERVAL_SECONDS": "1",
            "MOONCAKE_OFFLOAD_USE_URING": "true",
        }

    def _start_master(self) -> subprocess.Popen[bytes]:
        program = Path(mooncake.__file__).with_name("mooncake_master")
        ports = [f"--rpc_port={self._port}", f"--metrics_port={_free_port()}"]
        master = subprocess.Popen([str(program), *ports, *self._flags], stdout=2, stderr=2)
        deadline = time.monotonic() + _START_S
        while time.monotonic() < deadline and master.poll() is None:
            with socket.socket() as probe:
                if probe.connect_ex((_HOST, self._port)) == 0:
                    return master
            time.sleep(0.05)
        master.kill()
        raise RuntimeError(f"mooncake_master does not listen (exit code {master.wait()})")

    def _open(self) -> Any:
        store = MooncakeDistributedStore()
        asked = {
            "local_hostname": _HOST,
            "metadata_server": "P2PHANDSHAKE",
            "global_segment_size": str(_SEGMENT_SETS * self.setup.set_bytes),
            "local_buffer_size": str(self.setup.set_bytes),
            "protocol": "tcp",
            "master_server_addr": f"{_HOST}:{self._port}",
        }
        if self._has_ssd:
            asked |= {"enable_ssd_offload": "true", "ssd_offload_path": str(self._files)}
        _require_ok(store.setup(asked), "setup")
        return store

    def configuration(self) -> dict[str, Any]:
        shown = {**self._variables}
        if self._has_ssd:
            shown["MOONCAKE_OFFLOAD_FILE_STORAGE_PATH"] = "ssd"
        return {
            "master": self._flags,
            "client": {
                "protocol": "tcp",
                "metadata_server": "P2PHANDSHAKE",
                "global_segment_size": _SEGMENT_SETS * self.setup.set_bytes,
                "local_buffer_size": self.setup.set_bytes,
                "MC_STORE_MEMCPY": os.environ.get("MC_STORE_MEMCPY", "1 (default)"),
            },
            "offload": shown,
        }

    def versions(self) -> dict[str, str]:
        name = "mooncake-transfer-engine-non-cuda"
        return {name: version(name)}

    def name(self, digest: bytes) -> str:
        return digest.hex()

    def put(self) -> None:
        codes = self._store.batch_put_from(self.keys, self._from, self._sizes)
        require(codes.count(0), self.setup.pages, "put")

    def get_host(self) -> None:
        self._get()

    def get_cold(self) -> None:
        self._get()

    def _get(self) -> None:
        came = self._store.batch_get_into(self.keys, self._into, self._sizes)
        done = came.count(self.setup.page_bytes)
        if done < self.setup.pages:
            raise RuntimeError(f"get: {done} of {self.setup.pages} pages, code {min(came)}")

    def prepare(self, operation: str) -> None:
        """It has been writing since `put`: let that end, and have other keys put again."""
        if operation == "put_durable":
            self._await_disk()
            self.clear()
            self.rename([f"{key}-again" for key in self.keys])

    def put_durable(self) -> None:
        """Put, and wait until the master knows of a copy on disk of every page."""
        self.put()
        self._await_disk()

    def _await_disk(self) -> None:
        deadline = time.monotonic() + _WAIT_S
        while (count := self._on_disk()) < self.setup.pages:
            if time.monotonic() > deadline:
                require(count, self.setup.pages, f"on disk after {_WAIT_S:.0f} s")
            time.sleep(_POLL_S)

    def _on_disk(self) -> int:
        found = self._store.batch_get_replica_desc(self.keys)
        return sum(
            any(replica.is_local_disk_replica() for replica in found.get(key, ()))
            for key in self.keys
        )

    def empty_host(self) -> None:
        """Drop the copies in memory, when nobody has a lease on them any more."""
        time.sleep(1.1 * _LEASE_MS / 1000)
        cleared = self._store.batch_replica_clear(self.keys, self._store.get_hostname())
        require(len(cleared), self.setup.pages, "dropped from memory")

    def lookup(self, keys: Sequence[Any]) -> int:
        found: int = self._store.batch_is_exist(list(keys)).count(1)
        return found

    def clear(self) -> None:
        self._store.batch_remove(self.keys, True)

    def close(self) -> None:
        self._store.close()
        del self._store  # only then it leaves the master, which must be there still
        self._stop_master()

    def _stop_master(self) -> None:
        self._master.kill()
        self._master.wait()


def _require_ok(code: int, what: str) -> None:
    if code:
        raise RuntimeError(f"{what} failed: {code}")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((_HOST, 0))
        return int(probe.getsockname()[1])
