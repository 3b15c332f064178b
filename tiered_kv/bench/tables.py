"""A report as people read it: one table, then what it does not show."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from tiered_kv.bench.baseline import Comparison
from tiered_kv.bench.index_table import index_table
from tiered_kv.bench.report import BenchReport

_UNBOUNDED = 1000  # columns


def size_text(n_bytes: int) -> str:
    """A size as people write it: 64 KiB, 2 MiB."""
    for unit, shift in (("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if n_bytes >= 1 << shift:
            return f"{n_bytes / (1 << shift):g} {unit}"
    return f"{n_bytes} B"


def seconds_text(seconds: float) -> str:
    """A time as people write it: 12.3 us, 4.56 ms, 1.20 s."""
    for unit, scale in (("s", 1.0), ("ms", 1e3), ("us", 1e6)):
        if seconds * scale >= 1 or unit == "us":
            return f"{seconds * scale:.3g} {unit}"
    raise AssertionError


def rate_text(bytes_per_s: float) -> str:
    """A rate in GB/s."""
    return f"{bytes_per_s / 1e9:.2f}"


def print_report(report: BenchReport, console: Console) -> None:
    """Machine, table, checksums, notes, failures."""
    machine = report.machine
    console.print(
        f"{machine['cores']} x {machine['cpu']}, {_disk_text(machine)}", style="dim", markup=False
    )
    for table in _tables(report):
        _print_whole(table, console)
    checked = report.checksum
    if checked["verified"] or checked["failed"]:
        console.print(
            f"{checked['verified']:,} pages read back and compared, {checked['failed']:,} wrong"
        )
    for note in report.notes:
        console.print(f"note: {note}", style="dim", markup=False)
    for failure in report.failures:
        console.print(f"FAILED: {failure}", style="bold red", markup=False)


def _print_whole(table: Table, console: Console) -> None:
    """At its own width: on a narrow terminal lines are wrapped, figures are not cut off."""
    width = console.width
    unbounded = console.options.update(width=_UNBOUNDED)
    console.width = max(width, console.measure(table, options=unbounded).maximum)
    console.print(table, crop=False)
    console.width = width


def _tables(report: BenchReport) -> list[Table]:
    if report.kind == "index":
        return [index_table(report.rows)]
    if report.kind != "tiers":
        return [_plain_table(report.rows)]
    software = [row for row in report.rows if row.get("s_per_page") is not None]
    paths = [row for row in report.rows if row.get("s_per_page") is None]
    made = ((_tiers_table, paths), (_software_table, software))
    return [table(rows) for table, rows in made if rows]


def print_comparison(comparison: Comparison, console: Console) -> None:
    """What is worse than it was, and what could not be compared."""
    for note in comparison.notes:
        console.print(f"note: {note}", style="dim", markup=False)
    for regression in comparison.regressions:
        console.print(f"WORSE: {regression}", style="bold red", markup=False)
    if not comparison.compared:
        console.print(
            "FAILED: this run and the baseline have no figure in common", style="bold red"
        )
    else:
        worse = len(comparison.regressions)
        console.print(
            f"{comparison.compared:,} figures compared with the baseline, {worse:,} worse"
        )


def _disk_text(machine: Mapping[str, Any]) -> str:
    disk = machine["disk"]
    gpu = machine["gpu"] or "no GPU"
    return gpu if disk is None else f"{gpu}, {disk['fs']} on {disk['model'] or disk['source']}"


def _tiers_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("path")
    heads = ("page", "space", "GB/s", "limit", "", "ratio", "95 %", "n")
    for head in (*heads, "p50", "p95", "p99", "n", "CPU s/GB"):
        table.add_column(head, justify="right")
    for row in rows:
        table.add_row(*_tiers_cells(row))
    return table


def _software_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """The store's own work: pages too small for copying to count."""
    table = Table(box=None, pad_edge=False)
    table.add_column("path")
    for head in ("page", "pages a batch", "a page", "95 %", "CPU a page", "n"):
        table.add_column(head, justify="right")
    for row in rows:
        interval = row["s_per_page_ci95"]
        table.add_row(
            row["path"],
            size_text(row["page_bytes"]),
            str(row["batch"]),
            seconds_text(row["s_per_page"]),
            "..".join(map(seconds_text, interval)) if interval else "-",
            seconds_text(row["cpu_s_per_page"]),
            str(row["n"]),
        )
    return table


def _tiers_cells(row: Mapping[str, Any]) -> list[str]:
    def cell(name: str, text: Callable[[Any], str]) -> str:
        return "-" if row.get(name) is None else text(row[name])

    return [
        row["path"],
        size_text(row["page_bytes"]),
        row.get("space") or "",
        cell("bytes_per_s", rate_text),
        cell("limit_bytes_per_s", rate_text),
        row.get("limit") or "",
        cell("ratio", lambda value: f"{value:.2f}"),
        cell("ci95", lambda edges: f"{edges[0]:.2f}..{edges[1]:.2f}"),
        cell("n", str),
        *(cell(name, seconds_text) for name in ("p50_s", "p95_s", "p99_s")),
        cell("latency_n", str),
        cell("cpu_s_per_gb", lambda value: f"{value:.3f}"),
    ]


def _plain_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    table = Table(box=None, pad_edge=False)
    names = list(dict.fromkeys(name for row in rows for name in row))
    for name in names:
        table.add_column(name.replace("_", " "), justify="right")
    for row in rows:
        table.add_row(*(_plain_text(name, row.get(name)) for name in names))
    return table


def _plain_text(name: str, value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, list | tuple):
        return "..".join(_plain_text(name, one) for one in value)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    if name == "page_bytes":
        return size_text(int(value))
    if name.endswith(("_s", "_s_per_page")) and not name.endswith("_per_s"):
        return seconds_text(value)
    return f"{value:,}" if isinstance(value, int) else f"{value:,.4g}"
