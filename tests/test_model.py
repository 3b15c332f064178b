"""A TieredStore against a dict: whatever is done to it, a page comes back as it was put, or is a
miss.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any, ClassVar

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)
from store_rig import (
    LAYOUT,
    MEMORY_FOLDER,
    PAGE_BYTES,
    PAGE_TOKENS,
    PATIENCE_S,
    RiggedStore,
    assert_holds,
    content_of,
    index_problems,
    settle,
    tier_free_pages,
    write_slot,
)

from tiered_kv import KeyChain, StoreConfig, Transfer
from tiered_kv.keys import PageKey

HBM_PAGES, HOST_PAGES = 10, 8
LARGE_DISK, SMALL_DISK = "2MiB", "700KiB"  # 108 and 10 pages

# Conversations that share beginnings: (pages of the first, pages that follow), at 14 pages at most.
FORKS = (
    (0, "a", 14),
    (5, "b", 9),
    (5, "c", 4),
    (9, "d", 5),
    (0, "e", 12),
    (2, "f", 6),
    (0, "g", 3),
)


def _prompts() -> list[list[int]]:
    first = list(range(14 * PAGE_TOKENS))
    prompts = []
    for at, (shared, _, own) in enumerate(FORKS):
        tail = [1000 * (at + 1) + i for i in range(own * PAGE_TOKENS)]
        prompts.append((first[: shared * PAGE_TOKENS] + tail) if at else first)
    return prompts


class StoreMachine(RuleBasedStateMachine):
    """Puts, gets, prefetches, leases, held-up and failing disks, and restarts."""

    policy: ClassVar[Any] = "lru"
    write_policy: ClassVar[Any] = "back"

    @initialize(disk_size=st.sampled_from([LARGE_DISK, LARGE_DISK, SMALL_DISK]))
    def open(self, disk_size: str) -> None:
        self.folder = tempfile.TemporaryDirectory(dir=MEMORY_FOLDER)
        self.config = StoreConfig.parse(
            hbm=HBM_PAGES * PAGE_BYTES,
            host=HOST_PAGES * PAGE_BYTES,
            disk=Path(self.folder.name) / "store",
            disk_size=disk_size,
            policy=self.policy,
            write_policy=self.write_policy,
            io_threads=2,
        )
        self.is_lossless = disk_size == LARGE_DISK  # room for all pages there are, and no fault yet
        self.was_put: set[PageKey] = set()
        self.stored: set[PageKey] = set()  # of these a put has said that they are stored
        self.damaged: set[PageKey] = set()
        self.putting: list[tuple[KeyChain, Transfer]] = []
        self.leases: list[tuple[KeyChain, Transfer]] = []
        self.begin()

    def begin(self) -> None:
        self.store = RiggedStore(LAYOUT, self.config)
        self.prompts = [self.store.keys(prompt) for prompt in _prompts()]
        self.asked = 0

    # -- what an engine does -----------------------------------------------------------------------

    @property
    def is_held(self) -> bool:
        held = self.store.held
        return not (held.read_gate.is_set() and held.write_gate.is_set())

    @rule(prompt=st.integers(0, len(FORKS) - 1), start=st.integers(0, 13), count=st.integers(1, 6))
    def put(self, prompt: int, start: int, count: int) -> None:
        """New pages, and pages that are stored already, each given in slots of its own."""
        keys = self.prompts[prompt]
        start = min(start, self.store.match(keys).pages, len(keys) - 1)
        keys = keys[start : start + count]
        slots = self.store.hbm.allocate(len(keys))
        if slots is None:
            return
        for slot, key in zip(slots, keys, strict=True):
            write_slot(self.store, slot, content_of(key))
        self.was_put.update(keys)
        self.putting.append((keys, self.store.put(keys, slots)))
        self.collect_puts()

    @rule(prompt=st.integers(0, len(FORKS) - 1), is_thrice=st.booleans())
    def turn(self, prompt: int, is_thrice: bool) -> None:
        """What an engine does: get what is there in pieces that fit, compute and put the rest."""
        if self.is_held or self.leases:
            return
        for _ in range(3 if is_thrice else 1):
            keys, at = self.prompts[prompt], 0
            self.asked += len(keys)
            while at < len(keys):
                with self.store.get(keys[at:]) as load:
                    arrived = load.wait(PATIENCE_S)
                    assert_holds(self.store, load.slots, keys[at : at + arrived])
                    self.check_content(keys[at : at + arrived])
                at += arrived
                self.asked += len(keys) - at if arrived else 0
                settle(self.store)
                if not arrived:
                    break
            for first in range(at, len(keys), 4):
                self.put(prompt, first, 4)

    @rule(prompt=st.integers(0, len(FORKS) - 1))
    def get(self, prompt: int) -> None:
        """A get whose pages are read, and leased until `give_back`."""
        keys = self.prompts[prompt]
        self.asked += len(keys)
        self.leases.append((keys, self.store.get(keys)))
        if not self.is_held:
            self.leases[-1][1].wait(PATIENCE_S)

    @rule(prompt=st.integers(0, len(FORKS) - 1), count=st.integers(1, 5))
    def get_into_own_slots(self, prompt: int, count: int) -> None:
        keys = self.prompts[prompt][:count]
        slots = self.store.hbm.allocate(len(keys))
        if slots is None:
            return
        self.asked += len(keys)
        load = self.store.get(keys, into=slots, deadline_s=0.0 if self.is_held else None)
        arrived = load.wait(PATIENCE_S)
        assert_holds(self.store, slots[:arrived], keys[:arrived])
        self.check_content(keys[:arrived])
        self.store.hbm.release(slots)

    @rule(prompt=st.integers(0, len(FORKS) - 1))
    def prefetch(self, prompt: int) -> None:
        self.store.prefetch(self.prompts[prompt])

    @rule(prompt=st.integers(0, len(FORKS) - 1))
    def get_and_give_up(self, prompt: int) -> None:
        """Pages that come after the deadline are misses, and go nowhere they should not."""
        keys = self.prompts[prompt]
        self.asked += len(keys)
        with self.store.get(keys, deadline_s=0.0) as load:
            arrived = load.wait()
            assert_holds(self.store, load.slots[:arrived], keys[:arrived])

    @precondition(lambda self: self.leases)
    @rule(at=st.integers(0, 9), cancel=st.booleans())
    def give_back(self, at: int, cancel: bool) -> None:
        _, lease = self.leases.pop(at % len(self.leases))
        if cancel:
            lease.cancel()
        lease.release()

    @rule(prompt=st.integers(0, len(FORKS) - 1))
    def match_changes_nothing(self, prompt: int) -> None:
        if self.is_held:
            return
        settle(self.store)
        before = self.snapshot()
        match = self.store.match(self.prompts[prompt])
        assert match.pages == match.hbm_pages + match.host_pages + match.disk_pages
        assert self.snapshot() == before

    @rule()
    def flush(self) -> None:
        if not self.is_held:
            self.store.flush()

    # -- what the world does -----------------------------------------------------------------------

    @rule(reads=st.booleans(), writes=st.booleans())
    def hold_disk(self, reads: bool, writes: bool) -> None:
        for gate, is_held in (
            (self.store.held.read_gate, reads),
            (self.store.held.write_gate, writes),
        ):
            if is_held:
                gate.clear()
            else:
                gate.set()

    @rule()
    def let_disk_go(self) -> None:
        self.hold_disk(False, False)
        settle(self.store)
        self.collect_puts()

    @rule(remainder=st.integers(0, 3), kind=st.sampled_from(["flip", "fail_read"]))
    def break_reads(self, remainder: int, kind: str) -> None:
        def is_bad(slot: int) -> bool:
            bad = slot % 4 == remainder
            if bad:
                self.note_damage(slot)
            return bad

        self.is_lossless = False
        setattr(self.store.faulty, kind, is_bad)

    @rule()
    def fill_medium(self) -> None:
        self.is_lossless = False
        self.store.faulty.fail_write = lambda slots: True

    @rule()
    def mend(self) -> None:
        faulty = self.store.faulty
        faulty.flip = faulty.fail_read = lambda slot: False
        faulty.fail_write = lambda slots: False

    @rule(fix=st.booleans())
    def check_disk(self, fix: bool) -> None:
        if not self.is_held:
            report = self.store.check(fix)
            assert report.is_clean or not self.is_lossless, report.problems

    @rule()
    def reopen(self) -> None:
        self.let_disk_go()
        for _, lease in self.leases:
            lease.release()
        self.leases.clear()
        self.putting.clear()
        self.check_stats()
        self.store.close()
        self.begin()

    # -- what must hold ----------------------------------------------------------------------------

    def note_damage(self, slot: int) -> None:
        """Called on the load stream, for the slot of a page that is about to be found bad."""
        with self.store._lock:
            index = self.store._planner.index
            disk = index.by_name["disk"]
            self.damaged.update(index.key(page) for page in index if disk.slot[page] == slot)

    def collect_puts(self) -> None:
        if self.is_held:
            return
        for keys, transfer in self.putting:
            self.stored.update(keys[: transfer.wait(PATIENCE_S)])
        self.putting.clear()

    def check_content(self, keys: KeyChain) -> None:
        assert self.was_put.issuperset(keys), "a page that nobody has put"

    def snapshot(self) -> list[tuple[Any, ...]]:
        index = self.store._planner.index
        return [
            (key, index.last_use_of[page], [(t.state[page], t.slot[page]) for t in index.tiers])
            for key, page in sorted((index.key(page), page) for page in index)
        ]

    @invariant()
    def leased_pages_hold_what_was_put(self) -> None:
        if self.is_held:
            return
        for keys, lease in self.leases:
            count = lease.wait(PATIENCE_S)
            assert_holds(self.store, lease.slots, keys[:count])
            self.check_content(keys[:count])

    @invariant()
    def no_tier_holds_more_than_it_may(self) -> None:
        for tier, (used, capacity) in self.store.usage().items():
            assert used <= capacity, tier

    @invariant()
    def index_is_sound_when_idle(self) -> None:
        if self.is_held:
            return
        settle(self.store)
        assert index_problems(self.store, idle=not self.leases) == []
        assert not self.store._mover.arrivals
        index = self.store._planner.index
        with self.store._lock:
            for tier in index.tiers:
                placed = sum(1 for page in index if tier.state[page])
                assert placed == tier.resident
                owned = len(self.store.hbm._owned) if tier.name == "hbm" else 0
                doomed = len(tier.doomed)
                capacity = self.store._planner.room._slots[tier.name].capacity_pages  # type: ignore[attr-defined]
                free = tier_free_pages(self.store, tier.name)
                assert placed + owned + doomed + free == capacity, f"{tier.name} loses slots"

    @invariant()
    def disk_is_prefix_closed(self) -> None:
        with self.store._lock:
            index = self.store._planner.index
            disk = index.by_name["disk"]
            for page in index:
                parent = index.parent_of[page]
                if disk.is_resident(page) and parent >= 0:
                    assert disk.is_resident(parent) or index.key(parent) in self.damaged

    @invariant()
    def nothing_stored_is_lost(self) -> None:
        """While disk has room for every page and nothing fails, what was stored stays a hit."""
        if self.is_held or not self.is_lossless:
            return
        self.collect_puts()
        for keys in self.prompts:
            stored = 0
            while stored < len(keys) and keys[stored] in self.stored:
                stored += 1
            assert self.store.match(keys).pages >= stored

    def check_stats(self) -> None:
        settle(self.store)
        stats = self.store.stats()
        assert sum(stats.hit_pages.values()) + stats.missed_pages == self.asked

    def teardown(self) -> None:
        if hasattr(self, "store"):
            self.reopen()
            self.store.close()
            self.folder.cleanup()


def _machine(name: str, policy: str, write_policy: str, examples: int) -> Any:
    machine = type(name, (StoreMachine,), {"policy": policy, "write_policy": write_policy})
    case: Any = machine.TestCase  # type: ignore[attr-defined]
    case.settings = settings(
        max_examples=examples,
        stateful_step_count=40,
        deadline=None,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
    )
    return case


TestLruWriteBack = _machine("LruWriteBack", "lru", "back", 25)
TestLruWriteThrough = _machine("LruWriteThrough", "lru", "through", 20)
TestFifoWriteBack = _machine("FifoWriteBack", "fifo", "back", 10)
TestFifoWriteThrough = _machine("FifoWriteThrough", "fifo", "through", 10)
