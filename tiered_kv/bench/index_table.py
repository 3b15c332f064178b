"""`bench index` as people read it: a line a metric, a column a size."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table

_METRICS = (
    ("keys_tokens_per_s", "keys, tokens/s (list of ids)"),
    ("keys_array_tokens_per_s", "keys, tokens/s (int32 array)"),
    ("match_pages_per_s", "match, pages/s"),
    ("plan_get_s", "plan a get from host, ms"),
    ("plan_get_full_s", "  with HBM full, ms"),
    ("plan_get_disk_s", "  from disk, host full too, ms"),
    ("evict_p50_us", "evict one page, us: p50"),
    ("evict_p99_us", "  p99"),
    ("evict_batch_p50_us", "evict many at once, us a page: p50"),
    ("evict_batch_p99_us", "  p99"),
    ("rss_bytes_per_page", "memory, bytes a page"),
    ("reopen_s", "reopen, s"),
    ("scan_s", "bare scan of its LMDB, s"),
    ("reopen_ratio", "reopen / scan"),
    ("reopen_cpu_ratio", "  by CPU time"),
)


def index_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """Medians with n; growth is judged from the smallest size to the largest."""
    table = Table(box=None, pad_edge=False)
    gets = [f"{edge(row['get_pages'] for row in rows):,}" for edge in (min, max)]
    table.add_column(f"gets of {'..'.join(dict.fromkeys(gets))} pages")
    for row in rows:
        table.add_column(f"{row['pages']:,} pages", justify="right")
    table.add_column("n", justify="right")
    table.add_column("growth")
    growth = rows[-1].get("growth") or {}
    for metric, text in _METRICS:
        counts = [(row.get("n") or {}).get(metric, 1) for row in rows]
        n = f"{min(counts)}" if len(set(counts)) == 1 else f"{min(counts)}..{max(counts)}"
        cells = [_text(metric, row.get(metric)) for row in rows]
        table.add_row(text, *cells, n, growth.get(metric, ""))
    return table


def _text(metric: str, value: float | None) -> str:
    if value is None:
        return "-"
    if metric.startswith("plan_get"):
        value *= 1e3
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"
