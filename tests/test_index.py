"""Index: states, pins, ghosts, holes, and the order in which a tier gives pages up."""

from __future__ import annotations

from itertools import count
from random import Random

import pytest
from contracts import key_of
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_rig import PlannerRig, chain

from tiered_kv import index as index_module
from tiered_kv.index import Index, TierState
from tiered_kv.keys import KeyChain
from tiered_kv.plan import DISK, HBM, HOST

_slots = count()


@pytest.fixture
def index() -> Index:
    return Index([HBM, HOST, DISK])


def arrive(index: Index, tier: str, *names: object, parent: object | None = None) -> list[int]:
    """Pages that hang one from the other come into a tier and are used once."""
    hangs_from = -1 if parent is None else index.find(key_of(parent))
    pages = index.add(chain(*names), hangs_from)
    index.touch(pages)
    for page in pages:
        if not index.by_name[tier].state[page]:
            index.begin(index.by_name[tier], [page], [next(_slots)])
            index.finish(index.by_name[tier], [page])
    return pages


def names_of(index: Index, pages: list[int], *names: object) -> list[object]:
    by_key = {key_of(name): name for name in names}
    return [by_key[index.key(page)] for page in pages]


# -- states ----------------------------------------------------------------------------------------


def test_an_unknown_key_has_no_page(index: Index) -> None:
    assert index.find(key_of("a")) == -1
    assert len(index) == 0


def test_a_page_arrives_and_is_resident_only_when_it_has_finished(index: Index) -> None:
    host = index.by_name[HOST]
    (page,) = index.add(chain("a"), -1)
    assert host.state[page] == TierState.ABSENT
    index.begin(host, [page], [7])
    assert host.state[page] == TierState.ARRIVING
    assert not host.is_resident(page)
    assert host.resident == 0
    index.finish(host, [page])
    assert host.is_resident(page)
    assert (host.resident, host.slot[page]) == (1, 7)


def test_a_page_that_will_not_arrive_gives_its_slot_back_and_is_forgotten(index: Index) -> None:
    """LMCache #4991: a failed store stayed visible, and the next get read junk."""
    host = index.by_name[HOST]
    (page,) = index.add(chain("a"), -1)
    index.begin(host, [page], [7])
    assert index.abort(host, page) == 7
    assert index.find(key_of("a")) == -1
    assert index.match(chain("a")) == []


def test_a_page_knows_its_key_and_its_parents(index: Index) -> None:
    first, second = arrive(index, HOST, "a", "b")
    assert index.key(second) == key_of("b")
    assert index.parent_key(second) == key_of("a")
    assert index.parent_key(first) is None
    assert index.parent_of[second] == first


def test_a_page_may_be_in_several_tiers_and_leaves_each_by_itself(index: Index) -> None:
    (page,) = arrive(index, HOST, "a")
    arrive(index, DISK, "a")
    index.evict(index.by_name[HOST], [page])
    assert index.match(chain("a")) == [page]
    index.evict(index.by_name[DISK], [page])
    assert index.match(chain("a")) == []
    assert len(index) == 0


def test_adding_a_known_key_gives_the_same_page(index: Index) -> None:
    pages = arrive(index, HOST, "a", "b")
    assert index.add(chain("a", "b"), -1) == pages
    assert len(index) == 2


def test_a_page_number_is_used_again_without_its_past(index: Index) -> None:
    (page,) = arrive(index, HOST, "a")
    index.hint([page], 90)
    index.evict(index.by_name[HOST], [page])
    (again,) = arrive(index, HOST, "b")
    assert again == page
    assert index.favour(again) == 0
    assert index.hits_of[again] == 1


def test_hints_without_end_take_no_memory_and_the_last_one_counts(index: Index) -> None:
    host = index.by_name[HOST]
    pages = [arrive(index, HOST, name)[0] for name in "abcd"]
    for turn in range(1000):
        index.hint(pages, 90 if turn % 2 else 10)
    index.hint(pages[2:3], 0)
    assert len(host.policy._heap) <= 2 * len(host.policy._queued) + len(pages)  # type: ignore[attr-defined]
    assert index.victims(host, 9) == [pages[2], pages[0], pages[1], pages[3]]
    assert index.victims(host, 9) == [pages[2], pages[0], pages[1], pages[3]]


