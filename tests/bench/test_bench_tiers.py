"""`bench tiers` at sizes that a test suite affords: right, complete, and gone afterwards."""

from __future__ import annotations

import errno
import itertools
import json
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ByteSize

from tiered_kv.bench import content, disk_paths, host_paths, page_cache, tiers, workspace
from tiered_kv.bench.amounts import amounts_of
from tiered_kv.bench.content import Conversation, Load, Pages, open_store, page_layout
from tiered_kv.bench.disk_paths import Ring
from tiered_kv.bench.limits import Memcpy, PinnedLimit
from tiered_kv.bench.raw_disk import RawDisk
from tiered_kv.bench.report import BenchReport
from tiered_kv.bench.sampling import (
    LEAST_SAMPLES,
    Samples,
    Way,
    take_latencies,
    take_rates,
)
from tiered_kv.bench.settings import PATHS, TiersSettings
from tiered_kv.bench.statistics import LEAST_P99, percentile
from tiered_kv.config import StoreConfig
from tiered_kv.errors import ConfigError, TieredKVError, TierIOError
from tiered_kv.keys import KeyChain, PageKey
from tiered_kv.layout import KVLayout
from tiered_kv.storage.base import PageBuffer
from tiered_kv.storage.disk import DiskTier
from tiered_kv.storage.faulty import FaultyTier, WrappedTier
from tiered_kv.store import TieredStore

PAGE = 64 << 10
ROW_KEYS = {"path", "page_bytes", "bytes_per_s", "limit", "limit_bytes_per_s", "ratio", "ci95", "n"}
ROW_KEYS |= {"p50_s", "p95_s", "p99_s", "cpu_s_per_gb", "cold"}
LIMITS = {
    "host-put": "memcpy",
    "host-get": "memcpy",
    "host-mixed": "memcpy",
    "disk-put": "raw-write",
    "disk-get": "raw-read",
    "disk-get-hbm": "raw-read",
    "disk-mixed": "raw-mixed",
}


def silent(done: int, total: int, text: str) -> None:
    """Nobody watches."""


def measured(directory: Path, *paths: str, **more: Any) -> BenchReport:
    settings = {"directory": directory, "smoke": True, "device": "cpu", **more}
    if paths:
        settings["paths"] = paths
    return tiers.measure(TiersSettings(**settings), silent)


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> BenchReport:
    """One smoke run of everything."""
    return measured(tmp_path_factory.mktemp("bench"), page_bytes=[PAGE], set_bytes=1 << 20)


def rows_of(report: BenchReport, path: str) -> list[dict[str, Any]]:
    return [row for row in report.rows if row["path"] == path]


def test_every_path_has_a_row_with_every_key(report: BenchReport) -> None:
    assert {row["path"] for row in report.rows} == {*PATHS, "memcpy-large"}
    for row in report.rows:
        assert row.keys() >= ROW_KEYS, row["path"]
        assert row["bytes_per_s"] > 0 and row["n"] >= 1
        json.dumps(row)


@pytest.mark.parametrize("path", LIMITS)
def test_a_path_is_compared_with_its_own_limit(report: BenchReport, path: str) -> None:
    for row in rows_of(report, path):
        assert row["limit"] == LIMITS[path]
        assert row["ratio"] == pytest.approx(row["bytes_per_s"] / row["limit_bytes_per_s"])


def test_a_durable_put_is_measured_into_fresh_space_and_into_used(report: BenchReport) -> None:
    assert [row["space"] for row in rows_of(report, "disk-put")] == ["fresh", "steady"]


def test_every_page_that_was_read_back_was_compared(report: BenchReport) -> None:
    assert report.checksum["verified"] > 500 and report.checksum["failed"] == 0
    assert report.failures == [] and report.is_passed


def test_a_p99_is_not_given_of_a_few_samples(report: BenchReport) -> None:
    assert all(row["p99_s"] is None and row["p95_s"] is None for row in report.rows)
    assert any("299 samples" in note for note in report.notes)


