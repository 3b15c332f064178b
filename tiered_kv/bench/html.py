"""A report as one HTML file: plots, every row, notes. It needs nothing else, not even a network."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from html import escape
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tiered_kv.bench.report import BenchReport, write_whole
from tiered_kv.errors import ConfigError

_COLOURS = ("#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e", "#8c564b", "#17becf", "#7f7f7f")
_LEAST_LATENCIES = 3
_CURVE_POINTS = 64

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 72rem; color: #222; }
h1, h2 { font-weight: 600; } table { border-collapse: collapse; font-size: 13px; }
th, td { padding: 2px 10px; text-align: right; border-bottom: 1px solid #ddd; white-space: nowrap; }
.scroll { overflow-x: auto; } .failure { color: #b00; } pre { white-space: pre-wrap; }
"""

Figure = Any
"""A plotly figure."""


def require() -> None:
    """Raise ConfigError if plotly is not installed: asked before anything is measured."""
    if find_spec("plotly") is None:
        raise ConfigError('--html needs plotly: pip install "tiered-kv[report]"')


def write(report: BenchReport, path: Path) -> None:
    """Write a report with its plots, replacing the file in one step.

    The file holds plotly's script, about 5 MB, and refers to nothing outside itself.

    Raises:
        ConfigError: plotly is not installed, or the file cannot be written.
    """
    require()
    write_whole(path, page(report))


def page(report: BenchReport) -> str:
    """The whole file as text."""
    title = f"tiered-kv bench {report.kind}"
    parts = [f"<h1>{title}</h1>", _machine(report.machine)]
    parts += [f'<p class="failure">FAILED: {escape(one)}</p>' for one in report.failures]
    to_html = import_module("plotly.io").to_html
    for at, (heading, figure) in enumerate(_FIGURES[report.kind](report)):
        drawn = to_html(figure, full_html=False, include_plotlyjs=at == 0, include_mathjax=False)
        parts.append(f"<h2>{escape(heading)}</h2>{drawn}")
    parts.append(f"<h2>All figures</h2>{_table(report.rows)}")
    checked = report.checksum
    parts.append(
        f"<p>{checked['verified']:,} pages read back and compared, {checked['failed']:,} wrong.</p>"
    )
    notes = "".join(f"<li>{escape(note)}</li>" for note in report.notes)
    parts.append(f"<h2>What the numbers do not show</h2><ul>{notes}</ul>")
    settings = escape(json.dumps(report.settings, indent=1))
    parts.append(f"<h2>Settings</h2><pre>{settings}</pre>")
    head = f'<meta charset="utf-8"><title>{title}</title><style>{_STYLE}</style>'
    body = "\n".join(parts)
    return f"<!doctype html>\n<html><head>{head}</head><body>\n{body}\n</body></html>\n"


# -- words ---------------------------------------------------------------------------------------


def _machine(machine: Mapping[str, Any]) -> str:
    facts = (f"<b>{escape(name)}</b> {escape(_text(value))}" for name, value in machine.items())
    return f"<p>{' &middot; '.join(facts)}</p>"


def _table(rows: Sequence[Mapping[str, Any]]) -> str:
    names = list(dict.fromkeys(name for row in rows for name in row))
    head = "".join(f"<th>{escape(name)}</th>" for name in names)
    body = "".join(
        f"<tr>{''.join(f'<td>{escape(_text(row.get(name)))}</td>' for name in names)}</tr>"
        for row in rows
    )
    return f'<div class="scroll"><table><tr>{head}</tr>{body}</table></div>'


def _text(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, Mapping):
        return ", ".join(f"{name}: {_text(one)}" for name, one in value.items())
    if isinstance(value, list | tuple):
        return "..".join(_text(one) for one in value)
    return f"{value:.5g}" if isinstance(value, float) else str(value)


# -- plots ---------------------------------------------------------------------------------------


def _figure(x: str, y: str, **layout: Any) -> Figure:
    figure = import_module("plotly.graph_objects").Figure()
    figure.update_layout(template="plotly_white", height=460, xaxis_title=x, yaxis_title=y)
    figure.update_layout(**layout)
    return figure


def _line(figure: Figure, x: Sequence[Any], y: Sequence[Any], name: str, **style: Any) -> None:
    scatter = import_module("plotly.graph_objects").Scatter
    figure.add_trace(scatter(x=list(x), y=list(y), name=name, mode="lines+markers", **style))


def _bars(edges: Sequence[Any], values: Sequence[float]) -> dict[str, Any]:
    """Error bars from 95 % intervals; none where there is no interval."""
    known = [edge or (value, value) for edge, value in zip(edges, values, strict=True)]
    return {
        "type": "data",
        "symmetric": False,
        "array": [high - value for (_, high), value in zip(known, values, strict=True)],
        "arrayminus": [value - low for (low, _), value in zip(known, values, strict=True)],
    }


def _size(n_bytes: int) -> str:
    from tiered_kv.bench.tables import size_text

    return size_text(int(n_bytes))


def _by_path(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[Mapping[str, Any]]]:
    """Rows that have a limit, by path and kind of space, smallest page first."""
    found: dict[str, list[Mapping[str, Any]]] = {}
    for row in sorted(rows, key=lambda row: row["page_bytes"]):
        if row.get("limit_bytes_per_s"):
            name = " ".join(filter(None, (row["path"], row.get("space"))))
            found.setdefault(name, []).append(row)
    return found