def test_forget_drops_only_what_is_nowhere_and_childless(index: Index) -> None:
    arrive(index, HOST, "a")
    new = index.add(chain("a", "b", "c"), -1)
    index.forget(new[::-1])
    assert index.find(key_of("a")) >= 0
    assert index.find(key_of("b")) == index.find(key_of("c")) == -1
    assert index.check(lambda: True) == []


# -- match -----------------------------------------------------------------------------------------


def test_match_is_the_longest_prefix_over_all_tiers(index: Index) -> None:
    a, b = arrive(index, HOST, "a", "b")
    (c,) = arrive(index, DISK, "c", parent="b")
    assert index.match(chain("a", "b", "c", "d")) == [a, b, c]
    assert index.match(chain("a", "x", "c")) == [a]
    assert index.match(chain("x", "a")) == []
    assert index.match(KeyChain([])) == []


def test_match_counts_a_page_that_is_arriving(index: Index) -> None:
    (page,) = index.add(chain("a"), -1)
    index.begin(index.by_name[HOST], [page], [0])
    assert index.match(chain("a")) == [page]


def test_match_does_not_count_a_page_that_is_nowhere(index: Index) -> None:
    index.add(chain("a"), -1)
    assert index.match(chain("a")) == []


def test_match_changes_nothing(index: Index) -> None:
    """A lookup that promotes lets a scheduler that polls keep dead pages alive."""
    arrive(index, HOST, "a", "b")
    arrive(index, HOST, "c")
    before = (list(index.last_use_of), list(index.hits_of), list(index.children_of))
    order = index.victims(index.by_name[HOST], 3)
    for _ in range(5):
        index.match(chain("a", "b", "x"))
    assert (list(index.last_use_of), list(index.hits_of), list(index.children_of)) == before
    assert index.victims(index.by_name[HOST], 3) == order
    assert index.why_missing(key_of("x")) == "never_stored"


# -- use, pins and order ---------------------------------------------------------------------------


def test_of_one_request_the_deepest_page_counts_as_the_oldest(index: Index) -> None:
    pages = arrive(index, HOST, "a", "b", "c")
    uses = [index.last_use_of[page] for page in pages]
    assert uses == sorted(uses, reverse=True)
    assert len(set(uses)) == 3


def test_a_later_request_is_younger_than_all_of_an_earlier_one(index: Index) -> None:
    early = arrive(index, HOST, "a", "b", "c")
    late = arrive(index, HOST, "x", "y")
    assert min(index.last_use_of[page] for page in late) > max(
        index.last_use_of[page] for page in early
    )


def test_victims_are_the_oldest_leaves_first(index: Index) -> None:
    arrive(index, HOST, "a", "b")
    arrive(index, HOST, "a", "c")
    arrive(index, HOST, "x")
    order = index.victims(index.by_name[HOST], 9)
    assert names_of(index, order, *"abcx") == ["b", "c", "a", "x"]


def test_asking_for_victims_changes_nothing(index: Index) -> None:
    arrive(index, HOST, "a", "b", "c")
    host = index.by_name[HOST]
    assert index.victims(host, 2) == index.victims(host, 2)
    assert host.resident == 3
    assert index.victims(host, 0) == index.victims(host, -3) == []


def test_a_pinned_page_is_no_victim_and_keeps_those_above_it(index: Index) -> None:
    _, b, _ = arrive(index, HOST, "a", "b", "c")
    host = index.by_name[HOST]
    index.pin(host, [b])
    assert names_of(index, index.victims(host, 9), *"abc") == ["c"]
    index.unpin(host, [b])
    assert names_of(index, index.victims(host, 9), *"abc") == ["c", "b", "a"]


def test_a_pin_holds_until_it_has_been_taken_back_as_often_as_it_was_set(index: Index) -> None:
    (page,) = arrive(index, HOST, "a")
    host = index.by_name[HOST]
    index.pin(host, [page])
    index.pin(host, [page])
    index.unpin(host, [page])
    assert index.victims(host, 1) == []
    index.unpin(host, [page])
    assert index.victims(host, 1) == [page]


def test_a_pin_taken_back_twice_is_a_bug_and_says_so(index: Index) -> None:
    """TensorRT-LLM #12834, #11879: a count that went to -1 freed a page somebody read."""
    (page,) = arrive(index, HOST, "a")
    with pytest.raises(AssertionError, match="twice"):
        index.unpin(index.by_name[HOST], [page])


