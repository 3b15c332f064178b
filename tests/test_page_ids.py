"""Keys of restored pages are found before they are in the dict, and come into it with use."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import numpy as np
import pytest

from tiered_kv.found import FoundPages, KeyOrder, StoredPage
from tiered_kv.index import Index
from tiered_kv.keys import PageKey
from tiered_kv.page_ids import PageIds
from tiered_kv.plan import DISK, HOST


def key(number: int) -> PageKey:
    """Keys of which three each begin with the same 8 bytes."""
    return PageKey((number // 3 * 1000).to_bytes(8, "big") + number.to_bytes(24, "big"))


def chains(pages: int, length: int, source: Random) -> list[StoredPage]:
    """Conversations, in no order."""
    numbers = source.sample(range(3 * pages), pages)
    parents = [number if at % length else None for at, number in enumerate([0, *numbers[:-1]])]
    listed = [
        StoredPage(key(number), None if above is None else key(above), slot)
        for slot, (number, above) in enumerate(zip(numbers, parents, strict=True))
    ]
    source.shuffle(listed)
    return listed


def order_of(keys: list[PageKey]) -> KeyOrder:
    return KeyOrder.of(np.frombuffer(b"".join(keys), "V32"))


def restored(found: FoundPages) -> Index:
    index = Index([HOST, DISK])
    index.restore(index.by_name[DISK], found)
    return index


class Both:
    """An index whose pages sleep at first, and one whose pages were awake at once."""

    def __init__(self, seed: int) -> None:
        self.source = Random(seed)
        pages = chains(300, 6, self.source)
        found = FoundPages.of(pages)
        self.sleepy = restored(found)
        self.awake = restored(replace(found, keys=[*found.keys], order=None))
        assert self.sleepy._ids.sleeps and not self.awake._ids.sleeps
        self.slots = iter(range(300, 10**6))

    def keys(self) -> list[PageKey]:
        """A conversation that is known, or its first pages and others, or none that is known."""
        page = self.source.randrange(300)
        path: list[PageKey] = []
        while page >= 0 and self.awake._keys[page] is not None:
            path.insert(0, self.awake.key(page))
            page = self.awake.parent_of[page]
        new = [key(self.source.randrange(900)) for _ in range(self.source.randrange(3))]
        return path[: self.source.randrange(len(path) + 1)] + new

    def step(self) -> None:
        verb = self.source.choice([self.ask, self.ask, self.put, self.evict])
        verb()

    def ask(self) -> None:
        keys = self.keys() + self.keys()
        for question in ("match", "knows"):
            assert getattr(self.sleepy, question)(keys) == getattr(self.awake, question)(keys)
        assert list(map(self.sleepy.find, keys)) == list(map(self.awake.find, keys))

    def put(self) -> None:
        keys = self.keys()
        keys = list(dict.fromkeys(keys))
        slots = {each: next(self.slots) for each in keys}
        for index in (self.sleepy, self.awake):
            pages, disk = index.add(keys, -1), index.by_name[DISK]
            new = [page for page in pages if not disk.is_resident(page)]
            index.begin(disk, new, [slots[index.key(page)] for page in new])
            index.finish(disk, new)
            index.touch(pages)

    def evict(self) -> None:
        count = self.source.randrange(1, 12)
        for index in (self.sleepy, self.awake):
            disk = index.by_name[DISK]
            index.evict(disk, index.victims(disk, count))

    def check(self) -> None:
        assert len(self.sleepy) == len(self.awake)
        assert list(self.sleepy) == list(self.awake)
        assert self.sleepy._keys == self.awake._keys
        for index in (self.sleepy, self.awake):
            assert index.check() == []


@pytest.mark.parametrize("seed", range(20))
def test_pages_that_sleep_differ_from_others_in_nothing(seed: int) -> None:
    both = Both(seed)
    for _ in range(60):
        both.step()
    both.check()
    while both.sleepy._ids.sleeps:
        both.sleepy.find(key(both.source.randrange(10**6, 10**7)))
    assert dict(both.sleepy._ids) == dict(both.awake._ids)
    assert {both.sleepy.key(page): page for page in both.sleepy} == dict(both.sleepy._ids)
    for _ in range(20):
        both.step()
    both.check()


@pytest.mark.parametrize("at_once", [1, 200])
def test_what_is_asked_for_wakes_and_one_more_for_what_is_unknown(at_once: int) -> None:
    """Few keys are looked for one by one, many in columns. No key is kept twice."""
    keys = [key(number) for number in range(0, 6000, 3)]
    Random(1).shuffle(keys)
    ids = PageIds()
    known: list[PageKey | None] = [*keys]
    ids.restore(known, order_of(keys))
    assert ids.sleeps and not ids
    asked = [PageKey(bytes(bytearray(k))) for k in Random(0).sample(keys[1000:], 400)]
    for at in range(0, 400, at_once):
        ids.rouse(asked[at : at + at_once])
        ids.rouse(asked[at : at + at_once])
    assert dict(ids) == {k: keys.index(k) for k in asked}
    assert all(k is known[page] for k, page in ids.items())
    ids.rouse([key(10**6 + n) for n in range(1500)])
    assert ids.sleeps and dict(ids) == {k: keys.index(k) for k in {*keys[:1500], *asked}}
    ids.rouse([key(10**6 + n) for n in range(500)])
    assert not ids.sleeps
    assert dict(ids) == {k: at for at, k in enumerate(keys)}


def test_a_key_that_is_last_or_beyond_is_found_or_not() -> None:
    keys = [key(0), key(3), PageKey(b"\xff" * 32)]
    for asked in (keys, [*keys, *([PageKey(b"\xff" * 31 + b"\xfe")] * 40)]):
        ids = PageIds()
        ids.restore([*keys], order_of(keys))
        ids.rouse(asked[2:])
        assert ids[keys[2]] == 2
        assert asked[-1] in keys or asked[-1] not in ids
