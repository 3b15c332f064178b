"""What the tests of the disk tier stand on: pages by number, a small tier, a flipped byte."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tiered_kv.keys import PageKey
from tiered_kv.storage.base import Page, PageBuffer
from tiered_kv.storage.disk import DiskTier
from tiered_kv.storage.disk.direct_io import aligned_buffer

PAGE_BYTES = 16384
CAPACITY_BYTES = 4 << 20
AHEAD = 3
FINGERPRINT = "layout-a"


def key_of(number: int) -> PageKey:
    return PageKey(hashlib.sha256(number.to_bytes(8, "little")).digest())


def page(number: int, page_bytes: int = PAGE_BYTES, parent: PageKey | None = None) -> Page:
    data = np.random.default_rng(number).integers(0, 256, page_bytes, dtype=np.uint8)
    return Page(key_of(number), parent, data)


def chain(numbers: range) -> list[Page]:
    parents = [None, *(key_of(number) for number in numbers)]
    return [page(number, parent=parents[at]) for at, number in enumerate(numbers)]


def open_tier(path: Path, **changes: Any) -> DiskTier:
    settings: dict[str, Any] = {
        "page_bytes": PAGE_BYTES,
        "capacity_bytes": CAPACITY_BYTES,
        "fingerprint": FINGERPRINT,
    }
    return DiskTier.open(path, **(settings | changes))


def noted_calls(
    patch: pytest.MonkeyPatch, *methods: tuple[Any, str], when_done: bool = False
) -> list[str]:
    """The names of these methods as they are called from now on, or as they return."""
    events: list[str] = []

    def note(owner: Any, name: str) -> None:
        real = getattr(owner, name)

        def noted(*arguments: Any, **named: Any) -> Any:
            if not when_done:
                events.append(name)
            done = real(*arguments, **named)
            if when_done:
                events.append(name)
            return done

        patch.setattr(owner, name, noted)

    for owner, name in methods:
        note(owner, name)
    return events


def put(tier: DiskTier, pages: list[Page]) -> list[int]:
    slots = tier.reserve(len(pages))
    assert slots is not None
    tier.write(slots, pages)
    return slots


def buffers(count: int, page_bytes: int = PAGE_BYTES) -> list[PageBuffer]:
    stride = -(-page_bytes // 4096) * 4096
    memory = aligned_buffer(max(1, count) * stride)
    return [memory[at * stride :][:page_bytes] for at in range(count)]


def assert_holds(tier: DiskTier, slots: list[int], pages: list[Page]) -> None:
    into = buffers(len(slots), tier.page_bytes)
    assert tier.read(slots, into) == [None] * len(slots)
    for got, wanted in zip(into, pages, strict=True):
        assert np.array_equal(got, wanted.data)


def record_of(tier: DiskTier, slot: int) -> Any:
    return tier._records.record(slot)


def flip(tier: DiskTier, slot: int, path: Path, at: int = 100) -> None:
    record = record_of(tier, slot)
    with open(path / "segments" / f"{record.segment:05d}.seg", "r+b") as file:
        file.seek(record.offset + at)
        byte = file.read(1)
        file.seek(record.offset + at)
        file.write(bytes([byte[0] ^ 1]))


def raising_once(real: Callable[..., Any], error: type[BaseException]) -> Callable[..., Any]:
    """A function that does what `real` does, and the first time raises after it: a signal's."""
    calls = 0

    def raising(*arguments: Any) -> Any:
        nonlocal calls
        calls += 1
        done = real(*arguments)
        if calls == 1:
            raise error
        return done

    return raising
