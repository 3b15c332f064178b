"""What does the store reach of memcpy and of the raw disk, without a GPU?

    python -m bench.store_cpu               appends its rows to results/store_cpu.jsonl
    python -m bench.store_cpu --smoke       small sizes, no rows
    python -m bench.store_cpu --dir DIR     where the disk tier and the raw file lie

HBM is a pool in host memory, pages scattered over 32 layers. Each way is timed through
`TieredStore`, from the call to the end of `wait`, right after its limit on as many bytes, repeat by
repeat:

    gather       no store: the copies   memcpy, one thread
                 of a put alone
    put          HBM to host            memcpy, one thread
    get          host to HBM            memcpy, one thread
    flush        host to disk, durable  O_DIRECT writes of 8 MiB, 2 threads, then fdatasync
    prefetch     disk to host           O_DIRECT reads of 1 MiB, 4 threads
    get_disk     disk to HBM            the same reads

Rates are by wall clock and, of put and get and their limit, by CPU time of the process too: what is
left of them on a machine shared with other work. Both files are written into fresh space.
`software` is a put and a get of pages of 2 KiB, where copying costs next to nothing: the time of
planning, threads and Python for each page.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from bench import rows
from tiered_kv.config import StoreConfig
from tiered_kv.keys import KeyChain
from tiered_kv.layout import KVLayout
from tiered_kv.storage.base import PageBuffer
from tiered_kv.storage.slab import Slab
from tiered_kv.store import TieredStore

LAYERS = 32
_PAGE_TOKENS = 16
_PAGE_BYTES = (64 << 10, 256 << 10, 2 << 20)
_WAYS = ("gather", "put", "get", "flush", "prefetch", "get_disk")
_TINY_PAGE_BYTES = LAYERS * 64
_BATCHES = (1, 16, 64, 256)


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much is moved, and how often."""

    set_bytes: int
    repeats: int
    page_bytes: tuple[int, ...]
    software_repeats: int


