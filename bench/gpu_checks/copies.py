"""What does the store reach of what one pinned copy reaches, and does every byte come back?

Pages lie scattered over 32 layers in HBM and whole in host memory. Each repeat times a put, a get
and both at once through the store, from the call to the end of `wait` (planning, threads and
copies), each right after one contiguous copy of as many bytes the same way.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from bench.gpu_checks.rig import (
    Rig,
    Store,
    all_hbm,
    checksums,
    on_device,
    open_store,
    read_pages,
    write_pages,
    wrong_pages,
)
from bench.rows import load_average, size_text
from tiered_kv.bench.limits import ContiguousCopies
from tiered_kv.keys import KeyChain
from tiered_kv.layout import KVLayout

_PAGE_BYTES = (64 << 10, 256 << 10, 1 << 20, 2 << 20, 8 << 20)
_SMOKE_PAGE_BYTES = (64 << 10, 256 << 10)
_SET_BYTES = 256 << 20
_MAX_PAGES = 512
_WAYS = {"put": "HBM to host", "get": "host to HBM", "both": "both at once"}


@dataclass(slots=True)
class Through:
    """The same three ways through the store. HBM has room for two sets of pages, host for four."""

    rig: Rig
    store: Store
    layout: KVLayout
    pages: int
    stored: KeyChain | None = None
    spare: list[int] = field(default_factory=list)  # slots owned between two ways

    def ready(self) -> None:
        """All of HBM is ours, and nothing of what is stored is in it."""
        if len(self.spare) < self.store.hbm.capacity_pages:
            if self.spare:
                self.store.hbm.release(self.spare)
            self.spare = all_hbm(self.store)
        self.rig.synchronize()

    def put(self) -> None:
        """HBM to host: pages under keys never used before."""
        keys = self.rig.keys(self.layout, self.pages)
        assert self.store.put(keys, self._take()).wait() == self.pages
        self.stored = keys

    def get(self) -> None:
        """Host to HBM: the pages last put."""
        assert self.stored is not None
        into = self.spare[-self.pages :]
        assert self.store.get(self.stored, into=into).wait() == self.pages

    def both(self) -> None:
        """A put of new pages and a get of those last put, at once."""
        assert self.stored is not None
        keys = self.rig.keys(self.layout, self.pages)
        put = self.store.put(keys, self._take())
        load = self.store.get(self.stored, into=self.spare[-self.pages :])
        assert put.wait() == load.wait() == self.pages

    def _take(self) -> list[int]:
        taken, self.spare = self.spare[: self.pages], self.spare[self.pages :]
        return taken


def check_copies(rig: Rig) -> None:
    """Round trip by checksum, then the rates, for every page size."""
    for page_bytes in _SMOKE_PAGE_BYTES if rig.is_smoke else _PAGE_BYTES:
        layout = rig.layout(page_bytes)
        pages = rig.pick(min(_MAX_PAGES, _SET_BYTES // page_bytes), 6)
        store = open_store(layout, 2 * pages, 4 * pages, rig.device)
        baseline = ContiguousCopies.make(rig.device, pages * page_bytes)
        try:
            _round_trip(rig, store, layout, pages)
            _rates(rig, Through(rig, store, layout, pages), baseline)
        finally:
            baseline.close()
            store.close()


def _round_trip(rig: Rig, store: Store, layout: KVLayout, pages: int) -> None:
    content = rig.content(pages, layout.page_bytes)
    slots = all_hbm(store)
    write_pages(store, on_device(store, slots[:pages]), torch.from_numpy(content).to(rig.device))
    keys = rig.keys(layout, pages)
    put = store.put(keys, slots[:pages]).wait()
    store.hbm.release(slots[pages:])
    slots = all_hbm(store)
    back = slots[pages:]  # other slots than they came from
    came = store.get(keys, into=back).wait()
    wrong = wrong_pages(read_pages(store, on_device(store, back)), checksums(content))
    store.hbm.release(slots)
    case = f"{pages} pages of {size_text(layout.page_bytes)}"
    rig.log.add(
        "round_trip", "wrong_pages", "pages", [wrong], page_bytes=layout.page_bytes, of_pages=pages
    )
    result = f"{came} of {put} came back, {wrong} wrong (xxh3-128)"
    rig.found("round trip", case, result, put == came == pages and not wrong)


def _rates(rig: Rig, through: Through, baseline: ContiguousCopies) -> None:
    page_bytes, n_bytes = through.layout.page_bytes, through.pages * through.layout.page_bytes
    taken: dict[str, dict[str, list[float]]] = {way: {"copy": [], "store": []} for way in _WAYS}
    for repeat in range(rig.pick(7, 2) + 1):
        for way in _WAYS:
            rig.synchronize()
            of_copy = _seconds(getattr(baseline, way))
            through.ready()
            of_store = _seconds(getattr(through, way))
            if repeat:  # the first warms up
                taken[way]["copy"].append(of_copy)
                taken[way]["store"].append(of_store)
    through.store.hbm.release(through.spare)
    for way, direction in _WAYS.items():
        moved = n_bytes * (2 if way == "both" else 1)
        params = {
            "page_bytes": page_bytes,
            "pages": through.pages,
            "layers": len(through.store.hbm.layers),
            "way": direction,
            "load_average": load_average(),
        }
        rates = {
            what: rig.log.add(
                "copies", f"{what}_rate", "B/s", [moved / s for s in seconds], **params
            ).p50
            for what, seconds in taken[way].items()
        }
        result = f"{rates['store'] / 1e9:6.2f} GB/s of {rates['copy'] / 1e9:6.2f} in one copy"
        share = rates["store"] / rates["copy"]
        rig.found("copies", f"{size_text(page_bytes)}, {direction}", f"{result} ({share:.0%})")


def _seconds(work: Callable[[], None]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started
