"""What one tier has of each page."""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum

from tiered_kv.columns import column, longer
from tiered_kv.policy import Policy, make


class TierState(IntEnum):
    """What one tier has of one page."""

    ABSENT = 0
    ARRIVING = 1
    RESIDENT = 2


ABSENT, ARRIVING, RESIDENT = map(int, TierState)
"""The same as plain integers: to look a member of an enum up costs 40 ns, each time."""


class Nodes:
    """The pages of a store, wherever they are."""

    def __init__(self) -> None:
        self.parent_of = column("i")
        self.children_of = column("i")  # nodes that name this page as parent, wherever they are
        self.last_use_of = column("q")
        self.hits_of = column("I")
        self.favours: dict[int, int] = {}  # page -> logical time its hint adds to its last use

    def grow(self, pages: int) -> None:
        """Room for `pages` pages in all."""
        self.parent_of = longer(self.parent_of, pages)
        self.children_of = longer(self.children_of, pages)
        self.last_use_of = longer(self.last_use_of, pages)
        self.hits_of = longer(self.hits_of, pages)


class TierIndex:
    """One tier's share of the index: state, slot, pins, children by page; the policy's `Tree`."""

    __slots__ = (
        "_nodes",
        "children",
        "doomed",
        "name",
        "pins",
        "policy",
        "resident",
        "slot",
        "state",
    )

    def __init__(self, name: str, policy: str, nodes: Nodes) -> None:
        self.name = name
        self._nodes = nodes
        self.state = column("B")
        self.slot = column("i")
        self.pins = column("I")
        self.children = column("i")  # children in this tier or on their way into it
        self.doomed: dict[int, int] = {}  # page -> slot of a condemned copy somebody still reads
        self.resident = 0
        self.policy: Policy = make(policy, self)

    def parent(self, page: int) -> int:
        """The page before this one, or -1."""
        return self._nodes.parent_of[page]

    def child_count(self, page: int) -> int:
        """Children of a page in this tier, or on their way into it."""
        return self.children[page]

    def childless(self, pages: Sequence[int]) -> list[int]:
        """Those of the pages that have no child here, nor on its way here."""
        children = self.children
        return [page for page in pages if not children[page]]

    def last_use(self, page: int) -> int:
        """Logical time of the last use."""
        return self._nodes.last_use_of[page]

    def grow(self, pages: int) -> None:
        """Room for `pages` pages in all."""
        self.state = longer(self.state, pages)
        self.slot = longer(self.slot, pages)
        self.pins = longer(self.pins, pages)
        self.children = longer(self.children, pages)

    def favour(self, page: int) -> int:
        """Logical time that a caller's hint adds to the last use; negative for "give up early"."""
        return self._nodes.favours.get(page, 0)

    def is_resident(self, page: int) -> bool:
        """Whether the page's bytes are here and verified."""
        return self.state[page] == RESIDENT
