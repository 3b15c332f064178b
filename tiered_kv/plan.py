"""What a request's moves look like: small, picklable values, made by `planner.py`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import repeat
from typing import Any, NamedTuple

from tiered_kv.keys import PageKey

HBM, HOST, DISK = "hbm", "host", "disk"
TIERS = (HBM, HOST, DISK)

MISS_REASONS = (
    "never_stored",
    "evicted",
    "no_parent",
    "in_flight",
    "below_threshold",
    "not_worth_loading",
    "no_room",
    "failed",
    "corrupt",
)
"""What `why_miss` can say of a page that did not hit."""


class Move(NamedTuple):
    """One page from one slot to another.

    Attributes:
        waits: the source copy is itself still arriving; go when it has come, fail if it does not.
        after: the page whose demotion must succeed before `target_slot` is free, or -1.
        leaves: the source slot is given up once the move has been made (a demotion, not a copy).
    """

    page: int
    key: PageKey
    parent: PageKey | None
    source: str
    source_slot: int
    target: str
    target_slot: int
    waits: bool = False
    after: int = -1
    leaves: bool = False

    @property
    def is_in_place(self) -> bool:
        """Whether the bytes are where they should be, or will be without this move."""
        return self.source == self.target and self.source_slot == self.target_slot


def make_moves(
    pages: Sequence[int],
    keys: Iterable[PageKey],
    parents: Iterable[PageKey | None],
    way: tuple[str, Iterable[int], str, Iterable[int]],
    *,
    waits: Iterable[bool],
    after: Iterable[int] = repeat(-1),
    leaves: Iterable[bool] = repeat(False),
) -> list[Move]:
    """Moves of pages, by columns: 0.2 us each where `Move(...)` takes 1.0 us (Python 3.11).

    Args:
        way: source, source slots, target, target slots.
    """
    source, source_slots, target, target_slots = way
    rows = zip(
        pages,
        keys,
        parents,
        repeat(source),
        source_slots,
        repeat(target),
        target_slots,
        waits,
        after,
        leaves,
    )
    return list(map(_NEW, repeat(Move), rows))


_NEW: Callable[[type[Move], tuple[Any, ...]], Move] = tuple.__new__


@dataclass(frozen=True, slots=True)
class Plan:
    """The moves one request needs, in the order of their dependence.

    Attributes:
        pages: the pages of the hit (get, prefetch) or those given (put), in prompt order.
        sources: for each page of a hit, the fastest tier that had it when the plan was made.
        slots: for each page, its HBM slot.
        demote: host -> disk, each prefix root first, to make room on host.
        load: disk -> host.
        fill: host or disk -> HBM; source and target slot are the same where nothing need move.
        bind: pages that a caller has put into HBM itself.
        store: HBM -> host.
        write: host -> disk, copies made because the write policy says so.
        pins: (tier, page) to take back when the plan has ended.
        spare_slots: HBM slots to free when the plan has ended.
        misses: (reason, pages) for the keys that were asked for and are not in the hit.
        not_stored: pages given that found no place on host.
    """

    pages: tuple[int, ...] = ()
    sources: tuple[str, ...] = ()
    slots: tuple[int, ...] = ()
    demote: tuple[Move, ...] = ()
    load: tuple[Move, ...] = ()
    fill: tuple[Move, ...] = ()
    bind: tuple[Move, ...] = ()
    store: tuple[Move, ...] = ()
    write: tuple[Move, ...] = ()
    pins: tuple[tuple[str, int], ...] = ()
    spare_slots: tuple[int, ...] = ()
    misses: tuple[tuple[str, int], ...] = ()
    not_stored: int = 0

    @property
    def is_put(self) -> bool:
        """Whether it carries pages down rather than up."""
        return not self.sources

    def steps(self) -> tuple[tuple[Move, ...], ...]:
        """The moves in groups that each go into one tier, each after those it depends on."""
        return self.demote, self.load, self.fill, self.bind, self.store, self.write

    def moves(self) -> tuple[Move, ...]:
        """All moves, each after those it depends on."""
        return self.demote + self.load + self.fill + self.bind + self.store + self.write


@dataclass(frozen=True, slots=True)
class Gate:
    """What is not worth loading.

    Attributes:
        min_pages: a hit shorter than this is recomputed.
        compute_s_per_page: what recomputing a page costs; None: never cheaper than loading.
        load_s_per_page: what loading a page costs, by the tier it comes from.
    """

    min_pages: int = 0
    compute_s_per_page: float | None = None
    load_s_per_page: dict[str, float] = field(default_factory=dict)

    def cut(self, sources: Sequence[str]) -> tuple[int, str]:
        """How many leading pages to load, and why not more.

        Loading a prefix saves computing it, so the best cut is where the sum of (compute - load)
        over the pages before it is largest; a slow page in front of many fast ones is still loaded.
        """
        if len(sources) < self.min_pages:
            return 0, "below_threshold"
        if self.compute_s_per_page is None:
            return len(sources), ""
        best, best_saved, saved = 0, 0.0, 0.0
        for count, source in enumerate(sources, start=1):
            saved += self.compute_s_per_page - self.load_s_per_page.get(source, 0.0)
            if saved >= best_saved:
                best, best_saved = count, saved
        return best, "not_worth_loading"


LOAD_ALL = Gate()


@dataclass(slots=True)
class Draft:
    """A plan being made: the parts that several decisions add to."""

    demote: list[Move] = field(default_factory=list)
    pins: list[tuple[str, int]] = field(default_factory=list)
    misses: dict[str, int] = field(default_factory=dict)

    def miss(self, reason: str, pages: int) -> None:
        """Count pages that will not hit."""
        if pages > 0:
            self.misses[reason] = self.misses.get(reason, 0) + pages
