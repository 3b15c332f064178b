"""DiskStore: pages by key, bounded, verified, found again; whatever fails is a miss."""

from __future__ import annotations

import logging
import random
import subprocess
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from disk_rig import FINGERPRINT, PAGE_BYTES, buffers, flip, key_of, page

from tiered_kv.disk_store import DiskStore
from tiered_kv.errors import ConfigError, LayoutMismatchError, StoreClosedError, TieredKVError
from tiered_kv.keys import PageKey
from tiered_kv.storage.base import Page, PageBuffer, Tier
from tiered_kv.storage.disk import DiskTier
from tiered_kv.storage.faulty import CountingTier, FaultyTier, WrappedTier

SIZE = 4 << 20
DEADLINE_S = 60.0


class HeldTier(WrappedTier):
    """Reads and writes wait at a gate, open at first; `arrived` counts those that came to it."""

    def __init__(self, inner: Tier) -> None:
        super().__init__(inner)
        self.gate = threading.Event()
        self.gate.set()
        self.arrived = threading.Semaphore(0)

    def _pass(self) -> None:
        self.arrived.release()
        self.gate.wait()

    def write(self, slots: Sequence[int], pages: Sequence[Page]) -> None:
        self._pass()
        self.inner.write(slots, pages)

    def read(self, slots: Sequence[int], into: Sequence[PageBuffer]) -> list[TieredKVError | None]:
        self._pass()
        return self.inner.read(slots, into)


