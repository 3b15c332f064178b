"""`bench break-even`: from how many tokens on a load beats computing them again.

Loading k pages from a tier takes `load_latency_s + k * load_s_per_page`, both measured: the rate is
that of `bench tiers` at this page size, the latency what a single transfer takes beyond it.
Computing them takes `k * compute_s_per_page`, by one prefill rate for all lengths. Long prompts
compute slower than that a token, for attention grows with the square of the length; so what is said
here of them is on the safe side: loading pays at least from there on.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeGuard

from tiered_kv.bench.report import BenchReport, finished, machine
from tiered_kv.bench.settings import (
    BreakEvenSettings,
    MovingSettings,
    PathName,
    Show,
    TiersSettings,
)
from tiered_kv.errors import ConfigError
from tiered_kv.layout import KVLayout
from tiered_kv.plan import DISK, HBM, HOST

_PATHS: dict[str, tuple[PathName, ...]] = {HOST: ("host-get",), DISK: ("disk-get-hbm",)}
_PAGE_STEP = 256  # bytes: `bench tiers` measures multiples of this

_STEPS, _PREFILL_STEPS = 1000, 300  # of the progress that is shown
_LEAST_SPREAD = 1.01  # page sizes nearer than this to a measured one count as measured


@dataclass(frozen=True, slots=True)
class LoadCost:
    """What loading from one tier costs.

    Attributes:
        s_per_page: seconds a page, of many.
        latency_s: seconds before the first of them.
    """

    s_per_page: float
    latency_s: float


def break_even_pages(load: LoadCost, compute_s_per_page: float) -> int | None:
    """The fewest pages that load in less time than they compute; None if no number does."""
    saved_s = compute_s_per_page - load.s_per_page
    if saved_s <= 0:
        return None
    return max(1, math.floor(load.latency_s / saved_s) + 1)


def measure(settings: BreakEvenSettings, show: Show) -> BenchReport:
    """Take or measure both rates and compare them; blocks, and leaves no files.

    Raises:
        ConfigError: no model layout, no prefill rate and none that could be measured, or a file of
            rates without any.
    """
    from tiered_kv.bench import prefill

    settings = settings.in_effect()
    layout, loaded = prefill.layout_and_model(settings)
    known = None if settings.rates is None else _rates(settings.rates)
    notes: list[str] = []
    tokens_per_s = settings.prefill_tokens_per_s
    samples: dict[str, list[float]] = {}
    if loaded is not None:
        show(0, _STEPS, "prefill")
        samples["prefill_tokens_per_s"] = prefill.tokens_per_s(loaded, settings, notes)
        tokens_per_s = _median(samples["prefill_tokens_per_s"])
    assert tokens_per_s is not None, "layout_and_model sees to it that there is one"
    if known is None:
        known = _tiers_now(settings, layout, show)
    facts = machine() if settings.rates else known.machine
    if any(known.machine.get(name) != facts.get(name) for name in ("cpu", "gpu")):
        notes.append(f"{settings.rates}: was measured on another machine than this")
    costs = _costs(known, layout.page_bytes, settings.rates, notes)
    rows = _rows(layout, settings, tokens_per_s, costs)
    notes = [*_settings_lines(rows[0]), *notes, *_doubts(rows, settings)]
    report = BenchReport(
        "break-even",
        facts,
        settings.told(),
        rows,
        notes=notes,
        samples=samples,
        checksum=known.checksum if settings.rates is None else {"verified": 0, "failed": 0},
        failures=_failures(known, settings.rates),
    )
    return finished(report)


def _rates(path: Path) -> BenchReport:
    try:
        return BenchReport.from_json(path, "tiers")
    except ConfigError as error:
        raise ConfigError(f"--rates {error}") from error


def _failures(known: BenchReport, source: Path | None) -> list[str]:
    """What was wrong where the rates were measured: now, or when their file was made."""
    if source is None:
        return known.failures
    wrong = known.checksum["failed"]
    bad = [f"{wrong} pages were wrong"] if wrong else []
    return [f"--rates {source}: {one}" for one in [*bad, *known.failures]]


def _median(samples: Sequence[float]) -> float:
    from tiered_kv.bench.statistics import median

    return median(samples)


# -- what a load costs ---------------------------------------------------------------------------


def _tiers_now(settings: BreakEvenSettings, layout: KVLayout, show: Show) -> BenchReport:
    from tiered_kv.bench import tiers

    page_bytes = -(-layout.page_bytes // _PAGE_STEP) * _PAGE_STEP
    shared = set(MovingSettings.model_fields)  # `bench tiers` has them too
    asked = {name: getattr(settings, name) for name in settings.model_fields_set & shared}
    asked["page_bytes"] = (page_bytes,)
    asked["paths"] = tuple(path for paths in _PATHS.values() for path in paths)

    def show_rest(done: int, total: int, text: str) -> None:
        show(_PREFILL_STEPS + (_STEPS - _PREFILL_STEPS) * done // max(1, total), _STEPS, text)

    return tiers.measure(TiersSettings.model_validate(asked), show_rest)


def _costs(
    known: BenchReport, page_bytes: int, source: Path | None, notes: list[str]
) -> dict[str, LoadCost]:
    found = {}
    for tier, paths in _PATHS.items():
        rows = [row for row in known.rows if row.get("path") in paths and _is_sound(row)]
        if rows:
            found[tier] = load_cost(rows, page_bytes)
            _note_size(tier, rows, page_bytes, notes)
        else:
            notes.append(f"{tier}: no rate was measured, so nothing is said of it")
    if not found:
        wanted = ",".join(path for paths in _PATHS.values() for path in paths)
        raise ConfigError(
            f"--rates {source}: has no load rates; make it with `tiered-kv bench tiers --json "
            f"--paths {wanted}`"
        )
    return found


def _is_sound(row: Mapping[str, Any]) -> bool:
    return _is_positive(row.get("bytes_per_s")) and _is_positive(row.get("page_bytes"))


def _is_positive(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float) and 0 < value < math.inf


def load_cost(rows: Iterable[Mapping[str, Any]], page_bytes: int) -> LoadCost:
    """What a page of this size costs, from rows of one path at several page sizes.

    Between two sizes the rate is interpolated along the logarithm of the size; beyond the smallest
    and the largest it is theirs. Where a size was measured in fresh and in used space, used counts.
    The latency is the smallest size's: p50 of a single transfer less what its bytes take.
    """
    by_size: dict[int, Mapping[str, Any]] = {}
    for row in rows:
        if row["page_bytes"] not in by_size or row.get("space") == "steady":
            by_size[row["page_bytes"]] = row
    sizes = sorted(by_size)
    rates = [float(by_size[size]["bytes_per_s"]) for size in sizes]
    smallest = by_size[sizes[0]]
    single_s, single_bytes = smallest.get("p50_s"), smallest.get("latency_bytes")
    latency_s = 0.0
    if _is_positive(single_s) and _is_positive(single_bytes):
        latency_s = max(0.0, single_s - single_bytes / rates[0])
    return LoadCost(page_bytes / _rate_at(sizes, rates, page_bytes), latency_s)


def _rate_at(sizes: Sequence[int], rates: Sequence[float], page_bytes: int) -> float:
    if page_bytes <= sizes[0]:
        return rates[0]
    for (below, low), (above, high) in pairwise(zip(sizes, rates, strict=True)):
        if page_bytes <= above:
            share = math.log(page_bytes / below) / math.log(above / below)
            return low + share * (high - low)
    return rates[-1]


def _note_size(
    tier: str, rows: Sequence[Mapping[str, Any]], page_bytes: int, notes: list[str]
) -> None:
    low, high = (edge(row["page_bytes"] for row in rows) for edge in (min, max))
    if not low / _LEAST_SPREAD <= page_bytes <= high * _LEAST_SPREAD:
        notes.append(
            f"{tier}: pages of {page_bytes:,} bytes were not measured, the rate is that of "
            f"{low if page_bytes < low else high:,} bytes"
        )


# -- what it means -------------------------------------------------------------------------------


def _rows(
    layout: KVLayout,
    settings: BreakEvenSettings,
    tokens_per_s: float,
    costs: Mapping[str, LoadCost],
) -> list[dict[str, Any]]:
    compute_s = layout.page_tokens / tokens_per_s
    costs = {HBM: LoadCost(0.0, 0.0), **costs}
    pages = {tier: break_even_pages(cost, compute_s) for tier, cost in costs.items()}
    tokens = {tier: n and n * layout.page_tokens for tier, n in pages.items()} | {HBM: 0}
    paying = [n for tier, n in tokens.items() if n is not None and tier != HBM]
    return [
        {
            "tier": tier,
            "model": settings.model,
            "page_tokens": layout.page_tokens,
            "page_bytes": layout.page_bytes,
            "load_s_per_page": cost.s_per_page,
            "load_latency_s": cost.latency_s,
            "compute_s_per_page": compute_s,
            "break_even_tokens": tokens[tier],
            "prefill_tokens_per_s": tokens_per_s,
            "min_load_tokens": min(paying, default=None),
        }
        for tier, cost in costs.items()
    ]


def _settings_lines(row: Mapping[str, Any]) -> list[str]:
    """The store's own settings, as its file and `StoreConfig` take them."""
    lines = [f"prefill_tokens_per_s = {row['prefill_tokens_per_s']:.6g}"]
    if row["min_load_tokens"] is not None:
        lines.append(f"min_load_tokens = {row['min_load_tokens']}")
    return [f"set in the store: {line}" for line in lines]


def _doubts(rows: Sequence[Mapping[str, Any]], settings: BreakEvenSettings) -> list[str]:
    notes = [
        "with prefill_tokens_per_s the store measures itself what a page costs from each tier, and "
        "leaves out pages that would load slower than they compute; min_load_tokens is for the "
        "latency, which that does not know, and counts for every tier: it is the smallest here",
        "prefill is taken as equally fast at every length, and a load as alone on the machine",
    ]
    never = [row["tier"] for row in rows if row["break_even_tokens"] is None]
    if never:
        notes.append(f"{' and '.join(never)}: loading is slower than computing at any length")
    if settings.smoke:
        notes.append("--smoke: sizes too small to say how fast anything is")
    return notes
