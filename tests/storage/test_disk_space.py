"""The disk tier's capacity is a hard bound, whatever is written, freed, restarted or lost."""

from __future__ import annotations

import hashlib
import itertools
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import tiered_kv.storage.disk.tier
from tiered_kv.errors import ConfigError
from tiered_kv.keys import PageKey
from tiered_kv.storage.base import Page
from tiered_kv.storage.disk import DiskTier
from tiered_kv.storage.disk.geometry import (
    grow_geometry,
    minimum_capacity_bytes,
    plan_geometry,
)

PAGE_BYTES = 4096
CAPACITY_BYTES = 896 << 10


@pytest.fixture(scope="module", autouse=True)
def ahead() -> Iterator[None]:
    """Half of the writes here are told to the catalog in two steps."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiered_kv.storage.disk.tier, "_AHEAD_PAGES", 4)
        patch.setattr(tiered_kv.storage.disk.tier, "_AHEAD_BYTES", 0)
        yield


_STEPS = st.one_of(
    st.tuples(st.just("write"), st.integers(1, 40)),
    st.tuples(st.just("free"), st.integers(1, 5)),
    st.tuples(st.just("reopen"), st.just(0)),
    st.tuples(st.just("lose catalog"), st.just(0)),
)


def du_bytes(path: Path) -> int:
    out = subprocess.run(["du", "-s", "-B1", str(path)], capture_output=True, text=True, check=True)
    return int(out.stdout.split()[0])


class Model:
    """A tier and a dict that says what it must hold."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.numbers = itertools.count()
        self.held: dict[int, tuple[PageKey, bytes]] = {}  # by slot
        self.known: dict[PageKey, bytes] = {}
        self.tier = DiskTier.open(path, PAGE_BYTES, CAPACITY_BYTES, "f")

    def write(self, count: int) -> None:
        slots = self.tier.reserve(count)
        if slots is None:
            self.free(1)
            return
        pages = []
        for slot in slots:
            number = next(self.numbers)
            key = PageKey(hashlib.sha256(b"%d" % number).digest())
            data = np.random.default_rng(number).integers(0, 256, PAGE_BYTES, dtype=np.uint8)
            pages.append(Page(key, None, data))
            self.held[slot] = (key, data.tobytes())
            self.known[key] = data.tobytes()
        self.tier.write(slots, pages)

    def free(self, step: int) -> None:
        slots = sorted(self.held)[::step]
        for slot in slots:
            del self.held[slot]
        self.tier.free(slots)

    def reopen(self, without_catalog: bool) -> None:
        self.tier.close()
        if without_catalog:
            (self.path / "catalog" / "data.mdb").unlink()
        self.tier = DiskTier.open(self.path, PAGE_BYTES, CAPACITY_BYTES, "f")
        found = {stored.slot: stored.key for stored in self.tier.pages()}
        if not without_catalog:
            assert sorted(found.values()) == sorted(key for key, _ in self.held.values())
        self.held = {slot: (key, self.known[key]) for slot, key in found.items()}

    def verify(self) -> None:
        assert self.tier.disk_usage_bytes <= CAPACITY_BYTES
        assert self.tier.used_bytes == len(self.held) * PAGE_BYTES
        slots = list(self.held)
        into = [np.empty(PAGE_BYTES, np.uint8) for _ in slots]
        assert self.tier.read(slots, into) == [None] * len(slots)
        for slot, got in zip(slots, into, strict=True):
            assert got.tobytes() == self.held[slot][1]


@settings(
    max_examples=20,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
)
@given(st.lists(_STEPS, min_size=5, max_size=40))
def test_du_stays_within_capacity_and_every_page_comes_back(steps: list[tuple[str, int]]) -> None:
    """LMCache/LMCache#1454, #4725: a cap of 4 TB that took 14 TB, and a counter that leaked."""
    with tempfile.TemporaryDirectory() as folder:
        model = Model(Path(folder) / "store")
        for name, argument in steps:
            if name == "write":
                model.write(argument)
            elif name == "free":
                model.free(argument)
            else:
                model.reopen(name == "lose catalog")
            model.verify()
        assert model.tier.check().problems == []
        model.tier.close()
        assert du_bytes(model.path) <= CAPACITY_BYTES


def test_full_store_is_rewritten_many_times_over(tmp_path: Path) -> None:
    model = Model(tmp_path / "store")
    rng = np.random.default_rng(1)
    while model.tier.used_bytes < model.tier.capacity_pages * PAGE_BYTES:
        model.write(1)
    assert model.tier.reserve(1) is None
    for _ in range(250):
        slots = rng.permutation(sorted(model.held))[: rng.integers(1, 6)].tolist()
        for slot in slots:
            del model.held[slot]
        model.tier.free(slots)
        model.write(len(slots))
        assert model.tier.disk_usage_bytes <= CAPACITY_BYTES
    model.verify()
    assert model.tier.check().problems == []
    live = model.tier._geometry.segment_live_pages
    per_segment = model.tier._geometry.segment_bytes // (PAGE_BYTES + 4096)
    assert model.tier.write_amplification <= 2 * per_segment / (per_segment - live)
    model.tier.close()
    assert du_bytes(tmp_path / "store") <= CAPACITY_BYTES


@given(page_bytes=st.integers(1, 1 << 23), times=st.floats(1, 1e5))
@settings(max_examples=200, deadline=None, derandomize=True)
def test_geometry_fits_the_budget_and_leaves_compaction_its_room(
    page_bytes: int, times: float
) -> None:
    capacity_bytes = int(minimum_capacity_bytes(page_bytes) * times)
    geometry = plan_geometry(page_bytes, capacity_bytes)
    segments_bytes = geometry.segments * geometry.segment_bytes
    assert segments_bytes + geometry.catalog_bytes <= capacity_bytes
    assert geometry.segments >= 3
    assert geometry.capacity_pages >= 1
    alone = geometry.segment_bytes // (geometry.stride_bytes + 4096)
    assert geometry.segment_live_pages < alone
    grown = grow_geometry(geometry, 2 * capacity_bytes)
    assert grown.capacity_pages >= geometry.capacity_pages
    assert grown.segment_bytes == geometry.segment_bytes


def test_large_store_gives_most_of_its_bytes_to_pages() -> None:
    geometry = plan_geometry(2 << 20, 1 << 40)
    assert geometry.capacity_pages * geometry.page_bytes > 0.85 * (1 << 40)
    assert geometry.segment_bytes <= 256 << 20


def test_geometry_refuses_what_cannot_hold_a_page() -> None:
    for page_bytes in (1, 4096, 65536, 10_000_000):
        minimum = minimum_capacity_bytes(page_bytes)
        assert plan_geometry(page_bytes, minimum).capacity_pages >= 1
        with pytest.raises(ConfigError, match=str(minimum)):
            plan_geometry(page_bytes, minimum - 1)
