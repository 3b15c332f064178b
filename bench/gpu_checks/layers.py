"""Does computing start before the last layer has arrived, and is the copy hidden behind it?

Four runs over the same pages, interleaved: the copy alone, the layers' computing alone, one after
the other, and layer by layer with `wait_layer`. Hidden is what the last saves against the one
before it, as a share of the shorter of copy and computing: 100 % is all that could be hidden.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from bench.gpu_checks.rig import Rig, Store, all_hbm, open_store
from bench.rows import size_text
from tiered_kv.keys import KeyChain


@dataclass(slots=True)
class Model:
    """Stands in for a model: a matrix product, repeated until a layer takes as long as its copy."""

    matrix: torch.Tensor
    out: torch.Tensor
    repeats: int = 1

    @classmethod
    def make(cls, rig: Rig) -> Model:
        """A product small enough that many of them fit a layer."""
        width = rig.pick(1024 if rig.has_gpu else 256, 64)
        dtype = torch.bfloat16 if rig.has_gpu else torch.float32
        matrix = torch.ones(width, width, dtype=dtype, device=rig.device)
        return cls(matrix, torch.empty_like(matrix))

    def layer(self) -> None:
        """Queue one layer's work."""
        for _ in range(self.repeats):
            torch.mm(self.matrix, self.matrix, out=self.out)


@dataclass(slots=True)
class Arrival:
    """Pages on host, slots in HBM, and a model that reads them layer by layer."""

    rig: Rig
    store: Store
    keys: KeyChain
    into: list[int]
    model: Model
    layers: int

    def copy(self) -> None:
        """The copy alone."""
        self.store.get(self.keys, into=self.into).wait()

    def compute(self) -> None:
        """Computing alone."""
        for _ in range(self.layers):
            self.model.layer()

    def one_after_the_other(self) -> None:
        """Wait for all layers, then compute them."""
        self.copy()
        self.compute()

    def layer_by_layer(self) -> None:
        """Compute each layer as soon as it is there."""
        load = self.store.get(self.keys, into=self.into)
        for layer in range(self.layers):
            load.wait_layer(layer)
            self.model.layer()
        assert load.wait() == len(self.keys)

    def seconds(self, run: Callable[[], None]) -> float:
        """Wall time of a run and of all it has queued."""
        self.rig.synchronize()
        started = time.perf_counter()
        run()
        self.rig.synchronize()
        return time.perf_counter() - started

    def layer_times(self) -> list[float]:
        """When each layer could be used, in seconds from the call."""
        self.rig.synchronize()
        clock = _Clock(self.rig)
        load = self.store.get(self.keys, into=self.into)
        for layer in range(self.layers):
            load.wait_layer(layer)
            clock.mark()
        load.wait()
        return clock.seconds()


class _Clock:
    """Marks on the current stream: what the GPU sees, not when its queue was filled."""

    def __init__(self, rig: Rig) -> None:
        self._rig = rig
        self._marks: list[Any] = []
        self.mark()

    def mark(self) -> None:
        if not self._rig.has_gpu:
            self._marks.append(time.perf_counter())
            return
        event: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        self._marks.append(event)

    def seconds(self) -> list[float]:
        self._rig.synchronize()
        first, *later = self._marks
        if self._rig.has_gpu:
            return [first.elapsed_time(mark) / 1e3 for mark in later]
        return [mark - first for mark in later]


def check_layers(rig: Rig) -> None:
    """When layers arrive, and how much of the copy computing hides."""
    page_bytes, pages = rig.pick(2 << 20, 256 << 10), rig.pick(256 if rig.has_gpu else 32, 8)
    layout = rig.layout(page_bytes)
    store = open_store(layout, pages, pages, rig.device)
    try:
        keys = rig.keys(layout, pages)
        store.put(keys, all_hbm(store)).wait()
        slots = all_hbm(store)
        arrival = Arrival(rig, store, keys, slots, Model.make(rig), layout.layers)
        _measure(arrival, f"{pages} pages of {size_text(page_bytes)}")
        store.hbm.release(slots)
    finally:
        store.close()


def _measure(arrival: Arrival, case: str) -> None:
    rig, params = arrival.rig, {"pages": len(arrival.keys), "layers": arrival.layers}
    _as_long_as_the_copy(arrival)
    runs = {
        "copy": arrival.copy,
        "compute": arrival.compute,
        "one_after_the_other": arrival.one_after_the_other,
        "layer_by_layer": arrival.layer_by_layer,
    }
    taken: dict[str, list[float]] = {name: [] for name in runs}
    times: list[list[float]] = []
    for _ in range(rig.pick(9, 2)):
        for name, run in runs.items():
            taken[name].append(arrival.seconds(run))
        times.append(arrival.layer_times())
    p50 = {
        name: rig.log.add("layers", name, "s", seconds, **params).p50
        for name, seconds in taken.items()
    }
    first, last = (
        rig.log.add("layers", f"{which}_layer", "s", [one[at] for one in times], **params).p50
        for which, at in (("first", 0), ("last", -1))
    )
    rig.found("layers", f"{case}: first of {arrival.layers}", f"usable at {first / last:.0%}")
    saved = p50["one_after_the_other"] - p50["layer_by_layer"]
    hidden = saved / min(p50["copy"], p50["compute"])
    result = (
        f"copy {p50['copy'] * 1e3:.2f} ms, compute {p50['compute'] * 1e3:.2f}, in turn "
        f"{p50['one_after_the_other'] * 1e3:.2f}, overlapped {p50['layer_by_layer'] * 1e3:.2f}"
    )
    rig.found("layers", f"{case}: hidden {hidden:.0%}", result)


def _as_long_as_the_copy(arrival: Arrival) -> None:
    copy_s, compute_s = (
        min(arrival.seconds(run) for _ in range(4)) for run in (arrival.copy, arrival.compute)
    )
    arrival.model.repeats = max(1, round(copy_s / compute_s))
