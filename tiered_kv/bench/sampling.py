"""Samples of a way bytes go, each right after one of its limit, and the row they make."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tiered_kv.bench.content import Load
from tiered_kv.bench.report import sample_name
from tiered_kv.bench.statistics import (
    LEAST_P95,
    LEAST_P99,
    ci95,
    median,
    p95_or_none,
    p99_or_none,
    ratio_ci95,
)

LEAST_SAMPLES = 6
"""Taken whatever they cost, but in a smoke run: an interval needs them."""


class Way(ABC):
    """One way that pages go through a store.

    Attributes:
        path: its name in a report.
        limit_name: what it is compared with.
        space: of a disk: "fresh" or "steady", written before; None for memory.
    """

    path: str
    limit_name: str
    space: str | None = None

    @property
    def is_cold(self) -> bool:
        """Whether what was read came from the medium, not from a cache of the system."""
        return False

    @abstractmethod
    def bytes_of(self, load: Load) -> int:
        """Bytes that `ours` and `limit` move."""

    @abstractmethod
    def before(self, load: Load) -> None:
        """Make ready; not timed."""

    @abstractmethod
    def limit(self, load: Load) -> None:
        """Move as many bytes without a store; timed."""

    @abstractmethod
    def ours(self) -> None:
        """Move what `before` has prepared through the store; timed."""

    @abstractmethod
    def after(self) -> None:
        """Compare what came; not timed."""


@dataclass(frozen=True, slots=True)
class Amounts:
    """How much is measured.

    Attributes:
        full: what a sample of a rate moves.
        single: what a sample of a latency moves.
        repeats: samples of a rate.
        singles: samples of a latency.
        rate_s, single_s: what each of these may take of wall time, preparing included.
        least: samples that are taken past that.
    """

    full: Load
    single: Load
    repeats: int
    singles: int
    rate_s: float
    single_s: float
    least: int = LEAST_SAMPLES


@dataclass(slots=True)
class Samples:
    """What was measured of one way, in order; rates and their limits are pairs."""

    rates: list[float] = field(default_factory=list)
    limits: list[float] = field(default_factory=list)
    cpu_s_per_gb: list[float] = field(default_factory=list)
    limit_cpu_s_per_gb: list[float] = field(default_factory=list)
    latencies: list[float] = field(default_factory=list)


def take_rates(way: Way, amounts: Amounts, samples: Samples, tick: Callable[[], None]) -> None:
    """Limit and ours in turn (A B A B ...), the first pair thrown away."""
    end = time.monotonic() + amounts.rate_s
    n_bytes = way.bytes_of(amounts.full)
    for repeat in range(amounts.repeats + 1):
        if len(samples.rates) >= amounts.least and time.monotonic() > end:
            break
        way.before(amounts.full)
        limit_s, limit_cpu_s = _taken(lambda: way.limit(amounts.full))
        ours_s, ours_cpu_s = _taken(way.ours)
        way.after()
        tick()
        if repeat:
            samples.limits.append(n_bytes / limit_s)
            samples.rates.append(n_bytes / ours_s)
            samples.limit_cpu_s_per_gb.append(limit_cpu_s / n_bytes * 1e9)
            samples.cpu_s_per_gb.append(ours_cpu_s / n_bytes * 1e9)


def take_latencies(way: Way, amounts: Amounts, samples: Samples, tick: Callable[[], None]) -> None:
    """Single transfers, one at a time; the first is thrown away."""
    end = time.monotonic() + amounts.single_s
    for repeat in range(amounts.singles + 1):
        if len(samples.latencies) >= amounts.least and time.monotonic() > end:
            break
        way.before(amounts.single)
        taken, _ = _taken(way.ours)
        way.after()
        tick()
        if repeat:
            samples.latencies.append(taken)


def _taken(run: Callable[[], None]) -> tuple[float, float]:
    """Seconds by the clock, and of CPU time of all threads."""
    wall, cpu = time.perf_counter(), time.process_time()
    run()
    return time.perf_counter() - wall, time.process_time() - cpu


def row_of(way: Way, page_bytes: int, amounts: Amounts, samples: Samples) -> dict[str, Any]:
    """The row of a way at a page size; a figure that was not measured is None."""
    rates, limits, latencies = samples.rates, samples.limits, samples.latencies
    ratio = ratio_ci95(rates, limits)
    rate_ci95 = ci95(rates)
    return {
        "path": way.path,
        "page_bytes": page_bytes,
        "space": way.space,
        "bytes_per_s": median(rates),
        "bytes_per_s_ci95": rate_ci95 and list(rate_ci95),
        "limit": way.limit_name,
        "limit_bytes_per_s": median(limits),
        "ratio": ratio.value,
        "ci95": ratio.ci95 and list(ratio.ci95),
        "n": len(rates),
        "set_bytes": way.bytes_of(amounts.full),
        "p50_s": median(latencies) if latencies else None,
        "p95_s": p95_or_none(latencies),
        "p99_s": p99_or_none(latencies),
        "latency_n": len(latencies),
        "latency_bytes": way.bytes_of(amounts.single) if latencies else None,
        "cpu_s_per_gb": median(samples.cpu_s_per_gb),
        "limit_cpu_s_per_gb": median(samples.limit_cpu_s_per_gb),
        "cold": way.is_cold,
    }


def samples_of(row: dict[str, Any], samples: Samples) -> dict[str, list[float]]:
    """The samples behind a row, by name."""
    found = {
        "bytes_per_s": samples.rates,
        "limit_bytes_per_s": samples.limits,
        "cpu_s_per_gb": samples.cpu_s_per_gb,
        "limit_cpu_s_per_gb": samples.limit_cpu_s_per_gb,
        "latency_s": samples.latencies,
    }
    return {sample_name(row, metric): values for metric, values in found.items() if values}


def quantile_note(rows: list[dict[str, Any]]) -> str | None:
    """A sentence if a p95 or p99 was refused."""
    measured = [row["latency_n"] for row in rows if row.get("latency_n")]
    without = [sum(n < least for n in measured) for least in (LEAST_P95, LEAST_P99)]
    if not any(without):
        return None
    return (
        f"of {len(measured)} rows with latencies {without[0]} have no p95 and {without[1]} no p99: "
        f"these need {LEAST_P95} and {LEAST_P99} samples"
    )
