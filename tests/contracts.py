"""What every tier and every eviction policy must do, as tests: subclass one to test a new backend.

A tier's test file is about ten lines, and two raw accessors that reach its bytes past the tier::

    class TestMyTier(TierContract):
        def open_tier(self, folder: Path) -> MyTier:
            return MyTier(self.page_bytes, self.capacity_pages)

        def raw_read(self, tier: MyTier, slot: int) -> bytes: ...
        def raw_write(self, tier: MyTier, slot: int, data: bytes) -> None: ...
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tiered_kv.columns import FEW, Array, leading
from tiered_kv.errors import CorruptPageError
from tiered_kv.keys import PageKey
from tiered_kv.policy import Policy, base
from tiered_kv.storage.base import Page, PageBuffer, Tier

_settings = settings(
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.differing_executors],  # one test, many subclasses: the point
)


def key_of(name: object) -> PageKey:
    """A key for a name, the same in every process."""
    return PageKey(hashlib.sha256(repr(name).encode()).digest())


def page_of(name: object, page_bytes: int, parent: object | None = None) -> Page:
    """A page whose bytes are random but follow from its name."""
    seed = int.from_bytes(key_of(name)[:8], "little")
    data = np.random.default_rng(seed).integers(0, 256, page_bytes, dtype=np.uint8)
    return Page(key_of(name), None if parent is None else key_of(parent), data)


def pages_of(names: Sequence[object], page_bytes: int) -> list[Page]:
    """One page a name, each hanging from the one before."""
    parents = [None, *names]
    return [page_of(name, page_bytes, parents[at]) for at, name in enumerate(names)]


def buffers(n: int, page_bytes: int) -> list[PageBuffer]:
    """Buffers to read into, filled with a pattern that no test page has."""
    return [np.full(page_bytes, 0xA5, dtype=np.uint8) for _ in range(n)]


def take(tier: Tier, n: int) -> list[int]:
    """Reserve n slots of a tier that has room for them."""
    slots = tier.reserve(n)
    assert slots is not None
    return slots


def read_all(tier: Tier, slots: Sequence[int]) -> list[bytes]:
    """The bytes of slots that must be readable."""
    into = buffers(len(slots), tier.page_bytes)
    assert tier.read(slots, into) == [None] * len(slots)
    return [buffer.tobytes() for buffer in into]


class TierContract:
    """What `tiered_kv.storage.base.Tier` promises.

    Attributes:
        page_bytes: an odd size by default, so that padding is always there to be got wrong.
        capacity_pages: how many pages the tier under test holds; at least that many.
        verifies: whether the tier finds bytes that were changed beneath it.
    """

    page_bytes = 4 * 1027
    capacity_pages = 8
    verifies = False

    def open_tier(self, folder: Path) -> Tier:
        """A new, empty tier; `folder` is its own."""
        raise NotImplementedError

    def raw_read(self, tier: Any, slot: int) -> bytes:
        """The bytes of a written slot, not through the tier."""
        raise NotImplementedError

    def raw_write(self, tier: Any, slot: int, data: bytes) -> None:
        """Change the bytes of a written slot, not through the tier."""
        raise NotImplementedError

    @pytest.fixture
    def tier(self, tmp_path: Path) -> Iterator[Tier]:
        tier = self.open_tier(tmp_path / "tier")
        yield tier
        tier.close()

    def put(self, tier: Tier, names: Sequence[object]) -> list[int]:
        """Reserve and write one page a name."""
        slots = take(tier, len(names))
        tier.write(slots, pages_of(names, tier.page_bytes))
        return slots

    def bytes_of(self, names: Sequence[object]) -> list[bytes]:
        return [page_of(name, self.page_bytes).data.tobytes() for name in names]

    # -- slots -------------------------------------------------------------------------------------

    def test_a_new_tier_says_its_page_size_and_holds_what_it_was_asked_for(
        self, tier: Tier
    ) -> None:
        assert tier.page_bytes == self.page_bytes
        assert tier.capacity_pages >= self.capacity_pages
        assert tier.name

    def test_pages_at_capacity_fit_into_the_configured_bytes(self, tier: Tier) -> None:
        assert tier.capacity_pages * tier.page_bytes <= tier.capacity_bytes

    def test_a_new_tier_uses_nothing(self, tier: Tier) -> None:
        assert tier.used_bytes == 0

    def test_reserve_gives_distinct_slots_lowest_first(self, tier: Tier) -> None:
        assert take(tier, 3) == [0, 1, 2]
        assert take(tier, 2) == [3, 4]

    def test_reserve_of_nothing_is_an_empty_list(self, tier: Tier) -> None:
        assert tier.reserve(0) == []
        assert tier.used_bytes == 0

    def test_reserve_of_more_than_is_free_takes_nothing(self, tier: Tier) -> None:
        take(tier, 1)
        used = tier.used_bytes
        assert tier.reserve(tier.capacity_pages) is None
        assert tier.used_bytes == used
        assert take(tier, 1) == [1]

    def test_every_page_of_the_capacity_can_be_reserved_and_not_one_more(self, tier: Tier) -> None:
        assert take(tier, tier.capacity_pages) == list(range(tier.capacity_pages))
        assert tier.reserve(1) is None
        assert tier.reserve(0) == []

    def test_freed_slots_are_given_out_again_lowest_first(self, tier: Tier) -> None:
        take(tier, 5)
        tier.free([3, 1])
        assert take(tier, 3) == [1, 3, 5]

    def test_used_bytes_follow_reserve_and_free_exactly(self, tier: Tier) -> None:
        one = take(tier, 1)
        per_page = tier.used_bytes
        assert per_page >= tier.page_bytes
        more = take(tier, 4)
        assert tier.used_bytes == 5 * per_page
        tier.free(more[1:3])
        assert tier.used_bytes == 3 * per_page
        tier.free([*one, more[0], more[3]])
        assert tier.used_bytes == 0

    def test_a_full_tier_uses_no_more_than_its_capacity(self, tier: Tier) -> None:
        take(tier, tier.capacity_pages)
        assert tier.used_bytes <= tier.capacity_bytes

    def test_free_of_a_slot_that_is_not_reserved_is_refused(self, tier: Tier) -> None:
        take(tier, 2)
        with pytest.raises(ValueError, match="slot"):
            tier.free([2])

    def test_free_of_a_slot_outside_the_tier_is_refused(self, tier: Tier) -> None:
        for slot in (-1, tier.capacity_pages):
            with pytest.raises(ValueError, match="slot"):
                tier.free([slot])

    def test_free_twice_is_refused_and_the_slot_stays_single(self, tier: Tier) -> None:
        """A double free that goes through hands one slot to two owners (LMCache #993, #3381)."""
        take(tier, 2)
        tier.free([0])
        with pytest.raises(ValueError, match="slot"):
            tier.free([0])
        assert take(tier, 2) == [0, 2]

    def test_a_refused_free_frees_none_of_its_slots(self, tier: Tier) -> None:
        take(tier, 3)
        used = tier.used_bytes
        for wrong in ([0, 7], [1, 1], [2, 0, 2]):
            with pytest.raises(ValueError, match="slot"):
                tier.free(wrong)
            assert tier.used_bytes == used
        assert take(tier, 1) == [3]

    def test_free_of_nothing_is_harmless(self, tier: Tier) -> None:
        take(tier, 1)
        used = tier.used_bytes
        tier.free([])
        assert tier.used_bytes == used

    def test_threads_that_reserve_at_once_never_share_a_slot(self, tier: Tier) -> None:
        with ThreadPoolExecutor(4) as pool:
            taken = list(pool.map(lambda _: tier.reserve(1), range(tier.capacity_pages + 8)))
        slots = [slot for found in taken if found is not None for slot in found]
        assert sorted(slots) == list(range(tier.capacity_pages))

    # -- bytes -------------------------------------------------------------------------------------

    def test_a_page_comes_back_bit_for_bit(self, tier: Tier) -> None:
        assert read_all(tier, self.put(tier, ["a"])) == self.bytes_of(["a"])

    def test_a_batch_comes_back_in_the_order_asked_for(self, tier: Tier) -> None:
        slots = self.put(tier, ["a", "b", "c", "d"])
        order = [2, 0, 3, 1]
        asked = [slots[at] for at in order]
        assert read_all(tier, asked) == self.bytes_of(["c", "a", "d", "b"])

    def test_a_batch_may_be_written_to_scattered_slots_in_any_order(self, tier: Tier) -> None:
        take(tier, 7)
        tier.write([5, 1, 3], pages_of(["a", "b", "c"], tier.page_bytes))
        assert read_all(tier, [1, 3, 5]) == self.bytes_of(["b", "c", "a"])

    def test_what_was_written_is_really_there(self, tier: Tier) -> None:
        slots = self.put(tier, ["a", "b", "c"])
        assert [self.raw_read(tier, slot) for slot in slots] == self.bytes_of(["a", "b", "c"])

    def test_read_answers_from_the_bytes_that_are_there_now(self, tier: Tier) -> None:
        """Bytes changed beneath the tier come back as they are, or as an error."""
        slots = self.put(tier, ["a", "b", "c"])
        (changed,) = self.bytes_of(["other"])
        self.raw_write(tier, slots[1], changed)
        into = buffers(3, tier.page_bytes)
        outcome = tier.read(slots, into)
        if self.verifies:
            assert isinstance(outcome[1], CorruptPageError)
            assert outcome[1].tier == tier.name
        else:
            assert outcome[1] is None
            assert into[1].tobytes() == changed

    def test_writes_in_halves_can_all_be_read_once_they_have_ended(self, tier: Tier) -> None:
        slots = take(tier, 4)
        pages = pages_of("abcd", tier.page_bytes)
        first = tier.begin_write(slots[:1], pages[:1])
        second = tier.begin_write(slots[1:], pages[1:])
        first()
        second()
        assert read_all(tier, slots) == self.bytes_of("abcd")

    def test_reads_that_were_begun_end_as_read_does(self, tier: Tier) -> None:
        slots = self.put(tier, ["a", "b", "c"])
        into = buffers(3, tier.page_bytes)
        first = tier.begin_read(slots[:2], into[:2])
        second = tier.begin_read(slots[2:], into[2:])
        assert (first(), second()) == ([None] * 2, [None])
        assert [row.tobytes() for row in into] == self.bytes_of(["a", "b", "c"])

    def test_a_damaged_page_spoils_only_itself(self, tier: Tier) -> None:
        slots = self.put(tier, ["a", "b", "c"])
        damaged = bytearray(self.bytes_of(["b"])[0])
        damaged[-1] ^= 1
        self.raw_write(tier, slots[1], bytes(damaged))
        into = buffers(3, tier.page_bytes)
        outcome = tier.read(slots, into)
        assert (outcome[0], outcome[2]) == (None, None)
        assert [into[0].tobytes(), into[2].tobytes()] == self.bytes_of(["a", "c"])

    def test_a_write_leaves_its_neighbours_alone(self, tier: Tier) -> None:
        slots = self.put(tier, ["a", "b", "c"])
        tier.write([slots[1]], [page_of("new", tier.page_bytes)])
        assert read_all(tier, slots) == self.bytes_of(["a", "new", "c"])

    def test_the_last_write_to_a_slot_wins(self, tier: Tier) -> None:
        (slot,) = self.put(tier, ["a"])
        for name in ("b", "c"):
            tier.write([slot], [page_of(name, tier.page_bytes)])
            assert read_all(tier, [slot]) == self.bytes_of([name])

    def test_pages_of_extreme_bytes_come_back(self, tier: Tier) -> None:
        slots = take(tier, 2)
        data = [np.full(tier.page_bytes, value, dtype=np.uint8) for value in (0x00, 0xFF)]
        tier.write(slots, [Page(key_of(at), None, row) for at, row in enumerate(data)])
        assert read_all(tier, slots) == [row.tobytes() for row in data]

    def test_a_page_may_be_changed_by_its_owner_once_the_write_has_returned(
        self, tier: Tier
    ) -> None:
        (slot,) = take(tier, 1)
        page = page_of("a", tier.page_bytes)
        tier.write([slot], [page])
        page.data[:] = 0
        assert read_all(tier, [slot]) == self.bytes_of(["a"])

    def test_what_was_read_is_the_readers_own(self, tier: Tier) -> None:
        slots = self.put(tier, ["a"])
        into = buffers(1, tier.page_bytes)
        tier.read(slots, into)
        into[0][:] = 0
        assert read_all(tier, slots) == self.bytes_of(["a"])

    def test_read_fills_the_buffers_it_was_given_and_nothing_around_them(self, tier: Tier) -> None:
        slots = self.put(tier, ["a"])
        room = np.full(tier.page_bytes + 14, 0x5A, dtype=np.uint8)
        assert tier.read(slots, [room[7:-7]]) == [None]
        assert room[7:-7].tobytes() == self.bytes_of(["a"])[0]
        assert set(room[:7].tolist() + room[-7:].tolist()) == {0x5A}

    def test_a_read_only_page_can_be_written(self, tier: Tier) -> None:
        (slot,) = take(tier, 1)
        data = np.frombuffer(self.bytes_of(["a"])[0], dtype=np.uint8)
        tier.write([slot], [Page(key_of("a"), None, data)])
        assert read_all(tier, [slot]) == self.bytes_of(["a"])

    def test_one_slot_may_be_read_twice_in_a_batch(self, tier: Tier) -> None:
        (slot,) = self.put(tier, ["a"])
        assert read_all(tier, [slot, slot]) == self.bytes_of(["a", "a"])

    def test_empty_batches_are_harmless(self, tier: Tier) -> None:
        tier.write([], [])
        assert tier.read([], []) == []

    def test_reading_changes_nothing(self, tier: Tier) -> None:
        slots = self.put(tier, ["a", "b"])
        used = tier.used_bytes
        for _ in range(3):
            assert read_all(tier, slots) == self.bytes_of(["a", "b"])
        assert tier.used_bytes == used

    def test_write_needs_one_slot_a_page(self, tier: Tier) -> None:
        slots = take(tier, 2)
        with pytest.raises(ValueError, match="slot"):
            tier.write(slots, [page_of("a", tier.page_bytes)])

    def test_read_needs_one_buffer_a_slot(self, tier: Tier) -> None:
        slots = self.put(tier, ["a", "b"])
        with pytest.raises(ValueError, match="slot"):
            tier.read(slots, buffers(1, tier.page_bytes))

    def test_a_page_of_another_length_is_refused_and_nothing_written(self, tier: Tier) -> None:
        """One byte would broadcast over a whole numpy row, and a long page into its neighbour."""
        slots = self.put(tier, ["a", "b"])
        for length in (1, tier.page_bytes - 1, tier.page_bytes + 1):
            wrong = Page(key_of("wrong"), None, np.zeros(length, dtype=np.uint8))
            with pytest.raises(ValueError, match=str(tier.page_bytes)):
                tier.write(slots, [wrong, wrong])
        assert read_all(tier, slots) == self.bytes_of(["a", "b"])

    def test_a_buffer_of_another_length_is_refused(self, tier: Tier) -> None:
        slots = self.put(tier, ["a"])
        for length in (tier.page_bytes - 1, tier.page_bytes + 1):
            with pytest.raises(ValueError, match=str(tier.page_bytes)):
                tier.read(slots, [np.zeros(length, dtype=np.uint8)])

    def test_a_full_tier_gives_every_page_back(self, tier: Tier) -> None:
        names = list(range(tier.capacity_pages))
        slots = self.put(tier, names)
        assert read_all(tier, slots) == self.bytes_of(names)

    def test_a_slot_that_was_freed_and_taken_again_holds_the_new_page(self, tier: Tier) -> None:
        slots = self.put(tier, ["a", "b", "c"])
        tier.free([slots[1]])
        assert self.put(tier, ["d"]) == [slots[1]]
        assert read_all(tier, slots) == self.bytes_of(["a", "d", "c"])

    def test_free_leaves_the_other_pages_alone(self, tier: Tier) -> None:
        slots = self.put(tier, ["a", "b", "c", "d"])
        tier.free(slots[:2])
        assert read_all(tier, slots[2:]) == self.bytes_of(["c", "d"])

    def test_a_tier_can_be_emptied_and_filled_many_times(self, tier: Tier) -> None:
        for turn in range(4):
            names = [(turn, at) for at in range(tier.capacity_pages)]
            slots = self.put(tier, names)
            assert read_all(tier, slots) == self.bytes_of(names)
            tier.free(slots)
            assert tier.used_bytes == 0

    # -- several threads ---------------------------------------------------------------------------

    def test_threads_that_write_different_slots_do_not_disturb_each_other(self, tier: Tier) -> None:
        names = [(worker, turn) for worker in range(4) for turn in range(2)]

        def one(name: tuple[int, int]) -> int:
            (slot,) = self.put(tier, [name])
            return slot

        with ThreadPoolExecutor(4) as pool:
            slots = list(pool.map(one, names))
        assert read_all(tier, slots) == self.bytes_of(names)

    def test_readers_see_whole_pages_while_others_write_and_free(self, tier: Tier) -> None:
        kept = self.put(tier, ["a", "b", "c"])

        def churn(turn: int) -> None:
            tier.free(self.put(tier, [("churn", turn)]))

        def read(_: int) -> list[bytes]:
            return read_all(tier, kept)

        with ThreadPoolExecutor(4) as pool:
            writes = [pool.submit(churn, turn) for turn in range(8)]
            reads = [pool.submit(read, turn) for turn in range(8)]
            for write in writes:
                write.result()
            for found in reads:
                assert found.result() == self.bytes_of(["a", "b", "c"])

    # -- check and close ---------------------------------------------------------------------------

    def test_check_of_a_sound_tier_finds_nothing_and_counts_its_pages(self, tier: Tier) -> None:
        assert tier.check().is_clean
        self.put(tier, ["a", "b", "c"])
        report = tier.check()
        assert report.is_clean
        assert report.problems == []
        assert report.pages == 3

    def test_check_with_fix_leaves_a_sound_tier_as_it_is(self, tier: Tier) -> None:
        slots = self.put(tier, ["a", "b"])
        used = tier.used_bytes
        assert tier.check(fix=True).fixed == 0
        assert tier.used_bytes == used
        assert read_all(tier, slots) == self.bytes_of(["a", "b"])

    def test_check_finds_what_a_verifying_tier_can_find(self, tier: Tier) -> None:
        slots = self.put(tier, ["a", "b"])
        self.raw_write(tier, slots[1], self.bytes_of(["other"])[0])
        assert tier.check().is_clean != self.verifies

    def test_check_with_fix_drops_the_damaged_page_and_keeps_the_rest(self, tier: Tier) -> None:
        slots = self.put(tier, ["a", "b"])
        self.raw_write(tier, slots[1], self.bytes_of(["other"])[0])
        assert tier.check(fix=True).is_clean
        assert tier.check().is_clean
        assert read_all(tier, slots[:1]) == self.bytes_of(["a"])

    def test_close_twice_is_harmless(self, tier: Tier) -> None:
        self.put(tier, ["a"])
        tier.close()
        tier.close()

    # -- against the plain model -------------------------------------------------------------------

    @settings(_settings, max_examples=15)
    @given(data=st.data())
    def test_any_order_of_calls_gives_what_a_dict_gives(self, data: st.DataObject) -> None:
        tier = self._scratch_tier()
        held: dict[int, int] = {}
        names = iter(range(10_000))
        try:
            for _ in range(data.draw(st.integers(1, 12), label="calls")):
                self._one_call(tier, held, names, data)
            assert read_all(tier, list(held)) == self.bytes_of(list(held.values()))
            assert tier.check().is_clean
        finally:
            tier.free(list(held))
            assert tier.used_bytes == 0

    @pytest.fixture(autouse=True)
    def _own_folder(self, tmp_path: Path) -> Iterator[None]:
        self._folder = tmp_path / "scratch"
        self._scratch: Tier | None = None
        yield
        if self._scratch is not None:
            self._scratch.close()

    def _scratch_tier(self) -> Tier:
        if self._scratch is None:  # one for all examples: each leaves it empty
            self._scratch = self.open_tier(self._folder)
        return self._scratch

    def _one_call(
        self, tier: Tier, held: dict[int, int], names: Iterator[int], data: st.DataObject
    ) -> None:
        verb = data.draw(st.sampled_from(["put", "put", "rewrite", "free", "read"]), label="verb")
        if verb == "put":
            n = data.draw(st.integers(0, 4), label="n")
            slots = tier.reserve(n)
            assert (slots is None) == (n > tier.capacity_pages - len(held))
            fresh = {slot: next(names) for slot in slots or ()}
            assert not fresh.keys() & held.keys()
            tier.write(list(fresh), self._loose_pages(fresh.values()))
            held.update(fresh)
            return
        some = data.draw(
            st.lists(st.sampled_from(sorted(held) or [-1]), unique=True), label="slots"
        )
        slots = [slot for slot in some if slot in held]
        if verb == "rewrite":
            fresh = {slot: next(names) for slot in slots}
            tier.write(list(fresh), self._loose_pages(fresh.values()))
            held.update(fresh)
        elif verb == "free":
            tier.free(slots)
            for slot in slots:
                del held[slot]
        else:
            assert read_all(tier, slots) == self.bytes_of([held[slot] for slot in slots])

    def _loose_pages(self, names: Iterable[object]) -> list[Page]:
        """Pages that hang from nothing: a tier may call a page without its parent a fault."""
        return [page_of(name, self.page_bytes) for name in names]


class PlainTree:
    """A tier's tree as dicts: what a policy sees in these tests. Also keeps the policy informed."""

    def __init__(self) -> None:
        self.above: dict[int, int] = {}
        self.inside: set[int] = set()
        self.arriving: set[int] = set()
        self.used_at: dict[int, int] = {}
        self.came_at: dict[int, int] = {}
        self.favours: dict[int, int] = {}
        self.clock = 0
        self.policy: Policy | None = None

    def parent(self, page: int) -> int:
        return self.above[page]

    def parents(self, pages: Sequence[int]) -> Array:
        return np.array([self.above[page] for page in pages], np.intp)

    def child_count(self, page: int) -> int:
        there = self.inside | self.arriving
        return sum(parent == page for child, parent in self.above.items() if child in there)

    def childless(self, pages: Sequence[int]) -> list[int]:
        return [page for page in pages if not self.child_count(page)]

    def last_use(self, page: int) -> int:
        return self.used_at[page]

    def last_uses(self, pages: Sequence[int]) -> list[int]:
        return [self.used_at[page] for page in pages]

    def favoured_use(self, page: int) -> int:
        return self.used_at[page] + self.favours.get(page, 0)

    def favoured_uses(self, pages: Array) -> Array:
        return np.array([self.favoured_use(page) for page in pages.tolist()], np.int64)

    def line(self, page: int, n: int) -> Array:
        line: list[int] = []
        while len(line) < n and (page := self.above[page]) in self.inside:
            if self.child_count(page) != 1:
                break
            line.append(page)
        return np.array(line, np.intp)

    def hint(self, page: int, favour: int) -> None:
        assert self.policy is not None
        self.favours[page] = favour
        self.policy.rerank([page])

    def insert(self, page: int, parent: int = -1) -> None:
        """A page arrives and is used."""
        self.insert_all([page], [parent])

    def insert_all(self, pages: Sequence[int], parents: Sequence[int]) -> None:
        """Pages arrive together and are used; the policy hears of it when all are there."""
        assert self.policy is not None
        self.above.update(zip(pages, parents, strict=True))
        for page in pages:
            self._use(page)
            self.came_at[page] = self.used_at[page]
        self.arriving.difference_update(pages)
        self.inside.update(pages)
        self.policy.insert(pages)

    def await_child(self, page: int, parent: int) -> None:
        """A page is on its way in."""
        self.above[page] = parent
        self.arriving.add(page)

    def abort(self, page: int) -> None:
        """A page will not arrive after all."""
        assert self.policy is not None
        self.arriving.discard(page)
        self.policy.remove([page])

    def touch(self, page: int) -> None:
        assert self.policy is not None
        self._use(page)
        self.policy.touch([page])

    def remove(self, page: int) -> None:
        self.remove_all([page])

    def remove_all(self, pages: Sequence[int]) -> None:
        """Pages leave together; the policy hears of it when all are gone."""
        assert self.policy is not None
        self.inside.difference_update(pages)
        self.policy.remove(pages)

    def path(self, *pages: int) -> None:
        """Insert pages that hang one from the other."""
        parents = (-1, *pages)
        for at, page in enumerate(pages):
            if page not in self.inside:
                self.insert(page, parents[at])

    def _use(self, page: int) -> None:
        self.clock += 1
        self.used_at[page] = self.clock


class Holding:
    """A guard that holds the pages of which a function says so."""

    def __init__(self, holds: Callable[[int], bool]) -> None:
        self.holds = holds

    def lets_go(self, run: Array) -> int:
        return leading(np.array([not self.holds(page) for page in run.tolist()], np.bool_))


def _nothing(page: int) -> bool:
    return False


class PolicyContract:
    """What `tiered_kv.policy.base.Policy` promises, whatever the ranking.

    `rank` is the plain model: the page of lowest rank among the leaves gives way first. A policy
    whose order no function of one page describes leaves it as None.
    """

    rank: Callable[[PlainTree, int], int] | None = None

    def make_policy(self, tree: PlainTree) -> Policy:
        """The policy under test, looking at a tree."""
        raise NotImplementedError

    @pytest.fixture
    def tree(self) -> PlainTree:
        return self.new_tree()

    def new_tree(self) -> PlainTree:
        tree = PlainTree()
        tree.policy = self.make_policy(tree)
        return tree

    def victims(
        self, tree: PlainTree, n: int, protected: Callable[[int], bool] = _nothing
    ) -> list[int]:
        assert tree.policy is not None
        return tree.policy.victims(n, Holding(protected))

    def test_an_empty_tier_has_no_victims(self, tree: PlainTree) -> None:
        assert self.victims(tree, 3) == []

    def test_no_victims_when_none_are_wanted(self, tree: PlainTree) -> None:
        tree.insert(0)
        assert self.victims(tree, 0) == []

    def test_every_page_can_be_named_and_each_only_once(self, tree: PlainTree) -> None:
        tree.path(0, 1, 2)
        tree.path(0, 3)
        tree.insert(4)
        assert sorted(self.victims(tree, 5)) == [0, 1, 2, 3, 4]

    def test_asking_for_more_than_there_are_gives_those_there_are(self, tree: PlainTree) -> None:
        tree.path(0, 1)
        assert self.victims(tree, 9) == [1, 0]

    def test_a_page_comes_only_after_its_children(self, tree: PlainTree) -> None:
        """A child without its parent can never hit and only takes space (SGLang #27562, #30106)."""
        tree.path(0, 1, 2, 3)
        tree.path(0, 1, 4)
        order = self.victims(tree, 5)
        for page in order:
            above = tree.parent(page)
            assert above < 0 or order.index(above) > order.index(page)

    def test_a_parent_stays_while_not_all_of_its_children_go(self, tree: PlainTree) -> None:
        tree.path(0, 1)
        tree.path(0, 2)
        assert 0 not in self.victims(tree, 2)
        assert self.victims(tree, 3)[2] == 0

    def test_asking_changes_nothing(self, tree: PlainTree) -> None:
        tree.path(0, 1, 2)
        tree.path(3, 4)
        first = self.victims(tree, 4)
        assert self.victims(tree, 4) == first
        assert self.victims(tree, 2) == first[:2]
        assert self.victims(tree, 4) == first

    def test_protected_pages_stay_and_so_do_those_above_them(self, tree: PlainTree) -> None:
        tree.path(0, 1, 2)
        tree.path(0, 3)
        assert self.victims(tree, 9, lambda page: page == 2) == [3]

    def test_a_protected_page_is_named_again_once_it_no_longer_is(self, tree: PlainTree) -> None:
        tree.path(0, 1)
        assert self.victims(tree, 2, lambda page: True) == []
        assert self.victims(tree, 2) == [1, 0]

    def test_a_protected_leaf_does_not_hide_the_others(self, tree: PlainTree) -> None:
        for page in range(6):
            tree.insert(page)
        assert sorted(self.victims(tree, 3, lambda page: page < 3)) == [3, 4, 5]

    def test_a_removed_page_is_no_longer_named(self, tree: PlainTree) -> None:
        tree.path(0, 1)
        tree.remove(1)
        assert self.victims(tree, 9) == [0]

    def test_a_parent_becomes_a_leaf_when_its_last_child_leaves(self, tree: PlainTree) -> None:
        tree.path(0, 1)
        tree.path(0, 2)
        tree.remove(1)
        assert self.victims(tree, 1) == [2]
        tree.remove(2)
        assert self.victims(tree, 1) == [0]

    def test_a_page_that_is_awaited_keeps_its_parent(self, tree: PlainTree) -> None:
        """A parent that leaves while a child of it arrives would orphan the child on arrival."""
        tree.insert(0)
        tree.await_child(1, 0)
        assert self.victims(tree, 9) == []

    def test_a_parent_is_named_again_when_its_child_did_not_arrive(self, tree: PlainTree) -> None:
        tree.insert(0)
        tree.await_child(1, 0)
        assert self.victims(tree, 1) == []
        tree.abort(1)
        assert self.victims(tree, 1) == [0]

    def test_a_page_number_may_be_used_again_for_another_page(self, tree: PlainTree) -> None:
        tree.path(0, 1)
        tree.remove(1)
        tree.insert(1)
        assert sorted(self.victims(tree, 9)) == [0, 1]

    def test_page_numbers_may_have_gaps(self, tree: PlainTree) -> None:
        tree.insert(1000)
        tree.insert(3)
        assert sorted(self.victims(tree, 9)) == [3, 1000]

    def test_a_page_used_while_it_has_children_is_ranked_by_that_use(self, tree: PlainTree) -> None:
        tree.path(0, 1)
        tree.insert(2)
        tree.touch(0)
        order = self.victims(tree, 3)
        assert order.index(1) < order.index(0)

    @settings(_settings, max_examples=60)
    @given(data=st.data())
    def test_any_history_gives_the_order_of_the_plain_model(self, data: st.DataObject) -> None:
        """Also where batches are dealt with in columns, and pages up a branch chosen in runs."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(base, "FEW", data.draw(st.sampled_from([1, FEW]), label="few"))
            patch.setattr(base, "LONG", data.draw(st.sampled_from([1, 2, base.LONG]), label="long"))
            self._compare_with_the_plain_model(data)

    def _compare_with_the_plain_model(self, data: st.DataObject) -> None:
        tree = self.new_tree()
        page, pages = 0, data.draw(st.integers(1, 24), label="pages")
        while page < pages:
            known = [-1, *sorted(tree.inside)]
            together = list(range(page, page + data.draw(st.integers(1, 4), label="together")))
            parents = [
                data.draw(st.sampled_from(known + together[:at])) for at in range(len(together))
            ]
            tree.insert_all(together, parents)
            page = together[-1] + 1
            verb = data.draw(st.sampled_from(["none", "touch", "evict"]), label="verb")
            if verb == "touch":
                tree.touch(data.draw(st.sampled_from(sorted(tree.inside)), label="page"))
            elif verb == "evict":
                going = self.victims(tree, data.draw(st.integers(0, 3), label="n"))
                if data.draw(st.booleans(), label="go together"):
                    tree.remove_all(going)
                else:
                    for victim in going:
                        tree.remove(victim)
        pinned = data.draw(st.sets(st.sampled_from([-1, *sorted(tree.inside)])), label="pinned")
        n = data.draw(st.integers(0, 30), label="wanted")
        order = self.victims(tree, n, lambda page: page in pinned)
        assert not set(order) & pinned
        assert len(set(order)) == len(order) <= n
        assert set(order) <= tree.inside
        if type(self).rank is not None:
            assert order == self._plain_order(tree, n, pinned)

    def _plain_order(self, tree: PlainTree, n: int, pinned: set[int]) -> list[int]:
        rank = type(self).rank
        assert rank is not None
        order: list[int] = []
        while len(order) < n:
            left = tree.inside - set(order)
            parents = {tree.parent(page) for page in left}
            leaves = [page for page in left if page not in parents and page not in pinned]
            if not leaves:
                break
            order.append(min(leaves, key=lambda page: rank(tree, page)))
        return order
