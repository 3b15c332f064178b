"""First in, first out, kept prefix-closed: for comparison.

Every request adds a leaf, so this is nearly LRU on conversations; it ignores a page read again.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np

from tiered_kv.columns import Array
from tiered_kv.policy.base import LeafFirst, Tree


class Fifo(LeafFirst):
    """Ranks a page by when it came into the tier."""

    def __init__(self, tree: Tree) -> None:
        super().__init__(tree)
        self._arrived = array("q")

    def insert(self, pages: Sequence[int]) -> None:
        highest = max(pages, default=-1)
        if highest >= len(self._arrived):
            grown = max(highest + 1, len(self._arrived) * 5 // 4) - len(self._arrived)
            self._arrived.extend(array("q", bytes(8 * grown)))
        for page in pages:
            self._arrived[page] = self._tree.last_use(page)
        super().insert(pages)

    def fill(self, pages: range) -> None:
        self._arrived = array("q", self._tree.last_uses(pages))
        super().fill(pages)

    def rank(self, page: int) -> int:
        return self._arrived[page]

    def ranks(self, pages: Array) -> Array:
        arrived: Array = np.frombuffer(self._arrived, np.int64)
        return arrived[pages]
