"""What the tests of the store stand on: page contents that name their page, a disk that waits,
streams that wait.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tiered_kv import KVLayout, StoreConfig, TieredStore
from tiered_kv.errors import TieredKVError
from tiered_kv.found import FoundPages
from tiered_kv.keys import KeyChain, PageKey
from tiered_kv.storage.base import Page, PageBuffer, Tier
from tiered_kv.storage.faulty import CountingTier, FaultyTier, WrappedTier
from tiered_kv.streams import Event, Stream

PAGE_BYTES = 4096
PAGE_TOKENS = 4
LAYOUT = KVLayout.uniform(PAGE_BYTES, PAGE_TOKENS)
MEMORY_FOLDER = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None  # fsync costs nothing there
PATIENCE_S = 30.0  # a test that waits so long has found a hang

Content = np.ndarray[Any, np.dtype[np.uint8]]


def content_of(key: PageKey, page_bytes: int = PAGE_BYTES) -> Content:
    """The bytes of a page: its key first, then noise seeded by it."""
    noise = np.random.default_rng(int.from_bytes(key[:8], "little"))
    page = noise.integers(0, 256, page_bytes, dtype=np.uint8)
    page[: len(key)] = np.frombuffer(key, np.uint8)
    return page


def write_slot(store: TieredStore, slot: int, content: Content) -> None:
    """Put content into an HBM slot, as an engine would."""
    at = 0
    for layer in store.hbm.layers:
        size = layer.shape[1]
        layer[slot] = torch.from_numpy(content[at : at + size])
        at += size


def read_slot(store: TieredStore, slot: int) -> Content:
    """What stands in an HBM slot."""
    return np.concatenate([layer[slot].numpy() for layer in store.hbm.layers])


def assert_holds(store: TieredStore, slots: Sequence[int], keys: Sequence[PageKey]) -> None:
    """The slots hold these pages, bit for bit."""
    for slot, key in zip(slots, keys, strict=True):
        found = read_slot(store, slot)
        expected = content_of(key, store.layout.page_bytes)
        if not np.array_equal(found, expected):
            other = found[: len(key)].tobytes().hex()[:12]
            wrong = int((found != expected).sum())
            raise AssertionError(
                f"slot {slot} should hold {key.hex()[:12]}: {wrong} bytes differ, "
                f"begins with {other}"
            )


def fill_slots(store: TieredStore, keys: Sequence[PageKey]) -> list[int]:
    """New slots with the pages of these keys in them."""
    slots = store.hbm.allocate(len(keys))
    assert slots is not None
    for slot, key in zip(slots, keys, strict=True):
        write_slot(store, slot, content_of(key, store.layout.page_bytes))
    return slots


def put_pages(store: TieredStore, keys: KeyChain) -> int:
    """Compute and put pages; how many are stored."""
    return store.put(keys, fill_slots(store, keys)).wait(PATIENCE_S)


def get_pages(store: TieredStore, keys: Sequence[PageKey]) -> tuple[str, ...]:
    """Get pages, prove their content, give them back; the tiers they came from."""
    with store.get(keys) as load:
        count = load.wait(PATIENCE_S)
        assert_holds(store, load.slots, keys[:count])
        return load.tiers


def settle(store: TieredStore) -> None:
    """Wait until nothing moves; for a test that holds up no stream."""
    while True:
        with store._lock:
            transfers = list(store._mover.in_flight)
        if not transfers:
            break
        for transfer in transfers:
            assert transfer.settled.wait(PATIENCE_S), "a transfer never settled"
    mover = store._mover
    for stream in (
        *mover.load_streams,
        mover.write_stream,
        mover.fill_stream,
        mover.store_stream,
        mover.event_stream,
    ):
        stream.synchronize()  # what waited for the last of them, and runs in their threads


def flush_hbm(store: TieredStore) -> None:
    """Throw every page that nobody holds out of HBM."""
    tier = store._planner.index.by_name["hbm"]
    with store._lock:
        free = tier_free_pages(store, "hbm")
        victims = store._planner.index.victims(tier, tier.resident)
    slots = store.hbm.allocate(free + len(victims))
    assert slots is not None
    for slot in slots:
        write_slot(store, slot, np.full(store.layout.page_bytes, 0xEE, np.uint8))
    store.hbm.release(slots)


def tier_free_pages(store: TieredStore, tier: str) -> int:
    """Slots of a tier that nothing has to leave for."""
    return store._planner.room.free_pages[tier]


def index_problems(store: TieredStore, *, idle: bool) -> list[str]:
    """What is wrong with the store's index, and with how it counts slots."""
    with store._lock:
        problems = store._planner.index.check(lambda: idle)
        for tier in store._planner.index.tiers:
            if tier.resident > store._planner.room._slots[tier.name].capacity_pages:  # type: ignore[attr-defined]
                problems.append(f"{tier.name} holds more than it can")
    return problems


