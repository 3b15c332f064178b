"""The store in a process of its own and under load: memory, disk, leaks, threads, sudden death."""

from __future__ import annotations

import gc
import random
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from store_rig import (
    MEMORY_FOLDER,
    PAGE_BYTES,
    PATIENCE_S,
    Rig,
    RiggedStore,
    assert_holds,
    chain,
    content_of,
    get_pages,
    index_problems,
    put_pages,
    settle,
    write_slot,
)

from tiered_kv import KeyChain
from tiered_kv.storage.disk import DiskTier

ROOT = Path(__file__).parents[1]


@pytest.fixture
def in_memory() -> Iterator[Rig]:
    with tempfile.TemporaryDirectory(dir=MEMORY_FOLDER) as folder:
        rig = Rig(Path(folder))
        yield rig
        for store in rig.opened:
            store.close()


def child(code: str, *arguments: object) -> subprocess.Popen[str]:
    """A process that runs the code with these arguments, and talks through its pipes."""
    start = f"import sys; sys.path[:0] = [{str(ROOT)!r}, {str(ROOT / 'tests')!r}]\n"
    command = [sys.executable, "-c", start + code, *map(str, arguments)]
    return subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


# -- threads ---------------------------------------------------------------------------------------

SOAK_ROUNDS = 60
SOAK_THREADS = 6


class Worker:
    """One engine thread: turns of random conversations, every page that comes back proved."""

    def __init__(self, store: RiggedStore, seed: int) -> None:
        self.store = store
        self.random = random.Random(seed)
        self.verified = 0
        self.error: BaseException | None = None

    def __call__(self) -> None:
        try:
            for _ in range(SOAK_ROUNDS):
                self.turn()
        except BaseException as error:  # raised again by the test, in its own thread
            self.error = error

    def turn(self) -> None:
        keys = chain(self.store, self.random.randint(2, 9), self.random.randint(1, 6))
        if self.random.random() < 0.2:
            self.store.prefetch(keys)
        patience = 0.0 if self.random.random() < 0.1 else PATIENCE_S
        arrived = self.into_own_slots(keys) if self.random.random() < 0.2 else -1
        if arrived < 0:
            with self.store.get(keys, deadline_s=patience) as load:
                arrived = load.wait()
                assert_holds(self.store, load.slots, keys[:arrived])
        self.verified += arrived
        rest = keys[arrived : arrived + self.random.randint(1, 4)]
        slots = self.store.hbm.allocate(len(rest))
        if slots is None:
            return
        for slot, key in zip(slots, rest, strict=True):
            write_slot(self.store, slot, content_of(key))
        put = self.store.put(rest, slots)
        if self.random.random() < 0.5:
            put.wait(PATIENCE_S)

    def into_own_slots(self, keys: KeyChain) -> int:
        """Pages got into slots of the thread's own; -1 if there are none to be had."""
        slots = self.store.hbm.allocate(len(keys))
        if slots is None:
            return -1
        load = self.store.get(keys, into=slots)
        arrived = load.wait(PATIENCE_S)
        assert_holds(self.store, slots[:arrived], keys[:arrived])
        self.store.hbm.release(slots)
        return arrived


@pytest.mark.parametrize("write_policy", ["back", "through"])
@pytest.mark.parametrize("policy", ["lru", "fifo"])
def test_threads_never_see_another_pages_bytes(
    open_store: Rig, policy: str, write_policy: str
) -> None:
    """Same prompts, many threads, offload on: answers differed (row 3). Tiers are far too small."""
    store = open_store(hbm=24, host=10, disk="1MiB", policy=policy, write_policy=write_policy)
    failing = random.Random(7)
    store.faulty.fail_write = lambda slots: failing.random() < 0.1
    store.faulty.fail_read = lambda slot: failing.random() < 0.02
    store.faulty.flip = lambda slot: failing.random() < 0.02
    workers = [Worker(store, seed) for seed in range(SOAK_THREADS)]
    threads = [threading.Thread(target=worker) for worker in workers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10 * PATIENCE_S)
        assert not thread.is_alive()
    for worker in workers:
        if worker.error is not None:
            raise worker.error
    settle(store)
    assert index_problems(store, idle=True) == []
    assert not store._mover.arrivals
    assert not store._mover.wanted
    assert sum(worker.verified for worker in workers) > SOAK_THREADS * SOAK_ROUNDS // 2
    stats = store.stats()
    assert min(stats.hit_pages.values()) > 0
    for tier, (used, capacity) in store.usage().items():
        assert used <= capacity, tier


