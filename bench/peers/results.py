"""What a run has brought, and what follows from it: rates, ratios, goals."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from bench.peers.catalogue import PEERS, RAW
from bench.rows import Log, Measurement, size_text

SYNCED = "put_synced"
"""`put_durable` and, of a peer that does not sync by itself, one sync of its file system."""

DISK_GOAL, DEVICE_GOAL, HOST_GOAL, LOOKUP_GOAL = 1.5, 0.9, 1.0, 5.0


@dataclass(frozen=True, slots=True)
class Sample:
    """One operation, timed once.

    Attributes:
        count: bytes moved, or keys asked for.
    """

    peer: str
    page_bytes: int
    operation: str
    round: int
    seconds: float
    cpu_seconds: float
    count: int

    @property
    def rate(self) -> float:
        """Bytes or keys a second."""
        return self.count / self.seconds


@dataclass(slots=True)
class Outcome:
    """All that a run has brought.

    Attributes:
        failed: peer -> why it did not run, or not to its end.
        facts: peer -> what it was opened with, at the last page size.
        cached_bytes: the most that the page cache still held of a peer's files before a cold get.
    """

    peers: Sequence[str]
    page_bytes: Sequence[int]
    set_bytes: int
    rounds: int
    samples: list[Sample] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    facts: dict[str, dict[str, Any]] = field(default_factory=dict)
    cached_bytes: dict[str, int] = field(default_factory=dict)
    verified_pages: int = 0
    is_cold: bool = True
    load_average: tuple[float, float] = (0.0, 0.0)
    wall_s: float = 0.0

    def rates(self, peer: str, page_bytes: int, operation: str) -> list[float]:
        """One a round."""
        return [one.rate for one in self._of(peer, page_bytes, operation)]

    def cpu_s_per_gb(self, peer: str, page_bytes: int, operation: str) -> float:
        """Median CPU seconds of the worker's process for 1e9 bytes, or keys."""
        some = self._of(peer, page_bytes, operation)
        return median(one.cpu_seconds / one.count for one in some) * 1e9

    def _of(self, peer: str, page_bytes: int, operation: str) -> list[Sample]:
        wanted = peer, page_bytes, operation
        return [s for s in self.samples if (s.peer, s.page_bytes, s.operation) == wanted]

    def median_rate(self, peer: str, page_bytes: int, operation: str) -> float | None:
        """None if it has no such operation."""
        found = self.rates(peer, page_bytes, operation)
        return median(found) if found else None

    def best_peer(self, page_bytes: int, operation: str) -> tuple[str, float] | None:
        """The fastest of the others, and its median."""
        found = (
            (name, self.median_rate(name, page_bytes, operation))
            for name in self.peers
            if not PEERS[name].is_ours and not PEERS[name].is_limit
        )
        return max(
            ((name, rate) for name, rate in found if rate is not None),
            key=lambda one: one[1],
            default=None,
        )

    def device(self, page_bytes: int, operation: str) -> float | None:
        """What the machine alone does."""
        return self.median_rate(RAW, page_bytes, operation)


def add_synced(outcome: Outcome, sync_s: dict[tuple[str, int, int], float]) -> None:
    """Derive `put_synced` from `put_durable` and the sync that came after it.

    Args:
        sync_s: (peer, page_bytes, round) -> seconds.
    """
    for one in [s for s in outcome.samples if s.operation == "put_durable"]:
        after = sync_s.get((one.peer, one.page_bytes, one.round), 0.0)
        extra = 0.0 if PEERS[one.peer].is_durable else after
        outcome.samples.append(
            Sample(
                one.peer,
                one.page_bytes,
                SYNCED,
                one.round,
                one.seconds + extra,
                one.cpu_seconds,
                one.count,
            )
        )


@dataclass(frozen=True, slots=True)
class Verdict:
    """One goal: what was reached, what was wanted."""

    text: str
    is_met: bool

    def __str__(self) -> str:
        return f"{self.text}: {'met' if self.is_met else 'MISSED'}"


