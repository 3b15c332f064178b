"""What does offloading in the background take from a thread that computes?

    python -m bench.foreground              appends its rows to results/foreground.jsonl
    python -m bench.foreground --smoke      small sizes, no rows

A foreground thread runs one of two loops: a matmul of 1024 x 1024 float32 in one torch thread, and
50 tanh of 16 numbers, which is bound by the interpreter. Beside it, in turn (A B C A B C ...):

    alone        nothing
    offload-N    a thread that puts 8 MiB into a store and gets it back, in pages of N bytes, paced
                 to 1 GB/s, both ways counted
    memcpy-N     a thread that copies as many bytes a second as that one just did, 8 MiB at a time
                 in plain memcpy

What offloading takes beyond what the same copies take anyway is the ratio of iterations a second
beside the store to those beside memcpy; asked for: 0.9 and more with pages of 256 KiB. HBM is host
memory, its pages scattered over 32 layers. The pages of every window are compared at its end.
"""

from __future__ import annotations

import argparse
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch

from bench import rows
from bench.arguments import new_file
from tiered_kv.bench.statistics import ratio_ci95
from tiered_kv.config import StoreConfig
from tiered_kv.layout import KVLayout
from tiered_kv.storage.slab import Slab
from tiered_kv.store import TieredStore

LAYERS = 32
PAGE_BYTES = (64 << 10, 256 << 10)
_PAGE_TOKENS = 16
_HOST_SETS = 4
_DEADLINE_S = 60.0


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much is moved beside what, and how often."""

    set_bytes: int
    bytes_per_s: float
    window_s: float
    rounds: int
    matmul: int


FULL = Sizes(8 << 20, 1e9, 0.5, 20, 1024)
SMOKE = Sizes(1 << 20, 1e8, 0.05, 2, 64)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, append."""
    options = _parser().parse_args(arguments)
    sizes = SMOKE if options.smoke else FULL
    log = rows.Log()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for name, loop in _foregrounds(sizes).items():
            measure(log, sizes, name, loop)
    finally:
        torch.set_num_threads(threads)
    for made in log.measured:
        case = " ".join(f"{key}={value}" for key, value in made.params.items())
        spread = f"p20 {made.quantile(0.2):,.4g}, p80 {made.quantile(0.8):,.4g}"
        print(f"{made.metric:18} {made.p50:10,.4g} {made.unit:4} {case} ({spread})")
    path = options.rows or (None if options.smoke else rows.RESULTS / "foreground.jsonl")
    if path:
        rows.append(path, log.measured, rows.origin())
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench.foreground", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--smoke", action="store_true", help="small sizes")
    parser.add_argument("--rows", type=new_file, help="append rows to this file")
    return parser


def _foregrounds(sizes: Sizes) -> dict[str, Callable[[], object]]:
    left = torch.full((sizes.matmul, sizes.matmul), 0.5)
    out = torch.empty_like(left)
    few = torch.full((16,), 0.5)

    def tanhs() -> None:
        for _ in range(50):
            few.tanh()

    return {"matmul": lambda: torch.matmul(left, left, out=out), "tanh": tanhs}


# -- what goes on beside it ----------------------------------------------------------------------


class Work(Protocol):
    """One step of a background thread."""

    @property
    def step_bytes(self) -> int:
        """Bytes that a step copies."""

    def step(self) -> None:
        """Copy them; blocks."""

    def check(self) -> None:
        """Compare what was copied; not timed."""

    def close(self) -> None:
        """Give memory and threads back."""


class Memcpy:
    """As many bytes as a put and a get copy, in two plain copies."""

    def __init__(self, set_bytes: int) -> None:
        self._slabs = Slab(set_bytes), Slab(set_bytes)
        self._slabs[0].array[:] = 1
        self.step_bytes = 2 * set_bytes

    def step(self) -> None:
        """There and back."""
        above, below = (slab.array for slab in self._slabs)
        np.copyto(below, above)
        np.copyto(above, below)

    def check(self) -> None:
        """Both are what the first was."""
        assert all(bool((slab.array == 1).all()) for slab in self._slabs)

    def close(self) -> None:
        """Give the memory back."""
        for slab in self._slabs:
            slab.close()


class Offload:
    """A put of new pages out of HBM, and a get of them from host; HBM holds one set."""

    def __init__(self, set_bytes: int, page_bytes: int) -> None:
        layout = KVLayout.uniform(page_bytes, _PAGE_TOKENS, layers=LAYERS)
        self._pages = set_bytes // page_bytes
        config = StoreConfig.parse(hbm=set_bytes, host=_HOST_SETS * set_bytes, device="cpu")
        self._store = TieredStore.open(layout, config)
        self._made = 0
        self.step_bytes = 2 * set_bytes
        for layer in self._store.hbm.layers:
            layer.copy_(torch.randint(0, 256, layer.shape, dtype=torch.uint8))

    def step(self) -> None:
        """There and back, into slots that are its own."""
        self._round()

    def check(self) -> None:
        """One more, whose pages are compared."""
        self._round(is_compared=True)

    def _round(self, *, is_compared: bool = False) -> None:
        self._made += 1
        tokens = np.full(self._pages * _PAGE_TOKENS, self._made, np.uint32)
        keys = self._store.keys(tokens)
        slots = self._own()
        before = self._read(slots) if is_compared else None
        assert self._store.put(keys, slots).wait() == self._pages
        into = self._own()[::-1]
        assert self._store.get(keys, into=into).wait() == self._pages
        if before is not None:
            assert torch.equal(self._read(into), before), "pages came back wrong"
        self._store.hbm.release(into)

    def _own(self) -> list[int]:
        """All of HBM: what a put left there is on host by now."""
        end = time.monotonic() + _DEADLINE_S
        while (slots := self._store.hbm.allocate(self._pages)) is None:
            assert time.monotonic() < end, "HBM slots stayed in use"
            time.sleep(0.0002)
        return slots

    def _read(self, slots: Sequence[int]) -> torch.Tensor:
        at = torch.tensor(slots)
        return torch.cat([layer.index_select(0, at) for layer in self._store.hbm.layers], 1)

    def close(self) -> None:
        """Close the store."""
        self._store.close()