class Opened:
    """Stores in one directory, with a tier around their own where a test wants one."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.threads = ThreadPoolExecutor(8)
        self.stores: list[DiskStore] = []
        self.held: list[HeldTier] = []

    def __call__(
        self, around: Callable[[Tier], Tier] = lambda tier: tier, *, size: int = SIZE
    ) -> DiskStore:
        tier = DiskTier.open(self.path, PAGE_BYTES, size, FINGERPRINT)
        store = DiskStore(cast("DiskTier", around(tier)))
        self.stores.append(store)
        return store

    def hold(self, store: DiskStore) -> HeldTier:
        """From now on reads and writes of the store wait at a gate."""
        tier = HeldTier(store._tier)
        tier.gate.clear()
        self.held.append(tier)
        store._tier = cast("DiskTier", tier)
        return tier

    def close(self) -> None:
        for tier in self.held:
            tier.gate.set()
        self.threads.shutdown()
        for store in self.stores:
            store.close()


@pytest.fixture
def open_disk_store(tmp_path: Path) -> Iterator[Opened]:
    opened = Opened(tmp_path / "store")
    yield opened
    opened.close()


def keys_of(numbers: Sequence[int]) -> list[PageKey]:
    return [key_of(number) for number in numbers]


def put(store: DiskStore, numbers: Sequence[int], parents: Any = None) -> list[bool]:
    return store.put(keys_of(numbers), [page(number).data for number in numbers], parents)


def put_chain(store: DiskStore, numbers: Sequence[int]) -> list[bool]:
    keys = keys_of(numbers)
    return put(store, numbers, [None, *keys[:-1]])


def get(store: DiskStore, numbers: Sequence[int]) -> list[bool]:
    """Get pages and compare every one that counts as found."""
    into = buffers(len(numbers))
    came = store.get(keys_of(numbers), into)
    for number, is_here, buffer in zip(numbers, came, into, strict=True):
        assert not is_here or np.array_equal(buffer, page(number).data), f"page {number} is wrong"
    return came


def here(store: DiskStore, numbers: Sequence[int]) -> list[int]:
    present = store.contains(keys_of(numbers))
    return [number for number, is_here in zip(numbers, present, strict=True) if is_here]


def assert_sound(store: DiskStore) -> None:
    """Index, slots and bytes agree, and nothing is held that nobody uses."""
    assert store._index.check(lambda: True) == []
    resident = store.stats().resident_pages["disk"]
    assert store._tier.used_bytes == resident * PAGE_BYTES
    assert store._room.free_pages["disk"] == store.capacity_pages - resident
    assert store._tier.check().problems == []


# -- round trips -----------------------------------------------------------------------------------


def test_what_was_put_comes_back_and_the_rest_is_a_miss(open_disk_store: Opened) -> None:
    store = open_disk_store()
    assert put(store, range(5)) == [True] * 5
    assert get(store, [4, 9, 0, 2]) == [True, False, True, True]
    stats = store.stats()
    assert (stats.put_pages, stats.hit_pages["disk"], stats.missed_pages) == (5, 3, 1)
    assert stats.why_miss == {"never_stored": 1}
    assert stats.bytes_read["disk"] == 3 * PAGE_BYTES
    assert stats.bytes_written["disk"] == 5 * PAGE_BYTES
    assert stats.resident_pages == {"disk": 5}
    assert store.usage() == (5 * PAGE_BYTES, SIZE)
    assert_sound(store)


def test_pages_may_be_rows_parts_or_memoryviews(open_disk_store: Opened) -> None:
    store = open_disk_store()
    rows: list[PageBuffer] = [page(number).data for number in range(3)]
    view: Any = memoryview
    given: list[Any] = [rows[0], [rows[1][:5000], rows[1][5000:]], view(rows[2])]
    assert store.put(keys_of(range(3)), given) == [True] * 3
    got = [np.zeros(PAGE_BYTES, np.uint8) for _ in range(3)]
    into: list[Any] = [view(got[0]), got[1], [view(got[2])[:3], got[2][3:]]]
    assert store.get(keys_of(range(3)), into) == [True] * 3
    for row, back in zip(rows, got, strict=True):
        assert np.array_equal(row, back)


def test_a_page_that_is_there_is_not_written_again(open_disk_store: Opened) -> None:
    store = open_disk_store(CountingTier)
    counts = cast("CountingTier", store._tier).counts
    put(store, range(3))
    assert put(store, range(5)) == [True] * 5
    assert counts["pages_write"] == 5
    assert store.put([key_of(7)] * 2, [page(7).data] * 2) == [True, True]
    assert counts["pages_write"] == 6


def test_wrong_sizes_are_refused_and_leave_nothing_behind(open_disk_store: Opened) -> None:
    store = open_disk_store()
    row = page(0).data
    for keys, pages in (([key_of(0)], []), ([key_of(0)], [row[:-1]]), ([key_of(0)], [[row, row]])):
        with pytest.raises(ValueError, match="page"):
            store.put(keys, cast("Any", pages))
        with pytest.raises(ValueError, match="page"):
            store.get(keys, cast("Any", pages))
    with pytest.raises(ValueError, match="page"):
        store.put([key_of(0)], [row.reshape(2, -1)])
    with pytest.raises(ValueError, match="parents"):
        store.put([key_of(0)], [row], [])
    assert here(store, [0]) == []
    assert_sound(store)


def test_memory_that_is_not_to_be_written_to_is_refused(open_disk_store: Opened) -> None:
    """The kernel would write to it all the same, into a `bytes` object for one."""
    store = open_disk_store()
    put(store, [0])
    into = bytes(store.page_bytes)
    for page_into in (memoryview(into), [memoryview(into)]):
        with pytest.raises(ValueError, match="writable memory"):
            store.get([key_of(0)], [page_into])
    assert into == bytes(store.page_bytes)
    assert_sound(store)


def test_remove_and_clear_give_the_room_back(open_disk_store: Opened) -> None:
    store = open_disk_store()
    put_chain(store, range(6))
    store.remove(keys_of([1, 5, 99]))
    assert here(store, range(6)) == [0, 2, 3, 4]
    assert get(store, [1]) == [False]
    assert store.stats().why_miss == {"removed": 1}
    assert put(store, [1]) == [True]
    store.clear()
    assert here(store, range(6)) == []
    assert store.usage()[0] == 0
    assert put(store, range(6)) == [True] * 6
    assert_sound(store)


# -- restarts --------------------------------------------------------------------------------------


def test_pages_are_there_after_a_restart(open_disk_store: Opened) -> None:
    store = open_disk_store()
    put_chain(store, range(8))
    store.remove(keys_of([7]))
    store.close()
    store = open_disk_store()
    assert here(store, range(9)) == list(range(7))
    assert get(store, range(7)) == [True] * 7
    assert_sound(store)


def test_after_a_restart_a_parent_still_leaves_after_its_children(open_disk_store: Opened) -> None:
    store = open_disk_store()
    put_chain(store, range(10))
    store.close()
    store = open_disk_store()
    left = store.capacity_pages - 10
    put(store, range(100, 100 + left + 4))
    assert here(store, range(10)) == [0, 1, 2, 3, 4, 5]


def test_a_page_whose_parent_is_lost_is_found_all_the_same(open_disk_store: Opened) -> None:
    store = open_disk_store()
    put_chain(store, range(3))
    store.remove(keys_of([1]))
    store.close()
    store = open_disk_store()
    assert get(store, [0, 1, 2]) == [True, False, True]


# -- full ------------------------------------------------------------------------------------------


def test_a_full_store_gives_up_what_was_used_longest_ago(open_disk_store: Opened) -> None:
    store = open_disk_store()
    full = store.capacity_pages
    for number in range(full):
        put(store, [number])
    get(store, [0])
    store.touch(keys_of([2, 1]))  # of one prefix: 1 is the deeper page
    assert put(store, [1000, 1001]) == [True, True]
    assert here(store, range(6)) == [0, 1, 2, 5]
    for number in range(full - 5):
        put(store, [2000 + number])
    assert here(store, range(6)) == [0, 1, 2]
    put(store, [3000, 3001])
    assert here(store, range(6)) == [2]
    assert get(store, [3]) == [False]
    assert store.stats().why_miss == {"evicted": 1}
    assert_sound(store)


def test_asking_promotes_nothing(open_disk_store: Opened) -> None:
    """vllm-project/vllm#51439: a lookup alone promoted everything."""
    store = open_disk_store()
    for number in range(store.capacity_pages):
        put(store, [number])
    before = store.stats()
    store.contains(keys_of([0, 99_999]))
    assert store.stats() == before
    put(store, [1000])
    assert here(store, [0, 1]) == [1]


