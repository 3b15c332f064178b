"""What every check on a GPU stands on: a store, pages of known content, and a report.

Imports only what a machine with torch, numpy and xxhash has. Where the store's other packages are
there too, the store is `TieredStore` itself; where not, the same planner, mover and runs, no disk.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
import xxhash

from bench.rows import Log
from tiered_kv.counters import Counters
from tiered_kv.hbm_pages import HbmPages
from tiered_kv.keys import KeyChain, Namespace, PageKey, page_keys
from tiered_kv.layout import KVLayout
from tiered_kv.mover import Mover
from tiered_kv.plan import HBM, HOST
from tiered_kv.planner import Planner
from tiered_kv.run import Run
from tiered_kv.storage.hbm import HbmTier
from tiered_kv.storage.host import HostTier
from tiered_kv.streams import caller_event
from tiered_kv.transfer import Transfer

LAYERS = 32
_PAGE_TOKENS = 16
_PATIENCE_S = 20.0

Bytes = np.ndarray[Any, np.dtype[np.uint8]]


class Store(Protocol):
    """The part of `TieredStore` that the checks use."""

    hbm: HbmPages

    def get(
        self, keys: Sequence[PageKey], *, into: Sequence[int] | None = None, after: Any = None
    ) -> Transfer:
        """Bring pages into HBM."""

    def put(self, keys: KeyChain, pages: Sequence[int], *, after: Any = None) -> Transfer:
        """Give pages in HBM to the store."""

    def close(self) -> None:
        """Give everything back."""


class BareStore:
    """HBM and host without `TieredStore`, whose configuration and disk need more packages."""

    def __init__(
        self, layout: KVLayout, hbm_bytes: int, host_bytes: int, device: torch.device
    ) -> None:
        self._lock = threading.RLock()
        self._tier = HbmTier(layout, hbm_bytes, str(device))
        self._host = HostTier(layout.page_bytes, host_bytes, pin=device.type == "cuda")
        tiers = {HBM: self._tier, HOST: self._host}
        capacity = {name: tier.capacity_pages for name, tier in tiers.items()}
        self._planner = Planner(tiers, capacity)
        self._mover = Mover(self._planner, self._lock, self._tier, self._host, None, Counters())
        self.hbm = HbmPages(self._tier, self._planner.room, self._mover, self._lock)

    def get(
        self, keys: Sequence[PageKey], *, into: Sequence[int] | None = None, after: Any = None
    ) -> Transfer:
        """As `TieredStore.get`."""
        events, device_event = caller_event(self.hbm.device, after)
        with self._lock:
            plan = self._planner.plan_get(keys, into=into)
            release = self._release if into is None else None
            layers = len(self.hbm.layers)
            transfer = Transfer(plan, layers=layers, deadline_s=60.0, release=release)
            Run(self._mover, transfer, ready=events, device_event=device_event).start()
        return transfer

    def put(self, keys: KeyChain, pages: Sequence[int], *, after: Any = None) -> Transfer:
        """As `TieredStore.put`."""
        events, device_event = caller_event(self.hbm.device, after)
        with self._lock:
            self.hbm.disown(pages)
            transfer = Transfer(self._planner.plan_put(keys, pages))
            Run(self._mover, transfer, ready=events, device_event=device_event).start()
        return transfer

    def _release(self, transfer: Transfer, after: Any) -> None:
        events, device_event = caller_event(self.hbm.device, after)

        def unpin() -> None:
            with self._lock:
                self._planner.release(transfer.plan.pages)

        transfer.settled.on_fire(lambda: self._mover.after(events, device_event, unpin))

    def close(self) -> None:
        """Give everything back."""
        self._mover.close()
        self._host.close()
        self._tier.close()


def open_store(layout: KVLayout, hbm_pages: int, host_pages: int, device: torch.device) -> Store:
    """`TieredStore` where its packages are, else `BareStore`."""
    hbm_bytes = hbm_pages * layout.page_bytes
    host_bytes = host_pages * -(-layout.page_bytes // 4096) * 4096
    try:
        from tiered_kv.config import StoreConfig
        from tiered_kv.store import TieredStore
    except ModuleNotFoundError:
        return BareStore(layout, hbm_bytes, host_bytes, device)
    config = StoreConfig.parse(hbm=hbm_bytes, host=host_bytes, device=str(device))
    return TieredStore(layout, config)


@dataclass(frozen=True, slots=True)
class Verdict:
    """One line of the table: what was looked at, what came out, and whether that is right."""

    check: str
    case: str
    result: str
    passed: bool | None = None


@dataclass(slots=True)
class Rig:
    """The machine under test, and what has been found on it.

    Attributes:
        is_smoke: sizes that a test suite can afford.
    """

    device: torch.device
    is_smoke: bool
    log: Log = field(default_factory=Log)
    verdicts: list[Verdict] = field(default_factory=list)
    _seed: int = 0

    @property
    def has_gpu(self) -> bool:
        """Whether figures are of a GPU."""
        return self.device.type == "cuda"

    def pick(self, full: int, smoke: int) -> int:
        """A size: the full one, or the one for a smoke run."""
        return smoke if self.is_smoke else full

    def found(self, check: str, case: str, result: str, passed: bool | None = None) -> None:
        """Keep a line of the table. `passed` is None where there is nothing to pass."""
        self.verdicts.append(Verdict(check, case, result, passed))

    def layout(self, page_bytes: int) -> KVLayout:
        """Pages of this size, scattered over 32 layers."""
        return KVLayout.uniform(page_bytes, _PAGE_TOKENS, layers=LAYERS)

    def keys(self, layout: KVLayout, pages: int) -> KeyChain:
        """Keys that were never used before."""
        self._seed += 1
        tokens = np.random.default_rng(self._seed).integers(0, 50_000, pages * _PAGE_TOKENS)
        return page_keys(tokens, _PAGE_TOKENS, Namespace("bench", layout.fingerprint))

    def content(self, pages: int, page_bytes: int) -> Bytes:
        """Pages of random bytes, no two alike: uint8 ``[pages, page_bytes]``."""
        self._seed += 1
        source = np.random.Generator(np.random.SFC64(self._seed))
        words = source.integers(0, 2**64, pages * page_bytes // 8, dtype=np.uint64)
        return words.view(np.uint8).reshape(pages, page_bytes)

    def synchronize(self) -> None:
        """Block until the GPU has nothing left to do."""
        if self.has_gpu:
            torch.cuda.synchronize(self.device)


def checksums(pages: Bytes) -> list[bytes]:
    """xxh3-128 of each page."""
    return [xxhash.xxh3_128_digest(page) for page in pages]


def on_device(store: Store, slots: Sequence[int]) -> torch.Tensor:
    """Slots as an index tensor. Made ahead: it copies, and so waits for all that is queued."""
    return torch.tensor(slots, device=store.hbm.device)


def write_pages(store: Store, at: torch.Tensor, pages: torch.Tensor) -> None:
    """Put ``[pages, page_bytes]`` into HBM slots as an engine does, on the current stream."""
    for layer, rows in zip(store.hbm.layers, pages.tensor_split(LAYERS, dim=1), strict=True):
        layer.index_copy_(0, at, rows)


def read_pages(store: Store, at: torch.Tensor) -> torch.Tensor:
    """HBM slots as ``[pages, page_bytes]``, gathered on the current stream."""
    return torch.cat([layer.index_select(0, at) for layer in store.hbm.layers], dim=1)


def wrong_pages(found: torch.Tensor, expected: Sequence[bytes]) -> int:
    """How many pages do not have the checksum they should have."""
    sums = checksums(found.cpu().numpy())
    return sum(one != other for one, other in zip(sums, expected, strict=True))


def until(make: Callable[[], Any]) -> Any:
    """Call until the result is true: for what a store does a moment later, in its own threads.

    Raises:
        TimeoutError: it never came true.
    """
    end = time.monotonic() + _PATIENCE_S
    while not (made := make()):
        if time.monotonic() > end:
            raise TimeoutError(f"waited {_PATIENCE_S} s in vain")
        time.sleep(0.0002)
    return made


def all_hbm(store: Store) -> list[int]:
    """Every HBM slot, owned by the caller: nothing is cached in HBM any more."""
    slots: list[int] = until(lambda: store.hbm.allocate(store.hbm.capacity_pages))
    return slots
