"""LMCache's server keeps pages on disk by L2 adapters: two of them, as its controllers call them.

The adapters move pages between disk and memory objects that their caller owns. Here these lie over
the caller's pages: no copy between is charged to them.
"""

from __future__ import annotations

import os
import select
from abc import abstractmethod
from collections.abc import Callable, Sequence
from importlib.metadata import version
from typing import Any

import torch
from lmcache.v1.distributed.api import MemoryLayoutDesc, ObjectKey
from lmcache.v1.distributed.internal_api import L1MemoryDesc
from lmcache.v1.distributed.l2_adapters import create_l2_adapter
from lmcache.v1.distributed.l2_adapters.config import L2AdapterConfigBase
from lmcache.v1.distributed.l2_adapters.fs_native_l2_adapter import FSNativeL2AdapterConfig
from lmcache.v1.distributed.l2_adapters.raw_block_l2_adapter import RawBlockL2AdapterConfig
from lmcache.v1.memory_management import MemoryFormat, MemoryObjMetadata, TensorMemoryObj

from bench.peers.adapter import Adapter, Setup, require
from bench.peers.pages import DISK_SETS, Bytes

_WAIT_S = 100.0
_ALIGNMENT = 4096


class L2(Adapter):
    """An L2 adapter. A batch is cut into as many tasks as it has workers."""

    operations = ("put_durable", "get_cold", "lookup_present", "lookup_absent")
    packages: tuple[str, ...] = ("lmcache", "torch")

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        torch.set_num_threads(1)
        self.settings = self.adapter_settings()
        self._from = [_memory_object(page) for page in self.sources()]
        self._into = [_memory_object(page) for page in self.targets()]
        self._layout = {0: MemoryLayoutDesc([torch.Size((setup.page_bytes,))], [torch.uint8])}
        self._adapter = create_l2_adapter(self.adapter_config(), self._memory())

    @abstractmethod
    def adapter_settings(self) -> dict[str, Any]:
        """The JSON of `--l2-adapter`."""

    @abstractmethod
    def adapter_config(self) -> L2AdapterConfigBase:
        """The same, read by LMCache."""

    @abstractmethod
    def workers(self) -> tuple[int, int]:
        """Tasks that it carries out at once: stores, loads."""

    def _memory(self) -> L1MemoryDesc:
        return L1MemoryDesc(self._into[0].data_ptr, self.setup.set_bytes, _ALIGNMENT)

    def configuration(self) -> dict[str, Any]:
        return {
            "l2-adapter": {
                key: os.path.basename(value) if key.endswith("path") else value
                for key, value in self.settings.items()
            },
            "tasks a batch": "{} stores, {} loads".format(*self.workers()),
        }

    def versions(self) -> dict[str, str]:
        return {package: version(package) for package in self.packages}

    def name(self, digest: bytes) -> Any:
        return ObjectKey(digest, "bench", 0)

    def put_durable(self) -> None:
        adapter, done = self._adapter, {}
        tasks = {
            adapter.submit_store_task(self.keys[part], self._from[part])
            for part in self._parts(self.workers()[0])
        }

        def is_done() -> bool:
            done.update(adapter.pop_completed_store_tasks())
            return set(done) == tasks

        _wait(adapter.get_store_event_fd(), is_done)
        failed = [task for task, result in done.items() if not result.is_successful()]
        require(len(tasks) - len(failed), len(tasks), "stored, in tasks of many")

    def get_cold(self) -> None:
        adapter = self._adapter
        waiting = {
            adapter.submit_load_task(self.keys[part], self._into[part])
            for part in self._parts(self.workers()[1])
        }
        came = self._results(waiting, adapter.query_load_result, adapter.get_load_event_fd())
        require(came, self.setup.pages, "loaded")

    def lookup(self, keys: Sequence[Any]) -> int:
        adapter = self._adapter
        waiting = {adapter.submit_lookup_and_lock_task(list(keys), self._layout)}
        fd = adapter.get_lookup_and_lock_event_fd()
        found = self._results(waiting, adapter.query_lookup_and_lock_result, fd)
        adapter.submit_unlock(list(keys))
        return found

    def _results(self, waiting: set[int], query: Callable[[int], Any], fd: int) -> int:
        found = 0

        def is_done() -> bool:
            nonlocal found
            for task in list(waiting):
                bitmap = query(task)
                if bitmap is not None:
                    waiting.remove(task)
                    found += bitmap.popcount()
            return not waiting

        _wait(fd, is_done)
        return found

    def _parts(self, count: int) -> list[slice]:
        step = -(-self.setup.pages // count)
        return [slice(at, at + step) for at in range(0, self.setup.pages, step)]

    def clear(self) -> None:
        self._adapter.delete(list(self.keys))

    def close(self) -> None:
        self._adapter.close()


class FsNative(L2):
    """One file a page, C++ threads."""

    def adapter_settings(self) -> dict[str, Any]:
        return {
            "type": "fs_native",
            "base_path": str(self.setup.folder / "fs_native"),
            "num_workers": 4,
            "use_odirect": True,
        }

    def adapter_config(self) -> L2AdapterConfigBase:
        return FSNativeL2AdapterConfig.from_dict(self.settings)

    def workers(self) -> tuple[int, int]:
        return 1, 1  # its own threads share a batch

    def clear(self) -> None:
        """It cannot delete: its files are removed."""
        super().clear()
        for path in (self.setup.folder / "fs_native").rglob("*"):
            if path.is_file():
                path.unlink()


class RawBlock(L2):
    """Slots of one size in a file that stands in for a block device; index in memory."""

    packages = ("lmcache", "lmcache-rust-raw-block-io", "torch")
    _META_BYTES = 16 << 20

    def adapter_settings(self) -> dict[str, Any]:
        slot = self.setup.page_bytes + _ALIGNMENT  # its header
        path = self.setup.folder / "raw_block"
        size = self._META_BYTES + (DISK_SETS * self.setup.pages + 2) * slot
        with path.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, size)
        return {
            "type": "raw_block",
            "device_path": str(path),
            "slot_bytes": slot,
            "capacity_bytes": size,
            "meta_total_bytes": self._META_BYTES,
            "use_odirect": True,
            "io_engine": "io_uring",
            "num_store_workers": 2,
            "num_load_workers": 4,
        }

    def adapter_config(self) -> L2AdapterConfigBase:
        return RawBlockL2AdapterConfig.from_dict(self.settings)

    def workers(self) -> tuple[int, int]:
        return self.settings["num_store_workers"], self.settings["num_load_workers"]


def _memory_object(page: Bytes) -> Any:
    """What the adapters take, over a page of the caller's."""
    raw = torch.from_numpy(page)
    metadata = MemoryObjMetadata(
        shape=torch.Size((page.nbytes,)),
        dtype=torch.uint8,
        address=raw.data_ptr(),
        phy_size=page.nbytes,
        ref_count=1,
        fmt=MemoryFormat.KV_2LTD,
    )
    return TensorMemoryObj(raw, metadata, None)


def _wait(fd: int, is_done: Callable[[], bool]) -> None:
    """Until it is done, looking each time the event file descriptor says there is news."""
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    while not is_done():
        if not poll.poll(_WAIT_S * 1000):
            raise RuntimeError(f"no answer within {_WAIT_S:.0f} s")
        os.read(fd, 8)