def verdicts(outcome: Outcome) -> list[Verdict]:
    """All goals that this run can tell."""
    found: list[Verdict | None] = []
    largest = max(outcome.page_bytes)
    for name in outcome.peers:
        if not PEERS[name].is_ours:
            continue
        found += [_disk(outcome, name, largest, "get_cold", "cold get")]
        found += [_disk(outcome, name, largest, SYNCED, "durable put")]
        for page_bytes in outcome.page_bytes:
            found += [_times(outcome, name, page_bytes, "get_host", "host get", HOST_GOAL)]
        smallest = min(outcome.page_bytes)
        for kind in ("present",) if PEERS[name].answers_prefixes else ("present", "absent"):
            what = f"lookup, {kind} keys"
            found += [_times(outcome, name, smallest, f"lookup_{kind}", what, LOOKUP_GOAL)]
    return [one for one in found if one is not None]


def _disk(
    outcome: Outcome, name: str, page_bytes: int, operation: str, what: str
) -> Verdict | None:
    ours = outcome.median_rate(name, page_bytes, operation)
    device, best = outcome.device(page_bytes, operation), outcome.best_peer(page_bytes, operation)
    if ours is None or device is None or best is None:
        return None
    peer, rate = best
    is_met = ours >= min(DISK_GOAL * rate, DEVICE_GOAL * device)
    return Verdict(
        f"{name}, {what}, {size_text(page_bytes)}: {ours / 1e9:.2f} GB/s, {ours / rate:.2f} of the "
        f"best peer ({peer}; goal {DISK_GOAL}), {ours / device:.2f} of the device "
        f"(goal {DEVICE_GOAL}), the lower of both counts",
        is_met,
    )


def _times(
    outcome: Outcome, name: str, page_bytes: int, operation: str, what: str, goal: float
) -> Verdict | None:
    ours, best = (
        outcome.median_rate(name, page_bytes, operation),
        outcome.best_peer(page_bytes, operation),
    )
    if ours is None or best is None:
        return None
    peer, rate = best
    scale, unit = (1e6, "M keys/s") if operation.startswith("lookup") else (1e9, "GB/s")
    return Verdict(
        f"{name}, {what}, {size_text(page_bytes)}: {ours / scale:.2f} {unit}, {ours / rate:.2f} of "
        f"the best peer ({peer}, {rate / scale:.2f}), goal {goal:g}",
        ours >= goal * rate,
    )


def peers_ahead(outcome: Outcome) -> Iterable[str]:
    """Where a peer is faster than every face of ours that has the operation."""
    operations = list(dict.fromkeys(one.operation for one in outcome.samples))
    for page_bytes in outcome.page_bytes:
        for operation in operations:
            best = outcome.best_peer(page_bytes, operation)
            ours = [
                rate
                for name in outcome.peers
                if PEERS[name].is_ours
                and (rate := outcome.median_rate(name, page_bytes, operation)) is not None
            ]
            if best is not None and ours and max(ours) < best[1]:
                yield (
                    f"{best[0]} is ahead in {operation.replace('_', ' ')} at "
                    f"{size_text(page_bytes)}: {best[1] / max(ours):.2f} of our best"
                )


def measurements(outcome: Outcome, load_average: float) -> list[Measurement]:
    """A row for each peer, page size and operation; one sample a round."""
    log = Log()
    for peer in outcome.peers:
        for page_bytes in outcome.page_bytes:
            for operation in dict.fromkeys(one.operation for one in outcome.samples):
                rates = outcome.rates(peer, page_bytes, operation)
                if rates:
                    is_lookup = operation.startswith("lookup")
                    log.add(
                        "peers",
                        f"{operation}_rate",
                        "keys/s" if is_lookup else "B/s",
                        rates,
                        peer=peer,
                        page_bytes=page_bytes,
                        set_bytes=outcome.set_bytes,
                        durable=PEERS[peer].durable,
                        versions=outcome.facts.get(peer, {}).get("versions", {}),
                        load_average=load_average,
                    )
    return log.measured
