"""Which pages a tier may not give up."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tiered_kv.columns import Array, array_of, leading
from tiered_kv.tier_index import ABSENT, RESIDENT, Nodes, TierIndex


class Guard:
    """Asked page by page, or by runs, what may go; it remembers what it let go.

    A page that lives nowhere else must not leave while a child of it lives elsewhere: the child
    would be orphaned. Letting a child go that lives elsewhere too adds to that.

    Args:
        tier: the one that gives pages up.
        others: the other tiers.
        only_copies_may_go: they will live on elsewhere.
    """

    __slots__ = ("_kept", "_nodes", "_only_copies_may_go", "_others", "_pins", "_state", "_tier")

    def __init__(
        self,
        tier: TierIndex,
        others: Sequence[TierIndex],
        nodes: Nodes,
        *,
        only_copies_may_go: bool,
    ) -> None:
        self._tier = tier
        self._pins, self._state = tier.pins, tier.state
        self._nodes = nodes
        self._others = [other.state for other in others]
        self._only_copies_may_go = only_copies_may_go
        self._kept: dict[int, int] = {}  # page -> children let go that live elsewhere

    def holds(self, page: int) -> bool:
        """Whether a page must stay; if not, it is let go."""
        if self._pins[page] or self._state[page] != RESIDENT:
            return True
        for other in self._others:
            if other[page]:
                self._note(page)
                return False
        if self._only_copies_may_go:
            return False
        children = self._nodes.children_of[page] - self._tier.children[page]
        return children + self._kept.get(page, 0) > 0

    def lets_go(self, run: Array) -> int:
        """How many of the first pages of a run may go, one after the other; they are let go.

        Args:
            run: resident pages, of which each is the only child in this tier of the next.
        """
        if not len(run):
            return 0
        may_go = array_of(self._tier.pins)[run] == 0
        is_elsewhere = np.zeros(len(run), np.bool_)
        for other in self._others:
            is_elsewhere |= array_of(other)[run] != ABSENT
        if not self._only_copies_may_go:
            may_go &= is_elsewhere | ~self._leaves_children_behind(run, is_elsewhere)
        count = leading(may_go)
        if count and is_elsewhere[count - 1]:
            self._note(int(run[count - 1]))
        return count

    def _leaves_children_behind(self, run: Array, is_elsewhere: Array) -> Array:
        """Of each page whether a child of it lives elsewhere, once all before it have gone."""
        left = array_of(self._nodes.children_of)[run] - array_of(self._tier.children)[run]
        left[0] += self._kept.get(int(run[0]), 0)
        left[1:] += is_elsewhere[:-1]
        return left > 0

    def _note(self, page: int) -> None:
        parent = self._nodes.parent_of[page]
        self._kept[parent] = self._kept.get(parent, 0) + 1
