"""What is written together is read back in long runs."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from disk_rig import (
    assert_holds,
    key_of,
    open_tier,
    put,
    record_of,
)
from hypothesis import given
from hypothesis import strategies as st

from tiered_kv.config import StoreConfig
from tiered_kv.layout import KVLayout
from tiered_kv.storage.base import Page
from tiered_kv.storage.disk.runs import MIN_RUN_BYTES, RUN_BYTES, plan_runs, run_bytes
from tiered_kv.storage.disk.segment import SegmentFiles
from tiered_kv.store import TieredStore

STRIDE = 64 << 10


@pytest.fixture
def read_sizes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes of every read of more than a header, in the order they were done."""
    sizes: list[int] = []
    real = SegmentFiles.has_read

    def has_read(self: SegmentFiles, fd: int, offset: int, n_bytes: int) -> None:
        real(self, fd, offset, n_bytes)
        if n_bytes > 4096:
            sizes.append(n_bytes)

    monkeypatch.setattr(SegmentFiles, "has_read", has_read)
    return sizes


@pytest.mark.parametrize("page_bytes", [64 << 10, 256 << 10, 2 << 20])
def test_a_prefix_written_together_is_read_in_runs_of_a_megabyte(
    tmp_path: Path, page_bytes: int, read_sizes: list[int]
) -> None:
    count = (12 << 20) // page_bytes
    settings = {"page_bytes": page_bytes, "capacity_bytes": 128 << 20}
    tier = open_tier(tmp_path / "store", **settings)
    pages = [
        Page(key_of(number), key_of(number - 1), np.full(page_bytes, number, np.uint8))
        for number in range(1, count + 1)
    ]
    put(tier, pages)
    tier.close()
    tier = open_tier(tmp_path / "store", **settings)
    slots = {page.key: page.slot for page in tier.pages()}
    segments = {record_of(tier, slot).segment for slot in slots.values()}
    read_sizes.clear()
    assert_holds(tier, [slots[page.key] for page in pages], pages)
    ends = len(segments) + 1  # what is left over at the end of each, and of the part begun first
    assert sum(size < MIN_RUN_BYTES for size in read_sizes) <= ends
    assert max(read_sizes) <= max(RUN_BYTES, page_bytes)
    assert len(read_sizes) <= sum(read_sizes) // MIN_RUN_BYTES + ends
    tier.close()


def test_a_prefetch_after_a_restart_reads_in_runs_of_a_megabyte(
    tmp_path: Path, read_sizes: list[int]
) -> None:
    count, tokens = 256, 16
    layout = KVLayout.uniform(STRIDE, tokens, layers=4)
    config = StoreConfig.parse(
        hbm=count * STRIDE,
        host=2 * count * STRIDE,
        disk=tmp_path / "store",
        disk_size=256 << 20,
        device="cpu",
    )
    with TieredStore.open(layout, config) as store:
        keys = store.keys(list(range(count * tokens)))
        slots = store.hbm.allocate(count)
        assert slots is not None
        assert store.put(keys, slots).wait() == count
    with TieredStore.open(layout, config) as store:
        read_sizes.clear()
        assert store.prefetch(keys).wait() == count
    short = [size for size in read_sizes if size < MIN_RUN_BYTES]
    assert len(short) <= 2, f"{read_sizes}: at most the ends of two segments are short"
    assert sum(read_sizes) >= count * STRIDE


@given(
    places=st.lists(st.tuples(st.integers(0, 2), st.integers(0, 300)), unique=True, max_size=80),
    blocks=st.integers(1, 16),
    longest=st.integers(1, 64),
)
def test_runs_hold_every_page_once_and_are_no_longer_than_allowed(
    places: list[tuple[int, int]], blocks: int, longest: int
) -> None:
    taken: list[tuple[int, int]] = []  # pages of a segment do not overlap
    for segment, at in sorted(places):
        if not taken or taken[-1][0] != segment or at >= taken[-1][1] + blocks:
            taken.append((segment, at))
    taken = taken[::2] + taken[1::2]  # asked for in another order than they lie in
    segments = np.array([segment for segment, _ in taken], np.int32)
    firsts = np.array([first for _, first in taken], np.uint32)
    runs = plan_runs(segments, firsts, blocks * 4096, longest * 4096)
    assert sorted(at for run in runs for at in run.wanted) == list(range(len(taken)))
    for run in runs:
        assert [taken[at] for at in run.wanted] == [(run.segment, s // 4096) for s in run.starts]
        gaps = np.diff(run.starts) - blocks * 4096
        assert ((gaps >= 0) & (gaps <= 4096)).all()
        assert run.n_bytes == run.starts[-1] + blocks * 4096 - run.offset
        assert len(run.wanted) == 1 or run.n_bytes <= longest * 4096
    for run, following in pairwise(runs):
        gap = following.offset - (run.offset + run.n_bytes)
        is_near = run.segment == following.segment and 0 <= gap <= 4096
        joined = following.starts[0] + blocks * 4096 - run.offset
        assert not is_near or joined > longest * 4096, "two runs that could have been one"


@pytest.mark.parametrize(
    ("total", "wanted"),
    [(64 << 10, 1 << 20), (6 << 20, (6 << 20) // 4), (64 << 20, 4 << 20)],
    ids=["short", "shared", "long"],
)
def test_a_read_is_shared_among_the_threads(total: int, wanted: int) -> None:
    assert run_bytes(total, 4) == wanted
