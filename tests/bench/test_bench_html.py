"""`--html`: one file that needs nothing else and has every row."""

from __future__ import annotations

import re
from html import unescape
from pathlib import Path
from typing import Any

import pytest

from tiered_kv.bench import html
from tiered_kv.bench.report import BenchReport, Kind
from tiered_kv.cli import main
from tiered_kv.errors import ConfigError

MACHINE = {"cpu": "a <fast> one", "cores": 2, "gpu": None, "disk": {"fs": "ext4", "model": None}}


def tiers_row(path: str, page_bytes: int, rate: float, **more: Any) -> dict[str, Any]:
    row = {"path": path, "page_bytes": page_bytes, "bytes_per_s": rate, "ratio": 0.5, "n": 7}
    row |= {"limit": "memcpy", "limit_bytes_per_s": 2 * rate, "ci95": [0.4, 0.6], "space": None}
    return {**row, "set_bytes": 64 << 20, "latency_n": 3, "latency_bytes": 1 << 20, **more}


def tiers() -> BenchReport:
    rows = [
        tiers_row("host-get", 65536, 1.234567e9),
        tiers_row("host-get", 262144, 2.345678e9, ci95=None),
        tiers_row("disk-put", 65536, 3.456789e8, space="steady", limit="raw-write"),
        {"path": "memcpy-large", "page_bytes": 1 << 26, "bytes_per_s": 4.5678e9, "n": 5},
        {"path": "software-put", "page_bytes": 2048, "bytes_per_s": 1e8, "batch": 16, "n": 2},
    ]
    samples = {"host-get page_bytes=65536 latency_s": [1e-3, 2e-3, 3e-3], "other": [1.0]}
    notes = ["a note with <b>marks</b>"]
    return BenchReport("tiers", MACHINE, {"smoke": True}, rows, notes=notes, samples=samples)


def index() -> BenchReport:
    rows = [
        {
            "pages": pages,
            "page_tokens": 64,
            "keys_tokens_per_s": 2.1e7,
            "match_pages_per_s": 1e6,
            **dict.fromkeys(("plan_get_s", "plan_get_full_s", "plan_get_disk_s"), 0.005),
            "evict_p50_us": 10.0,
            "evict_p99_us": None,
            "rss_bytes_per_page": 240.5,
            "reopen_s": 1.5,
            "scan_s": 0.5,
            "reopen_ratio": 3.0,
            "n": {"plan_get_s": 9},
            "ci95": {"plan_get_s": [0.004, 0.006], "scan_s": None},
            "growth": None if pages == 1000 else {"plan_get_s": "flat", "reopen_s": "linear"},
        }
        for pages in (1000, 100_000)
    ]
    return BenchReport("index", MACHINE, {}, rows, samples={"pages=1000 evict_s": [1e-5] * 5})


def break_even() -> BenchReport:
    rows = [
        {
            "tier": tier,
            "page_tokens": 64,
            "page_bytes": 1 << 20,
            "load_latency_s": 0.001,
            "load_s_per_page": load_s,
            "compute_s_per_page": 0.01,
            "break_even_tokens": tokens,
        }
        for tier, load_s, tokens in (("hbm", 0.0, 0), ("host", 0.001, 64), ("disk", 0.02, None))
    ]
    return BenchReport("break-even", MACHINE, {}, rows, failures=["2 pages did not come back"])


REPORTS = {"tiers": tiers, "index": index, "break-even": break_even}


@pytest.fixture(params=sorted(REPORTS))
def report(request: pytest.FixtureRequest) -> BenchReport:
    kind: Kind = request.param
    made: BenchReport = REPORTS[kind]()
    return made


def test_the_file_refers_to_nothing_outside_itself(report: BenchReport, tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    html.write(report, path)
    text = path.read_text(encoding="utf-8")
    tags = re.findall(r"<(?:script|link|img|iframe|source|object|embed)\b[^>]*>", text)
    assert any(tag.startswith("<script") for tag in tags)
    assert [tag for tag in tags if re.search(r"\b(src|href|data)\s*=", tag)] == []
    assert "@import" not in text.split("</style>")[0]
    assert text.count("Plotly.newPlot(") >= 1


def test_the_file_has_every_row_and_every_figure_of_it(report: BenchReport, tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    html.write(report, path)
    table = path.read_text(encoding="utf-8").split("<table>")[1].split("</table>")[0]
    lines = table.split("<tr>")[2:]
    assert len(lines) == len(report.rows)
    heads = re.findall(r"<th>(.*?)</th>", table)
    for line, row in zip(lines, report.rows, strict=True):
        cells = [unescape(cell) for cell in re.findall(r"<td>(.*?)</td>", line)]
        shown = dict(zip(heads, cells, strict=True))
        assert {name for name, cell in shown.items() if cell != "-"} == {
            name for name, value in row.items() if value is not None
        }
        for name, value in row.items():
            if isinstance(value, float):
                assert float(shown[name]) == pytest.approx(value, rel=1e-4)


def test_every_path_is_plotted_against_its_limit() -> None:
    page = html.page(tiers())
    for wanted in ("host: rate by page size", "disk: rate by page size", "host-get: memcpy"):
        assert wanted in page
    assert "disk-put steady: raw-write" in page
    assert "Latency of a single transfer" in page
    assert "Bytes moved by tier" in page
    assert page.count("Plotly.newPlot(") == 5


def test_an_index_is_plotted_by_metric_with_its_growth() -> None:
    page = html.page(index())
    assert "reopen_s: linear" in page
    assert "plan_get_s: flat" in page
    assert "<h2>evict_p99_us" not in page, "a p99 that was refused has no plot"
    assert "<h2>Evictions</h2>" in page


def test_words_of_a_report_are_text_and_not_marks() -> None:
    page = html.page(tiers())
    assert "a note with &lt;b&gt;marks&lt;/b&gt;" in page
    assert "a &lt;fast&gt; one" in page
    assert "FAILED: 2 pages did not come back" in html.page(break_even())


def test_the_file_is_replaced_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "report.html"
    path.write_text("older")
    monkeypatch.setattr(html, "page", lambda report: "newer")
    html.write(tiers(), path)
    assert path.read_text() == "newer"
    assert [one.name for one in tmp_path.iterdir()] == ["report.html"]


def test_without_plotly_one_line_says_so_before_anything_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(html, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="plotly"):
        html.write(tiers(), tmp_path / "report.html")
    assert main(["bench", "index", "--html", str(tmp_path / "report.html")]) == 2
    said = capsys.readouterr().err.strip()
    assert said == 'tiered-kv: error: --html needs plotly: pip install "tiered-kv[report]"'
    assert not list(tmp_path.iterdir())
