"""The deciding side, measured in a process of its own: no bytes, no torch, slots that are numbers.

`python -m tiered_kv.bench.deciding JSON` prints what one `Load` gave, as a JSON object of samples
by metric. `tiered_kv.bench.index` runs it once a size, because what a page takes of memory shows
only in a process that held nothing else before.

The store that is decided for is in its steady state: a disk with three quarters of the pages, full,
and above it a host with the last quarter, full of pages that were never written; so whatever comes
into host sends something to disk, for which something leaves there. Half of the pages are in
conversations of `long_pages`, the others in conversations of 16, 64 of which share their first two.
"""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from tiered_kv.errors import TieredKVError
from tiered_kv.found import FIRST, FoundPages
from tiered_kv.keys import KeyChain, Namespace, PageKey, page_keys
from tiered_kv.plan import DISK, HBM, HOST, TIERS, Draft, Plan
from tiered_kv.planner import Planner
from tiered_kv.slots import SlotPool

SHORT_PAGES = 16
SHARED_PAGES = 2
FANOUT = 64
_HOST_SHARE = 4  # one page in so many
EVICT_BATCH = 64
"""Pages a call where many are evicted together."""
_WORKER_DEADLINE_S = 600.0

Samples = dict[str, list[float]]


@dataclass(frozen=True, slots=True)
class Load:
    """What one process measures.

    Attributes:
        pages: known to the index when it is full, at least 8 times `long_pages`.
        long_pages: of a long conversation, and so of a get.
        page_tokens: tokens a page.
        key_tokens: of the prompt that keys are made of.
        repeats: samples of every figure but evictions.
        evictions: samples of these; a p99 needs 299.
    """

    pages: int
    long_pages: int
    page_tokens: int
    key_tokens: int
    repeats: int
    evictions: int


def chains(pages: int, long_pages: int) -> Iterator[KeyChain]:
    """Conversations of `pages` pages in all, long and short; of the short ones a shared head first.

    Keys are random: a key is a hash, so it has no order that its page's neighbours would share.
    """
    made = made_long = shorts = 0
    head = KeyChain(())
    while made < pages:
        left, is_head = pages - made, shorts % FANOUT == 0
        if 2 * made_long <= made:
            chain = KeyChain(new_keys(min(long_pages, left)))
            made_long += len(chain)
        elif is_head:
            chain = head = KeyChain(new_keys(min(SHARED_PAGES, left)))
            shorts += 1
        else:
            parent = head[-1]
            chain = KeyChain(new_keys(min(SHORT_PAGES - SHARED_PAGES, left)), parent)
            shorts += 1
        made += len(chain)
        yield chain


def new_keys(count: int) -> list[PageKey]:
    """Keys that no page has yet."""
    raw = os.urandom(32 * count)
    return [PageKey(raw[at : at + 32]) for at in range(0, len(raw), 32)]


# -- in the process of its own -------------------------------------------------------------------


