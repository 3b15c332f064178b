"""Pages on their way into a tier, and when they will be there."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import compress

from tiered_kv.keys import PageKey
from tiered_kv.plan import Move, Moves, waiting
from tiered_kv.streams import Event


class Arrivals:
    """An event for each page that comes, the same for all that come together. Not locked."""

    def __init__(self) -> None:
        self._events: defaultdict[str, dict[PageKey, Event]] = defaultdict(dict)

    def __len__(self) -> int:
        return sum(map(len, self._events.values()))

    def announce(self, tier: str, keys: Iterable[PageKey], done: Event) -> None:
        """Pages will be in a tier, or not come after all, when the event fires."""
        self._events[tier].update(dict.fromkeys(keys, done))

    def event(self, tier: str, key: PageKey) -> Event | None:
        """When a page will be in a tier; None if it is not on its way there."""
        return self._events[tier].get(key)

    def awaited(self, moves: Sequence[Move]) -> set[PageKey]:
        """The pages whose moves wait for them and that are on their way already."""
        if not isinstance(moves, Moves):
            return {move.key for move in waiting(moves) if self.event(move.source, move.key)}
        events = self._events[moves.source]
        return events.keys() & compress(moves.keys, moves.waits) if events else set()

    def above(
        self, tier: str, keys: Iterable[PageKey], parents: Iterable[PageKey | None]
    ) -> set[Event]:
        """When parents of pages, but those among the pages, will be there: hardly ever any."""
        events = self._events[tier]
        return {events[key] for key in {*parents}.difference(keys) if key in events}

    def end(self, tier: str, keys: Iterable[PageKey]) -> None:
        """Pages, all announced, are on their way no longer."""
        events = self._events[tier]
        for key in keys:
            del events[key]
