"""LMCache's server beside an engine: its only way to keep KV of a vLLM that runs on a CPU.

Its in-process connector has none for CPUs ("No supported cpu connector found") and recomputes.
Server and engine must be told the same transfer mode: left to themselves they choose two that do
not match, and the engine waits five minutes for an answer. `lmcache_driven`, used here, lets the
server copy out of shared memory; it is faster than the other one, which pickles.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from bench.engine_runs.variants import LMCACHE_CHUNK_TOKENS, Setup, Variant

_START_S = 180.0
_STOP_S = 30.0
_ROOM = 1.5  # it evicts from 80 % on

ENVIRONMENT = {
    "LMCACHE_TRACK_USAGE": "false",
    "LMCACHE_DISABLE_BANNER": "1",
    "LMCACHE_LOG_LEVEL": "WARNING",
}


def arguments(variant: Variant, setup: Setup) -> list[str]:
    """Of `lmcache server`."""
    is_disk = variant.server == "disk"
    n_bytes = setup.sizes.small_host_bytes if is_disk else setup.sizes.host_bytes
    asked = {
        "--port": setup.port,
        "--http-port": setup.port + 1,
        "--chunk-size": LMCACHE_CHUNK_TOKENS,
        "--l1-size-gb": round(n_bytes * _ROOM / (1 << 30), 4),
        "--eviction-policy": "LRU",
        "--supported-transfer-mode": "lmcache_driven",
    }
    made = [word for flag, value in asked.items() for word in (flag, str(value))]
    if is_disk:
        adapter = {"type": "fs_native", "base_path": str(setup.folder), "use_odirect": True}
        made += ["--l2-adapter", json.dumps(adapter)]
    return [*made, "--disable-observability"]


@contextmanager
def running(python: Path, variant: Variant, setup: Setup, log: Path) -> Iterator[None]:
    """The server of a variant that has one, listening; stopped at the end.

    Raises:
        RuntimeError: it does not come up.
    """
    if variant.server is None:
        yield
        return
    command = [str(python.with_name("lmcache")), "server", *arguments(variant, setup)]
    environment = {**os.environ, **ENVIRONMENT, "PYTHONHASHSEED": "0"}
    with log.open("ab") as file:
        server = subprocess.Popen(
            command, stdout=file, stderr=file, env=environment, start_new_session=True
        )
    try:
        _wait_until_listening(server, setup.port)
        yield
    finally:
        _stop(server)


def free_port() -> int:
    """A port that is free now, and so is the next one."""
    while True:
        with socket.socket() as first, socket.socket() as second:
            first.bind(("127.0.0.1", 0))
            port = int(first.getsockname()[1])
            try:
                second.bind(("127.0.0.1", port + 1))
            except OSError:
                continue
            return port


def _wait_until_listening(server: subprocess.Popen[bytes], port: int) -> None:
    deadline = time.monotonic() + _START_S
    while time.monotonic() < deadline:
        if server.poll() is not None:
            raise RuntimeError(f"the LMCache server ended with exit code {server.returncode}")
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.1)
    raise RuntimeError(f"the LMCache server did not listen within {_START_S:.0f} s")


def _stop(server: subprocess.Popen[bytes]) -> None:
    """Ask, then kill the group: nothing it has started stays behind."""
    if server.poll() is None:
        server.terminate()
        with suppress(subprocess.TimeoutExpired):
            server.wait(_STOP_S)
    with suppress(ProcessLookupError):
        os.killpg(server.pid, signal.SIGKILL)
    server.wait()
