"""What a request's moves look like: small, picklable values, made by `planner.py`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, compress, repeat
from typing import Any, NamedTuple, TypeAlias, overload

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


_NEW: Callable[[type[Move], tuple[Any, ...]], Move] = tuple.__new__  # 0.2 us; Move(...): 1.0


class Moves(Sequence[Move]):
    """Moves from one tier to another, in columns: a `Move` is made when somebody asks for it.

    That takes 0.2 us a page, and to name a field of it 0.03: as much as all else that is done with
    the moves of a put (Python 3.11, Xeon 2.8 GHz, 2026-11). Not to be changed; columns are shared.
    """

    __slots__ = (
        "after",
        "keys",
        "leaves",
        "pages",
        "parents",
        "source",
        "source_slots",
        "target",
        "target_slots",
        "waits",
    )

    def __init__(
        self,
        pages: Sequence[int],
        keys: Sequence[PageKey],
        parents: Sequence[PageKey | None],
        way: tuple[str, Sequence[int], str, Sequence[int]],
        *,
        waits: Sequence[bool],
        after: Sequence[int] | None = None,
        leaves: Sequence[bool] | None = None,
    ) -> None:
        """Columns of equal length; `way` is source, source slots, target, target slots."""
        self.pages, self.keys, self.parents = pages, keys, parents
        self.source, self.source_slots, self.target, self.target_slots = way
        self.waits = waits
        self.after = [-1] * len(pages) if after is None else after
        self.leaves = [False] * len(pages) if leaves is None else leaves

    def __len__(self) -> int:
        return len(self.pages)

    def __iter__(self) -> Iterator[Move]:
        return map(
            _NEW,
            repeat(Move),
            zip(
                self.pages,
                self.keys,
                self.parents,
                repeat(self.source),
                self.source_slots,
                repeat(self.target),
                self.target_slots,
                self.waits,
                self.after,
                self.leaves,
            ),
        )

    @overload
    def __getitem__(self, at: int) -> Move: ...

    @overload
    def __getitem__(self, at: slice) -> Moves: ...

    def __getitem__(self, at: int | slice) -> Move | Moves:
        if isinstance(at, slice):
            return self._each(lambda column: column[at])
        return Move(
            self.pages[at],
            self.keys[at],
            self.parents[at],
            self.source,
            self.source_slots[at],
            self.target,
            self.target_slots[at],
            self.waits[at],
            self.after[at],
            self.leaves[at],
        )

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and tuple(self) == tuple(other)

    def __hash__(self) -> int:
        return hash(tuple(self))

    def __add__(self, other: Steps) -> tuple[Move, ...]:
        return (*self, *other)

    def __radd__(self, other: Steps) -> tuple[Move, ...]:
        return (*other, *self)

    def where(self, wanted: Sequence[bool]) -> Moves:
        """Those of the moves that are wanted."""
        return self._each(lambda column: list(compress(column, wanted)))

    def _each(self, take: Callable[[Any], Any]) -> Moves:
        way = self.source, take(self.source_slots), self.target, take(self.target_slots)
        return Moves(
            take(self.pages),
            take(self.keys),
            take(self.parents),
            way,
            waits=take(self.waits),
            after=take(self.after),
            leaves=take(self.leaves),
        )


Steps: TypeAlias = "Moves | tuple[Move, ...]"


def pages_of(moves: Sequence[Move]) -> Sequence[int]:
    """The page of each move."""
    return moves.pages if isinstance(moves, Moves) else [move.page for move in moves]


def keys_of(moves: Sequence[Move]) -> Sequence[PageKey]:
    """The key of each page."""
    return moves.keys if isinstance(moves, Moves) else [move.key for move in moves]


def parents_of(moves: Sequence[Move]) -> Sequence[PageKey | None]:
    """The key before each page's."""
    return moves.parents if isinstance(moves, Moves) else [move.parent for move in moves]


def source_slots_of(moves: Sequence[Move]) -> Sequence[int]:
    """The slot each page comes from."""
    return moves.source_slots if isinstance(moves, Moves) else [m.source_slot for m in moves]


def target_slots_of(moves: Sequence[Move]) -> Sequence[int]:
    """The slot each page goes to."""
    return moves.target_slots if isinstance(moves, Moves) else [m.target_slot for m in moves]


def afters_of(moves: Sequence[Move]) -> Sequence[int]:
    """The page whose demotion each waits for, or -1."""
    return moves.after if isinstance(moves, Moves) else [move.after for move in moves]


def waiting(moves: Sequence[Move]) -> Sequence[Move]:
    """Those whose source copy is itself still arriving."""
    if isinstance(moves, Moves) and True not in moves.waits:
        return ()
    return [move for move in moves if move.waits]


def in_motion(moves: Sequence[Move]) -> Sequence[Move]:
    """Those, all into one tier, that do move something, not a page that is in its slot already."""
    if not moves or moves[0].target != HBM or (isinstance(moves, Moves) and moves.source != HBM):
        return moves
    return [move for move in moves if move.source != HBM or not move.is_in_place]


def where(moves: Sequence[Move], wanted: Sequence[bool]) -> Sequence[Move]:
    """Those of the moves that are wanted."""
    if all(wanted):
        return moves
    return moves.where(wanted) if isinstance(moves, Moves) else list(compress(moves, wanted))


def steps_of(moves: Sequence[Move]) -> Steps:
    """Moves as a plan keeps them."""
    return moves if moves and isinstance(moves, Moves) else tuple(moves)


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
        pins: (tier, pages) to take back when the plan has ended.
        spare_slots: HBM slots to free when the plan has ended.
        misses: (reason, pages) for the keys that were asked for and are not in the hit.
        not_stored: pages given that found no place on host.
    """

    pages: tuple[int, ...] = ()
    sources: tuple[str, ...] = ()
    slots: tuple[int, ...] = ()
    demote: Steps = ()
    load: Steps = ()
    fill: Steps = ()
    bind: Steps = ()
    store: Steps = ()
    write: Steps = ()
    pins: tuple[tuple[str, Sequence[int]], ...] = ()
    spare_slots: tuple[int, ...] = ()
    misses: tuple[tuple[str, int], ...] = ()
    not_stored: int = 0

    @property
    def is_put(self) -> bool:
        """Whether it carries pages down rather than up."""
        return not self.sources

    def steps(self) -> tuple[Steps, ...]:
        """The moves in groups that each go into one tier, each after those it depends on."""
        return self.demote, self.load, self.fill, self.bind, self.store, self.write

    def moves(self) -> tuple[Move, ...]:
        """All moves, each after those it depends on."""
        return tuple(chain.from_iterable(self.steps()))


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

    demote: Sequence[Move] = ()
    pins: list[tuple[str, Sequence[int]]] = field(default_factory=list)
    misses: dict[str, int] = field(default_factory=dict)

    def pin(self, tier: str, pages: Sequence[int]) -> None:
        """Note pages, pinned in a tier, that the plan has to let go of when it ends."""
        if pages:
            self.pins.append((tier, pages))

    def miss(self, reason: str, pages: int) -> None:
        """Count pages that will not hit."""
        if pages > 0:
            self.misses[reason] = self.misses.get(reason, 0) + pages
