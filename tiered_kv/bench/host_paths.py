"""HBM to host and back: put, get, and both at once."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from tiered_kv.bench.content import (
    Load,
    Pages,
    get_all,
    open_store,
    page_layout,
    put_all,
    wait_all,
)
from tiered_kv.bench.limits import CopyLimit, copy_limit
from tiered_kv.bench.sampling import Amounts, Way
from tiered_kv.config import StoreConfig
from tiered_kv.storage.slab import align_up


class HostStage(NamedTuple):
    """A store of HBM and host, full of known pages, and its limit."""

    pages: Pages
    limit: CopyLimit
    page_bytes: int


@contextmanager
def host_stage(page_bytes: int, amounts: Amounts, device: str) -> Iterator[HostStage]:
    """HBM and host for two sets each; a put to a full host pushes the oldest pages out."""
    pages = 2 * max(amounts.full.pages, amounts.single.pages)
    config = StoreConfig.parse(
        hbm=pages * page_bytes, host=pages * align_up(page_bytes), device=device
    )
    with open_store(page_layout(page_bytes), config) as store:
        limit = copy_limit(store.hbm.device, amounts.full.pages * page_bytes, page_bytes)
        try:
            made = Pages(store)
            made.fill()
            yield HostStage(made, limit, page_bytes)
        finally:
            limit.close()


class _HostWay(Way):
    def __init__(self, stage: HostStage) -> None:
        self.pages, self._limit, self._page_bytes = stage
        self.store = self.pages.store
        self.limit_name = self._limit.name

    def bytes_of(self, load: Load) -> int:
        return load.pages * self._page_bytes


class HostPut(_HostWay):
    """HBM to host."""

    path = "host-put"

    def before(self, load: Load) -> None:
        self.pages.own()
        self._made = self.pages.make(load)

    def limit(self, load: Load) -> None:
        self._limit.put(self.bytes_of(load))

    def ours(self) -> None:
        self._came = wait_all(put_all(self.store, self._made))

    def after(self) -> None:
        self.pages.check(self._made)


class HostGet(_HostWay):
    """Host to HBM: pages that are no longer in HBM."""

    path = "host-get"

    def before(self, load: Load) -> None:
        self.pages.own()
        self._made = self.pages.make(load)
        self.pages.put(self._made)
        self.pages.own()
        self._into = self.pages.slots_for(self._made)

    def limit(self, load: Load) -> None:
        self._limit.get(self.bytes_of(load))

    def ours(self) -> None:
        self._came = wait_all(get_all(self.store, self._made, self._into))

    def after(self) -> None:
        self.pages.compare(self._made, self._into, self._came)


class HostMixed(_HostWay):
    """Half of the bytes each way, at once: every other transfer is a get."""

    path = "host-mixed"

    def bytes_of(self, load: Load) -> int:
        return 2 * _half(load).pages * self._page_bytes

    def before(self, load: Load) -> None:
        self.pages.own()
        self._got = self.pages.make(_half(load))
        self.pages.put(self._got)
        self.pages.own()
        self._made = self.pages.make(_half(load))
        self._into = self.pages.slots_for(self._got)

    def limit(self, load: Load) -> None:
        self._limit.both(self.bytes_of(load))

    def ours(self) -> None:
        puts, gets = [], []
        for made, got, into in zip(self._made, self._got, self._into, strict=True):
            puts += put_all(self.store, [made])
            gets += get_all(self.store, [got], [into])
        wait_all(puts)
        self._came = wait_all(gets)

    def after(self) -> None:
        self.pages.compare(self._got, self._into, self._came)
        self.pages.check(self._made)


def _half(load: Load) -> Load:
    """What goes each way: of one transfer half of its pages, at least one."""
    if load.transfers > 1:
        return Load(load.transfers // 2, load.transfer_pages)
    return Load(1, max(1, load.transfer_pages // 2))


HOST_WAYS = {way.path: way for way in (HostPut, HostGet, HostMixed)}
