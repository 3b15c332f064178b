"""Decider: the store's deciding half in a process of its own, such as an engine's scheduler.

It owns no byte. What it decides goes down in an `Order`; what has become of it comes up in a
`Report` of every rank, and only when all of them have a page does it count. HBM is the engine's:
it names the slots, and says when it gives them away.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from tiered_kv.counters import Counters, StoreStats
from tiered_kv.errors import ConfigError
from tiered_kv.found import FoundPages, StoredPage
from tiered_kv.index import OnChange
from tiered_kv.keys import KeyChain, PageKey
from tiered_kv.orders import Job, JobEnd, JobKind, Order, RankFacts, Report
from tiered_kv.plan import DISK, HOST, LOAD_ALL, Gate, Move, Plan
from tiered_kv.planner import Planner
from tiered_kv.slots import SlotPool


class Hit(NamedTuple):
    """What a lookup found.

    Attributes:
        pages: leading pages that some tier has, or awaits, and that are worth loading.
        ready: of those, the leading ones that a tier has: what may be promised.
        on_host: of those, the leading ones that host has.
        why_cut: why pages that are there are not worth loading, one of `MISS_REASONS`.
    """

    pages: int
    ready: int
    on_host: int
    why_cut: str = ""


class Put(NamedTuple):
    """What became of a put.

    Attributes:
        job: None if nothing has to move.
        not_stored: trailing pages that found no room on host, or nothing to hang from.
    """

    job: Job | None
    not_stored: int


@dataclass(slots=True)
class Ended:
    """A job that all ranks have ended, for its owner.

    Attributes:
        arrived: leading pages of a get that are in HBM on all ranks.
        not_stored: positions in `job.slots` of pages of a put that did not reach host.
    """

    job: Job
    arrived: int
    not_stored: tuple[int, ...]


class _DiskNumbers:
    """Slots of the disk tier as the decider numbers them; notes what was freed."""

    def __init__(self, capacity: int) -> None:
        self._pool = SlotPool(capacity)
        self.freed: list[int] = []

    def reserve(self, n: int) -> list[int] | None:
        return self._pool.reserve(n)

    def free(self, slots: Sequence[int]) -> None:
        self._pool.free(slots)
        self.freed += slots


class Decider:
    """Index, policy and plans of a store whose bytes other processes move. Not locked.

    Args:
        ranks: what each carrier has.
        policy: eviction policy of host and disk.
        write_through: write every page to disk at once, not only when host gives it up.
        on_change: told when a page begins or ends to count in a tier; not of those found at start.

    Raises:
        ConfigError: some ranks have a disk tier and some do not.
    """

    def __init__(
        self,
        ranks: Sequence[RankFacts],
        *,
        policy: str = "lru",
        write_through: bool = True,
        on_change: OnChange | None = None,
    ) -> None:
        capacity = {HOST: min(rank.host_pages for rank in ranks)}
        has_disk = {rank.disk_pages > 0 for rank in ranks}
        if len(has_disk) > 1:
            raise ConfigError("some ranks have a disk tier and some do not: give all of them one")
        slots: dict[str, SlotPool | _DiskNumbers] = {HOST: SlotPool(capacity[HOST])}
        self._disk: _DiskNumbers | None = None
        if has_disk == {True}:
            capacity[DISK] = min(rank.disk_pages for rank in ranks)
            self._disk = slots[DISK] = _DiskNumbers(capacity[DISK])
        self._ranks = len(ranks)
        self._planner = Planner(
            slots, capacity, policy=policy, write_through=write_through, restores=len(ranks) == 1
        )
        self._counters = Counters()
        self._load_s: dict[str, float] = {}
        self._next_id = 0
        self._jobs: dict[int, Job] = {}  # of which not all ranks have reported
        self._plans: dict[int, Plan] = {}  # theirs, with pins
        self._ends: dict[int, JobEnd] = {}
        self._fresh: list[Job] = []
        self._heard: set[int] = set()
        self._adopted: tuple[tuple[PageKey, int], ...] | None = ()
        if self._disk is not None:
            self._adopted = self._adopt([rank.found for rank in ranks])
        self._planner.index.on_change = on_change

    def _adopt(
        self, found: Sequence[Sequence[tuple[PageKey, PageKey | None]]]
    ) -> tuple[tuple[PageKey, int], ...]:
        """Count the pages that all ranks still have from an earlier run."""
        assert self._disk is not None
        others = [{key for key, _ in pages} for pages in found[1:]]
        common = [page for page in found[0] if all(page[0] in keys for keys in others)]
        slots = self._disk.reserve(min(len(common), self._planner.room.capacity[DISK])) or []
        pages = [
            StoredPage(key, parent, slot)
            for (key, parent), slot in zip(common, slots, strict=False)  # more than fit: dropped
        ]
        orphans = set(self._planner.adopt(DISK, FoundPages.of(pages)))
        return tuple((page.key, page.slot) for page in pages if page.slot not in orphans)

    # -- questions ---------------------------------------------------------------------------------

    def match(self, keys: Sequence[PageKey], gate: Gate = LOAD_ALL) -> Hit:
        """The longest stored run of `keys` that is worth loading. Changes nothing.

        Args:
            keys: of consecutive pages; of a prompt's tail too, whose head the engine has.
            gate: its load costs are those measured, whatever it says.
        """
        index = self._planner.index
        pages = index.match(keys)
        why_cut = ""
        if gate is not LOAD_ALL:
            gate = replace(gate, load_s_per_page=self._load_s)
            count, why_cut = gate.cut(index.sources(pages))
            pages = pages[:count]
        on_host = _leading(pages, index.by_name[HOST].is_resident)
        ready = on_host + _leading(
            pages[on_host:], lambda page: any(tier.is_resident(page) for tier in index.tiers)
        )
        return Hit(len(pages), ready, on_host, why_cut)

    def why_missing(self, key: PageKey) -> str:
        """Why a page is not stored: one of `MISS_REASONS`."""
        return self._planner.index.why_missing(key)

    def stats(self) -> StoreStats:
        """Counters of what was decided, and the pages in each tier now."""
        tiers = self._planner.index.tiers
        return self._counters.snapshot({tier.name: tier.resident for tier in tiers})

    @property
    def capacity_pages(self) -> dict[str, int]:
        """Pages each tier holds."""
        return dict(self._planner.room.capacity)

    @property
    def jobs_in_flight(self) -> int:
        """Jobs of which not all ranks have reported the end."""
        return len(self._jobs)

    @property
    def has_orders(self) -> bool:
        """Whether jobs were decided since the last order."""
        return bool(self._fresh)

    def check(self) -> list[str]:
        """Every broken invariant as one line; none if all is well. O(pages)."""
        return self._planner.index.check(lambda: not self._jobs)

    # -- the verbs ---------------------------------------------------------------------------------

    def get(
        self,
        keys: Sequence[PageKey],
        slots: Sequence[int],
        owner: str = "",
        *,
        is_awaited: bool = False,
    ) -> Job:
        """Load the longest stored run of `keys` into the engine's slots, one a key; see `Job`.

        Args:
            keys: of consecutive pages, no more than `match` found `ready`: a page that is still on
                its way may never come.
            slots: where to.
            owner: whom it is for.
            is_awaited: as of `Job`.
        """
        plan = self._planner.plan_get(keys, into=slots)
        return self._add("get", plan, owner, slots, is_awaited=is_awaited)

    def put(self, keys: KeyChain, slots: Sequence[int], owner: str = "") -> Put:
        """Store those of the pages in the engine's slots that are not stored.

        The engine keeps the slots, and must not let them be overwritten before the job has ended
        or was named in `Order.fences`.
        """
        self._counters.add("total", "put", len(keys))
        plan = self._planner.plan_put(keys, slots)
        self._counters.add("total", "not_stored", plan.not_stored)
        return Put(self._add_if_moving("put", plan, owner, slots), plan.not_stored)

    def prefetch(self, keys: Sequence[PageKey], owner: str = "") -> Job | None:
        """Bring what of the longest stored run is on disk alone to host; None if nothing is."""
        return self._add_if_moving("prefetch", self._planner.plan_prefetch(keys), owner, ())

    def count_misses(self, keys: Sequence[PageKey], why_present: str) -> None:
        """Note pages that the engine computes.

        Args:
            keys: of consecutive pages.
            why_present: the reason where a page is stored all the same, one of `MISS_REASONS`.
        """
        present = len(self._planner.index.match(keys))
        reasons = Counter(self._planner.why_missed(keys[present:]))
        reasons[why_present] += present
        for reason, pages in reasons.items():
            self._counters.add("miss", reason, pages)

    def clear(self) -> None:
        """Drop every page that no job is about. What is in flight stays, as what it is."""
        planner = self._planner
        for tier in planner.index.tiers:
            while victims := planner.index.victims(tier, max(1, tier.resident)):
                planner.room.free(tier.name, planner.index.evict(tier, victims))

    def _add_if_moving(
        self, kind: JobKind, plan: Plan, owner: str, slots: Sequence[int]
    ) -> Job | None:
        if any(plan.steps()):
            return self._add(kind, plan, owner, slots)
        self._planner.end(plan)
        return None

    def _add(
        self,
        kind: JobKind,
        plan: Plan,
        owner: str,
        slots: Sequence[int],
        *,
        is_awaited: bool = False,
    ) -> Job:
        job = Job(self._next_id, kind, _moving_part(plan), owner, tuple(slots), is_awaited)
        self._next_id += 1
        self._jobs[job.id] = job
        self._plans[job.id] = plan
        self._fresh.append(job)
        return job

    # -- orders and reports ------------------------------------------------------------------------

    def order(self, fences: Iterable[int] = ()) -> Order:
        """All that was decided since the last order."""
        freed: tuple[int, ...] = ()
        if self._disk is not None:
            freed, self._disk.freed = tuple(self._disk.freed), []
        order = Order(
            tuple(self._fresh), self._adopted, freed, frozenset(fences), frozenset(self._heard)
        )
        self._fresh, self._adopted, self._heard = [], None, set()
        return order

    def take(self, report: Report) -> list[Ended]:
        """Learn what has become of jobs; returns those that all ranks have ended now."""
        self._load_s.update(report.load_s_per_page)
        self._hear(report.failed)
        ended = []
        for job_id, end in report.ended.items():
            if job_id in self._ends:
                self._ends[job_id].merge(end)
            else:
                self._ends[job_id] = end
            if self._ends[job_id].ranks >= self._ranks:
                ended.append(self._end(job_id))
        return ended

    def failed_owners(self, report: Report) -> set[str]:
        """Whose loads have failed, by a report that is still to be taken."""
        return {self._jobs[number].owner for number in report.failed if number in self._jobs}

    def _hear(self, failed: set[int]) -> None:
        """Loads have failed: puts decided meanwhile may be of pages computed over them."""
        self._heard |= failed
        if any(not self._jobs[number].is_awaited for number in failed if number in self._jobs):
            self._fresh = [
                replace(job, is_void=True) if job.kind == "put" else job for job in self._fresh
            ]

    def _end(self, job_id: int) -> Ended:
        job, plan, end = self._jobs.pop(job_id), self._plans.pop(job_id), self._ends.pop(job_id)
        planner = self._planner
        if end.bad or end.lost:
            self._take_back(job, end)
        else:
            for moves in job.plan.steps():
                planner.arrived_all(moves)
        planner.end(plan)
        stored = {move.source_slot for move in self._stored(job, end)}
        wanted = {move.source_slot for move in job.plan.store}
        not_stored = tuple(at for at, s in enumerate(job.slots) if s in wanted and s not in stored)
        if job.kind == "get":
            self._count_get(plan, end)
        return Ended(job, end.arrived, not_stored)

    def _take_back(self, job: Job, end: JobEnd) -> None:
        """Publish what has arrived of a job of which not all has."""
        planner = self._planner
        for at, move in enumerate(job.plan.moves()):
            if at in end.bad:
                planner.condemn(move, end.bad[at])
                self._counters.add("total", end.bad[at], 1)
            if at in end.lost:
                planner.failed(move, end.lost[at])
            else:
                planner.arrived(move)

    @staticmethod
    def _stored(job: Job, end: JobEnd) -> list[Move]:
        first = len(job.plan.demote) + len(job.plan.load) + len(job.plan.fill) + len(job.plan.bind)
        return [move for at, move in enumerate(job.plan.store, first) if at not in end.lost]

    def _count_get(self, plan: Plan, end: JobEnd) -> None:
        for source, pages in Counter(plan.sources[: end.arrived]).items():
            self._counters.add("hit", source, pages)
        for reason, pages in plan.misses:
            self._counters.add("miss", reason, pages)
        reason = next(iter(end.bad.values()), "failed")
        self._counters.add("miss", reason, len(plan.pages) - end.arrived)


def _leading(pages: Sequence[int], holds: Callable[[int], bool]) -> int:
    """How many leading pages something holds for."""
    return next((at for at, page in enumerate(pages) if not holds(page)), len(pages))


def _moving_part(plan: Plan) -> Plan:
    """The plan for those who move: no pins, no pages that no move is about."""
    moving = {move.page for move in plan.load + plan.fill + plan.store + plan.write}
    at = [i for i, page in enumerate(plan.pages) if page in moving]
    return replace(
        plan,
        pages=tuple(plan.pages[i] for i in at),
        sources=tuple(plan.sources[i] for i in at) if plan.sources else (),
        slots=tuple(plan.slots[i] for i in at) if plan.slots else (),
        pins=(),
        misses=(),
        spare_slots=(),
    )
