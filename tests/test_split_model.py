"""A decider with its carriers against the truth: what a request loads is what was computed, on all
ranks, whatever fails, hangs back or is given away meanwhile.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)
from split_rig import HBM_PAGES, LAYOUT, Engine, Rank, chain
from store_rig import MEMORY_FOLDER

from tiered_kv.decider import Ended
from tiered_kv.errors import CorruptPageError, TieredKVError, TierIOError
from tiered_kv.keys import KeyChain, PageKey
from tiered_kv.plan import DISK
from tiered_kv.storage.disk import DiskTier

HOST_PAGES = 8
DISK_BYTES = {9: 668 << 10, 25: 1 << 20}  # by the pages it holds
PROMPTS = [chain(*"aaaaaa" + tail) for tail in ("xxxxxx", "yyy", "", "zzzzzzzz")] + [chain(*"bbb")]
FAULTS = ("fill", "store", "read", "corrupt", "write")


class _Request(NamedTuple):
    keys: KeyChain
    slots: list[int]


class _Faults:
    """Calls that fail: so many of each kind, on one rank."""

    def __init__(self, rank: Rank) -> None:
        self.left = dict.fromkeys(FAULTS, 0)
        self._break(rank.hbm, "write_layers", "fill")
        self._break(rank.hbm, "read", "store")
        assert rank.disk is not None
        self._break(rank.disk, "begin_write", "write")
        self._spoil(rank.disk)
        self.refused = 0  # writes that found no room, which the decider thought there was
        self._watch(rank.disk)

    def _is_due(self, kind: str) -> bool:
        is_due = self.left[kind] > 0
        self.left[kind] -= is_due
        return is_due

    def _break(self, owner: Any, verb: str, kind: str) -> None:
        through = getattr(owner, verb)

        def call(*args: Any) -> Any:
            if self._is_due(kind):
                raise TierIOError("injected", tier=kind, errno=5)
            return through(*args)

        setattr(owner, verb, call)

    def _spoil(self, disk: Any) -> None:
        through = disk.read

        def read(slots: Sequence[int], into: Any) -> list[TieredKVError | None]:
            outcome: list[TieredKVError | None] = through(slots, into)
            for at in range(len(slots)):
                if self._is_due("read"):
                    outcome[at] = TierIOError("injected", tier="disk", errno=5)
                elif self._is_due("corrupt"):
                    into[at][0] ^= 1
                    outcome[at] = CorruptPageError("injected", tier="disk")
            return outcome

        disk.read = read

    def _watch(self, disk: Any) -> None:
        through = disk.reserve

        def reserve(n: int) -> list[int] | None:
            slots: list[int] | None = through(n)
            self.refused += slots is None
            return slots

        disk.reserve = reserve


class SplitMachine(RuleBasedStateMachine):
    """Requests that come, wait, run and end, over few HBM slots that are soon used again."""

    @initialize(
        ranks=st.sampled_from([1, 2]),
        lag=st.sampled_from([0, 1]),
        through=st.booleans(),
        disk_pages=st.sampled_from(list(DISK_BYTES)),
    )
    def open(self, ranks: int, lag: int, through: bool, disk_pages: int) -> None:
        self.folder = tempfile.TemporaryDirectory(dir=MEMORY_FOLDER)
        self.settings: dict[str, Any] = {
            "ranks": ranks,
            "lag": lag,
            "write_through": through,
            "disk_size": DISK_BYTES[disk_pages],
        }
        self.strangers = 0
        self._open()
        assert [rank.carrier.facts().disk_pages for rank in self.rig.ranks] == [disk_pages] * ranks

    def _open(self) -> None:
        self.rig = Engine(
            host_pages=HOST_PAGES,
            disk=Path(self.folder.name),
            write_back=True,
            **self.settings,
        )
        self.faults = [_Faults(rank) for rank in self.rig.ranks]
        self.readers: dict[int, set[int]] = {}  # slot -> puts that read it
        self.puts: dict[int, list[int]] = {}
        self.waiting: dict[int, _Request] = {}  # by its load
        self.next_slot = 0

    # -- the engine around it ----------------------------------------------------------------------

    def _allocate(self, n: int) -> list[int]:
        """The slots that were given back longest ago, but for those of requests that wait."""
        busy = {slot for request in self.waiting.values() for slot in request.slots}
        slots: list[int] = []
        while len(slots) < n:
            if self.next_slot not in busy:
                slots.append(self.next_slot)
            self.next_slot = (self.next_slot + 1) % 24
        return slots

    def _fences(self, slots: Sequence[int]) -> set[int]:
        return {put for slot in slots for put in self.readers.get(slot, ())}

    def _put(self, request: _Request) -> None:
        job, _ = self.rig.decider.put(request.keys, request.slots)
        if job is not None:
            self.puts[job.id] = [move.source_slot for move in job.plan.store]
            for slot in self.puts[job.id]:
                self.readers.setdefault(slot, set()).add(job.id)

    def _step(self, request: _Request | None = None, computed: int = 0, taken: int = 0) -> None:
        """A step that computes a request's pages but for the first, and stores all.

        Args:
            taken: its slots from this one on were others' before.
        """
        fences: set[int] = set()
        compute: tuple[Sequence[PageKey], Sequence[int]] = ((), ())
        if request is not None:
            fences = self._fences(request.slots[taken:])
            compute = (request.keys[computed:], request.slots[computed:])
            self._put(request)
        self._learn(self.rig.step(fences=fences, compute=compute))

    def _learn(self, ended: list[Ended]) -> None:
        for end in ended:
            for slot in self.puts.pop(end.job.id, ()):
                self.readers[slot].discard(end.job.id)

    # -- what happens ------------------------------------------------------------------------------

    @rule(prompt=st.sampled_from(PROMPTS), pages=st.integers(1, 14))
    def request_that_waits(self, prompt: KeyChain, pages: int) -> None:
        while self.waiting:
            self.requests_whose_loads_are_over()
        keys = prompt[:pages]
        found = self.rig.decider.match(keys).ready
        request = _Request(keys, self._allocate(len(keys)))
        if not found:
            return self._step(request)
        fences = self._fences(request.slots)
        job = self.rig.decider.get(keys[:found], request.slots[:found], is_awaited=True)
        self.waiting[job.id] = request
        return self._learn(self.rig.step(fences=fences))

    @rule()
    def requests_whose_loads_are_over(self) -> None:
        for number, request in list(self.waiting.items()):
            if number in self.rig.over:
                arrived = self.rig.arrived[number]
                assert self.rig.holds(request.keys[:arrived], request.slots[:arrived])
                del self.waiting[number]
                self._step(request, arrived, taken=len(request.slots))
        self._step()

    @rule(prompt=st.sampled_from(PROMPTS), pages=st.integers(1, 14))
    @precondition(lambda self: self.rig.lag == 0)
    def request_that_runs_while_it_loads(self, prompt: KeyChain, pages: int) -> None:
        keys = prompt[:pages]
        hit = self.rig.decider.match(keys)
        request = _Request(keys, self._allocate(len(keys)))
        if not hit.on_host:
            return self._step(request)
        job = self.rig.decider.get(keys[: hit.on_host], request.slots[: hit.on_host])
        self._step(request, hit.on_host)
        arrived = self.rig.arrived[job.id]
        assert self.rig.holds(keys[:arrived], request.slots[:arrived])
        if arrived < hit.on_host:  # all after it is computed again
            return self._step(request, arrived, taken=len(keys))
        return None

    @rule(prompt=st.sampled_from(PROMPTS))
    def prefetch(self, prompt: KeyChain) -> None:
        self.rig.decider.prefetch(prompt)
        self._step()

    @rule(prompts=st.integers(2, 6), pages=st.integers(1, 8))
    def requests_of_others(self, prompts: int, pages: int) -> None:
        """They come once: a full disk gives pages up for theirs, whose slots take these over."""
        for _ in range(prompts):
            self.strangers += 1
            keys = chain(*[chr(0x100 + self.strangers)] * pages)
            self._step(_Request(keys, self._allocate(pages)))

    @rule()
    def forget_all(self) -> None:
        self.rig.decider.clear()

    @rule(rank=st.integers(0, 1), kind=st.sampled_from(FAULTS), calls=st.integers(1, 3))
    def fail(self, rank: int, kind: str, calls: int) -> None:
        self.faults[rank % len(self.faults)].left[kind] += calls

    @rule()
    def restart(self) -> None:
        """Also in the middle of things: nothing is waited for."""
        self.rig.close()
        self._open()

    @invariant()
    def books_are_in_order(self) -> None:
        if hasattr(self, "rig"):
            assert self.rig.decider.check() == []
            assert [faults.refused for faults in self.faults] == [0] * len(self.rig.ranks)

    def teardown(self) -> None:
        if not hasattr(self, "rig"):
            return
        for faults in self.faults:
            faults.left = dict.fromkeys(FAULTS, 0)
        self._learn(self.rig.settle())
        assert not any(self.readers.values())
        self._step()  # tells the ranks which pages are gone
        stored = self.rig.decider.stats().resident_pages[DISK]
        for rank in self.rig.ranks:
            assert isinstance(rank.disk, DiskTier)
            assert rank.disk.used_bytes == stored * LAYOUT.page_bytes
        for keys in PROMPTS:
            found = self.rig.decider.match(keys).ready
            job = self.rig.decider.get(keys[:found], range(found), is_awaited=True)
            self.rig.settle()
            assert self.rig.arrived[job.id] == found
            assert self.rig.holds(keys[:found], range(found))
        self.rig.close()
        self.folder.cleanup()


assert HBM_PAGES >= 24
TestSplit = SplitMachine.TestCase
TestSplit.settings = settings(
    max_examples=30,
    stateful_step_count=30,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)
