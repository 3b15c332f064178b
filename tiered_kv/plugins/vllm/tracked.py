"""What the scheduler's side of the connector remembers of a request."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from enum import Enum

from vllm.v1.request import Request

from tiered_kv.keys import KeyChain, PageKey
from tiered_kv.plugins.vllm.identity import page_key

MAX_PREFETCHES = 2  # a page that leaves host again while its request queues is fetched once more
MAX_RETRIES = 3


class Fetch(Enum):
    """How far the disk pages of a waiting request are on their way to host."""

    NONE = "none"
    WANTED = "wanted"
    UNDER_WAY = "under way"


@dataclass(slots=True)
class Tracked:
    """A request from its arrival to its end.

    Attributes:
        root: what its keys hang from: model, layout and adapter.
        keys: of its full pages so far.
        next_put: its first page not yet given to the store.
        local_pages: pages the engine had itself at the last lookup.
        is_awaited: whether the load promised at the last lookup goes on while the request waits.
        may_load: False after a load of it has failed: computing never does.
        fetched_pages: pages the prefetch brought from disk that are not used yet.
    """

    request: Request
    root: PageKey
    keys: list[PageKey] = field(default_factory=list)
    next_put: int = 0
    retries: int = 0
    local_pages: int = 0
    is_awaited: bool = False
    may_load: bool = True
    is_counted: bool = False
    fetch: Fetch = Fetch.NONE
    fetches: int = 0
    fetch_until: float = float("inf")
    fetched_pages: int = 0
    sources: dict[str, int] = field(default_factory=dict)

    def extend(self) -> None:
        """Add the keys of pages that have become full."""
        for block_hash in self.request.block_hashes[len(self.keys) :]:
            self.keys.append(page_key(self.root, block_hash))

    def chain(self, first: int, end: int) -> KeyChain:
        """Keys of pages [first, end)."""
        return KeyChain(self.keys[first:end], self.keys[first - 1] if first else None)

    def must_wait(self, deadline_s: float) -> bool:
        """Whether its disk pages are still to be waited for; no longer than so many seconds."""
        if self.fetch is Fetch.NONE:
            return False
        now = time.monotonic()
        self.fetch_until = min(self.fetch_until, now + deadline_s)
        return now < self.fetch_until

    def fetched(self) -> None:
        """Its prefetch is over."""
        self.fetch = Fetch.NONE
        self.fetch_until = float("inf")

    def want_fetch(self) -> bool:
        """Ask for its disk pages to be brought to host; False if that was tried often enough."""
        if self.fetch is Fetch.NONE and self.fetches < MAX_PREFETCHES:
            self.fetch = Fetch.WANTED
        return self.fetch is Fetch.WANTED