def test_what_the_numbers_do_not_show_is_said(report: BenchReport) -> None:
    text = " ".join(report.notes)
    for words in ("HBM is simulated in host memory", "smoke sizes", "in flight together"):
        assert words in text


def test_software_is_measured_a_page_at_every_batch(report: BenchReport) -> None:
    rows = rows_of(report, "software-put") + rows_of(report, "software-get")
    assert [row["batch"] for row in rows] == [1, 16, 64, 256] * 2
    assert all(row["limit"] is None and row["s_per_page"] > 0 for row in rows)


def test_a_rate_is_the_median_of_its_samples(report: BenchReport) -> None:
    (row,) = rows_of(report, "host-get")
    samples = report.samples[f"host-get page_bytes={PAGE} bytes_per_s"]
    assert row["n"] == len(samples)
    assert row["bytes_per_s"] == percentile(samples, 50)


def test_only_the_paths_asked_for_are_measured_and_nothing_is_left(tmp_path: Path) -> None:
    found = measured(tmp_path, "disk-get", "host-put", page_bytes=[PAGE])
    assert [row["path"] for row in found.rows] == ["memcpy-large", "host-put", "disk-get"]
    assert list(tmp_path.iterdir()) == []


def test_cold_opens_the_store_again_and_finds_all_on_disk(tmp_path: Path) -> None:
    found = measured(tmp_path, "disk-get", "disk-get-hbm", page_bytes=[PAGE], cold=True)
    assert found.failures == []
    assert all(row["cold"] for row in found.rows)


