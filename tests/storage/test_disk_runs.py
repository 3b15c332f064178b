"""What is written together is read back in long runs, and committed in groups."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from disk_rig import (
    assert_holds,
    buffers,
    chain,
    key_of,
    open_tier,
    put,
    record_of,
)
from hypothesis import given
from hypothesis import strategies as st

import tiered_kv.storage.disk.tier
from tiered_kv.config import StoreConfig
from tiered_kv.errors import TierIOError
from tiered_kv.layout import KVLayout
from tiered_kv.storage.base import Page
from tiered_kv.storage.disk.catalog import Catalog
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
    ends = len(segments)  # what is left over at the end of each segment may be short
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


# -- group commits -------------------------------------------------------------------------------


@pytest.fixture
def pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two pages a commit."""
    monkeypatch.setattr(tiered_kv.storage.disk.tier, "_GROUP_PAGES", 2)


@pytest.mark.usefixtures("pairs")
def test_a_group_is_committed_after_its_data_and_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = open_tier(tmp_path / "store")
    events: list[str] = []
    real_write, real_sync, real_commit = os.pwritev, os.fdatasync, Catalog.commit

    def commit(self: Catalog, **arguments: Any) -> None:
        when = arguments.pop("when")
        first = arguments["added"].keys[0]

        def allowed() -> None:
            when()
            events.append(f"commit {numbers[first]}")

        real_commit(self, when=allowed, **arguments)

    def noted(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            done = real(*arguments)
            events.append(name)
            return done

        return call

    pages = chain(range(6))
    numbers = {page.key: number for number, page in enumerate(pages)}
    monkeypatch.setattr(os, "pwritev", noted("write", real_write))
    monkeypatch.setattr(os, "fdatasync", noted("sync", real_sync))
    monkeypatch.setattr(Catalog, "commit", commit)
    slots = put(tier, pages)
    monkeypatch.undo()
    commits = [at for at, event in enumerate(events) if event.startswith("commit")]
    assert [events[at] for at in commits] == ["commit 0", "commit 2", "commit 4"]
    for number, at in enumerate(commits, 1):
        assert events[:at].count("write") >= number
        assert "sync" in events[([0, *commits][number - 1]) : at], "synced since the one before"
    assert_holds(tier, slots, pages)
    tier.close()


@pytest.mark.usefixtures("pairs")
@pytest.mark.parametrize("call", ["pwritev", "fdatasync", "commit"])
@pytest.mark.parametrize("nth", [1, 2, 3])
def test_when_a_later_group_fails_no_page_of_the_write_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, nth: int
) -> None:
    tier = open_tier(tmp_path / "store")
    before = chain(range(100, 103))
    kept = put(tier, before)
    owner: Any = Catalog if call == "commit" else os
    real, calls = getattr(owner, call), []

    def failing(*arguments: Any, **named: Any) -> Any:
        calls.append(call)
        if len(calls) == nth:
            raise OSError(errno.EIO, "broken")
        return real(*arguments, **named)

    slots = tier.reserve(6)
    assert slots is not None
    with monkeypatch.context() as patch:
        patch.setattr(owner, call, failing)
        with pytest.raises(TierIOError, match="writing 6 pages failed"):
            tier.write(slots, chain(range(6)))
    outcomes = tier.read(slots, buffers(6))
    assert all(isinstance(outcome, TierIOError) for outcome in outcomes)
    assert tier.check().is_clean
    tier.write(slots, chain(range(6)))  # it remains usable
    tier.write(slots[:3], chain(range(20, 23)))
    tier.free(slots[3:])
    tier.close()
    tier = open_tier(tmp_path / "store")
    found = {page.key: page.slot for page in tier.pages()}
    assert set(found) == {page.key for page in before} | {key_of(n) for n in range(20, 23)}
    assert_holds(tier, [found[page.key] for page in before], before)
    assert len(kept) == 3
    tier.close()


@pytest.mark.usefixtures("pairs")
def test_groups_and_compaction_together_lose_nothing(tmp_path: Path) -> None:
    """A page committed with an earlier group may be moved before the write that brought it ends."""
    tier = open_tier(tmp_path / "store")
    rng = np.random.default_rng(0)
    held: dict[int, Any] = {}
    number = 0
    while number < 6 * tier.capacity_pages:
        count = int(rng.integers(7, 40))
        while (slots := tier.reserve(count)) is None:
            gone = rng.permutation(sorted(held))[:20].tolist()
            tier.free(gone)
            for slot in gone:
                del held[slot]
        pages = chain(range(number, number + count))
        number += count
        tier.write(slots, pages)
        held.update(zip(slots, pages, strict=True))
    assert tier.write_amplification > 1.2, "nothing was compacted"
    assert_holds(tier, list(held), list(held.values()))
    assert tier.check().is_clean
    tier.close()
    tier = open_tier(tmp_path / "store")
    found = {page.key: page.slot for page in tier.pages()}
    assert set(found) == {page.key for page in held.values()}
    assert_holds(tier, [found[page.key] for page in held.values()], list(held.values()))
    tier.close()