def test_a_pin_in_one_tier_does_not_hold_the_page_in_another(index: Index) -> None:
    (page,) = arrive(index, HOST, "a")
    arrive(index, DISK, "a")
    index.pin(index.by_name[HOST], [page])
    assert index.victims(index.by_name[DISK], 1) == [page]


def test_a_page_that_is_arriving_is_no_victim_nor_is_its_parent(index: Index) -> None:
    arrive(index, HOST, "a")
    (b,) = index.add(chain("b"), index.find(key_of("a")))
    index.begin(index.by_name[HOST], [b], [next(_slots)])
    assert index.victims(index.by_name[HOST], 9) == []


def test_a_parent_that_lives_nowhere_else_stays_while_a_child_lives_below(index: Index) -> None:
    """Dropping it would orphan the child: a page on disk that can never hit again."""
    a, b = arrive(index, HOST, "a", "b")
    arrive(index, DISK, "b", parent="a")
    host = index.by_name[HOST]
    assert index.victims(host, 9) == [b]
    arrive(index, DISK, "a")
    assert index.victims(host, 9) == [b, a]


def test_a_parent_that_is_to_be_demoted_may_leave_before_its_child_below(index: Index) -> None:
    a, b = arrive(index, HOST, "a", "b")
    arrive(index, DISK, "b", parent="a")
    assert index.victims(index.by_name[HOST], 9, demote=True) == [b, a]


def test_children_elsewhere_do_not_hold_a_page_that_lives_elsewhere_too(index: Index) -> None:
    arrive(index, HBM, "a", "b", "c")
    arrive(index, HOST, "a", "b", "c")
    order = index.victims(index.by_name[HBM], 9)
    assert names_of(index, order, *"abc") == ["c", "b", "a"]


# -- ghosts ----------------------------------------------------------------------------------------


def test_why_missing_tells_never_stored_from_evicted(index: Index) -> None:
    (page,) = arrive(index, HOST, "a")
    index.evict(index.by_name[HOST], [page])
    assert index.why_missing(key_of("a")) == "evicted"
    assert index.why_missing(key_of("b")) == "never_stored"


@pytest.mark.parametrize("reason", ["failed", "no_room", "corrupt"])
def test_why_missing_repeats_what_it_was_told(index: Index, reason: str) -> None:
    (page,) = index.add(chain("a"), -1)
    index.begin(index.by_name[HOST], [page], [0])
    index.abort(index.by_name[HOST], page, reason)
    assert index.why_missing(key_of("a")) == reason


def test_a_page_that_left_one_of_its_tiers_is_not_missing(index: Index) -> None:
    (page,) = arrive(index, HOST, "a")
    arrive(index, DISK, "a")
    index.evict(index.by_name[HOST], [page])
    assert index.why_missing(key_of("a")) == "never_stored"


def test_a_page_that_comes_back_is_no_longer_a_ghost(index: Index) -> None:
    (page,) = arrive(index, HOST, "a")
    index.evict(index.by_name[HOST], [page])
    (page,) = arrive(index, HOST, "a")
    assert index.why_missing(key_of("a")) == "never_stored"


@pytest.mark.parametrize(("dropped", "left"), [(1, 3), (2, 3), (3, 5)])
def test_only_so_many_ghosts_are_remembered_the_newest(
    index: Index, monkeypatch: pytest.MonkeyPatch, dropped: int, left: int
) -> None:
    """The oldest are dropped when there are `dropped` too many."""
    monkeypatch.setattr(index_module, "GHOST_PAGES", 3)
    monkeypatch.setattr(index_module, "GHOSTS_DROPPED", dropped)
    for name in "abcde":
        (page,) = arrive(index, HOST, name)
        index.evict(index.by_name[HOST], [page])
    reasons = [index.why_missing(key_of(name)) for name in "abcde"]
    assert reasons == ["never_stored"] * (5 - left) + ["evicted"] * left


# -- damage ----------------------------------------------------------------------------------------


def test_a_condemned_copy_stops_counting_at_once(index: Index) -> None:
    (page,) = arrive(index, DISK, "a")
    slot = index.by_name[DISK].slot[page]
    assert index.condemn(index.by_name[DISK], page, "corrupt") == slot
    assert index.match(chain("a")) == []
    assert index.why_missing(key_of("a")) == "corrupt"
    assert index.check(lambda: True) == []


