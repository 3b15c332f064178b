"""What whoever moves bytes asks, and tells, whoever keeps the books of where they are."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from tiered_kv.keys import PageKey
from tiered_kv.plan import Move, Plan


class Books(Protocol):
    """A `Planner`, or in another process than it a `Manifest`. Used under the mover's lock."""

    def key(self, page: int) -> PageKey:
        """The key of a page of a plan."""

    def has(self, key: PageKey, tiers: Iterable[str]) -> bool:
        """Whether one of these tiers has a page."""

    def arriving(self, moves: Sequence[Move]) -> Sequence[Move]:
        """Moves into one tier: those whose target slots are promised, not a caller's own."""

    def possible(self, moves: Sequence[Move]) -> Sequence[Move]:
        """Those that, what they waited for being over, have their source and target slots."""

    def durable(self, moves: Sequence[Move]) -> Sequence[Move]:
        """The writes that leave disk prefix-closed: their parents are there, or go before them."""

    def arrived_all(self, moves: Sequence[Move]) -> None:
        """Moves into one tier: the bytes are in place and verified."""

    def failed(self, move: Move, reason: str = "failed") -> None:
        """A move was not made."""

    def condemn(self, move: Move, reason: str) -> None:
        """The source copy of a move was found bad."""

    def end(self, plan: Plan) -> None:
        """All moves of a plan have arrived or failed."""
