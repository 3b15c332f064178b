"""What goes between the process that decides and those that move: orders down, reports up.

All of it is small and picklable. One decider may have several carriers, one a rank of the engine:
each carries out the same order on its own share of every page, and a page counts when all have it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from tiered_kv.keys import PageKey
from tiered_kv.plan import Plan

JobKind = Literal["get", "put", "prefetch"]


@dataclass(frozen=True, slots=True)
class RankFacts:
    """What a carrier has when it starts.

    Attributes:
        host_pages: pages its host tier holds.
        disk_pages: pages its disk tier holds; 0: it has none.
        found: (key, parent) of every page on its disk, in the order they were written.
    """

    host_pages: int
    disk_pages: int = 0
    found: Sequence[tuple[PageKey, PageKey | None]] = ()


@dataclass(frozen=True, slots=True)
class Job:
    """One plan to be carried out.

    Attributes:
        owner: the request it is for.
        slots: in a get or put, the HBM slot of every page asked for.
        is_awaited: a get whose request does nothing before it has ended; without, the request runs
            in the very step that starts it, and waits layer by layer.
        is_void: a put whose pages may be wrong, computed over a load that failed: not to be made.
    """

    id: int
    kind: JobKind
    plan: Plan
    owner: str = ""
    slots: tuple[int, ...] = ()
    is_awaited: bool = False
    is_void: bool = False


@dataclass(frozen=True, slots=True)
class Order:
    """All that was decided since the last one.

    Attributes:
        jobs: in the order of their dependence.
        adopted: (key, disk slot) for pages found at start that count; the others are to be dropped.
            None but in the first order.
        freed: disk slots whose pages are gone; comes before the jobs.
        fences: jobs that must let HBM be before the engine goes on: it has given their pages away.
        heard: failed loads that the decider has newly learnt of; see `Carrier`.
    """

    jobs: tuple[Job, ...] = ()
    adopted: tuple[tuple[PageKey, int], ...] | None = None
    freed: tuple[int, ...] = ()
    fences: frozenset[int] = frozenset()
    heard: frozenset[int] = frozenset()


@dataclass(slots=True)
class JobEnd:
    """How a job ended on `ranks` ranks.

    Attributes:
        arrived: leading pages of a get that are in HBM, on all of them.
        lost: position in `plan.moves()` -> why it was not made.
        bad: position -> why the source copy does not count any more.
    """

    ranks: int = 1
    arrived: int = 0
    lost: dict[int, str] = field(default_factory=dict)
    bad: dict[int, str] = field(default_factory=dict)

    def merge(self, other: JobEnd) -> None:
        """Add what other ranks say of the same job."""
        self.ranks += other.ranks
        self.arrived = min(self.arrived, other.arrived)
        self.lost.update(other.lost)
        self.bad.update(other.bad)


@dataclass(slots=True)
class Report:
    """What has become of jobs since the last report, of one rank or of several.

    Attributes:
        ended: by job id.
        failed: gets of which a page will not come, told at once: one that hangs ends much later.
        load_s_per_page: running cost of loading a page, by tier, on the slowest rank.
    """

    ended: dict[int, JobEnd] = field(default_factory=dict)
    failed: set[int] = field(default_factory=set)
    load_s_per_page: dict[str, float] = field(default_factory=dict)

    def merge(self, other: Report) -> None:
        """Add the report of other ranks."""
        for job, end in other.ended.items():
            if job in self.ended:
                self.ended[job].merge(end)
            else:
                self.ended[job] = end
        self.failed |= other.failed
        for tier, seconds in other.load_s_per_page.items():
            self.load_s_per_page[tier] = max(self.load_s_per_page.get(tier, 0.0), seconds)
