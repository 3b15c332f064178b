"""Least recently used, leaf first: the default.

On KV traces no online policy beats it reliably (arXiv 2609.28870; our replay of three traces
agrees).
"""

from __future__ import annotations

import numpy as np

from tiered_kv.columns import Array
from tiered_kv.policy.base import LeafFirst


class Lru(LeafFirst):
    """Ranks a page by its last use, and what a hint adds to it."""

    def rank(self, page: int) -> int:
        rank = self._tree.favoured_use(page)
        return rank if rank > 0 else 0

    def ranks(self, pages: Array) -> Array:
        return np.maximum(self._tree.favoured_uses(pages), 0)
