"""Whose directory a disk store may open, and how it leaves it."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import lmdb
import numpy as np
import pytest

from tiered_kv.errors import ConfigError, LayoutMismatchError, TierIOError
from tiered_kv.keys import PageKey
from tiered_kv.storage.base import Page
from tiered_kv.storage.disk import DiskTier
from tiered_kv.storage.disk.catalog import Catalog
from tiered_kv.storage.disk.directory import StoreDirectory
from tiered_kv.storage.disk.geometry import minimum_capacity_bytes

ROOT = Path(__file__).resolve().parents[2]
PAGE_BYTES = 8192
CAPACITY_BYTES = 2 << 20


def open_tier(path: Path, **changes: Any) -> DiskTier:
    settings: dict[str, Any] = {
        "page_bytes": PAGE_BYTES,
        "capacity_bytes": CAPACITY_BYTES,
        "fingerprint": "layout-a",
    }
    return DiskTier.open(path, **(settings | changes))


def filled(path: Path, count: int = 5) -> None:
    tier = open_tier(path)
    keys = [PageKey(hashlib.sha256(bytes([n])).digest()) for n in range(count)]
    slots = tier.reserve(count)
    assert slots is not None
    tier.write(slots, [Page(key, None, np.full(PAGE_BYTES, key[0], np.uint8)) for key in keys])
    tier.close()


def snapshot(path: Path) -> dict[str, tuple[int, int, bytes]]:
    return {
        str(found.relative_to(path)): (
            found.lstat().st_mode,
            found.lstat().st_mtime_ns,
            found.read_bytes() if found.is_file() else b"",
        )
        for found in sorted(path.rglob("*"))
    }


def test_directories_and_files_are_private(tmp_path: Path) -> None:
    previous = os.umask(0)
    try:
        filled(tmp_path / "store")
    finally:
        os.umask(previous)
    assert stat.S_IMODE((tmp_path / "store").stat().st_mode) == 0o700
    for found in (tmp_path / "store").rglob("*"):
        wanted = 0o700 if found.is_dir() else 0o600
        assert stat.S_IMODE(found.stat().st_mode) == wanted, found


def test_empty_directory_of_ours_is_taken_and_made_private(tmp_path: Path) -> None:
    (tmp_path / "store").mkdir(mode=0o755)
    filled(tmp_path / "store")
    assert stat.S_IMODE((tmp_path / "store").stat().st_mode) == 0o700


def test_second_opener_is_refused_by_name_of_the_first(tmp_path: Path) -> None:
    tier = open_tier(tmp_path / "store")
    with pytest.raises(ConfigError, match=f"in use by process {os.getpid()}"):
        open_tier(tmp_path / "store")
    code = (
        "import sys\nfrom tiered_kv.storage.disk import DiskTier\n"
        f"DiskTier.open({str(tmp_path / 'store')!r}, {PAGE_BYTES}, {CAPACITY_BYTES}, 'layout-a')\n"
    )
    other = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert other.returncode == 1
    assert f"in use by process {os.getpid()}" in other.stderr.splitlines()[-1]
    tier.close()
    open_tier(tmp_path / "store").close()


def test_foreign_directory_is_refused_and_left_alone(tmp_path: Path) -> None:
    foreign = tmp_path / "photos"
    foreign.mkdir(mode=0o755)
    (foreign / "a.jpg").write_bytes(b"jpeg")
    before = snapshot(foreign), foreign.stat().st_mode
    with pytest.raises(ConfigError, match="not a tiered-kv store"):
        open_tier(foreign)
    assert (snapshot(foreign), foreign.stat().st_mode) == before


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not a tiered-kv marker"),
        ("[]", "not a tiered-kv marker"),
        pytest.param("[" * 60_000, "not a tiered-kv marker", id="nested-too-deeply"),
        ('{"format": "tiered-kv-disk", "version": 1e999}', "not a tiered-kv marker"),
        ('{"format": "zarr", "version": 3}', "zarr"),
        ('{"format": "tiered-kv-disk", "version": 3}', "version 3, this program reads 1 to 2"),
        ('{"format": "tiered-kv-disk", "version": 1}', "damaged"),
    ],
)
def test_marker_that_is_not_ours_is_refused_and_left_alone(
    tmp_path: Path, text: str, message: str
) -> None:
    store = tmp_path / "store"
    store.mkdir()
    (store / "format.json").write_text(text)
    before = snapshot(store)
    with pytest.raises(ConfigError, match=message):
        open_tier(store)
    assert snapshot(store) == before


@pytest.mark.parametrize("changes", [{"fingerprint": "layout-b"}, {"page_bytes": 4096}])
def test_other_layout_is_refused_and_both_are_named(
    tmp_path: Path, changes: dict[str, Any]
) -> None:
    filled(tmp_path / "store")
    with pytest.raises(LayoutMismatchError) as caught:
        open_tier(tmp_path / "store", **changes)
    for named in ("layout-a", str(PAGE_BYTES), *map(str, changes.values())):
        assert named in str(caught.value)
    again = open_tier(tmp_path / "store")
    assert again.recovered_pages == 5
    again.close()


def test_capacity_may_grow_and_not_shrink(tmp_path: Path) -> None:
    filled(tmp_path / "store")
    with pytest.raises(ConfigError, match=str(CAPACITY_BYTES)):
        open_tier(tmp_path / "store", capacity_bytes=CAPACITY_BYTES - 4096)
    grown = open_tier(tmp_path / "store", capacity_bytes=2 * CAPACITY_BYTES)
    assert grown.recovered_pages == 5
    count = grown.capacity_pages - 5
    slots = grown.reserve(count)
    assert slots is not None
    keys = [PageKey(hashlib.sha256(b"more%d" % n).digest()) for n in range(count)]
    grown.write(slots, [Page(key, None, np.full(PAGE_BYTES, key[0], np.uint8)) for key in keys])
    assert grown.capacity_pages > 1.5 * 5
    assert grown.disk_usage_bytes <= 2 * CAPACITY_BYTES
    grown.close()
    marker = json.loads((tmp_path / "store" / "format.json").read_text())
    assert marker["capacity_bytes"] == 2 * CAPACITY_BYTES
    again = open_tier(tmp_path / "store", capacity_bytes=2 * CAPACITY_BYTES)
    assert again.recovered_pages == count + 5
    assert again.check().is_clean
    again.close()


def test_symlinks_are_refused(tmp_path: Path) -> None:
    filled(tmp_path / "real")
    (tmp_path / "link").symlink_to(tmp_path / "real")
    with pytest.raises(ConfigError, match="symlink"):
        open_tier(tmp_path / "link")
    for inside in ("segments", "catalog", "catalog/data.mdb", "tiered-kv.lock", "format.json"):
        target = tmp_path / "real" / inside
        moved = tmp_path / "moved"
        target.rename(moved)
        target.symlink_to(moved)
        with pytest.raises(ConfigError):
            open_tier(tmp_path / "real")
        target.unlink()
        moved.rename(target)
    (tmp_path / "real" / "segments" / "00001.seg").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match="not a segment"):
        open_tier(tmp_path / "real")
    (tmp_path / "real" / "segments" / "00001.seg").unlink()
    open_tier(tmp_path / "real").close()


def test_path_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be used"):
        open_tier(tmp_path / "file" / "store")
    with pytest.raises(ConfigError, match="cannot be used"):
        open_tier(tmp_path / "file")


def test_capacity_for_less_than_a_page_is_refused_with_the_minimum(tmp_path: Path) -> None:
    minimum = minimum_capacity_bytes(1 << 20)
    with pytest.raises(ConfigError, match=f"at least {minimum}"):
        open_tier(tmp_path / "store", page_bytes=1 << 20, capacity_bytes=minimum - 1)
    assert not (tmp_path / "store").exists()
    with pytest.raises(ConfigError):
        open_tier(tmp_path / "store", page_bytes=0)


def test_creation_that_was_killed_is_taken_up_again(tmp_path: Path) -> None:
    store = tmp_path / "store"
    store.mkdir()
    (store / "tiered-kv.lock").write_text("1\n")
    (store / "format.json.tmp").write_text("{")
    filled(store)
    assert not (store / "format.json.tmp").exists()


@pytest.mark.parametrize("call", ["open", "pwrite", "write", "fsync", "mkdir", "catalog"])
@pytest.mark.parametrize("was_there", [False, True], ids=["new", "empty"])
def test_creation_on_a_full_device_says_so_and_leaves_nothing_in_the_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, was_there: bool
) -> None:
    """It ended with a raw "[Errno 28]" and a directory with a lock file in it."""
    path = tmp_path / "store"
    if was_there:
        path.mkdir()
    owner, name = (lmdb, "open") if call == "catalog" else (os, call)
    real = getattr(owner, name)

    def full(*args: Any, **kwargs: Any) -> Any:
        if owner is lmdb:
            raise lmdb.Error(f"{args[0]}: No space left on device")
        if call == "open" and kwargs.get("dir_fd") is None:
            return real(*args, **kwargs)  # of what is there: takes no space
        if call == "mkdir" and kwargs.get("dir_fd") is None:
            return real(*args, **kwargs)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, full)
        with pytest.raises((ConfigError, TierIOError)) as caught:
            open_tier(path)
    assert f"no space left on the device of {path}" in str(caught.value)
    assert "Errno" not in str(caught.value) and "\n" not in str(caught.value)
    assert path.exists() == was_there
    if was_there:
        assert {left.name for left in path.iterdir()} <= {"tiered-kv.lock"}
    again = open_tier(path, fingerprint="layout-b", capacity_bytes=CAPACITY_BYTES // 2)
    again.close()


def test_catalog_that_breaks_off_on_a_full_device_is_not_called_broken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """LMDB makes an I/O error of a write that a full device cuts short."""

    def cut_short(*args: Any, **kwargs: Any) -> None:
        raise TierIOError("mdb_txn_commit: Input/output error", tier="disk", errno=errno.EIO)

    with monkeypatch.context() as patch:
        patch.setattr(Catalog, "commit", cut_short)
        with pytest.raises(TierIOError, match="Input/output"):
            open_tier(tmp_path / "store")
        patch.setattr(StoreDirectory, "has_space", False)
        with pytest.raises(TierIOError, match="no space left"):
            open_tier(tmp_path / "store")
    assert list(tmp_path.iterdir()) == []


def test_full_device_does_not_cost_a_store_that_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    filled(tmp_path / "store")

    def full(*args: Any, **kwargs: Any) -> Any:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", full)
        with pytest.raises(ConfigError, match="no space left"):
            open_tier(tmp_path / "store")
        patch.undo()
        patch.setattr(Catalog, "commit", full)
        with pytest.raises(TierIOError, match="no space left"):
            open_tier(tmp_path / "store")
    again = open_tier(tmp_path / "store")
    assert again.recovered_pages == 5
    again.close()


def test_loser_of_a_race_to_make_a_store_touches_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both find no directory; the second gets to its lock when the first has it."""
    path = tmp_path / "store"
    real_mkdir = Path.mkdir
    first: list[DiskTier] = []

    def mkdir(self: Path, *args: Any, **kwargs: Any) -> None:
        monkeypatch.setattr(Path, "mkdir", real_mkdir)
        first.append(open_tier(path))
        real_mkdir(self, *args, **kwargs)

    monkeypatch.setattr(Path, "mkdir", mkdir)
    with pytest.raises(ConfigError, match="in use"):
        open_tier(path)
    slots = first[0].reserve(1)
    assert slots is not None
    first[0].write(slots, [Page(PageKey(bytes(32)), None, np.zeros(PAGE_BYTES, np.uint8))])
    assert first[0].check().is_clean
    first[0].close()
    open_tier(path).close()


