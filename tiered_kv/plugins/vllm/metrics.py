"""Metrics of the connector, as vLLM collects, logs and exports them: `vllm:tiered_kv_*`.

Numbers travel as plain nested dicts, metric -> labels -> number, from the workers and the scheduler
over process borders to the loggers. Pages are counted by the side that decides, once for the whole
engine; bytes by the ranks that move them. Counters add up, over ranks and over time; of a gauge the
newest value counts, so those of a rank carry its number.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from numbers import Integral
from typing import Any, NamedTuple

from prometheus_client import Counter, Gauge
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)

from tiered_kv.counters import StoreStats
from tiered_kv.plan import DISK, HBM, HOST, MISS_REASONS, TIERS

Numbers = dict[str, dict[str, float]]
"""metric -> label values joined by ">", "" where it has no labels -> number."""

_JOINT = ">"
_WAYS = (f"{HBM}>{HOST}", f"{HOST}>{DISK}", f"{DISK}>{HOST}", f"{HOST}>{HBM}")
_BELOW = tuple(tier for tier in TIERS if tier != HBM)  # HBM is vLLM's own


class Metric(NamedTuple):
    """One metric.

    Attributes:
        labels: names of its labels.
        seen: label values that are exported from the start, so that a rate can be taken at once.
    """

    what: str
    labels: tuple[str, ...] = ()
    seen: tuple[str, ...] = ("",)


COUNTERS = {
    "hit_pages": Metric("Pages loaded, by the tier they came from.", ("tier",), _BELOW),
    "missed_pages": Metric("Pages looked up and not loaded.", ("reason",), MISS_REASONS),
    "put_pages": Metric("Pages given to the store, those it had already among them."),
    "not_stored_pages": Metric("Of those, pages that found no room on the host."),
    "corrupt_pages": Metric("Pages whose checksum was wrong; each is a miss."),
    "moved_bytes": Metric("Bytes moved between tiers, all ranks.", ("source", "target"), _WAYS),
    "failed_writes": Metric("Pages whose write to disk failed, all ranks."),
}
GAUGES = {
    "resident_pages": Metric("Pages in a tier now.", ("tier",), _BELOW),
    "used_bytes": Metric("Bytes a tier of a rank holds now.", ("tier", "rank"), ()),
    "capacity_bytes": Metric("Bytes a tier of a rank may hold.", ("tier", "rank"), ()),
}


@dataclass
class TieredKVStats(KVConnectorStats):
    """What has happened since the last report."""

    data: dict[str, Any] = field(default_factory=dict)  # as `Numbers`

    def __post_init__(self) -> None:
        """Take a copy: vLLM's loggers share what they were given, and `aggregate` adds in place."""
        self.data = {name: dict(by_label) for name, by_label in self.data.items()}

    @classmethod
    def counting(cls, rank: int = 0) -> Counting:
        """What turns running totals of one side into reports; `rank` is the worker's."""
        return Counting(rank)

    @classmethod
    def of(cls, delta: Mapping[str, Mapping[str, float] | float]) -> TieredKVStats:
        """From metric -> number, or metric -> label -> number; zeros of counters are left out.

        A label of two parts, as of `moved_bytes`, is written "disk>host".

        Raises:
            ValueError: no such metric, or labels that are not its own.
        """
        data: Numbers = {}
        for name, numbers in delta.items():
            by_label = dict(numbers) if isinstance(numbers, Mapping) else {"": numbers}
            _check(name, by_label)
            kept = {label: _plain(n) for label, n in by_label.items() if n or name in GAUGES}
            if kept:
                data[name] = kept
        return cls(data)

    def reset(self) -> None:
        """Forget everything."""
        self.data = {}

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        """Take in what another rank, or a later report, says; returns itself."""
        for name, by_label in other.data.items():
            own = self.data.setdefault(name, {})
            for label, number in by_label.items():
                own[label] = number if name in GAUGES else own.get(label, 0) + number
        return self

    def reduce(self) -> dict[str, int | float]:
        """For vLLM's log line: metric or metric{label} -> number."""
        return {
            f"{name}{{{label}}}" if label else name: number
            for name, by_label in self.data.items()
            for label, number in by_label.items()
        }

    def is_empty(self) -> bool:
        """Whether there is nothing to report."""
        return not self.data


