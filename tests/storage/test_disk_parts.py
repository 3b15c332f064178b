"""Pages in pieces: gathered on their way to disk, scattered on their way back."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from disk_rig import PAGE_BYTES, flip, key_of, open_tier, page

from tiered_kv.errors import CorruptPageError
from tiered_kv.storage.base import PageBuffer
from tiered_kv.storage.disk.direct_io import aligned_buffer, read_exact, write_exact
from tiered_kv.storage.disk.extent import checksum_of
from tiered_kv.storage.disk.parts import PartedPage


def cut(count: int, widths: list[int], offset: int) -> list[list[PageBuffer]]:
    """Pages of an engine that keeps each part in a region of its own: k0 k1 .. v0 v1 .."""
    memory = aligned_buffer(offset + count * sum(widths))
    regions = [offset + count * sum(widths[:at]) for at in range(len(widths))]
    return [
        [memory[start + n * width :][:width] for start, width in zip(regions, widths, strict=True)]
        for n in range(count)
    ]


def fill(parts: list[PageBuffer], number: int) -> None:
    data, at = page(number, sum(part.nbytes for part in parts)).data, 0
    for part in parts:
        part[:] = data[at : at + part.nbytes]
        at += part.nbytes


@pytest.mark.parametrize(
    ("widths", "offset"),
    [
        ([8192, 8192], 0),
        ([8192, 8192], 64),
        ([4096] * 4, 0),
        ([1000, 3, 0, 7000], 0),
        ([64] * 256, 0),
    ],
    ids=["K-V", "K-V-unaligned", "4-aligned", "odd", "tiny"],
)
def test_a_page_in_pieces_comes_back_in_pieces_and_in_one(
    tmp_path: Path, widths: list[int], offset: int
) -> None:
    n_bytes = sum(widths)
    tier = open_tier(tmp_path / "store", page_bytes=n_bytes)
    pages = cut(9, widths, offset)
    for number, parts in enumerate(pages):
        fill(parts, number)
    slots = tier.reserve(9)
    assert slots is not None
    tier.write(slots, [PartedPage(key_of(n), None, parts) for n, parts in enumerate(pages)])
    into = cut(9, widths, offset)
    assert tier.read(slots, into) == [None] * 9
    whole = [aligned_buffer(n_bytes)[:n_bytes] for _ in range(9)]
    assert tier.read(slots, whole) == [None] * 9
    for number in range(9):
        assert np.array_equal(np.concatenate(into[number]), page(number, n_bytes).data)
        assert np.array_equal(whole[number], page(number, n_bytes).data)
    assert tier.check().is_clean
    tier.close()


def test_a_run_of_more_pieces_than_one_system_call_takes(tmp_path: Path) -> None:
    """80 layers in pieces of their own, K and V: 160 vectors a page, and Linux takes 1,024."""
    widths = [4096] * 160
    tier = open_tier(tmp_path / "store", page_bytes=sum(widths), capacity_bytes=64 << 20)
    pages = cut(12, widths, 0)
    for number, parts in enumerate(pages):
        fill(parts, number)
    slots = tier.reserve(12)
    assert slots is not None
    tier.write(slots, [PartedPage(key_of(n), None, parts) for n, parts in enumerate(pages)])
    into = cut(12, widths, 0)
    assert tier.read(slots, into) == [None] * 12
    for got, wanted in zip(into, pages, strict=True):
        assert np.array_equal(np.concatenate(got), np.concatenate(wanted))
    tier.close()


@pytest.mark.parametrize("limit", [1, 5, 4096, 10_000])
def test_many_pieces_survive_transfers_cut_short(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: int
) -> None:
    """A system call may move less than it was asked for, and end anywhere."""
    real_write, real_read = os.pwritev, os.preadv

    def short(call: Any) -> Any:
        def moving(fd: int, vectors: Any, offset: int) -> int:
            assert len(vectors) <= 1024
            kept, left = [], limit * 64
            for vector in vectors:
                view = memoryview(vector)[:left]
                left -= view.nbytes
                kept.append(view)
                if not left:
                    break
            return int(call(fd, kept, offset))

        return moving

    monkeypatch.setattr(os, "pwritev", short(real_write))
    monkeypatch.setattr(os, "preadv", short(real_read))
    source = np.random.default_rng(0).integers(0, 256, 3000 * 7, dtype=np.uint8)
    into = np.zeros_like(source)
    fd = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        assert write_exact(fd, list(source.reshape(3000, 7)), 0) == source.nbytes
        assert read_exact(fd, list(into.reshape(3000, 7)), 0) == source.nbytes
    finally:
        os.close(fd)
    assert np.array_equal(into, source)


def test_a_checksum_does_not_depend_on_how_a_page_is_cut() -> None:
    data = page(1).data
    assert checksum_of(data) == checksum_of(data[:1], data[1:7000], data[7000:])


def test_a_damaged_page_in_pieces_is_noticed(tmp_path: Path) -> None:
    tier = open_tier(tmp_path / "store")
    (parts,) = cut(1, [PAGE_BYTES // 2] * 2, 0)
    fill(parts, 0)
    slots = tier.reserve(1)
    assert slots is not None
    tier.write(slots, [PartedPage(key_of(0), None, parts)])
    flip(tier, slots[0], tmp_path / "store", at=PAGE_BYTES - 1)
    (outcome,) = tier.read(slots, [parts])
    assert isinstance(outcome, CorruptPageError)
    tier.close()


def test_pieces_that_are_no_page_are_refused(tmp_path: Path) -> None:
    tier = open_tier(tmp_path / "store")
    slots = tier.reserve(1)
    assert slots is not None
    half = np.zeros(PAGE_BYTES // 2, np.uint8)
    for parts in ([half], [half, half, half], [half.reshape(2, -1), half], [half, half[::2]]):
        with pytest.raises(ValueError, match=f"row of {PAGE_BYTES} bytes"):
            tier.write(slots, [PartedPage(key_of(0), None, parts)])
    with pytest.raises(ValueError, match=f"row of {PAGE_BYTES} bytes"):
        tier.read(slots, [[half]])
    tier.close()