def test_files_of_others_beside_the_store_are_left_alone(tmp_path: Path) -> None:
    filled(tmp_path / "store")
    (tmp_path / "store" / "notes.txt").write_text("mine")
    again = open_tier(tmp_path / "store")
    assert again.recovered_pages == 5
    again.close()
    assert (tmp_path / "store" / "notes.txt").read_text() == "mine"


def test_small_pages_are_warned_of_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Of a store with pages of 4 KiB little more than a third is pages."""
    for _ in range(2):
        open_tier(tmp_path / "small", page_bytes=4096, capacity_bytes=64 << 20).close()
    open_tier(tmp_path / "large", page_bytes=16384).close()
    warned = [record.getMessage() for record in caplog.records if "pages of" in record.message]
    assert len(warned) == 1
    assert "4096 bytes fill only 35 %" in warned[0]


def test_cut_and_grown_segments_are_put_back_to_length(tmp_path: Path) -> None:
    filled(tmp_path / "store")
    segment = tmp_path / "store" / "segments" / "00000.seg"
    length = segment.stat().st_size
    for wrong in (4096, 8 << 20):
        os.truncate(segment, wrong)
        tier = open_tier(tmp_path / "store")
        assert segment.stat().st_size == length
        assert tier.disk_usage_bytes <= CAPACITY_BYTES
        tier.close()
    tier = open_tier(tmp_path / "store")
    assert len(tier.check(fix=True).problems) > 0
    assert tier.check().problems == []
    tier.close()