class Counting:
    """Running totals in, reports of what is new out. Not locked: its side alone uses it."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._told: Numbers = {}

    def since_last(
        self, stats: StoreStats, usage: Mapping[str, tuple[int, int]]
    ) -> TieredKVStats | None:
        """The counters that rose and the gauges that changed since the last call, None if none did.

        Args:
            stats: with `resident_pages` of the side that decides, else of one that moves.
            usage: tier -> (used, capacity) bytes on this rank.
        """
        totals = _totals(stats)
        for at, name in enumerate(("used_bytes", "capacity_bytes")):
            totals[name] = {f"{tier}{_JOINT}{self._rank}": n[at] for tier, n in usage.items()}
        report: Numbers = {}
        for name, by_label in totals.items():
            told = self._told.get(name, {})
            report[name] = {
                label: number if name in GAUGES else number - told.get(label, 0)
                for label, number in by_label.items()
                if number != told.get(label, None if name in GAUGES else 0)
            }
        self._told = totals
        delta = TieredKVStats.of(report)
        return None if delta.is_empty() else delta


class TieredKVPromMetrics(KVConnectorPromMetrics):
    """The metrics in vLLM's Prometheus registry."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._metrics: dict[str, Any] = {}
        for name, metric in COUNTERS.items():
            self._register(name, metric, metric_types[Counter])
        for name, metric in GAUGES.items():
            self._register(name, metric, metric_types[Gauge], multiprocess_mode="mostrecent")

    def _register(self, name: str, metric: Metric, of_type: Any, **options: Any) -> None:
        self._metrics[name] = of_type(
            name=f"vllm:tiered_kv_{name}",
            documentation=metric.what,
            labelnames=[*self._labelnames, *metric.labels],
            **options,
        )
        for engine in self.per_engine_labelvalues:
            for label in metric.seen:
                self._child(name, label, engine)

    def _child(self, name: str, label: str, engine_idx: int) -> Any:
        own = label.split(_JOINT) if label else []
        return self._metrics[name].labels(*self.per_engine_labelvalues[engine_idx], *own)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Record one report of an engine."""
        for name, by_label in transfer_stats_data.items():
            for label, number in by_label.items():
                child = self._child(name, label, engine_idx)
                if name in GAUGES:
                    child.set(number)
                else:
                    child.inc(number)


def build_stats(data: dict[str, Any] | None = None) -> TieredKVStats:
    """What `build_kv_connector_stats` returns: a report as it came over a process border."""
    return TieredKVStats(data or {})


def build_prom_metrics(
    vllm_config: VllmConfig,
    metric_types: dict[Any, Any],
    labelnames: list[str],
    per_engine_labelvalues: dict[int, list[object]],
) -> TieredKVPromMetrics:
    """What `build_prom_metrics` of the connector returns."""
    return TieredKVPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)


def _plain(number: float) -> float:
    """An int or float itself: one that vLLM cannot encode would end its output thread."""
    return int(number) if isinstance(number, Integral) else float(number)


def _check(name: str, by_label: Mapping[str, float]) -> None:
    metric = COUNTERS.get(name) or GAUGES.get(name)
    if metric is None:
        raise ValueError(f"no metric {name!r}: there are {', '.join((*COUNTERS, *GAUGES))}")
    for label in by_label:
        if (len(label.split(_JOINT)) if label else 0) != len(metric.labels):
            raise ValueError(f"{name}: label {label!r} must be {_JOINT.join(metric.labels)!r}")


def _totals(stats: StoreStats) -> Numbers:
    read, written = stats.bytes_read, stats.bytes_written
    totals: Numbers = {
        "moved_bytes": {
            f"{HBM}{_JOINT}{HOST}": read[HBM],
            f"{HOST}{_JOINT}{HBM}": written[HBM],
            f"{DISK}{_JOINT}{HOST}": read[DISK],
            f"{HOST}{_JOINT}{DISK}": written[DISK],
        },
        "failed_writes": {"": stats.failed_writes},
    }
    if stats.resident_pages:  # of the side that decides; a rank's own count would be the second
        totals |= {
            "hit_pages": {tier: stats.hit_pages[tier] for tier in _BELOW},
            "missed_pages": dict(stats.why_miss),
            "put_pages": {"": stats.put_pages},
            "not_stored_pages": {"": stats.not_stored_pages},
            "corrupt_pages": {"": stats.checksums_failed},
            "resident_pages": dict(stats.resident_pages),
        }
    return totals