@dataclass(slots=True)
class Paced:
    """A thread that does steps of a work at a given rate, as far as it can keep up."""

    work: Work
    bytes_per_s: float
    steps: int = 0
    seconds: float = 0.0
    _stop: threading.Event = field(default_factory=threading.Event)
    _error: list[BaseException] = field(default_factory=list)

    def _run(self) -> None:
        step_s = self.work.step_bytes / self.bytes_per_s
        started = time.perf_counter()
        try:
            while not self._stop.is_set():
                self.work.step()
                self.steps += 1
                due = started + self.steps * step_s
                self._stop.wait(max(0.0, due - time.perf_counter()))
        except BaseException as error:  # raised again by the thread that waits for this one
            self._error.append(error)
        self.seconds = time.perf_counter() - started

    @contextmanager
    def running(self) -> Iterator[None]:
        """It runs inside the block and has ended after it."""
        thread = threading.Thread(target=self._run, name="bench-background", daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._stop.set()
            thread.join(_DEADLINE_S)
        assert not thread.is_alive(), "the background thread hangs"
        if self._error:
            raise self._error[0]

    @property
    def reached(self) -> float:
        """Bytes a second that it copied."""
        return self.steps * self.work.step_bytes / self.seconds


# -- measuring -----------------------------------------------------------------------------------

Rates = dict[str, list[float]]
"""By what goes on beside the foreground."""


def measure(log: rows.Log, sizes: Sizes, name: str, loop: Callable[[], object]) -> None:
    """One foreground beside everything, in turn; adds its rows."""
    memcpy = Memcpy(sizes.set_bytes)
    offloads = {size: Offload(sizes.set_bytes, size) for size in PAGE_BYTES}
    rates: Rates = {}
    copied: Rates = {}
    try:
        for repeat in range(sizes.rounds + 1):
            found = _round(loop, memcpy, offloads, sizes)
            for beside, (rate, bytes_per_s) in found.items() if repeat else ():
                rates.setdefault(beside, []).append(rate)
                copied.setdefault(beside, []).append(bytes_per_s)
    finally:
        memcpy.close()
        for offload in offloads.values():
            offload.close()
    _add(log, sizes, name, rates, copied)


def _round(
    loop: Callable[[], object], memcpy: Work, offloads: Mapping[int, Work], sizes: Sizes
) -> dict[str, tuple[float, float]]:
    """Iterations a second of the foreground and bytes a second beside it, of each case once."""
    found = {"alone": (_iterations_per_s(loop, sizes.window_s), 0.0)}
    for page_bytes, offload in offloads.items():
        ours = _beside(loop, offload, sizes.bytes_per_s, sizes.window_s)
        found[f"offload-{page_bytes}"] = ours
        found[f"memcpy-{page_bytes}"] = _beside(loop, memcpy, ours[1], sizes.window_s)
    return found


def _beside(
    loop: Callable[[], object], work: Work, bytes_per_s: float, window_s: float
) -> tuple[float, float]:
    paced = Paced(work, bytes_per_s)
    with paced.running():
        rate = _iterations_per_s(loop, window_s)
    work.check()
    return rate, paced.reached


def _iterations_per_s(loop: Callable[[], object], window_s: float) -> float:
    done, started = 0, time.perf_counter()
    while (taken := time.perf_counter() - started) < window_s or not done:
        loop()
        done += 1
    return done / taken


def _add(log: rows.Log, sizes: Sizes, name: str, rates: Rates, copied: Rates) -> None:
    params = {"foreground": name, "wanted_bytes_per_s": sizes.bytes_per_s}
    params |= {"set_bytes": sizes.set_bytes, "load_average": rows.load_average()}
    for beside, taken in rates.items():
        more = {"beside": beside, "bytes_per_s": round(float(np.median(copied[beside]))), **params}
        log.add("foreground", "iterations_per_s", "1/s", taken, **more)
    for page_bytes in PAGE_BYTES:
        ours, plain = f"offload-{page_bytes}", f"memcpy-{page_bytes}"
        for metric, case, base in (
            ("ratio_to_memcpy", ours, plain),
            ("ratio_to_alone", ours, "alone"),
            ("ratio_to_alone", plain, "alone"),
        ):
            ci95 = ratio_ci95(rates[case], rates[base]).ci95
            edges = ci95 and [round(edge, 4) for edge in ci95]
            pairs = [one / other for one, other in zip(rates[case], rates[base], strict=True)]
            log.add("foreground", metric, "1", pairs, beside=case, ci95=edges, **params)


if __name__ == "__main__":
    sys.exit(main())