class _Decided:
    """A planner whose moves are made at once, and what it knows."""

    def __init__(self, load: Load) -> None:
        self._load = load
        capacity = {HBM: load.long_pages, HOST: load.pages // _HOST_SHARE}
        capacity[DISK] = load.pages - capacity[HOST]
        pools = {tier: SlotPool(pages) for tier, pages in capacity.items()}
        self._disk_slots = pools[DISK]
        self.planner = Planner(pools, capacity)
        self._long: list[PageKey] = []  # last keys of long conversations, least recently used first

    def fill(self) -> None:
        """Disk as after a restart, host by puts."""
        long_pages, capacity = self._load.long_pages, self.planner.room.capacity
        self.planner.adopt(DISK, self._found(chains(capacity[DISK], long_pages), capacity[DISK]))
        for keys in chains(capacity[HOST], long_pages):
            self.put(keys)

    def _found(self, below: Iterator[KeyChain], pages: int) -> FoundPages:
        """Conversations as a tier would have found them, in the order in which they were put."""
        self._disk_slots.take_first(pages)
        found: list[PageKey] = []
        parent = np.arange(-1, pages - 1, dtype=np.int32)
        ends: dict[PageKey, int] = {}  # the last page of what begins a conversation, and its row
        for keys in below:
            self._note(keys)
            parent[len(found)] = FIRST if keys.parent is None else ends[keys.parent]
            found += keys
            if keys.parent is None:
                ends[keys[-1]] = len(found) - 1
        rows = np.arange(pages)
        return FoundPages(found, parent, rows.astype(np.int32), rows, None)

    def _note(self, keys: KeyChain) -> None:
        if len(keys) == self._load.long_pages:
            self._long.append(keys[-1])

    def put(self, keys: KeyChain) -> None:
        """Pages out of HBM; at most `long_pages`, for which it has room."""
        slots = self.planner.room.exactly(HBM, len(keys))
        assert slots is not None, "nothing is leased here"
        self.planner.carry_out(self.planner.plan_put(keys, slots))
        self._note(keys)

    def get(self, source: str, *, with_room: bool) -> float:
        """Seconds of planning a get of one long conversation, and of noting that it has arrived.

        Args:
            source: the tier that it comes from.
            with_room: whether HBM has free slots for it, or gives up as many pages for it.
        """
        planner, n = self.planner, self._load.long_pages
        self.put(KeyChain(new_keys(n)))  # HBM is full of pages that nobody reads
        keys = self._one_in(source)
        if with_room:
            slots = planner.room.exactly(HBM, n)
            assert slots is not None, "nothing is leased here"
            planner.room.free(HBM, slots)
        started = time.thread_time()
        plan = planner.carry_out(planner.plan_get(keys))
        taken = time.thread_time() - started
        assert plan.sources == (source,) * len(keys), "the conversation was where it should be"
        planner.release(plan.pages)
        return taken

    def _one_in(self, source: str) -> KeyChain:
        """The least recently used long conversation that is in this tier and in none above it."""
        for _ in range(8 * _HOST_SHARE):
            for at, last in enumerate(self._long):
                keys = self._keys_upto(last)
                if keys and all(self._is_in(source, key) for key in keys):
                    self._long.append(self._long.pop(at))
                    return KeyChain(keys)
            self.put(KeyChain(new_keys(self._load.long_pages)))  # what is older goes down
            self._long = [last for last in self._long if self.planner.index.find(last) >= 0]
        raise AssertionError(f"no conversation came to be in {source}")

    def _keys_upto(self, last: PageKey) -> list[PageKey]:
        index = self.planner.index
        keys: list[PageKey] = []
        above: PageKey | None = last
        while above is not None and (page := index.find(above)) >= 0:
            keys.append(above)
            above = index.parent_key(page)
        return keys[::-1]

    def _is_in(self, source: str, key: PageKey) -> bool:
        above = TIERS[: TIERS.index(source)]
        return self.planner.has(key, (source,)) and not self.planner.has(key, above)

    def evict(self, pages: int) -> float:
        """Seconds a page of making room for so many in a full host, disk being full below it."""
        planner = self.planner
        draft = Draft()
        started = time.thread_time()
        grants = planner.room.on_host(pages, draft)
        taken = time.thread_time() - started
        assert len(grants.slots) == pages, "a full host makes room for as little as this"
        planner.carry_out(Plan(demote=tuple(draft.demote), pins=tuple(draft.pins)))
        planner.room.free(HOST, grants.slots)
        self.put(KeyChain(new_keys(pages)))  # and host is full again
        return taken / pages


def measure(load: Load) -> Samples:
    """Everything, in this process; its memory counts only if nothing was measured in it before."""
    gc.collect()
    before = _rss_bytes()
    decided = _Decided(load)
    decided.fill()
    gc.collect()
    known = len(decided.planner.index)
    found = {"rss_bytes_per_page": [(_rss_bytes() - before) / known], "known_pages": [float(known)]}
    found["evict_s"] = [decided.evict(1) for _ in range(load.evictions)]
    batch = min(EVICT_BATCH, load.long_pages)
    found["evict_batch_s"] = [decided.evict(batch) for _ in range(load.evictions)]
    for name, source, with_room in _GETS:
        decided.get(source, with_room=with_room)
        found[name] = [decided.get(source, with_room=with_room) for _ in range(load.repeats)]
    problems = decided.planner.index.check()
    assert not problems, problems[0]
    return {**found, **_keys_made(load)}


_GETS = (
    ("plan_get_s", HOST, True),
    ("plan_get_full_s", HOST, False),
    ("plan_get_disk_s", DISK, False),
)


def _keys_made(load: Load) -> Samples:
    ids = np.random.default_rng(0).integers(0, 150_000, load.key_tokens)
    kinds = {"keys_s": ids.tolist(), "keys_array_s": ids.astype(np.int32)}
    namespace = Namespace("model", "layout")
    found: Samples = {name: [] for name in kinds}
    for _ in range(load.repeats + 1):
        for name, given in kinds.items():
            started = time.thread_time()
            page_keys(given, load.page_tokens, namespace)
            found[name].append(time.thread_time() - started)
    return {name: taken[1:] for name, taken in found.items()}


def _rss_bytes() -> int:
    resident = Path("/proc/self/statm").read_text(encoding="ascii").split()[1]
    return int(resident) * os.sysconf("SC_PAGE_SIZE")


# -- from outside --------------------------------------------------------------------------------


def measure_apart(load: Load) -> Samples:
    """`measure` in a new process; blocks.

    Raises:
        TieredKVError: the process failed or did not end in 10 minutes; with its last line.
    """
    root = str(Path(__file__).resolve().parents[2])
    path = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, "-m", __spec__.name, json.dumps(asdict(load))]
    try:
        done = subprocess.run(
            command,
            env={**os.environ, "PYTHONPATH": path},
            capture_output=True,
            text=True,
            timeout=_WORKER_DEADLINE_S,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise TieredKVError(
            f"an index of {load.pages:,} pages was not measured in {_WORKER_DEADLINE_S:.0f} s: "
            "give smaller --pages"
        ) from error
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        raise TieredKVError(f"measuring an index of {load.pages:,} pages failed: {last}")
    found: Samples = json.loads(done.stdout)
    return found


if __name__ == "__main__":
    print(json.dumps(measure(Load(**json.loads(sys.argv[1])))))
