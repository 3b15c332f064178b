"""`bench index`: what deciding costs with 10 k, 100 k and 1 M pages known, and how that grows.

Times of keys, match, plans and evictions are CPU time of the one thread that decides: nothing in it
waits, so on an idle core they are the wall's, and on a shared machine not the neighbours'. Scans
and openings are timed by the wall, in turn.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tiered_kv.bench.deciding import EVICT_BATCH, Load, Samples, measure_apart
from tiered_kv.bench.report import BenchReport, finished, machine, sample_name
from tiered_kv.bench.settings import IndexSettings, Show
from tiered_kv.bench.statistics import ci95, median, p99_or_none, percentile, ratio_ci95
from tiered_kv.bench.workspace import available_memory_bytes, workspace
from tiered_kv.errors import ConfigError

GET_PAGES = 1000
LEAST_PAGES = 256
_REOPEN_S = 40.0  # a size, at most: 1 M pages took 17 s an opening (2 x 2.8 GHz Xeon, 2026-11)
_STEPS = 4  # of one size
DISK_BYTES_A_PAGE = 200  # its entry in the tree, 142, and what commits leave free there
_RAM_BYTES_A_PAGE = 800


class _Scale(NamedTuple):
    key_tokens: int
    repeats: int
    evictions: int
    match_calls: int


def measure(settings: IndexSettings, show: Show) -> BenchReport:
    """Measure every size; blocks, and leaves no files.

    Raises:
        ConfigError: a size that is too small or given twice, a directory that cannot be used.
        TieredKVError: the process that measures the deciding side failed.
    """
    settings = settings.in_effect()
    sizes = _sizes(settings)
    scale = _Scale(1 << 20, settings.repeats, 1000, 50)
    if settings.smoke:
        scale = _Scale(1 << 14, settings.repeats, 299, 2)
    rows: list[dict[str, Any]] = []
    samples: Samples = {}
    needed_bytes = (1 << 20) + sizes[-1] * DISK_BYTES_A_PAGE
    with workspace(settings.directory, needed_bytes, less="fewer --pages") as folder:
        facts = machine(folder)
        for at, pages in enumerate(sizes):
            steps = _Steps(show, at * _STEPS, len(sizes) * _STEPS, pages)
            found = _measured(settings, pages, scale, steps, folder / str(pages))
            rows.append(row := _row(pages, settings, found))
            samples |= {sample_name(row, name): taken for name, taken in found.items()}
    for row in rows[1:]:
        row["growth"] = _growth([one for one in rows if one["pages"] <= row["pages"]])
    notes = _notes(settings, rows)
    show(len(sizes) * _STEPS, len(sizes) * _STEPS, "done")
    return finished(
        BenchReport("index", facts, settings.told(), rows, notes=notes, samples=samples)
    )


def _sizes(settings: IndexSettings) -> list[int]:
    sizes = list(settings.pages)
    if min(sizes) < LEAST_PAGES:
        raise ConfigError(
            f"pages={min(sizes)}: give {LEAST_PAGES} or more, so that every tier holds some"
        )
    ram_bytes = available_memory_bytes()
    if ram_bytes is not None and max(sizes) * _RAM_BYTES_A_PAGE > ram_bytes:
        raise ConfigError(
            f"pages={max(sizes)}: takes {_RAM_BYTES_A_PAGE} bytes of memory a page while it is "
            f"made and measured; there is room for {ram_bytes // _RAM_BYTES_A_PAGE}"
        )
    if len(set(sizes)) < len(sizes):
        raise ConfigError(f"pages={','.join(map(str, sizes))}: a size is given twice")
    return sorted(sizes)


class _Steps:
    """Says how far one size has come."""

    def __init__(self, show: Show, done: int, total: int, pages: int) -> None:
        self._show, self._done, self._total, self._pages = show, done, total, pages

    def begin(self, text: str) -> None:
        """One more step begins."""
        self._show(self._done, self._total, f"{self._pages:,} pages: {text}")
        self._done += 1


def _measured(
    settings: IndexSettings, pages: int, scale: _Scale, steps: _Steps, folder: Path
) -> Samples:
    from tiered_kv.bench import reopening  # torch

    long_pages = min(GET_PAGES, pages // 8)
    load = Load(
        pages=pages,
        long_pages=long_pages,
        page_tokens=settings.page_tokens,
        key_tokens=max(scale.key_tokens, settings.page_tokens),
        repeats=scale.repeats,
        evictions=scale.evictions,
    )
    steps.begin("keys, plans, evictions, memory")
    found = measure_apart(load)
    steps.begin("making a store directory")
    try:
        directory = reopening.make_directory(folder, pages, long_pages, settings.page_tokens)
        steps.begin("scanning and reopening it")
        reopened = reopening.reopen(directory, scale.repeats, _REOPEN_S)
        steps.begin("match")
        with directory.open_store() as store:
            taken_s = reopening.match_s(store, directory.long, scale.repeats, scale.match_calls)
        found["match_s"] = taken_s
    finally:
        shutil.rmtree(folder, ignore_errors=True)  # the next size needs the room
    found["keys_s"] = [taken / load.key_tokens for taken in found["keys_s"]]
    found["keys_array_s"] = [taken / load.key_tokens for taken in found["keys_array_s"]]
    found |= {name: list(getattr(reopened, name)) for name in reopened.__slots__}
    return found


# -- rows ----------------------------------------------------------------------------------------

_RATES = {  # of samples that are seconds a unit
    "keys_tokens_per_s": "keys_s",
    "keys_array_tokens_per_s": "keys_array_s",
    "match_pages_per_s": "match_s",
}
_TIMES = ("plan_get_s", "plan_get_full_s", "plan_get_disk_s", "reopen_s", "scan_s")
_EVICTIONS = {"evict": "evict_s", "evict_batch": "evict_batch_s"}


def _row(pages: int, settings: IndexSettings, found: Samples) -> dict[str, Any]:
    """One size; `n` and `ci95` are by metric."""
    row: dict[str, Any] = {
        "pages": pages,
        "page_tokens": settings.page_tokens,
        "get_pages": min(GET_PAGES, pages // 8),
        "evict_batch_pages": min(EVICT_BATCH, GET_PAGES, pages // 8),
    }
    n: dict[str, int] = {}
    intervals: dict[str, Sequence[float] | None] = {}

    def note(metric: str, value: float | None, taken: Sequence[float]) -> None:
        row[metric], n[metric], intervals[metric] = value, len(taken), ci95(taken)

    for metric, name in _RATES.items():
        rates = [1 / seconds for seconds in found[name]]
        note(metric, median(rates), rates)
    for metric in _TIMES:
        note(metric, median(found[metric]), found[metric])
    for metric, name in _EVICTIONS.items():
        taken = [seconds * 1e6 for seconds in found[name]]
        note(f"{metric}_p50_us", percentile(taken, 50), taken)
        row[f"{metric}_p99_us"], n[f"{metric}_p99_us"] = p99_or_none(taken), len(taken)
    row["rss_bytes_per_page"] = found["rss_bytes_per_page"][0]
    for metric, ours, limit in (
        ("reopen_ratio", "reopen_s", "scan_s"),
        ("reopen_cpu_ratio", "reopen_cpu_s", "scan_cpu_s"),
    ):
        ratio = ratio_ci95(found[ours], found[limit])
        row[metric], n[metric], intervals[metric] = ratio.value, len(found[ours]), ratio.ci95
    return {**row, "n": n, "ci95": intervals, "growth": None}


COSTS: dict[str, Callable[[Mapping[str, Any]], float]] = {
    "keys_tokens_per_s": lambda row: 1 / row["keys_tokens_per_s"],
    "match_pages_per_s": lambda row: 1 / row["match_pages_per_s"],
    "plan_get_s": lambda row: row["plan_get_s"],
    "plan_get_full_s": lambda row: row["plan_get_full_s"],
    "plan_get_disk_s": lambda row: row["plan_get_disk_s"],
    "evict_p50_us": lambda row: row["evict_p50_us"],
    "evict_p99_us": lambda row: row["evict_p99_us"],
    "rss_bytes_per_page": lambda row: row["rss_bytes_per_page"],
    "reopen_s": lambda row: row["reopen_s"],
    "scan_s": lambda row: row["scan_s"],
}
"""What is judged of growth: the cost of one get, eviction, page or opening."""


def _growth(rows: Sequence[Mapping[str, Any]]) -> dict[str, str] | None:
    sizes = [row["pages"] for row in rows]
    per_get = [row["get_pages"] for row in rows]
    found = {}
    for metric, cost in COSTS.items():
        costs = [cost(row) for row in rows]
        if metric.startswith("plan_get"):  # small sizes have no room for a get of 1,000
            costs = [each / n for each, n in zip(costs, per_get, strict=True)]
        found[metric] = growth(sizes, costs)
    return found


def growth(sizes: Sequence[int], costs: Sequence[float]) -> str:
    """Whether costs grow like a constant ("flat"), the logarithm of sizes ("log") or the sizes.

    The nearest of the three by least squares of the logarithms, the factor being free.
    """
    shapes: dict[str, Callable[[float], float]] = {
        "flat": lambda n: 1.0,
        "log": math.log,
        "linear": float,
    }

    def misfit(shape: str) -> float:
        off = [
            math.log(cost / shapes[shape](size)) for size, cost in zip(sizes, costs, strict=True)
        ]
        mean = sum(off) / len(off)
        return sum((one - mean) ** 2 for one in off)

    return min(shapes, key=misfit)


def _notes(settings: IndexSettings, rows: Sequence[Mapping[str, Any]]) -> list[str]:
    notes = [
        "keys, match, plans and evictions are in CPU time of the thread that decides; copies and "
        "I/O are in `bench tiers`",
        "plans are made for a full host above a full disk, half of the pages in conversations of "
        f"{rows[-1]['get_pages']:,}, half in conversations of 16; plan_get_full_s also gives up as "
        "many HBM pages, plan_get_disk_s moreover sends as many host pages to disk",
        "an eviction is one host slot made free; of a conversation that was never written the "
        f"first one plans to write all of it, ms for {rows[-1]['get_pages']:,} pages; the "
        "others find that done, and p50 and p99 are theirs",
        f"in evict_batch {rows[-1]['evict_batch_pages']} slots are made free at a time; per page",
        "rss_bytes_per_page: growth of a process's resident memory from an empty to a full index, "
        "keys and slots included, caches and what the disk tier keeps left out",
        "reopen_ratio: opening the store (DiskTier.open and Planner.adopt) over a bare cursor scan "
        "of its LMDB, in turn, both out of the page cache",
    ]
    few = min(min(row["n"][name] for name in ("plan_get_s", "reopen_s")) for row in rows)
    if few < 6:
        notes.append(f"some figures are medians of {few}: no 95 % interval below 6 samples")
    if settings.smoke:
        notes.append("--smoke: sizes too small to say how fast anything is")
    return notes
