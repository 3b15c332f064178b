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

    def is_arriving(self, move: Move) -> bool:
        """Whether the target slot of a move is promised to its page, not a caller's own."""

    def is_possible(self, move: Move) -> bool:
        """Whether, what it waited for being over, a move has its source and its target slot."""

    def durable(self, moves: Sequence[Move]) -> list[Move]:
        """The writes that leave disk prefix-closed: their parents are there, or go before them."""

    def arrived(self, move: Move) -> None:
        """The bytes of a move are in place and verified."""

    def failed(self, move: Move, reason: str = "failed") -> None:
        """A move was not made."""

    def condemn(self, move: Move, reason: str) -> None:
        """The source copy of a move was found bad."""

    def end(self, plan: Plan) -> None:
        """All moves of a plan have arrived or failed."""