def test_a_condemned_copy_that_is_being_read_keeps_its_slot_until_the_last_reader(
    index: Index,
) -> None:
    (page,) = arrive(index, DISK, "a")
    disk = index.by_name[DISK]
    slot = disk.slot[page]
    index.pin(disk, [page])
    index.pin(disk, [page])
    assert index.condemn(disk, page, "corrupt") is None
    assert index.match(chain("a")) == []
    assert index.unpin(disk, [page]) == []
    assert index.unpin(disk, [page]) == [slot]
    assert index.find(key_of("a")) == -1
    assert index.check(lambda: True) == []


def test_a_condemned_copy_leaves_the_other_tiers_theirs(index: Index) -> None:
    (page,) = arrive(index, HOST, "a")
    arrive(index, DISK, "a")
    index.condemn(index.by_name[DISK], page, "corrupt")
    assert index.match(chain("a")) == [page]


def test_a_hole_hides_what_hangs_from_it_and_keeps_its_place(index: Index) -> None:
    a, b, c = arrive(index, DISK, "a", "b", "c")
    index.condemn(index.by_name[DISK], b, "corrupt")
    assert index.match(chain("a", "b", "c")) == [a]
    assert index.find(key_of("b")) == b
    assert index.by_name[DISK].is_resident(c)
    assert index.check(lambda: True) == []


def test_a_hole_heals_when_its_page_is_put_again(index: Index) -> None:
    """A key stands for its whole prefix, so what hung from the lost page hangs from the new one."""
    pages = arrive(index, DISK, "a", "b", "c")
    index.condemn(index.by_name[DISK], pages[1], "corrupt")
    arrive(index, HOST, "b", parent="a")
    assert index.match(chain("a", "b", "c")) == pages
    assert index.check(lambda: True) == []


def test_a_hole_goes_with_its_last_child(index: Index) -> None:
    _, b, c = arrive(index, DISK, "a", "b", "c")
    disk = index.by_name[DISK]
    index.condemn(disk, b, "corrupt")
    index.evict(disk, [c])
    assert index.find(key_of("b")) == -1
    assert index.find(key_of("a")) >= 0
    assert index.check(lambda: True) == []


def test_holes_above_one_another_go_together(index: Index) -> None:
    a, b, c = arrive(index, DISK, "a", "b", "c")
    disk = index.by_name[DISK]
    index.condemn(disk, a, "corrupt")
    index.condemn(disk, b, "corrupt")
    index.evict(disk, [c])
    assert len(index) == 0
    assert index.check(lambda: True) == []


# -- check -----------------------------------------------------------------------------------------


def test_check_finds_a_child_count_that_is_wrong(index: Index) -> None:
    (page,) = arrive(index, HOST, "a")
    index.children_of[page] = 3
    assert any("counts 3 children, has 0" in line for line in index.check())


def test_check_finds_a_resident_count_that_is_wrong(index: Index) -> None:
    arrive(index, HOST, "a")
    index.by_name[HOST].resident = 5
    assert index.check() == ["host counts 5 resident pages, has 1"]


def test_check_finds_two_pages_in_one_slot(index: Index) -> None:
    a, b = arrive(index, HOST, "a", "b")
    index.by_name[HOST].slot[b] = index.by_name[HOST].slot[a]
    assert index.check() == ["two pages share a slot of host"]


def test_check_finds_a_page_that_is_kept_for_nothing(index: Index) -> None:
    index.add(chain("a"), -1)
    assert any("is nowhere and kept" in line for line in index.check())


def test_check_finds_a_pin_that_was_left_behind_when_nothing_is_in_flight(index: Index) -> None:
    (page,) = arrive(index, HOST, "a")
    index.pin(index.by_name[HOST], [page])
    assert index.check() == []
    assert any("pinned in host" in line for line in index.check(lambda: True))


# -- any order of calls ----------------------------------------------------------------------------