def test_cold_fails_if_keys_hit_that_are_called_new(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A store that was not emptied: it holds the very conversations that come first."""

    def warm(layout: KVLayout, config: StoreConfig) -> TieredStore:
        store = open_store(layout, config)
        monkeypatch.setattr(content, "_numbers", itertools.count(1))
        pages = Pages(store)
        pages.own()
        pages.put(pages.make(Load(2, 2)))
        store.hbm.release(pages.free)
        monkeypatch.setattr(content, "_numbers", itertools.count(1))
        return store

    monkeypatch.setattr(host_paths, "open_store", warm)
    found = measured(tmp_path, "host-put", page_bytes=[PAGE], cold=True)
    assert not found.is_passed
    assert "not cold: of 32 keys never put 4 matched, 4 came back" in found.failures[0]


@pytest.mark.parametrize(("left", "is_cold"), [(0.0, True), (0.5, False)])
@pytest.mark.parametrize("is_direct", [True, False])
def test_reads_of_files_in_memory_are_not_called_cold(
    left: float, is_cold: bool, is_direct: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiers, "has_direct_io", lambda folder: is_direct)
    monkeypatch.setattr(page_cache, "resident_share", lambda files: left)
    found = measured(tmp_path, "disk-get", page_bytes=[PAGE])
    assert [row["cold"] for row in found.rows] == [is_cold]
    said = " ".join(found.notes)
    assert ("not cold: 50% of the files" in said) == (not is_cold)
    assert ("no O_DIRECT" in said) == (is_cold and not is_direct)
    assert found.is_passed
    asked = measured(tmp_path, "disk-get", page_bytes=[PAGE], cold=True)
    assert asked.is_passed == is_cold


# -- what is wrong is found ----------------------------------------------------------------------


class SilentlyWrongTier(WrappedTier):
    """Reads a byte other than was written, and says nothing of it."""

    def read(self, slots: Sequence[int], into: Sequence[PageBuffer]) -> list[TieredKVError | None]:
        outcome = self.inner.read(slots, into)
        for buffer in into:
            buffer[buffer.nbytes // 2] ^= 1
        return outcome


def with_disk(monkeypatch: pytest.MonkeyPatch, wrap: Any) -> None:
    """Put a tier around the disk tier of every store that is measured."""

    def opened(layout: KVLayout, config: StoreConfig) -> TieredStore:
        assert config.disk is not None and config.disk_size is not None
        inner = DiskTier.open(
            config.disk, layout.page_bytes, int(config.disk_size), layout.fingerprint
        )
        return TieredStore(layout, config, disk=wrap(inner))

    monkeypatch.setattr(disk_paths, "open_store", opened)


def test_a_wrong_byte_is_found_and_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with_disk(monkeypatch, SilentlyWrongTier)
    found = measured(tmp_path, "disk-get", page_bytes=[PAGE])
    assert found.checksum["failed"] > 0 and not found.is_passed


def test_pages_that_do_not_come_back_are_counted_and_fail(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def flipping(inner: DiskTier) -> FaultyTier:
        tier = FaultyTier(inner)
        tier.flip = lambda slot: slot % 5 == 0
        return tier

    with_disk(monkeypatch, flipping)
    found = measured(tmp_path, "disk-get-hbm", page_bytes=[PAGE])
    assert any("did not come back" in failure for failure in found.failures)
    assert not found.is_passed


def test_bytes_that_did_not_come_from_disk_are_no_figure_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same set again and again would come from host after the first time."""

    def same_set(self: disk_paths.DiskStage, load: Load) -> list[Conversation]:
        return self.ring.conversations[: load.transfers]

    monkeypatch.setattr(disk_paths.DiskStage, "next_cold", same_set)
    found = measured(tmp_path, "disk-get", page_bytes=[PAGE])
    assert "0 pages were read from disk" in " ".join(found.failures)


def test_what_is_still_on_host_is_driven_out_before_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sets of one transfer each: two first pages of one had outlasted two others on host."""

    def same_set(self: Ring, load: Load) -> list[Conversation]:
        return self.conversations[: load.transfers]

    monkeypatch.setattr(Ring, "next", same_set)
    found = measured(tmp_path, "disk-get", "disk-get-hbm", page_bytes=[PAGE])
    assert found.failures == []


def test_an_interrupted_run_leaves_no_files(tmp_path: Path) -> None:
    calls = []

    def interrupt(done: int, total: int, text: str) -> None:
        calls.append(text)
        if "disk-mixed" in text:
            assert list(tmp_path.iterdir()) != []
            raise KeyboardInterrupt

    settings = TiersSettings(directory=tmp_path, smoke=True, device="cpu", paths=("disk-mixed",))
    with pytest.raises(KeyboardInterrupt):
        tiers.measure(settings, interrupt)
    assert list(tmp_path.iterdir()) == []
    assert calls


def test_a_disk_that_fills_up_is_one_error_and_leaves_no_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*arguments: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(RawDisk, "fill", full)
    with pytest.raises(TierIOError, match=f"measuring in {tmp_path} failed: No space left"):
        measured(tmp_path, "disk-get", page_bytes=[PAGE])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("more", [{"set_bytes": 1 << 50}, {"page_bytes": [1 << 50]}])
def test_more_memory_than_there_is_is_refused(tmp_path: Path, more: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="MiB of memory are needed") as caught:
        measured(tmp_path, "host-put", **more)
    assert "--set-bytes" in str(caught.value)


@pytest.mark.parametrize("size", [1000, 128, 65537])
def test_a_page_that_does_not_divide_into_layers_is_refused(size: int, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"page_bytes={size}: is not a multiple of 256"):
        measured(tmp_path, page_bytes=[size])


def test_pages_of_odd_and_large_sizes_are_measured(tmp_path: Path) -> None:
    """Not a multiple of a disk block, and larger than a set."""
    found = measured(tmp_path, "disk-put", "disk-mixed", page_bytes=[8448, 3 << 20])
    assert found.is_passed, found.failures
    assert {row["page_bytes"] for row in found.rows} == {8448, 3 << 20}


# -- parts ---------------------------------------------------------------------------------------


def test_a_page_keeps_its_checksum_through_the_store_and_no_two_are_alike() -> None:
    config = StoreConfig.parse(hbm=8 * PAGE, host=8 * PAGE, device="cpu")
    with open_store(page_layout(PAGE), config) as store:
        pages = Pages(store)
        pages.fill()
        pages.own()
        made = pages.make(Load(2, 2))
        digests = [digest for one in made for digest in one.digests]
        assert len(set(digests)) == 4
        pages.put(made)
        pages.check(made)
        assert (pages.verified, pages.failed, pages.lost) == (4, 0, 0)
        for layer in store.hbm.layers:
            layer[pages.free[0]] += 1
        pages.compare(made, pages.slots_for(made), [2, 2])
        assert (pages.verified, pages.failed, pages.lost) == (7, 1, 0)
        pages.compare(made, pages.slots_for(made), [0, 2])
        assert pages.lost == 2


def test_memcpy_copies_whole_pages_in_shuffled_order() -> None:
    limit = Memcpy(16 * 4096, 4096)
    limit._from[:] = np.arange(16, dtype=np.uint8)[:, None]
    limit.put(16 * 4096)
    came = limit._to[:, 0].tolist()
    assert sorted(came) == list(range(16)) and came != sorted(came)
    assert (limit._to == limit._to[:, :1]).all()
    assert limit.large() == 16 * 4096
    limit.close()


@pytest.mark.parametrize("is_direct", [False, True])
def test_the_raw_file_moves_what_it_says(tmp_path: Path, is_direct: bool) -> None:
    raw = RawDisk(tmp_path, 64 << 10, 3, 4096, read_threads=2, is_direct=is_direct)
    raw.fill()
    raw.write_fresh(8192)
    raw.read(10_000)
    raw.mixed(4096, 4096)
    assert raw.bytes_written == 3 * (64 << 10) + 8192 + 4096
    source, target = (slab.array for slab in raw._slabs)
    assert (target[:12288] == source[:12288]).all() and not target[12288:].any()
    assert (tmp_path / "raw").read_bytes() == source.tobytes() * 3
    raw.close()
    assert list(tmp_path.iterdir()) == []


def test_a_dropped_file_is_not_in_the_page_cache(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"x" * (1 << 20))
    assert page_cache.resident_share([path]) == 1.0
    left = page_cache.drop([path])
    assert left == page_cache.resident_share([path])
    assert left in (0.0, 1.0)  # 1: a file system in memory
    assert page_cache.drop([]) == 0.0


def test_a_pinned_copy_moves_as_many_bytes_as_it_is_asked_for() -> None:
    limit = PinnedLimit(torch.device("cpu"), 4096)
    copies = limit._copies
    copies.device[0][:] = 1
    copies.host[1][:] = 2

    def came() -> list[int]:
        return [int(copies.host[0].sum()), int(copies.device[1].sum())]

    limit.put(100)
    assert came() == [100, 0]
    limit.both(400)
    assert came() == [200, 400]
    limit.get(4096)
    assert came() == [200, 2 * 4096]
    limit.close()


@given(
    page_bytes=st.sampled_from([256, 64 << 10, 1 << 20, 8 << 20, 40 << 20]),
    set_bytes=st.integers(1, 256 << 20),
    smoke=st.booleans(),
)
def test_a_set_is_whole_pages_in_whole_transfers(
    page_bytes: int, set_bytes: int, smoke: bool
) -> None:
    settings = TiersSettings(smoke=smoke, transfer_bytes=ByteSize(8 << 20))
    amounts = amounts_of(settings, page_bytes, set_bytes)
    full, single = amounts.full, amounts.single
    assert full.pages * page_bytes <= max(set_bytes, page_bytes)
    assert full.transfer_pages * page_bytes <= max(8 << 20, page_bytes)
    whole = amounts_of(TiersSettings(), page_bytes, min(set_bytes, 64 << 20)).full
    assert (whole.transfers, whole.pages >= full.pages or set_bytes > 64 << 20) == (1, True)
    assert (single.transfers, single.pages <= full.transfer_pages) == (1, True)
    assert amounts.singles >= LEAST_P99 or smoke


def test_a_smoke_run_reports_the_sizes_it_took_and_keeps_those_that_were_given() -> None:
    small = TiersSettings(smoke=True).in_effect().told()
    taken = [small[name] for name in ("page_bytes", "set_bytes", "transfer_bytes", "repeats")]
    assert taken == [[64 << 10, 256 << 10], 2 << 20, 512 << 10, 2]
    given = TiersSettings(smoke=True, repeats=7, page_bytes=(ByteSize(4096),)).in_effect()
    assert (given.repeats, given.page_bytes, given.set_bytes) == (7, (4096,), 2 << 20)
    assert TiersSettings(repeats=3).in_effect() == TiersSettings(repeats=3)


def test_a_slow_disk_is_given_smaller_sets_unless_their_size_was_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiers, "_SET_S", 1e-9)
    for asked, wanted in (
        (TiersSettings(), 16 << 20),
        (TiersSettings(smoke=True), 512 << 10),
        (TiersSettings(set_bytes=ByteSize(5)), 5),
        (TiersSettings(smoke=True, set_bytes=ByteSize(5)), 5),
    ):
        bench = tiers.TiersBench(asked.in_effect(), "cpu", tmp_path, silent)
        bench._fit_to_the_disk()
        assert bench.set_bytes == wanted
        assert [note for note in bench.notes if "disk is slow" in note] == bench.notes
    assert list(tmp_path.iterdir()) == []


class SlowWay(Way):
    """Every transfer takes three seconds of a clock that nothing else moves."""

    path = limit_name = "slow"

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 0.0
        monkeypatch.setattr(time, "monotonic", lambda: self.now_s)
        monkeypatch.setattr(time, "perf_counter", lambda: self.now_s)

    def bytes_of(self, load: Load) -> int:
        return 1

    def before(self, load: Load) -> None:
        pass

    def limit(self, load: Load) -> None:
        self.now_s += 3

    def ours(self) -> None:
        self.now_s += 3

    def after(self) -> None:
        pass


@pytest.mark.parametrize(("is_smoke", "taken"), [(True, 1), (False, LEAST_SAMPLES)])
def test_a_slow_disk_is_left_alone_after_the_fewest_samples(
    monkeypatch: pytest.MonkeyPatch, is_smoke: bool, taken: int
) -> None:
    settings = TiersSettings(smoke=is_smoke, repeats=15)
    amounts = amounts_of(settings, PAGE, 2 << 20)
    way, samples = SlowWay(monkeypatch), Samples()
    take_rates(way, amounts, samples, lambda: None)
    take_latencies(way, amounts, samples, lambda: None)
    assert len(samples.rates) == len(samples.limits) == taken
    assert len(samples.latencies) == taken
    assert set(samples.latencies) == {3.0}


def test_progress_never_goes_back_and_ends_at_its_total(tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    settings = TiersSettings.model_validate(
        {"directory": tmp_path, "smoke": True, "page_bytes": [PAGE], "device": "cpu"}
    )
    tiers.measure(settings, lambda done, total, text: seen.append((done, total)))
    assert seen == sorted(seen) and len({total for _, total in seen}) == 1
    assert seen[-1][0] == seen[-1][1]


def test_a_set_of_the_ring_comes_again_after_all_others() -> None:
    full, single = Load(2, 4), Load(1, 2)
    ring = Ring(full)
    for number in range(5):
        keys = KeyChain([PageKey(bytes([number, at]) * 16) for at in range(4)])
        ring.add([Conversation(keys, [0, 1, 2, 3], [b""] * 4)] * 2)
    seen = [ring.next(full)[0].keys[0][0] for _ in range(6)]
    assert seen == [2, 3, 4, 2, 3, 4]
    parts = [ring.next(single)[0] for _ in range(5)]
    assert [part.keys[0][:2] for part in parts[:2]] == [bytes([2, 0]), bytes([2, 2])]
    assert all(len(part) == 2 for part in parts)
    assert parts[4].keys[0][0] == 3


def test_a_workspace_needs_a_directory_with_room(tmp_path: Path) -> None:
    for path, words in (
        (tmp_path / "absent", "is not a directory"),
        (tmp_path, "MiB free; give one with more room, or fewer pages$"),
    ):
        room = workspace.workspace(path, 1 << 60, less="fewer pages")
        with pytest.raises(ConfigError, match=words), room:
            pass
