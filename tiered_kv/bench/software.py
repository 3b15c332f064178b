"""What the store's own work costs a page, where copying costs next to nothing."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from tiered_kv.bench.content import (
    LAYERS,
    Conversation,
    Load,
    Pages,
    get_all,
    open_store,
    page_layout,
    put_all,
    wait_all,
)
from tiered_kv.bench.report import sample_name
from tiered_kv.bench.statistics import ci95, median
from tiered_kv.config import StoreConfig
from tiered_kv.store import TieredStore

PAGE_BYTES = LAYERS * 64
BATCHES = (1, 16, 64, 256)
_WARM_UP = 3


def software(
    repeats: int, device: str, tick: Callable[[], None], batches: Sequence[int] = BATCHES
) -> tuple[list[dict[str, Any]], dict[str, list[float]], list[Pages]]:
    """Rows of put and get of pages of 2 KiB in batches, their samples, and the pages compared."""
    rows: list[dict[str, Any]] = []
    samples: dict[str, list[float]] = {}
    compared = []
    for batch in batches:
        taken, pages = _of_batch(batch, repeats, device)
        compared.append(pages)
        for path, times in taken.items():
            row, kept = _row(path, batch, times)
            rows.append(row)
            samples |= kept
        tick()
    return rows, samples, compared


def _of_batch(
    batch: int, repeats: int, device: str
) -> tuple[dict[str, list[tuple[float, float]]], Pages]:
    config = StoreConfig.parse(hbm=2 * batch * PAGE_BYTES, host=4 * batch * 4096, device=device)
    taken: dict[str, list[tuple[float, float]]] = {"software-put": [], "software-get": []}
    with open_store(page_layout(PAGE_BYTES), config) as store:
        pages = Pages(store)
        pages.fill()
        for repeat in range(repeats + _WARM_UP):
            pages.own()
            made = pages.make(Load(1, batch))
            put = _taken(partial(_put, store, made))
            pages.own()
            into = pages.slots_for(made)
            get = _taken(partial(_get, store, made, into))
            pages.compare(made, into, get[2])
            if repeat >= _WARM_UP:
                taken["software-put"].append(put[:2])
                taken["software-get"].append(get[:2])
    return taken, pages


def _put(store: TieredStore, made: list[Conversation]) -> list[int]:
    return wait_all(put_all(store, made))


def _get(store: TieredStore, made: list[Conversation], into: list[list[int]]) -> list[int]:
    return wait_all(get_all(store, made, into))


def _taken(run: Callable[[], list[int]]) -> tuple[float, float, list[int]]:
    cpu, wall = time.process_time(), time.perf_counter()
    came = run()
    return time.perf_counter() - wall, time.process_time() - cpu, came


def _row(
    path: str, batch: int, times: Sequence[tuple[float, float]]
) -> tuple[dict[str, Any], dict[str, list[float]]]:
    walls, cpus = ([one[at] / batch for one in times] for at in (0, 1))
    interval = ci95(walls)
    wall = median(walls)
    row = {
        "path": path,
        "page_bytes": PAGE_BYTES,
        "space": None,
        "batch": batch,
        "s_per_page": wall,
        "s_per_page_ci95": interval and list(interval),
        "cpu_s_per_page": median(cpus),
        "bytes_per_s": PAGE_BYTES / wall,
        "limit": None,
        "limit_bytes_per_s": None,
        "ratio": None,
        "ci95": None,
        "n": len(times),
        "p50_s": wall * batch,
        "p95_s": None,
        "p99_s": None,
        "cpu_s_per_gb": median(cpus) / PAGE_BYTES * 1e9,
        "cold": False,
    }
    kept = {sample_name(row, "s_per_page"): walls, sample_name(row, "cpu_s_per_page"): cpus}
    return row, kept
