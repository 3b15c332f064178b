"""Pages of known content in a store's HBM, and whether they come back as they were."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
import xxhash

from tiered_kv.config import StoreConfig
from tiered_kv.keys import KeyChain
from tiered_kv.layout import KVLayout
from tiered_kv.storage.base import PageBuffer
from tiered_kv.store import TieredStore
from tiered_kv.transfer import Transfer

LAYERS = 32
PAGE_TOKENS = 16
_STAMP_BYTES = 8
_PATIENCE_S = 20.0
_SEED = 7
_numbers = itertools.count(1)  # of conversations: a store that is opened again holds older ones


def page_layout(page_bytes: int) -> KVLayout:
    """Pages of this size, scattered over 32 layers of a pool that is kept layer by layer."""
    return KVLayout.uniform(page_bytes, PAGE_TOKENS, layers=LAYERS)


def open_store(layout: KVLayout, config: StoreConfig) -> TieredStore:
    """The store that is measured."""
    return TieredStore.open(layout, config)


@dataclass(frozen=True, slots=True)
class Load:
    """What is moved at once: so many transfers of so many pages, all in flight together."""

    transfers: int
    transfer_pages: int

    @property
    def pages(self) -> int:
        """Pages of all transfers."""
        return self.transfers * self.transfer_pages


@dataclass(frozen=True, slots=True)
class Conversation:
    """Consecutive pages that no other shares: their keys, slots they were made in, checksums."""

    keys: KeyChain
    slots: list[int]
    digests: list[bytes]

    def __len__(self) -> int:
        return len(self.keys)

    def part(self, first: int, pages: int) -> Conversation:
        """Some consecutive pages of it."""
        cut = slice(first, first + pages)
        return Conversation(self.keys[cut], self.slots[cut], self.digests[cut])


@dataclass(slots=True)
class Pages:
    """The HBM slots of a store as an engine has them: owned, in shuffled order, full of KV.

    Attributes:
        verified: pages read back whose checksum (xxh3-128) was right.
        failed: pages whose was not.
        lost: pages that did not come back at all.
    """

    store: TieredStore
    free: list[int] = field(default_factory=list)
    verified: int = 0
    failed: int = 0
    lost: int = 0
    _random: np.random.Generator = field(
        default_factory=lambda: np.random.Generator(np.random.SFC64(_SEED))
    )

    def fill(self) -> None:
        """Random bytes for all of HBM, no two pages alike."""
        for layer in self.store.hbm.layers:
            words = self._random.integers(0, 2**63, layer.numel() // 8 + 1, dtype=np.int64)
            random = torch.from_numpy(words.view(np.uint8)[: layer.numel()])
            layer.copy_(random.reshape(layer.shape))

    def own(self) -> None:
        """Take every HBM slot: nothing that is stored is in HBM any more. Waits for its users."""
        hbm = self.store.hbm
        if self.free:
            hbm.release(self.free)
            self.free = []
        end = time.monotonic() + _PATIENCE_S
        while (slots := hbm.allocate(hbm.capacity_pages)) is None:
            if time.monotonic() > end:
                raise TimeoutError(f"HBM slots were still in use after {_PATIENCE_S} s")
            time.sleep(0.0002)
        self.free = self._random.permutation(slots).tolist()

    def take(self, n: int) -> list[int]:
        """Some of the slots owned, in no order; the caller gives them to `put`."""
        taken, self.free = self.free[:n], self.free[n:]
        assert len(taken) == n, "HBM has room for two sets"
        return taken

    def make(self, load: Load) -> list[Conversation]:
        """New conversations, in slots that are owned until they are put."""
        made = [self._conversation(load.transfer_pages) for _ in range(load.transfers)]
        self._synchronize()
        return made

    def _conversation(self, pages: int) -> Conversation:
        slots = self.take(pages)
        number = next(_numbers)
        tokens = np.full(pages * PAGE_TOKENS, number % (1 << 31), dtype=np.uint32)
        stamps = np.arange(pages, dtype=np.int64) + (number << 32)
        rows = torch.from_numpy(stamps.view(np.uint8).reshape(pages, _STAMP_BYTES))
        layer = self.store.hbm.layers[0]
        at = torch.tensor(slots, device=layer.device)
        layer[:, :_STAMP_BYTES].index_copy_(0, at, rows.to(layer.device))
        digests = _digests(self._read(slots))
        return Conversation(self.store.keys(tokens, salt="bench"), slots, digests)

    def put(self, made: Sequence[Conversation]) -> None:
        """Put and wait until all pages are on host."""
        for came, one in zip(wait_all(put_all(self.store, made)), made, strict=True):
            self.lost += len(one) - came

    def slots_for(self, conversations: Sequence[Conversation]) -> list[list[int]]:
        """Owned slots to load each of them into; they stay owned."""
        starts = np.cumsum([0, *(len(one) for one in conversations)]).tolist()
        assert starts[-1] <= len(self.free), "HBM has room for two sets"
        return [self.free[a:b] for a, b in itertools.pairwise(starts)]

    def check(self, conversations: Sequence[Conversation]) -> None:
        """Load them, wherever they are, and compare."""
        self.own()
        into = self.slots_for(conversations)
        transfers = get_all(self.store, conversations, into)
        self.compare(conversations, into, wait_all(transfers))

    def compare(
        self,
        conversations: Sequence[Conversation],
        into: Sequence[Sequence[int]],
        came: Sequence[int],
    ) -> None:
        """Compare pages in HBM slots with what they were when they were made."""
        self._synchronize()
        for one, slots, count in zip(conversations, into, came, strict=True):
            found = _digests(self._read(slots[:count]))
            right = sum(a == b for a, b in zip(found, one.digests, strict=False))
            self.verified += right
            self.failed += count - right
            self.lost += len(one) - count

    def _read(self, slots: Sequence[int]) -> PageBuffer:
        layers = self.store.hbm.layers
        at = torch.tensor(slots, device=layers[0].device, dtype=torch.int64)
        rows: PageBuffer = torch.cat([one.index_select(0, at) for one in layers], 1).cpu().numpy()
        return rows

    def _synchronize(self) -> None:
        if self.store.hbm.device.type == "cuda":
            torch.cuda.synchronize(self.store.hbm.device)


def _digests(pages: PageBuffer) -> list[bytes]:
    return [xxhash.xxh3_128_digest(page) for page in pages]


def put_all(store: TieredStore, conversations: Sequence[Conversation]) -> list[Transfer]:
    """Begin a put of each, without waiting in between."""
    return [store.put(one.keys, one.slots) for one in conversations]


def get_all(
    store: TieredStore, conversations: Sequence[Conversation], into: Sequence[Sequence[int]]
) -> list[Transfer]:
    """Begin a get of each, without waiting in between."""
    return [store.get(one.keys, into=slots) for one, slots in zip(conversations, into, strict=True)]


def prefetch_all(store: TieredStore, conversations: Sequence[Conversation]) -> list[Transfer]:
    """Begin a prefetch of each, without waiting in between."""
    return [store.prefetch(one.keys) for one in conversations]


def wait_all(transfers: Sequence[Transfer]) -> list[int]:
    """Wait for all of them; the leading pages of each that came."""
    return [transfer.wait() for transfer in transfers]


def cut(conversations: Sequence[Conversation], pages: int) -> Iterator[Conversation]:
    """Their pages in order, in parts of so many."""
    for one in conversations:
        for first in range(0, len(one), pages):
            yield one.part(first, pages)
