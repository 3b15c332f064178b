"""What the scheduler's side of the connector remembers of a request."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from enum import Enum

from vllm.v1.request import Request

from tiered_kv.keys import KeyChain, PageKey
from tiered_kv.plugins.vllm.identity import page_key

MAX_PREFETCHES = 2  # a page that leaves host again while its request queues is fetched once more


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
        hashes: vLLM's block hashes that the keys were made of.
        may_put: False when its blocks were computed before the store forgot all.
        next_put: its first page not yet taken by the store.
        next_try: how many pages it must have before more are given to the store.
        local_pages: pages the engine had itself at the last lookup.
        why_computed: why stored pages beyond those promised at the last lookup are computed.
        is_awaited: whether the load promised at the last lookup goes on while the request waits.
        is_loading: its blocks are being filled: what is in them now is not its own.
        may_load: False after a load of it has failed: computing never does.
        wait_until: when it stops waiting for its pages, by `time.monotonic`.
        fetched_pages: pages the prefetch brought from disk that are not used yet.
        sources: pages of its last load, by tier.
    """

    request: Request
    root: PageKey
    keys: list[PageKey] = field(default_factory=list)
    hashes: list[bytes] = field(default_factory=list)
    may_put: bool = True
    next_put: int = 0
    next_try: int = 0
    pause_pages: int = 1
    local_pages: int = 0
    why_computed: str = ""
    is_awaited: bool = False
    is_loading: bool = False
    may_load: bool = True
    is_counted: bool = False
    fetch: Fetch = Fetch.NONE
    fetches: int = 0
    wait_until: float = float("inf")
    fetched_pages: int = 0
    sources: dict[str, int] = field(default_factory=dict)

    # -- keys --------------------------------------------------------------------------------------

    def extend(self) -> None:
        """Add the keys of pages that have become full.

        A session that is given more input takes its last token back: a page that ended in it is
        another one then. Hashes are chained, so those before an equal one are equal.
        """
        now = self.request.block_hashes
        same = min(len(self.hashes), len(now))
        while same and self.hashes[same - 1] != now[same - 1]:
            same -= 1
        if same < len(self.hashes):
            del self.keys[same:], self.hashes[same:]
            self.put_again(same)
        for block_hash in now[same:]:
            self.keys.append(page_key(self.root, block_hash))
            self.hashes.append(block_hash)

    def chain(self, first: int, end: int) -> KeyChain:
        """Keys of pages [first, end)."""
        return KeyChain(self.keys[first:end], self.keys[first - 1] if first else None)

    def rename(self, root: PageKey) -> None:
        """From now on its keys hang from another root; what it has computed is not put under it."""
        self.root = root
        self.keys, self.hashes = [], []
        self.next_put = self.next_try = 0
        self.may_put = self.request.num_computed_tokens == 0

    # -- what it gives the store -------------------------------------------------------------------

    def put_again(self, page: int) -> None:
        """Its pages from this one on will be computed anew."""
        self.next_put, self.next_try = min(self.next_put, page), min(self.next_try, page)

    def restart(self) -> None:
        """It has lost its blocks: all of it will be computed or loaded anew."""
        self.next_put = self.next_try = 0
        self.may_put = True

    def given(self, first: int, end: int, not_taken: int) -> None:
        """The store was given its pages [first, end), and has not taken the last so many."""
        self.next_put = self.next_try = end
        if not not_taken:
            self.pause_pages = 1
        elif not_taken < end - first:
            self.turned_down(end - not_taken, end)
        else:  # the page they hang from may have left the store, while its block is here
            self.turned_down(0, end)

    def turned_down(self, page: int, end: int) -> None:
        """The store has not taken its pages [page, end): try again later, and more and more so."""
        self.next_put = min(self.next_put, page)
        self.next_try = max(self.next_try, end + self.pause_pages)
        self.pause_pages *= 2

    # -- what it waits for -------------------------------------------------------------------------

    def is_late(self, deadline_s: float) -> bool:
        """Whether it has waited long enough for its pages; the clock starts at the first call."""
        now = time.monotonic()
        self.wait_until = min(self.wait_until, now + deadline_s)
        return now >= self.wait_until

    def want_fetch(self) -> bool:
        """Ask for its disk pages to be brought to host; False if that was tried often enough."""
        if self.fetch is Fetch.NONE and self.fetches < MAX_PREFETCHES:
            self.fetch = Fetch.WANTED
        return self.fetch is Fetch.WANTED

    def served(self, *, is_loading: bool) -> None:
        """It has got blocks: it waits no more, but for the load into them."""
        self.wait_until = float("inf")
        self.fetched_pages = 0
        self.is_loading = is_loading

    def load_failed(self) -> None:
        """A load of it has failed: from its first page on all may be computed now."""
        self.may_load = False
        self.put_again(self.local_pages)