def test_a_parent_does_not_leave_before_its_children(open_disk_store: Opened) -> None:
    """sgl-project/sglang#27562: an inner page was evicted, and what hung from it never hit again.

    The head of a prefix that an engine's host tier holds is never read from disk, and would be the
    first to leave by its last use alone.
    """
    store = open_disk_store()
    full = store.capacity_pages
    put_chain(store, range(20))
    put(store, range(100, 100 + full - 20))
    store.touch(keys_of([19]))
    put(store, range(1000, 1000 + full - 22))
    assert here(store, range(20))[:1] == [0]
    kept = here(store, range(20))
    assert kept == list(range(len(kept)))


def test_a_batch_larger_than_the_store_is_stored_from_its_head(open_disk_store: Opened) -> None:
    store = open_disk_store()
    full = store.capacity_pages
    put(store, [9000])
    stored = put_chain(store, range(full + 7))
    assert stored == [True] * full + [False] * 7
    assert here(store, [9000]) == []
    assert store.stats().not_stored_pages == 7
    assert_sound(store)


def test_making_room_takes_nothing_that_the_same_batch_names(open_disk_store: Opened) -> None:
    store = open_disk_store()
    full = store.capacity_pages
    put(store, range(full))
    oldest = [full - 1, full - 2]  # the deepest of the batch count as the oldest
    assert put(store, [*oldest, 1000, 1001]) == [True] * 4
    assert here(store, oldest) == oldest
    assert put(store, [2000], [key_of(full - 5)]) == [True]
    assert here(store, [full - 5]) == [full - 5]