# -- leaks and bounds ------------------------------------------------------------------------------


def test_thousands_of_turns_leave_nothing_behind(in_memory: Rig) -> None:
    """Memory that grows a little with every request (row 37)."""
    store = in_memory(hbm=8, host=6, disk="700KiB")
    sizes = []
    for turn in range(2400):
        keys = chain(store, 3, 1 + turn % 40)
        arrived = len(get_pages(store, keys))
        if arrived < 3:
            put_pages(store, keys[arrived:])
        if turn in (600, 2399):
            settle(store)
            gc.collect()
            sizes.append(_sizes(store))
    assert sizes[0] == sizes[1]
    assert index_problems(store, idle=True) == []


def _sizes(store: RiggedStore) -> dict[str, int]:
    index, mover = store._planner.index, store._mover
    return {
        "ids": len(index._keys),
        "arrivals": len(mover.arrivals),
        "in flight": len(mover.in_flight),
        "wanted": len(mover.wanted),
        "doomed": sum(len(tier.doomed) for tier in index.tiers),
        "pins": sum(sum(tier.pins[page] for page in index) for tier in index.tiers),
        "lent": len(store.hbm._lent),
        "owned": len(store.hbm._owned),
        "transfers": sum(type(thing).__name__ in ("Run", "Event") for thing in gc.get_objects()),
        "threads": threading.active_count(),
    }


def test_disk_never_takes_more_than_its_size(open_store: Rig, tmp_path: Path) -> None:
    """A cap of 4 TB and 14 TB on disk (row 21): counted as du does, while pages churn."""
    store = open_store(hbm=8, host=4, disk="1MiB", write_policy="through")
    capacity = 1 << 20
    for turn in range(60):
        put_pages(store, chain(store, 4, turn + 1))
        assert _du(tmp_path / "store") <= capacity
    store.close()
    assert _du(tmp_path / "store") <= capacity
    again = open_store(hbm=8, host=4, disk="1MiB")
    assert again.stats().resident_pages["disk"] > 0
    assert again.check().is_clean


def _du(folder: Path) -> int:
    paths = [folder, *folder.rglob("*")]
    return sum(path.lstat().st_blocks * 512 for path in paths)


MEMORY_RUN = """
import numpy as np
from tiered_kv import KVLayout, StoreConfig, TieredStore

def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096

layout = KVLayout.uniform(64 << 10, 16)
with TieredStore.open(layout, StoreConfig.parse(hbm="1MiB", host="1MiB")) as store:
    slots = store.hbm.allocate(2)
    store.put(store.keys(range(32)), slots).wait()
    with store.get(store.keys(range(32))) as load:
        load.wait()
before = resident()
config = StoreConfig.parse(hbm="64MiB", host="128MiB", disk=sys.argv[1], disk_size="512MiB")
with TieredStore.open(layout, config) as store:
    peak, pages = 0, 0
    for prompt in range(24):
        keys = store.keys(range(prompt << 20, (prompt << 20) + 16 * 200))
        slots = store.hbm.allocate(200)
        for layer in store.hbm.layers:
            layer[slots] = prompt + 1
        store.put(keys, slots).wait()
        pages += 200
        peak = max(peak, resident())
    for prompt in range(24):
        with store.get(store.keys(range(prompt << 20, (prompt << 20) + 16 * 200))) as load:
            assert load.wait() == 200, load.wait()
        peak = max(peak, resident())
print(peak - before, pages)
"""


