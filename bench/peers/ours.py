"""tiered-kv itself, by its two faces: TieredStore over host memory and disk, DiskStore on disk."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import numpy as np

from bench.peers.adapter import Adapter, Setup, require
from bench.peers.pages import DISK_SETS, LOOKUP_KEYS, Bytes
from tiered_kv.config import StoreConfig
from tiered_kv.disk_store import DiskStore
from tiered_kv.keys import KeyChain, PageKey
from tiered_kv.layout import KVLayout
from tiered_kv.store import TieredStore

_PAGE_TOKENS = 16
_HOST_SETS = 2.25  # as the pools of the others have
_METADATA_BYTES = 64 << 20


def _versions() -> dict[str, str]:
    found = {"numpy": np.__version__}
    for package in ("tiered-kv", "torch", "lmdb", "xxhash"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    return found


class Store(Adapter):
    """TieredStore. The caller's memory is its HBM tier, which stands in host memory on a CPU.

    `put_durable` is `flush`: from host memory to disk, synced and committed. The memory tier is
    emptied by closing the store and opening it again. What a round has stored gives way to the
    next one by policy, as in a store that has been full for long.
    """

    operations = ("put", "get_host", "put_durable", "get_cold", "lookup_present", "lookup_absent")

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self._layout = KVLayout.uniform(setup.page_bytes, _PAGE_TOKENS, layers=1)
        self._settings = {
            "hbm": 2 * setup.set_bytes,
            "host": int(_HOST_SETS * setup.set_bytes),
            "disk": setup.folder / "store",
            "disk_size": DISK_SETS * setup.set_bytes + _METADATA_BYTES,
            "device": "cpu",
            "deadline_s": None,
        }
        self._open()

    def _open(self) -> None:
        self._store = TieredStore.open(self._layout, StoreConfig.parse(**self._settings))
        self._slots: list[int] = []

    def configuration(self) -> dict[str, Any]:
        shown = {**self._settings, "disk": "store", "page_tokens": _PAGE_TOKENS, "layers": 1}
        return {"TieredStore": shown}

    def versions(self) -> dict[str, str]:
        return _versions()

    def begin(self, number: int) -> None:
        self.number = number
        self._chain = self._keys(number, "here", self.setup.pages)
        whole, rest = divmod(LOOKUP_KEYS, self.setup.pages)
        self.present = [self._chain] * whole + [self._chain[:rest]] * (rest > 0)
        self.absent = [self._keys(number, f"absent {at}", 1) for at in range(LOOKUP_KEYS)]
        self._slots = self._take()

    def _keys(self, number: int, salt: str, pages: int) -> KeyChain:
        tokens = np.random.default_rng(number).integers(0, 50_000, pages * _PAGE_TOKENS)
        return self._store.keys(tokens, salt=salt)

    def _take(self) -> list[int]:
        """Slots for all pages, and no page of the store's own left in HBM."""
        slots = self._store.hbm.allocate(self._store.hbm.capacity_pages)
        assert slots is not None, "on a CPU a page is free as soon as its transfer has ended"
        self._store.hbm.release(slots[self.setup.pages :])
        return slots[: self.setup.pages]

    def sources(self) -> list[Bytes]:
        return self._rows()

    def targets(self) -> list[Bytes]:
        if not self._slots:
            self._slots = self._take()
        return self._rows()

    def _rows(self) -> list[Bytes]:
        pool = self._store.hbm.layers[0].numpy()
        return [pool[slot] for slot in self._slots]

    def put(self) -> None:
        slots, self._slots = self._slots, []
        require(self._store.put(self._chain, slots).wait(), self.setup.pages, "put")

    def get_host(self) -> None:
        self._get()

    def get_cold(self) -> None:
        self._get()

    def _get(self) -> None:
        got = self._store.get(self._chain, into=self._slots).wait()
        require(got, self.setup.pages, "get")

    def put_durable(self) -> None:
        require(self._store.flush(), self.setup.pages, "flush")

    def empty_host(self) -> None:
        self._store.close()
        self._open()

    def lookup(self, keys: Sequence[Any]) -> int:
        """A match a prefix: the whole round, time and again; absent keys one by one."""
        match = self._store.match
        return sum(match(one).pages for one in keys)

    def clear(self) -> None:
        self._store.hbm.release(self._slots)
        self._slots = []

    def close(self) -> None:
        self._store.close()


class Disk(Adapter):
    """DiskStore: from the caller's memory to disk and back, no memory tier."""

    operations = ("put_durable", "get_cold", "lookup_present", "lookup_absent")

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self._size = DISK_SETS * setup.set_bytes + _METADATA_BYTES
        self._store = DiskStore.open(setup.folder / "disk", self._size, setup.page_bytes, "bench")

    def configuration(self) -> dict[str, Any]:
        return {"DiskStore": {"size": self._size, "io_threads": "4 (default)"}}

    def versions(self) -> dict[str, str]:
        return _versions()

    def name(self, digest: bytes) -> PageKey:
        return PageKey(digest)

    def put_durable(self) -> None:
        stored = self._store.put(self.keys, self.sources(), [None, *self.keys[:-1]])
        require(sum(stored), self.setup.pages, "put")

    def get_cold(self) -> None:
        came = self._store.get(self.keys, self.targets())
        require(sum(came), self.setup.pages, "get")

    def lookup(self, keys: Sequence[Any]) -> int:
        return sum(self._store.contains(keys))

    def clear(self) -> None:
        """The next round takes its room by policy."""

    def close(self) -> None:
        self._store.close()
