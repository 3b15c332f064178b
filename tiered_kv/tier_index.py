"""What one tier has of each page."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from enum import IntEnum
from itertools import pairwise

import numpy as np

from tiered_kv.columns import FEW, Array, Numbers, array_of, column, leading, longer, numbers
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

    def hang(self, pages: Sequence[int], parent: int) -> None:
        """New pages hang one from the other, the first from `parent` or -1."""
        if len(pages) < FEW:
            for page in pages:
                self.parent_of[page], self.hits_of[page] = parent, 0
                if parent >= 0:
                    self.children_of[parent] += 1
                parent = page
            return
        if parent >= 0:
            self.children_of[parent] += 1
        at = numbers(pages)
        parents = array_of(self.parent_of)
        parents[at[0]] = parent
        parents[at[1:]] = at[:-1]
        array_of(self.hits_of)[at] = 0
        array_of(self.children_of)[at[:-1]] = 1

    def runs(self, pages: Sequence[int]) -> list[Sequence[int]]:
        """Pages cut into runs up a branch: within one, each is followed by its parent.

        Pages that come root first are turned, each run by itself.
        """
        if len(pages) < 2:
            return [pages] if pages else []
        parent_of = self.parent_of
        if parent_of[pages[1]] == pages[0] or parent_of[pages[-1]] == pages[-2]:
            return self._runs(pages[::-1])[::-1]
        return self._runs(pages)

    def _runs(self, pages: Sequence[int]) -> list[Sequence[int]]:
        if len(pages) < FEW:
            parent_of = self.parent_of
            pairs = enumerate(pairwise(pages), start=1)
            cuts = [at for at, (page, above) in pairs if parent_of[page] != above]
        else:
            at = numbers(pages)
            cuts = (np.flatnonzero(array_of(self.parent_of)[at[:-1]] != at[1:]) + 1).tolist()
        return [pages[first:end] for first, end in pairwise((0, *cuts, len(pages)))]

    def use(self, pages: Sequence[int], clock: int) -> None:
        """Pages, each once, were used: the first at logical time `clock`, each a tick before."""
        if len(pages) < FEW:
            last_use_of, hits_of = self.last_use_of, self.hits_of
            for page in pages:
                last_use_of[page] = clock
                hits_of[page] += 1
                clock -= 1
            return
        at = numbers(pages)
        array_of(self.last_use_of)[at] = np.arange(clock, clock - len(pages), -1)
        array_of(self.hits_of)[at] += 1


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

    def parents(self, pages: Sequence[int]) -> Array:
        """`parent` of each page."""
        found: Array = array_of(self._nodes.parent_of)[numbers(pages)]
        return found

    def child_count(self, page: int) -> int:
        """Children of a page in this tier, or on their way into it."""
        return self.children[page]

    def childless(self, pages: Sequence[int]) -> list[int]:
        """Those of the pages that have no child here, nor on its way here."""
        if isinstance(pages, range):
            here = array_of(self.children)[pages.start : pages.stop]
            found: list[int] = (np.flatnonzero(here == 0) + pages.start).tolist()
        elif len(pages) >= FEW:
            at = numbers(pages)
            found = at[array_of(self.children)[at] == 0].tolist()
        else:
            children = self.children
            found = [page for page in pages if not children[page]]
        return found

    def last_use(self, page: int) -> int:
        """Logical time of the last use."""
        return self._nodes.last_use_of[page]

    def last_uses(self, pages: Sequence[int]) -> list[int]:
        """Logical time of the last use of each page."""
        found: list[int] = array_of(self._nodes.last_use_of)[numbers(pages)].tolist()
        return found

    def grow(self, pages: int) -> None:
        """Room for `pages` pages in all."""
        self.state = longer(self.state, pages)
        self.slot = longer(self.slot, pages)
        self.pins = longer(self.pins, pages)
        self.children = longer(self.children, pages)

    def favoured_use(self, page: int) -> int:
        """The last use, and what a caller's hint adds to it; less than 0 for "give up early"."""
        nodes = self._nodes
        if nodes.favours:
            return nodes.last_use_of[page] + nodes.favours.get(page, 0)
        return nodes.last_use_of[page]

    def favoured_uses(self, pages: Array) -> Array:
        """`favoured_use` of each page."""
        uses: Array = array_of(self._nodes.last_use_of)[pages]
        favours = self._nodes.favours
        if favours:
            uses += np.fromiter((favours.get(page, 0) for page in pages.tolist()), np.int64)
        return uses

    def line(self, page: int, n: int) -> Array:
        """Up to n resident pages above one, nearest first, each with one child here."""
        parent_of, above = self._nodes.parent_of, list[int]()
        while len(above) < n and (page := parent_of[page]) >= 0:
            above.append(page)
        line = numbers(above)
        is_in_line = array_of(self.state)[line] == RESIDENT
        is_in_line &= array_of(self.children)[line] == 1
        return line[: leading(is_in_line)]

    def is_resident(self, page: int) -> bool:
        """Whether the page's bytes are here and verified."""
        return self.state[page] == RESIDENT

    def states(self, pages: Collection[int]) -> bytes:
        """The state of each page."""
        if len(pages) < FEW:
            return bytes([self.state[page] for page in pages])
        return array_of(self.state)[numbers(pages)].tobytes()

    def slots(self, pages: Collection[int]) -> list[int]:
        """The slot of each page; -1 where it is neither here nor on its way."""
        if len(pages) < FEW:
            return [self.slot[page] for page in pages]
        slots = array_of(self.slot)[numbers(pages)]
        found = Numbers(slots.tolist())
        found.array = slots
        return found

    def have(self, state: int, pages: Sequence[int], slots: Sequence[int]) -> list[bool]:
        """For each page whether it is in that state in the slot that is named with it."""
        if len(pages) < FEW:
            states, slot_of = self.state, self.slot
            return [
                states[page] == state and slot_of[page] == slot
                for page, slot in zip(pages, slots, strict=True)
            ]
        at = numbers(pages)
        is_there = array_of(self.state)[at] == state
        is_there &= array_of(self.slot)[at] == numbers(slots)
        found: list[bool] = is_there.tolist()
        return found

    # -- change: told by the index, which sees to what else follows --------------------------------

    def begin(self, pages: Sequence[int], slots: Sequence[int]) -> None:
        """Pages that are absent are on their way into slots, one each."""
        if len(pages) < FEW:
            state, slot_of, children = self.state, self.slot, self.children
            parent_of = self._nodes.parent_of
            for page, slot in zip(pages, slots, strict=True):
                assert state[page] == ABSENT
                state[page] = ARRIVING
                slot_of[page] = slot
                parent = parent_of[page]
                if parent >= 0:
                    children[parent] += 1
            return
        if len(slots) != len(pages):
            raise ValueError(f"{len(slots)} slots for {len(pages)} pages: one a page")
        at, states = numbers(pages), array_of(self.state)
        assert not states[at].any()
        states[at] = ARRIVING
        array_of(self.slot)[at] = numbers(slots)
        self._count_children(at, np.add)

    def finish(self, pages: Sequence[int]) -> None:
        """Pages on their way have arrived."""
        self.resident += len(pages)
        if len(pages) < FEW:
            state = self.state
            for page in pages:
                assert state[page] == ARRIVING
                state[page] = RESIDENT
            return
        at, states = numbers(pages), array_of(self.state)
        assert (states[at] == ARRIVING).all()
        states[at] = RESIDENT

    def may_leave(self, pages: Sequence[int]) -> bool:
        """Whether all of the pages are resident and nobody has pinned one."""
        if len(pages) < FEW:
            state, pins = self.state, self.pins
            return all(state[page] == RESIDENT and not pins[page] for page in pages)
        at = numbers(pages)
        is_here = (array_of(self.state)[at] == RESIDENT).all()
        return bool(is_here and not array_of(self.pins)[at].any())

    def leave(self, pages: Sequence[int]) -> list[int]:
        """Pages are absent from now on. Returns the slots they had."""
        if len(pages) < FEW:
            state, slot_of, children = self.state, self.slot, self.children
            parent_of = self._nodes.parent_of
            left = [slot_of[page] for page in pages]
            for page in pages:
                state[page] = ABSENT
                slot_of[page] = -1
                parent = parent_of[page]
                if parent >= 0:
                    children[parent] -= 1
            return left
        at, slot_column = numbers(pages), array_of(self.slot)
        slots: list[int] = slot_column[at].tolist()
        array_of(self.state)[at] = ABSENT
        slot_column[at] = -1
        self._count_children(at, np.subtract)
        return slots

    def pin(self, pages: Sequence[int]) -> None:
        """One pin more for each page, named as often as it is pinned."""
        if len(pages) < FEW:
            pins = self.pins
            for page in pages:
                pins[page] += 1
        else:
            np.add.at(array_of(self.pins), numbers(pages), np.uint32(1))

    def unpin(self, pages: Sequence[int]) -> None:
        """One pin less for each page, named as often as it is unpinned."""
        if len(pages) < FEW:
            pins = self.pins
            for page in pages:
                assert pins[page] > 0, "a pin is taken back twice"
                pins[page] -= 1
            return
        at, pinned = numbers(pages), array_of(self.pins)
        assert pinned[at].all(), "a pin is taken back twice"
        np.subtract.at(pinned, at, np.uint32(1))

    def _count_children(self, pages: Array, count: np.ufunc) -> None:
        parents = array_of(self._nodes.parent_of)[pages]
        count.at(array_of(self.children), parents[parents >= 0], np.int32(1))
