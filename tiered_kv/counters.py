"""What a store has done: counters that only rise, and a snapshot of them."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from tiered_kv.plan import TIERS

_RATE_WEIGHT = 0.2  # of the newest batch in the running load rate


@dataclass(frozen=True, slots=True)
class StoreStats:
    """A snapshot. Pages are counted by `get`, and only once their bytes were there and verified.

    Attributes:
        hit_pages: pages that came back, by the tier they came from.
        missed_pages: pages asked for that did not.
        why_miss: the reasons of those.
        bytes_read, bytes_written: payload moved out of and into each tier.
        checksums_verified, checksums_failed: pages read from disk.
        put_pages: pages given to `put`.
        not_stored_pages: of those, pages that found no room on host.
        failed_writes: pages whose write to disk failed; they stayed on host.
        resident_pages: pages in each tier now.
        load_s_per_page: running cost of bringing a page from each tier, in seconds; what the gate
        uses.
    """

    hit_pages: dict[str, int]
    missed_pages: int
    why_miss: dict[str, int]
    bytes_read: dict[str, int]
    bytes_written: dict[str, int]
    checksums_verified: int
    checksums_failed: int
    put_pages: int
    not_stored_pages: int
    failed_writes: int
    resident_pages: dict[str, int]
    load_s_per_page: dict[str, float]


@dataclass(slots=True)
class Counters:
    """The live counters behind `StoreStats`. Safe to use from several threads."""

    _lock: threading.Lock = field(default_factory=threading.Lock)
    _counts: dict[str, Counter[str]] = field(
        default_factory=lambda: {
            name: Counter() for name in ("hit", "miss", "read", "written", "total")
        }
    )
    _load_s: dict[str, float] = field(default_factory=dict)

    def add(self, group: str, name: str, n: int) -> None:
        """Raise one counter: group is hit, miss, read, written or total."""
        if n:
            with self._lock:
                self._counts[group][name] += n

    def moved(self, source: str, target: str, n_bytes: int) -> None:
        """Payload bytes went from one tier to another."""
        self.add("read", source, n_bytes)
        self.add("written", target, n_bytes)

    def loaded(self, tier: str, pages: int, seconds: float) -> None:
        """Pages came from a tier in so many seconds: one more sample of its rate."""
        if not pages:
            return
        with self._lock:
            cost = seconds / pages
            before = self._load_s.get(tier, cost)
            self._load_s[tier] = before + _RATE_WEIGHT * (cost - before)

    def load_s_per_page(self) -> dict[str, float]:
        """Running cost of loading a page, by tier."""
        with self._lock:
            return dict(self._load_s)

    def snapshot(self, resident_pages: Mapping[str, int]) -> StoreStats:
        """Everything now, at one moment."""
        with self._lock:
            hit, miss, read, written, total = (
                self._counts[name] for name in ("hit", "miss", "read", "written", "total")
            )
            return StoreStats(
                hit_pages={tier: hit[tier] for tier in TIERS},
                missed_pages=sum(miss.values()),
                why_miss=dict(miss),
                bytes_read={tier: read[tier] for tier in TIERS},
                bytes_written={tier: written[tier] for tier in TIERS},
                checksums_verified=total["verified"],
                checksums_failed=total["corrupt"],
                put_pages=total["put"],
                not_stored_pages=total["not_stored"],
                failed_writes=total["write_failed"],
                resident_pages=dict(resident_pages),
                load_s_per_page=dict(self._load_s),
            )