def test_pages_of_one_put_may_hang_from_each_other_in_any_shape(open_disk_store: Opened) -> None:
    store = open_disk_store()
    put(store, [7])
    above = {0: None, 1: 0, 2: 1, 3: 1, 4: 3, 5: 7, 6: 99}  # two branches, a page here, and nowhere
    parents = [None if parent is None else key_of(parent) for parent in above.values()]
    assert put(store, list(above), parents) == [True] * 7
    index = store._index
    found = {number: index.parent_key(index.find(key_of(number))) for number in above}
    assert found == dict(zip(above, parents, strict=True)) | {6: None}
    assert get(store, list(above)) == [True] * 7
    assert_sound(store)


def test_the_directory_never_takes_more_than_its_size(open_disk_store: Opened) -> None:
    """LMCache/LMCache#1454: 460 GB in a store of 250."""
    store = open_disk_store()
    for batch in range(0, 6 * store.capacity_pages, 40):
        put(store, range(batch, batch + 40))
        command = ["du", "-s", "-B1", str(open_disk_store.path)]
        taken = int(subprocess.check_output(command).split()[0])
        assert taken <= SIZE
    assert store.stats().resident_pages["disk"] == store.capacity_pages


# -- damage ----------------------------------------------------------------------------------------


def test_a_damaged_page_is_a_miss_and_can_be_put_again(
    open_disk_store: Opened, caplog: pytest.LogCaptureFixture
) -> None:
    store = open_disk_store()
    put_chain(store, range(6))
    for number in (2, 3):
        slot = store._disk.slot[store._index.find(key_of(number))]
        flip(store._tier, slot, open_disk_store.path)
    with caplog.at_level(logging.WARNING):
        assert get(store, range(6)) == [True, True, False, False, True, True]
    assert here(store, range(6)) == [0, 1, 4, 5]
    assert len(caplog.records) == 1, "one line, however many pages"
    stats = store.stats()
    assert (stats.checksums_verified, stats.checksums_failed) == (6, 2)
    assert get(store, [2]) == [False]
    assert store.stats().why_miss == {"corrupt": 3}
    assert put_chain(store, range(6)) == [True] * 6
    assert get(store, range(6)) == [True] * 6
    assert_sound(store)


def test_a_file_cut_short_is_a_miss(open_disk_store: Opened) -> None:
    """HiCacheFile and others raise on a short file, or take it for a page."""
    store = open_disk_store()
    put(store, range(4))
    for segment in (open_disk_store.path / "segments").iterdir():
        with open(segment, "r+b") as file:
            file.truncate(4096 + 2 * PAGE_BYTES + 100)
    assert get(store, range(4)) == [True, True, False, False]
    assert here(store, range(4)) == [0, 1]


def test_a_medium_that_fails_is_a_miss_and_one_line(
    open_disk_store: Opened, caplog: pytest.LogCaptureFixture
) -> None:
    store = open_disk_store(FaultyTier)
    medium = cast("FaultyTier", store._tier)
    put(store, range(4))
    medium.fail_write = lambda slots: True
    with caplog.at_level(logging.WARNING):
        for _ in range(5):
            assert put_chain(store, range(3, 9)) == [True] + [False] * 5
    assert len(caplog.records) == 1
    assert "no space left" in caplog.text
    assert store.stats().failed_writes == 25
    assert get(store, [5]) == [False]
    assert store.stats().why_miss == {"failed": 1}
    medium.fail_write = lambda slots: False
    assert put_chain(store, range(3, 9)) == [True] * 6
    medium.fail_read = lambda slot: slot == store._disk.slot[store._index.find(key_of(4))]
    assert get(store, [3, 4, 5]) == [True, False, True]
    medium.fail_read = lambda slot: False
    assert here(store, [4]) == [], "what cannot be read must not be promised again"
    assert put(store, [4]) == [True]
    assert_sound(store)