FULL = Sizes(64 << 20, 9, _PAGE_BYTES, 40)
SMOKE = Sizes(1 << 20, 2, _PAGE_BYTES[:1], 2)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, append."""
    options = _parser().parse_args(arguments)
    sizes = SMOKE if options.smoke else FULL
    log = rows.Log()
    with tempfile.TemporaryDirectory(prefix="tiered-kv-bench-", dir=options.dir) as directory:
        for page_bytes in sizes.page_bytes:
            ways(log, sizes, page_bytes, Path(directory))
    for batch in _BATCHES:
        software(log, batch, sizes.software_repeats)
    _print(log)
    path = options.rows or (None if options.smoke else rows.RESULTS / "store_cpu.jsonl")
    if path:
        rows.append(path, log.measured, rows.origin())
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench.store_cpu", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--smoke", action="store_true", help="small sizes")
    parser.add_argument("--dir", type=Path, default=Path("/var/tmp"), help="on the disk to measure")
    parser.add_argument("--rows", type=Path, help="append rows to this file")
    return parser


def _print(log: rows.Log) -> None:
    for made in log.measured:
        p20, p50, p80 = (made.quantile(share) for share in (0.2, 0.5, 0.8))
        case = " ".join(str(value) for key, value in made.params.items() if key != "layers")
        scale, unit = (1e9, "GB/s") if made.unit == "B/s" else (1e-6, "us")
        values = f"p20 {p20 / scale:8.3f} p50 {p50 / scale:8.3f} p80 {p80 / scale:8.3f} {unit}"
        print(f"{made.name:10} {made.metric:22} {values:50} {case}")


# -- bytes ---------------------------------------------------------------------------------------


class Raw:
    """The limits: memcpy between two slabs, and a file past the page cache."""

    def __init__(self, n_bytes: int, path: Path, writes: int) -> None:
        self._slabs = Slab(n_bytes), Slab(n_bytes)
        self._slabs[0].array[:] = 1
        self._fd = _open_direct(path)
        os.posix_fallocate(self._fd, 0, n_bytes * writes)
        self._n_bytes = n_bytes
        self._written = 0
        self._writers, self._readers = ThreadPoolExecutor(2), ThreadPoolExecutor(4)

    def memcpy(self) -> None:
        """One contiguous copy."""
        source, target = self._slabs
        np.copyto(target.array, source.array)

    def gather(self, page_bytes: int) -> None:
        """As many bytes out of 32 layers, page by page: one strided copy a page."""
        source, target = (slab.array for slab in self._slabs)
        pages = self._n_bytes // page_bytes
        pool = source.reshape(LAYERS, pages, page_bytes // LAYERS)
        host = target.reshape(pages, LAYERS, page_bytes // LAYERS)
        for page in range(pages):
            np.copyto(host[page], pool[:, page])

    def write(self) -> None:
        """The next n_bytes of the file, durable."""
        base = self._written * self._n_bytes
        self._written += 1
        memory: PageBuffer = self._slabs[0].array
        step = min(8 << 20, self._n_bytes)

        def one(at: int) -> None:
            buffers = [memory[at : at + step].data]
            assert os.pwritev(self._fd, buffers, base + at) == step

        list(self._writers.map(one, range(0, self._n_bytes, step)))
        os.fdatasync(self._fd)

    def read(self) -> None:
        """The n_bytes last written."""
        base = (self._written - 1) * self._n_bytes
        memory: PageBuffer = self._slabs[1].array
        step = min(1 << 20, self._n_bytes)

        def one(at: int) -> None:
            buffers = [memory[at : at + step].data]
            assert os.preadv(self._fd, buffers, base + at) == step

        list(self._readers.map(one, range(0, self._n_bytes, step)))

    def close(self) -> None:
        """Give memory, threads and file back."""
        self._writers.shutdown()
        self._readers.shutdown()
        os.close(self._fd)
        for slab in self._slabs:
            slab.close()


def _open_direct(path: Path) -> int:
    flags = os.O_RDWR | os.O_CREAT
    try:
        return os.open(path, flags | os.O_DIRECT, 0o600)
    except OSError:  # the store reads and writes through the page cache here too, and says so
        return os.open(path, flags, 0o600)


class Taken(NamedTuple):
    """Seconds that something took."""

    wall: float
    cpu: float


@dataclass(slots=True)
class Round:
    """One repeat: set A goes down to disk, set B pushes it out of host, A comes back."""

    store: TieredStore
    raw: Raw
    pages: int
    seed: int
    seconds: dict[str, tuple[Taken, Taken]] = field(default_factory=dict)  # way -> (limit, ours)

    def run(self) -> None:
        """All ways, each right after its limit."""
        store, raw, pages = self.store, self.raw, self.pages
        first, second = (_keys(store, pages, seed) for seed in (self.seed, self.seed + 1))
        slots = _all_hbm(store)
        self._time("gather", raw.memcpy, partial(raw.gather, store.layout.page_bytes))
        self._time("put", raw.memcpy, partial(_put, store, first, slots[:pages]))
        self._time("flush", raw.write, store.flush)
        _put(store, second, slots[pages:])  # the first set gives way; it is on disk
        store.flush()
        slots = _all_hbm(store)
        self._time("get", raw.memcpy, partial(_get, store, second, slots[:pages]))
        self._time("prefetch", raw.read, lambda: store.prefetch(first).wait())
        self._time("get_disk", raw.read, partial(_get, store, second, slots[:pages]))
        store.hbm.release(slots)

    def _time(self, way: str, limit: Callable[[], object], ours: Callable[[], object]) -> None:
        self.seconds[way] = _taken(limit), _taken(ours)


def ways(log: rows.Log, sizes: Sizes, page_bytes: int, directory: Path) -> None:
    """All ways at one page size."""
    pages = sizes.set_bytes // page_bytes
    layout = KVLayout.uniform(page_bytes, _PAGE_TOKENS, layers=LAYERS)
    rounds = sizes.repeats + 1  # the first warms up
    # Host: one set, what is kept aside for staging, and one page. Disk: all sets and its own needs.
    host_bytes = sizes.set_bytes + max(page_bytes, sizes.set_bytes // 8)
    config = StoreConfig.parse(
        hbm=2 * sizes.set_bytes,
        host=host_bytes,
        disk=directory / f"store-{page_bytes}",
        disk_size=2 * (2 * rounds * sizes.set_bytes) + (64 << 20),
        device="cpu",
    )
    taken: list[Round] = []
    raw_path = directory / "raw"
    raw = Raw(sizes.set_bytes, raw_path, rounds)
    try:
        with TieredStore.open(layout, config) as store:
            for number in range(rounds):
                taken.append(Round(store, raw, pages, seed=2 * number))
                taken[-1].run()
    finally:
        raw.close()
        raw_path.unlink()
    params: dict[str, Any] = {"page_bytes": page_bytes, "pages": pages, "layers": LAYERS}
    params["load_average"] = rows.load_average()
    for way in _WAYS:
        for at, metric in enumerate((f"{way}_limit", way)):
            clocks = ("wall", "cpu") if way in ("gather", "put", "get") else ("wall",)
            for clock in clocks:
                seconds = [getattr(one.seconds[way][at], clock) for one in taken[1:]]
                rates = [sizes.set_bytes / s for s in seconds]
                log.add("store_cpu", f"{metric}_rate", "B/s", rates, clock=clock, **params)


# -- software ------------------------------------------------------------------------------------


def software(log: rows.Log, batch: int, repeats: int) -> None:
    """Wall time and CPU time a page of a put and a get of tiny pages, in batches of this many."""
    layout = KVLayout.uniform(_TINY_PAGE_BYTES, _PAGE_TOKENS, layers=LAYERS)
    pool = 2 * batch * _TINY_PAGE_BYTES
    config = StoreConfig.parse(hbm=pool, host=4 * batch * 4096, device="cpu")
    taken: list[tuple[Taken, Taken]] = []
    with TieredStore.open(layout, config) as store:
        for repeat in range(repeats + 3):  # the first three warm up
            keys = _keys(store, batch, repeat)
            slots = _all_hbm(store)
            put = _taken(partial(_put, store, keys, slots[:batch]))
            store.hbm.release(slots[batch:])
            slots = _all_hbm(store)
            get = _taken(partial(_get, store, keys, slots[:batch]))
            store.hbm.release(slots)
            if repeat >= 3:
                taken.append((put, get))
    for at, metric in enumerate(("put_s_per_page", "get_s_per_page")):
        for clock in ("wall", "cpu"):
            samples = [getattr(one[at], clock) / batch for one in taken]
            params = {"batch": batch, "load_average": rows.load_average()}
            log.add("software", metric, "s", samples, clock=clock, **params)


def _taken(run: Callable[[], object]) -> Taken:
    cpu, wall = time.process_time(), time.perf_counter()
    run()
    return Taken(time.perf_counter() - wall, time.process_time() - cpu)


def _put(store: TieredStore, keys: KeyChain, slots: list[int]) -> None:
    assert store.put(keys, slots).wait() == len(keys)


def _get(store: TieredStore, keys: KeyChain, slots: list[int]) -> None:
    assert store.get(keys, into=slots).wait() == len(keys)


def _keys(store: TieredStore, pages: int, seed: int) -> KeyChain:
    tokens = np.random.default_rng(seed).integers(0, 50_000, pages * _PAGE_TOKENS)
    return store.keys(tokens, salt="bench")


def _all_hbm(store: TieredStore) -> list[int]:
    slots = store.hbm.allocate(store.hbm.capacity_pages)
    assert slots is not None, "on a CPU a page is free as soon as its transfer has ended"
    return slots


if __name__ == "__main__":
    sys.exit(main())