class History:
    """Calls on a planner in random order, plans landing move by move, some moves failing.

    Held at every step: no slot leaks or is shared; each resident page's slot has that page's bytes;
    what a get brought is what was asked for, until released; counters and tree agree.
    """

    def __init__(self, rig: PlannerRig, seed: int, faults: float) -> None:
        self.rig = rig
        self.random = Random(seed)
        self.faults = faults

    def keys(self) -> KeyChain:
        """A prompt: two conversations share their first page, and two of those their second."""
        conversation, turns = self.random.randrange(4), self.random.randint(1, 7)
        path: list[object] = []
        for depth in range(turns):
            shared = conversation // 2 if depth == 0 else (conversation // 2, conversation > 2)
            path.append((depth, shared if depth < 2 else conversation))
        return chain(*path)

    def step(self) -> None:
        calls = {
            self.put: 5,
            self.put_anywhere: 1,
            self.get: 4,
            self.get_into: 1,
            self.prefetch: 2,
            self.flush: 1,
            self.release: 4,
            self.restart: 0.1 if DISK in self.rig.capacity else 0,
        }
        (call,) = self.random.choices(list(calls), list(calls.values()))
        call()
        self.check()
        for _ in range(self.random.choice([0, 0, 3, 6, 12])):
            self.work()

    def put(self) -> None:
        keys = self.keys()
        found = len(self.rig.planner.index.match(keys))
        if found < len(keys):
            self.rig.begin_put(keys[found:])

    def put_anywhere(self) -> None:
        keys = self.keys()
        self.rig.begin_put(keys[self.random.randrange(len(keys)) :])

    def get(self) -> None:
        self.rig.begin_get(self.keys())

    def get_into(self) -> None:
        keys = self.keys()
        slots = self.rig.allocate(len(keys))
        if slots is not None:
            self.rig.begin_get(keys, into=slots)

    def prefetch(self) -> None:
        self.rig.begin_prefetch(self.keys())

    def flush(self) -> None:
        self.rig.begin_flush(self.random.randint(1, 4))

    def release(self) -> None:
        for lease in self.rig.leases[self.random.randrange(2) :]:
            self.rig.release(lease)
        busy = {slot for flight in self.rig.flights for slot in flight.plan.slots}
        self.rig.release_owned(self.rig.owned - busy)

    def restart(self) -> None:
        self.finish()
        self.rig.restart()

    def finish(self) -> None:
        self.rig.land_all()
        for lease in list(self.rig.leases):
            self.rig.release(lease)
        self.rig.release_owned(self.rig.owned)

    def work(self) -> None:
        """One step of whatever plan can make one."""
        flights = [f for f in self.rig.flights if f.begun or self.rig.ready(f)]
        if not flights:
            return
        flight = self.random.choice(flights)
        ready = self.rig.ready(flight)
        if flight.begun and (not ready or self.random.random() < 0.5):
            publish = self.random.choice([self.rig.publish, self.rig.publish_together])
            publish(flight, self.random.randrange(len(flight.begun)))
        else:
            self.rig.begin(
                flight,
                self.random.choice(ready),
                fails=self.random.random() < self.faults,
                is_corrupt=self.random.random() < self.faults,
                copy_late=self.random.random() < 0.5,
            )
        self.check()

    def check(self) -> None:
        self.rig.check()
        if not self.faults:
            self.check_prefixes()

    def check_prefixes(self) -> None:
        """No page without its parent, and on disk none without its parent there."""
        index = self.rig.planner.index
        disk = index.by_name.get(DISK)
        for page in index:
            parent = index.parent_of[page]
            assert parent < 0 or index.is_present(parent)
            if disk is not None and disk.is_resident(page):
                assert parent < 0 or disk.state[parent]


@settings(max_examples=120, deadline=None, derandomize=True, database=None)
@given(
    steps=st.integers(30, 90),
    seed=st.integers(0, 2**32),
    hbm=st.sampled_from([2, 7, 9, 12]),
    host=st.integers(1, 9),
    disk=st.sampled_from([0, 1, 4, 9, 16]),
    policy=st.sampled_from(["lru", "fifo"]),
    write_through=st.booleans(),
    faults=st.sampled_from([0, 0, 0.05, 0.3]),
)
def test_whatever_happens_slots_bytes_and_tree_agree(
    steps: int,
    seed: int,
    hbm: int,
    host: int,
    disk: int,
    policy: str,
    write_through: bool,
    faults: float,
) -> None:
    rig = PlannerRig(hbm, host, disk, policy=policy, write_through=write_through)
    history = History(rig, seed, faults)
    for _ in range(steps):
        history.step()
    history.finish()
    rig.check()