def test_an_unforeseen_error_leaves_nothing_behind(
    open_disk_store: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_disk_store()
    put(store, range(3))

    def fail(*arguments: Any) -> None:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(store._tier, "write", fail)
        patch.setattr(store._tier, "read", fail)
        with pytest.raises(MemoryError):
            put(store, [7, 8])
        with pytest.raises(MemoryError):
            get(store, [0, 1])
    assert here(store, range(9)) == [0, 1, 2]
    assert_sound(store)


# -- at once ---------------------------------------------------------------------------------------


def arrivals(tier: HeldTier, count: int) -> None:
    for _ in range(count):
        assert tier.arrived.acquire(timeout=DEADLINE_S)


def test_two_puts_of_one_page_write_it_once(open_disk_store: Opened) -> None:
    store = open_disk_store(CountingTier)
    counts = cast("CountingTier", store._tier).counts
    tier = open_disk_store.hold(store)
    first = open_disk_store.threads.submit(put, store, [0, 1])
    arrivals(tier, 1)
    second = open_disk_store.threads.submit(put, store, [1, 2])
    arrivals(tier, 1)
    assert here(store, [0, 1, 2]) == [], "what is arriving is not there yet"
    assert store.contains(keys_of([1])) == [False]
    tier.gate.set()
    assert first.result(DEADLINE_S) == [True, True]
    assert second.result(DEADLINE_S) == [True, True]
    assert counts["pages_write"] == 3
    assert_sound(store)


def test_a_put_that_waited_for_one_that_failed_says_so(open_disk_store: Opened) -> None:
    store = open_disk_store(FaultyTier)
    cast("FaultyTier", store._tier).fail_write = lambda slots: len(slots) == 2
    tier = open_disk_store.hold(store)
    first = open_disk_store.threads.submit(put, store, [0, 1])
    arrivals(tier, 1)
    second = open_disk_store.threads.submit(put, store, [1, 2])
    arrivals(tier, 1)
    tier.gate.set()
    assert first.result(DEADLINE_S) == [False, False]
    assert second.result(DEADLINE_S) == [False, True]
    assert_sound(store)


def test_a_page_that_is_being_read_is_not_evicted(open_disk_store: Opened) -> None:
    store = open_disk_store()
    full = store.capacity_pages
    put(store, range(full))
    tier = open_disk_store.hold(store)
    reading = open_disk_store.threads.submit(get, store, range(full))
    arrivals(tier, 1)
    assert put(store, [1000, 1001]) == [False, False], "everything is pinned: no room"
    store.clear()
    assert here(store, range(full)) == []
    tier.gate.set()
    assert reading.result(DEADLINE_S) == [True] * full
    assert store.usage()[0] == 0
    assert put(store, [3, 1000]) == [True, True]
    assert_sound(store)


def test_a_page_whose_removed_copy_is_still_read_is_stored_again_after_that(
    open_disk_store: Opened,
) -> None:
    store = open_disk_store()
    put(store, range(4))
    tier = open_disk_store.hold(store)
    reading = open_disk_store.threads.submit(get, store, range(4))
    arrivals(tier, 1)
    store.remove(keys_of([3]))
    assert put(store, [3]) == [False]
    assert store.stats().not_stored_pages == 1
    tier.gate.set()
    assert reading.result(DEADLINE_S) == [True] * 4
    assert put(store, [3]) == [True]
    assert_sound(store)


def test_a_page_removed_as_its_read_begins_is_still_the_page_asked_for(
    open_disk_store: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a read has pinned it reads from where it lay then, whoever takes it out of the index."""
    store = open_disk_store()
    put(store, range(6))
    pin = store._pin

    def pin_and_lose(keys: Sequence[PageKey]) -> Any:
        found = pin(keys)
        store.clear()
        return found

    monkeypatch.setattr(store, "_pin", pin_and_lose)
    assert get(store, [2, 9, 4]) == [True, False, True]
    assert here(store, range(6)) == []
    assert store.usage()[0] == 0
    assert_sound(store)


def test_two_readers_of_a_damaged_page_both_miss(open_disk_store: Opened) -> None:
    store = open_disk_store()
    put(store, [0, 1])
    flip(store._tier, store._disk.slot[store._index.find(key_of(0))], open_disk_store.path)
    tier = open_disk_store.hold(store)
    readers = [open_disk_store.threads.submit(get, store, [0, 1]) for _ in range(2)]
    arrivals(tier, 2)
    tier.gate.set()
    for reader in readers:
        assert reader.result(DEADLINE_S) == [False, True]
    assert put(store, [0]) == [True]
    assert get(store, [0, 1]) == [True, True]
    assert_sound(store)


def test_close_waits_for_what_is_under_way(open_disk_store: Opened) -> None:
    store = open_disk_store()
    put(store, range(4))
    tier = open_disk_store.hold(store)
    calls = [
        open_disk_store.threads.submit(get, store, range(4)),
        open_disk_store.threads.submit(put, store, [10, 11]),
    ]
    arrivals(tier, 2)
    closing = open_disk_store.threads.submit(store.close)
    refused: list[Callable[[], Any]] = [
        lambda: store.contains([key_of(0)]),
        lambda: store.touch([key_of(0)]),
        lambda: store.remove([key_of(0)]),
        store.clear,
        lambda: get(store, [0]),
        lambda: put(store, [0]),
    ]
    while not store._is_closed:
        assert not closing.done()
    for call in refused:
        with pytest.raises(StoreClosedError):
            call()
    assert not closing.done()
    tier.gate.set()
    assert calls[0].result(DEADLINE_S) == [True] * 4
    assert calls[1].result(DEADLINE_S) == [True] * 2
    closing.result(DEADLINE_S)
    store.close()
    assert here(open_disk_store(), [0, 10, 11]) == [0, 10, 11]


def test_many_readers_and_writers_never_see_a_wrong_page(open_disk_store: Opened) -> None:
    """vllm-project/vllm#31210: right alone, wrong in company. Eviction, damage and failures too."""
    store = open_disk_store(FaultyTier)
    medium = cast("FaultyTier", store._tier)
    dice = random.Random(0)
    luck = [dice.random() for _ in range(10_000)]
    medium.fail_write = lambda slots: luck[sum(slots) % 10_000] < 0.05
    medium.fail_read = lambda slot: luck[slot * 7919 % 10_000] < 0.02
    medium.flip = lambda slot: luck[slot * 104_729 % 10_000] < 0.02
    numbers = 2 * store.capacity_pages
    hits = [0] * 8

    def work(worker: int) -> None:
        own = random.Random(worker)
        for _ in range(60):
            start = own.randrange(numbers)
            batch = [(start + at) % numbers for at in range(own.randrange(1, 24))]
            match own.randrange(5):
                case 0 | 1:
                    put_chain(store, batch)
                case 2 | 3:
                    hits[worker] += sum(get(store, batch))
                case _:
                    store.touch(keys_of(batch))
                    store.remove(keys_of(batch[:1]))

    for worker in [open_disk_store.threads.submit(work, worker) for worker in range(8)]:
        worker.result(DEADLINE_S)
    assert sum(hits) > 100
    assert_sound(store)


# -- the door --------------------------------------------------------------------------------------


def test_open_says_what_is_wrong(tmp_path: Path) -> None:
    path = tmp_path / "store"
    with pytest.raises(ConfigError, match="policy='best': there is fifo, lru"):
        DiskStore.open(path, SIZE, PAGE_BYTES, FINGERPRINT, policy="best")
    assert not path.exists()
    with pytest.raises(ConfigError, match="give at least"):
        DiskStore.open(path, 1000, PAGE_BYTES, FINGERPRINT)
    with DiskStore.open(path, SIZE, PAGE_BYTES, FINGERPRINT, policy="fifo") as store:
        put(store, [0])
        with pytest.raises(ConfigError, match="in use by process"):
            DiskStore.open(path, SIZE, PAGE_BYTES, FINGERPRINT)
    with pytest.raises(LayoutMismatchError, match="one directory for each model"):
        DiskStore.open(path, SIZE, PAGE_BYTES, "another layout")
    with pytest.raises(LayoutMismatchError):
        DiskStore.open(path, SIZE, 2 * PAGE_BYTES, FINGERPRINT)
    with DiskStore.open(path, SIZE, PAGE_BYTES, FINGERPRINT) as store:
        assert get(store, [0]) == [True]