def _tiers(report: BenchReport) -> Iterator[tuple[str, Figure]]:
    paths = _by_path(report.rows)
    for tier in sorted({name.split("-")[0] for name in paths}):
        mine = {name: rows for name, rows in paths.items() if name.startswith(tier)}
        yield f"{tier}: rate by page size, and its limit (dashed)", _rates(mine)
    yield "Share of the limit, 95 % intervals", _ratios(paths)
    latencies = {
        name.removesuffix(" latency_s"): taken
        for name, taken in report.samples.items()
        if name.endswith(" latency_s") and len(taken) >= _LEAST_LATENCIES
    }
    if latencies:
        yield "Latency of a single transfer", _latencies(latencies)
    yield "Bytes moved by tier, in all samples", _bytes_moved(paths)


def _rates(paths: Mapping[str, Sequence[Mapping[str, Any]]]) -> Figure:
    figure = _figure("bytes a page", "GB/s", xaxis_type="category", yaxis_rangemode="tozero")
    for at, (name, rows) in enumerate(paths.items()):
        sizes, colour = [_size(row["page_bytes"]) for row in rows], _COLOURS[at % len(_COLOURS)]
        _line(figure, sizes, [row["bytes_per_s"] / 1e9 for row in rows], name, line_color=colour)
        limits = [row["limit_bytes_per_s"] / 1e9 for row in rows]
        dashed = {"color": colour, "dash": "dash"}
        _line(figure, sizes, limits, f"{name}: {rows[0]['limit']}", line=dashed, opacity=0.6)
    return figure


def _ratios(paths: Mapping[str, Sequence[Mapping[str, Any]]]) -> Figure:
    figure = _figure("bytes a page", "of the limit", xaxis_type="category")
    figure.update_yaxes(rangemode="tozero")
    for name, rows in paths.items():
        ratios = [row["ratio"] for row in rows]
        bars = _bars([row.get("ci95") for row in rows], ratios)
        _line(figure, [_size(row["page_bytes"]) for row in rows], ratios, name, error_y=bars)
    return figure


def _latencies(samples: Mapping[str, Sequence[float]]) -> Figure:
    box = import_module("plotly.graph_objects").Box
    figure = _figure("", "ms", yaxis_type="log", showlegend=False)
    for name, taken in samples.items():
        figure.add_trace(box(y=[one * 1e3 for one in taken], name=name, boxpoints=False))
    return figure


def _bytes_moved(paths: Mapping[str, Sequence[Mapping[str, Any]]]) -> Figure:
    bar = import_module("plotly.graph_objects").Bar
    figure = _figure("", "GB", barmode="stack")
    for name, rows in paths.items():
        moved = sum(_moved(row) for row in rows) / 1e9
        figure.add_trace(bar(x=[name.split("-")[0]], y=[moved], name=name))
    return figure


def _moved(row: Mapping[str, Any]) -> int:
    single = (row.get("latency_bytes") or 0) * (row.get("latency_n") or 0)
    return int((row.get("set_bytes") or 0) * row["n"] + single)


def _index(report: BenchReport) -> Iterator[tuple[str, Figure]]:
    from tiered_kv.bench.index import COSTS

    rows = sorted(report.rows, key=lambda row: row["pages"])
    pages = [row["pages"] for row in rows]
    grown = rows[-1].get("growth") or {}
    for metric in COSTS:
        values = [row[metric] for row in rows if row.get(metric) is not None]
        if len(values) < len(rows):
            continue
        edges = [(row.get("ci95") or {}).get(metric) for row in rows]
        figure = _figure("pages in the index", metric, xaxis_type="log", height=320)
        figure.update_yaxes(rangemode="tozero")
        _line(figure, pages, values, metric, error_y=_bars(edges, values))
        yield f"{metric}: {grown.get(metric, 'one size')}", figure
    evictions = {
        name: taken
        for name, taken in report.samples.items()
        if name.endswith((" evict_s", " evict_batch_s")) and len(taken) >= _LEAST_LATENCIES
    }
    if evictions:
        yield "Evictions", _latencies(evictions)


def _break_even(report: BenchReport) -> Iterator[tuple[str, Figure]]:
    found = [row["break_even_tokens"] or 0 for row in report.rows]
    page_tokens = report.rows[0]["page_tokens"]
    most = max(4 * max(found), 64 * page_tokens)
    tokens = [most * at // _CURVE_POINTS for at in range(1, _CURVE_POINTS + 1)]
    figure = _figure("tokens", "ms", yaxis_rangemode="tozero")
    compute_s = report.rows[0]["compute_s_per_page"] / page_tokens
    _line(figure, tokens, [one * compute_s * 1e3 for one in tokens], "compute")
    for row in report.rows:
        each = row["load_s_per_page"] / page_tokens
        times = [(row["load_latency_s"] + one * each) * 1e3 for one in tokens]
        _line(figure, tokens, times, f"load from {row['tier']}")
        if row["break_even_tokens"]:
            figure.add_vline(x=row["break_even_tokens"], line_dash="dot", opacity=0.5)
    yield "Loading and computing, by length", figure


_FIGURES: dict[str, Callable[[BenchReport], Iterator[tuple[str, Figure]]]] = {
    "tiers": _tiers,
    "index": _index,
    "break-even": _break_even,
}