class HeldTier(WrappedTier):
    """Reads or writes of the tier inside wait until the test lets them go."""

    def __init__(self, inner: Tier) -> None:
        super().__init__(inner)
        self.read_gate = threading.Event()
        self.write_gate = threading.Event()
        self.read_gate.set()
        self.write_gate.set()
        self.is_reading = threading.Event()
        self.is_writing = threading.Event()

    def begin_write(self, slots: Sequence[int], pages: Sequence[Page]) -> Callable[[], None]:
        self.is_writing.set()
        assert self.write_gate.wait(PATIENCE_S)
        return self.inner.begin_write(slots, pages)

    def read(self, slots: Sequence[int], into: Sequence[PageBuffer]) -> list[TieredKVError | None]:
        self.is_reading.set()
        assert self.read_gate.wait(PATIENCE_S)
        return self.inner.read(slots, into)


class RiggedStore(TieredStore):
    """A store whose own disk tier can be held up, made to fail, and counts what is asked of it."""

    held: HeldTier
    faulty: FaultyTier
    counting: CountingTier
    own_disk: Tier

    def _open_disk(
        self, layout: KVLayout, config: StoreConfig
    ) -> tuple[Tier, Callable[[], FoundPages]]:
        disk, found = super()._open_disk(layout, config)
        self.own_disk = disk
        self.counting = CountingTier(disk)
        self.faulty = FaultyTier(self.counting)
        self.held = HeldTier(self.faulty)
        return self.held, found


@contextmanager
def held_stream(stream: Stream) -> Iterator[Event]:
    """Keep a stream busy until the block ends or the event is fired."""
    let_go, begun = Event(), threading.Event()

    def block() -> None:
        begun.set()
        let_go.wait(PATIENCE_S)

    done = stream.submit(block)
    assert begun.wait(PATIENCE_S)
    try:
        yield let_go
    finally:
        let_go.fire()
        done.wait(PATIENCE_S)


class Rig:
    """Opens stores with tiers of so many pages, and closes them whatever became of the test."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.opened: list[RiggedStore] = []

    def __call__(
        self,
        hbm: int = 16,
        host: int = 16,
        disk: str = "2MiB",
        layout: KVLayout = LAYOUT,
        **more: Any,
    ) -> RiggedStore:
        config = StoreConfig.parse(
            hbm=hbm * layout.page_bytes,
            host=(host + 1) * layout.page_bytes,  # one is for staging
            disk=self.folder / "store",
            disk_size=disk,
            **more,
        )
        store = RiggedStore(layout, config)
        self.opened.append(store)
        return store

    def let_all_go(self) -> None:
        for store in self.opened:
            store.held.read_gate.set()
            store.held.write_gate.set()


def chain(store: RiggedStore, pages: int, first_token: int = 0) -> KeyChain:
    """Keys of a prompt of so many pages; prompts of different first tokens share nothing."""
    n = pages * store.layout.page_tokens
    return store.keys(range(first_token * 1_000_000, first_token * 1_000_000 + n))


def flush_host(store: RiggedStore) -> None:
    """Throw every page that nobody holds out of host."""
    index, room = store._planner.index, store._planner.room
    host = index.by_name["host"]
    with store._lock:
        room.free("host", index.evict(host, index.victims(host, host.resident)))


def put_on_disk_alone(store: RiggedStore, keys: KeyChain) -> None:
    """The pages are on disk, neither in HBM nor on host."""
    assert put_pages(store, keys) == len(keys)
    store.flush()
    flush_hbm(store)
    flush_host(store)
    match = store.match(keys)
    assert (match.hbm_pages, match.host_pages, match.disk_pages) == (0, 0, len(keys))