def test_process_takes_no_more_memory_than_it_was_given(tmp_path: Path) -> None:
    """Host allocations of twice the budget (row 25): resident memory over that of an idle run."""
    out, errors = child(MEMORY_RUN, tmp_path / "store").communicate(timeout=5 * PATIENCE_S)
    assert out, errors
    taken, pages = map(int, out.split())
    assert taken <= 1.05 * (192 << 20) + 250 * pages


# -- sudden death ----------------------------------------------------------------------------------

KILLED_RUN = """
from store_rig import *
from tiered_kv import StoreConfig, TieredStore

config = StoreConfig.parse(
    hbm=16 * PAGE_BYTES, host=9 * PAGE_BYTES, disk=sys.argv[1], disk_size="2MiB",
    write_policy=sys.argv[2],
)
with TieredStore.open(LAYOUT, config) as store:
    for prompt in range(1, 10_000):
        keys = chain(store, 4, prompt)
        stored = put_pages(store, keys)
        print(prompt, store.match(keys).disk_pages, stored, flush=True)
"""


@pytest.mark.parametrize("write_policy", ["back", "through"])
def test_killed_in_the_middle_what_was_committed_hits(
    tmp_path: Path, write_policy: str, open_store: Rig
) -> None:
    """SIGKILL while pages are written, then a new process on the same directory (row 24)."""
    process = child(KILLED_RUN, tmp_path / "store", write_policy)
    assert process.stdout is not None
    lines = [process.stdout.readline() for _ in range(30)]
    process.send_signal(signal.SIGKILL)
    rest, errors = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == -signal.SIGKILL, errors
    told = [line for line in [*lines, *rest.splitlines(keepends=True)] if line.endswith("\n")]
    last = int(told[-1].split()[0])
    store = open_store(hbm=16, host=8)
    assert store.check().is_clean
    found = 0
    for prompt in range(1, last + 1):
        keys = chain(store, 4, prompt)
        match = store.match(keys)
        assert len(get_pages(store, keys)) == match.pages
        found += match.pages
        if write_policy == "through" and prompt > last - 5:
            assert match.pages == 4  # its put had said that it was on disk
    assert found > 0
    assert store.check().is_clean
    assert index_problems(store, idle=True) == []


def test_second_process_is_refused_and_the_first_goes_on(tmp_path: Path, open_store: Rig) -> None:
    store = open_store()
    keys = chain(store, 2)
    put_pages(store, keys)
    code = """
from store_rig import *
from tiered_kv import ConfigError
try:
    RiggedStore(LAYOUT, StoreConfig.parse(
        hbm="64KiB", host="64KiB", disk=sys.argv[1], disk_size="2MiB"))
except ConfigError as error:
    print("refused:", error)
"""
    out, errors = child(code, tmp_path / "store").communicate(timeout=2 * PATIENCE_S)
    assert out.startswith("refused:"), errors
    assert out.count("\n") == 1
    store.flush()
    assert store.check().is_clean
    assert len(get_pages(store, keys)) == 2


def test_pages_found_again_are_those_of_the_disk_tier(open_store: Rig, tmp_path: Path) -> None:
    """What the store knows after a restart and what the tier holds are the same pages."""
    store = open_store(hbm=8, host=4, disk="700KiB")
    for prompt in range(1, 9):
        put_pages(store, chain(store, 3, prompt))
    store.close()
    again = open_store(hbm=8, host=4, disk="700KiB")
    disk = again.own_disk
    assert isinstance(disk, DiskTier)
    index = again._planner.index
    assert sorted(page.key for page in disk.pages()) == sorted(index.key(page) for page in index)
    assert again.usage()["disk"][0] == len(index) * PAGE_BYTES
