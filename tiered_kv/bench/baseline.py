"""A report kept to compare later ones with, and what has become worse since."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tiered_kv.bench.report import BenchReport, row_id

MORE_IS_BETTER = (
    "bytes_per_s",
    "ratio",
    "keys_tokens_per_s",
    "match_pages_per_s",
)
LESS_IS_BETTER = (
    "p50_s",
    "cpu_s_per_gb",
    "s_per_page",
    "plan_get_s",
    "evict_p99_us",
    "rss_bytes_per_page",
    "reopen_ratio",
    "break_even_tokens",
)
"""What is compared. The limit is the machine's; p95 and p99 of one run are too noisy to gate on,
but for evictions, which are timed a thousand times in CPU time."""

_NEVER = "break_even_tokens"  # null: at no length

_SAME_MACHINE = ("cpu", "cores", "gpu", "disk", "kernel", "python", "torch")
_ANY_SETTINGS = (
    "directory",
    "rates",
    "paths",
    "pages",
    "page_bytes",
)  # what they say, the rows say too


@dataclass(frozen=True, slots=True)
class Regression:
    """One figure that is worse than it was by more than the tolerance."""

    row: str
    metric: str
    was: float
    now: float
    ratio: float

    def __str__(self) -> str:
        return (
            f"{self.row}: {self.metric} was {self.was:.4g}, is {self.now:.4g} (x {self.ratio:.2f})"
        )


@dataclass(frozen=True, slots=True)
class Comparison:
    """A report against a baseline.

    Attributes:
        compared: figures that both have.
        notes: what makes the two hard to compare, in sentences.
    """

    regressions: list[Regression]
    compared: int
    notes: list[str]


def save(report: BenchReport, path: Path) -> None:
    """Keep a report as a baseline. Raises ConfigError if the file cannot be written."""
    report.write(path)


def compare(report: BenchReport, baseline: BenchReport, tolerance: float) -> Comparison:
    """Every figure of `report` that is worse than in `baseline` by more than the tolerance.

    Args:
        tolerance: 0.1 allows a rate 10 % lower, a time 10 % longer.
    """
    now = {row_id(row): row for row in report.rows}
    was = {row_id(row): row for row in baseline.rows}
    regressions, compared = [], 0
    for name in (now.keys() & was.keys()) - {name for name in now if _is_limit(now[name])}:
        for metric in (*MORE_IS_BETTER, *LESS_IS_BETTER):
            before, after = _number(was[name], metric), _number(now[name], metric)
            if before is None or after is None or not 0 < before < math.inf:
                continue
            compared += 1
            if _is_worse(metric, before, after, tolerance):
                regressions.append(Regression(name, metric, before, after, after / before))
    order = {name: at for at, name in enumerate(now)}
    regressions.sort(key=lambda one: order[one.row])
    return Comparison(regressions, compared, _notes(report, baseline, list(now), list(was)))


def _is_limit(row: Mapping[str, Any]) -> bool:
    """Whether a row is of the machine alone."""
    return row.get("path") == "memcpy-large"


def _number(row: Mapping[str, Any], metric: str) -> float | None:
    value = row.get(metric)
    if metric == _NEVER and metric in row and value is None:
        return math.inf
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None


def _is_worse(metric: str, before: float, after: float, tolerance: float) -> bool:
    if metric in MORE_IS_BETTER:
        return after < before * (1 - tolerance)
    return after > before * (1 + tolerance)


def _notes(report: BenchReport, baseline: BenchReport, now: list[str], was: list[str]) -> list[str]:
    notes = [
        f"the baseline is from another machine: {name} was {baseline.machine.get(name)!r}, is "
        f"{report.machine.get(name)!r}"
        for name in _SAME_MACHINE
        if baseline.machine.get(name) != report.machine.get(name)
    ]
    names = sorted((baseline.settings.keys() | report.settings.keys()) - {*_ANY_SETTINGS})
    notes += [
        f"the baseline has other settings: {name} was {baseline.settings.get(name)!r}, is "
        f"{report.settings.get(name)!r}"
        for name in names
        if baseline.settings.get(name) != report.settings.get(name)
    ]
    notes += [f"not in this run: {name}" for name in was if name not in now]
    notes += [f"not in the baseline: {name}" for name in now if name not in was]
    return notes
