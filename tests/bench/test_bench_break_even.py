"""`bench break-even`: its arithmetic against figures worked out by hand, and what it refuses."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from known_models import LLAMA_8B, MISTRAL_7B

from tiered_kv.bench import break_even
from tiered_kv.bench.break_even import LoadCost, break_even_pages, load_cost
from tiered_kv.bench.report import BenchReport, machine
from tiered_kv.bench.settings import BreakEvenSettings, Show, TiersSettings
from tiered_kv.cli import main
from tiered_kv.config import StoreConfig
from tiered_kv.errors import ConfigError
from tiered_kv.plan import Gate

MIB = 1 << 20


def nothing(*_: object) -> None:
    """Progress that nobody watches."""


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A page of 64 tokens is 2 x 32 layers x 8 heads x 128 x 2 bytes x 64 = 8 MiB."""
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA_8B))
    return path


def rate(path: str, page_bytes: int, bytes_per_s: float, **more: Any) -> dict[str, Any]:
    row = {"path": path, "page_bytes": page_bytes, "bytes_per_s": bytes_per_s, "space": None}
    return {**row, "p50_s": None, "latency_bytes": None, **more}


@pytest.fixture
def rates(tmp_path: Path) -> Path:
    """Host 8 GiB/s at 1 ms a page, no latency; disk 1 GiB/s with 20 ms before the first byte."""
    single = {"p50_s": 0.021, "latency_bytes": MIB}
    rows = [
        rate("host-get", 8 * MIB, 8.0 * (1 << 30), p50_s=0.0001, latency_bytes=MIB),
        rate("disk-get-hbm", 8 * MIB, 1.0 * (1 << 30), **single),
        rate("disk-put", 8 * MIB, 1.0),
    ]
    return saved(tmp_path / "rates.json", rows)


def saved(path: Path, rows: list[dict[str, Any]]) -> Path:
    BenchReport("tiers", {"cpu": "x", "gpu": None}, {}, rows).write(path)
    return path


@pytest.mark.parametrize(
    ("load", "compute_s", "pages"),
    [
        (LoadCost(0.001, 0.010), 0.003, 6),  # 5 pages take 15 ms either way: the sixth wins
        (LoadCost(0.001, 0.011), 0.003, 6),
        (LoadCost(0.001, 0.0), 0.003, 1),
        (LoadCost(0.0, 0.0), 0.003, 1),
        (LoadCost(0.003, 0.0), 0.003, None),
        (LoadCost(0.004, 0.0), 0.003, None),
    ],
)
def test_break_even_is_the_first_page_count_that_loads_sooner(
    load: LoadCost, compute_s: float, pages: int | None
) -> None:
    assert break_even_pages(load, compute_s) == pages
    if pages is not None:
        assert load.latency_s + pages * load.s_per_page < pages * compute_s
        before = pages - 1
        assert load.latency_s + before * load.s_per_page >= before * compute_s


def test_a_rate_between_two_sizes_is_interpolated_along_their_logarithm() -> None:
    rows = [rate("host-get", MIB, 1e9), rate("host-get", 4 * MIB, 3e9)]
    assert load_cost(rows, 2 * MIB).s_per_page == pytest.approx(2 * MIB / 2e9)
    assert load_cost(rows, MIB).s_per_page == pytest.approx(MIB / 1e9)
    assert load_cost(rows, 64 << 10).s_per_page == pytest.approx((64 << 10) / 1e9)
    assert load_cost(rows, 16 * MIB).s_per_page == pytest.approx(16 * MIB / 3e9)


def test_the_latency_is_what_a_single_transfer_takes_beyond_its_bytes() -> None:
    rows = [rate("x", MIB, 1e9, p50_s=0.005, latency_bytes=1_000_000)]
    assert load_cost(rows, MIB).latency_s == pytest.approx(0.004)
    fast = [rate("x", MIB, 1e9, p50_s=0.0005, latency_bytes=1_000_000)]
    assert load_cost(fast, MIB).latency_s == 0.0
    assert load_cost([rate("x", MIB, 1e9)], MIB).latency_s == 0.0


def test_used_space_counts_before_fresh() -> None:
    rows = [rate("x", MIB, 9e9, space="fresh"), rate("x", MIB, 1e9, space="steady")]
    for order in (rows, rows[::-1]):
        assert load_cost(order, MIB).s_per_page == pytest.approx(MIB / 1e9)


def test_rows_are_those_worked_out_by_hand(model: Path, rates: Path) -> None:
    """At 6,400 tokens/s a page of 64 tokens computes in 10 ms.

    Host loads it in 8 MiB / 8 GiB/s = 0.98 ms: one page. Disk in 7.8 ms, after 20 ms: it saves
    2.19 ms a page, so 10 pages.
    """
    settings = BreakEvenSettings(model=str(model), rates=rates, prefill_tokens_per_s=6400)
    report = break_even.measure(settings, nothing)
    hbm, host, disk = report.rows
    assert [row["tier"] for row in report.rows] == ["hbm", "host", "disk"]
    assert all(row["page_bytes"] == 8 * MIB for row in report.rows)
    assert all(row["compute_s_per_page"] == pytest.approx(0.01) for row in report.rows)
    assert host["load_s_per_page"] == pytest.approx(1 / 1024)
    assert disk["load_s_per_page"] == pytest.approx(8 / 1024)
    assert disk["load_latency_s"] == pytest.approx(0.021 - 1 / 1024)
    tokens = [row["break_even_tokens"] for row in (hbm, host, disk)]
    assert tokens == [0, 64, 10 * 64]


def test_a_tier_that_never_pays_is_null_and_said(model: Path, rates: Path) -> None:
    """At 10,000 tokens/s a page computes in 6.4 ms, and loads from disk in 7.8."""
    settings = BreakEvenSettings(model=str(model), rates=rates, prefill_tokens_per_s=10_000)
    report = break_even.measure(settings, nothing)
    assert [row["break_even_tokens"] for row in report.rows] == [0, 64, None]
    assert report.rows[2]["min_load_tokens"] == 64
    assert any(note.startswith("disk: loading is slower than computing") for note in report.notes)


def test_the_printed_settings_are_the_stores_and_its_gate_agrees(model: Path, rates: Path) -> None:
    """Given the same figures, the gate loads from where the report says that it pays."""
    settings = BreakEvenSettings(model=str(model), rates=rates, prefill_tokens_per_s=10_000)
    report = break_even.measure(settings, nothing)
    begin = "set in the store: "
    lines = [note.removeprefix(begin) for note in report.notes if note.startswith(begin)]
    given = {name: float(value) for name, value in (line.split(" = ") for line in lines)}
    assert given == {"prefill_tokens_per_s": 10_000, "min_load_tokens": 64}
    config = StoreConfig.parse(hbm="1GiB", host="1GiB", **given)
    assert (config.prefill_tokens_per_s, config.min_load_tokens) == (10_000, 64)
    row = report.rows[0]
    costs = {one["tier"]: one["load_s_per_page"] for one in report.rows}
    gate = Gate(1, row["compute_s_per_page"], costs)
    assert gate.cut(["host"] * 3)[0] == 3
    assert gate.cut(["disk"] * 3)[0] == 0


def test_nothing_is_said_of_a_tier_without_a_rate(model: Path, tmp_path: Path) -> None:
    rates = saved(tmp_path / "host.json", [rate("host-get", MIB, 1e9)])
    settings = BreakEvenSettings(model=str(model), rates=rates, prefill_tokens_per_s=100)
    report = break_even.measure(settings, nothing)
    assert [row["tier"] for row in report.rows] == ["hbm", "host"]
    assert any(note.startswith("disk: no rate was measured") for note in report.notes)
    assert any("8,388,608 bytes were not measured" in note for note in report.notes)


def test_page_tokens_and_dtype_make_the_page(model: Path, rates: Path) -> None:
    settings = BreakEvenSettings(
        model=str(model), rates=rates, prefill_tokens_per_s=100, page_tokens=16, dtype="int8"
    )
    assert break_even.measure(settings, nothing).rows[0]["page_bytes"] == MIB


def test_prefill_is_measured_with_a_real_model_where_no_rate_is_given(rates: Path) -> None:
    settings = BreakEvenSettings(model="micro-qwen3", rates=rates, smoke=True, repeats=2)
    report = break_even.measure(settings, nothing)
    measured = report.samples["prefill_tokens_per_s"]
    assert len(measured) == 2
    assert report.rows[0]["prefill_tokens_per_s"] == pytest.approx(sum(measured) / 2)
    assert any("by transformers on" in note for note in report.notes)


def test_rates_are_measured_where_no_file_names_them(model: Path, tmp_path: Path) -> None:
    small = {**MISTRAL_7B, "num_hidden_layers": 4, "hidden_size": 64, "num_attention_heads": 8}
    model.write_text(json.dumps(small))
    folder = tmp_path / "here"
    folder.mkdir()
    settings = BreakEvenSettings(
        model=str(model), prefill_tokens_per_s=100, smoke=True, directory=folder, device="cpu"
    )
    report = break_even.measure(settings, nothing)
    assert [row["tier"] for row in report.rows] == ["hbm", "host", "disk"]
    assert all(row["load_s_per_page"] > 0 for row in report.rows[1:])
    assert report.checksum["verified"] > 0
    assert report.is_passed
    assert not list(folder.iterdir())


def test_rates_are_measured_with_the_amounts_that_were_asked_for(
    model: Path, rates: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tiered_kv.bench import tiers

    seen: list[TiersSettings] = []

    def measure(settings: TiersSettings, show: Show) -> BenchReport:
        seen.append(settings)
        return replace(BenchReport.from_json(rates), machine=machine())

    monkeypatch.setattr(tiers, "measure", measure)
    amounts = {"set_bytes": 4 * MIB, "transfer_bytes": MIB, "repeats": 7, "device": "cpu"}
    asked = {"model": str(model), "prefill_tokens_per_s": 100, **amounts}
    break_even.measure(BreakEvenSettings.model_validate(asked), nothing)
    assert seen[0].model_dump(include=set(amounts)) == amounts


def test_what_was_wrong_with_rates_is_said_and_nothing_else_of_their_pages(
    model: Path, rates: Path
) -> None:
    bad = replace(
        BenchReport.from_json(rates), checksum={"verified": 9, "failed": 2}, failures=["not cold"]
    )
    bad.write(rates)
    settings = BreakEvenSettings(model=str(model), rates=rates, prefill_tokens_per_s=100)
    report = break_even.measure(settings, nothing)
    assert report.checksum == {"verified": 0, "failed": 0}
    assert report.failures == [
        f"--rates {rates}: {one}" for one in ("2 pages were wrong", "not cold")
    ]


def test_a_latency_that_is_no_number_counts_as_none() -> None:
    bad = rate("host-get", MIB, 1e9, p50_s="fast", latency_bytes=MIB)
    assert load_cost([bad], MIB).latency_s == 0


def test_a_bench_without_a_model_or_a_rate_says_what_is_missing(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for arguments, wanted in (
        ([], "--model: is required"),
        (["--model", str(model)], "--prefill-tokens-per-s: is required"),
        (["--model", str(model), "--prefill-tokens-per-s", "-1"], "--prefill-tokens-per-s -1"),
        (["--model", "no/such/model"], "no/such/model"),
        (
            ["--model", str(model), "--prefill-tokens-per-s", "1", "--rates", str(model)],
            f"--rates {model}: is not a report",
        ),
    ):
        assert main(["bench", "break-even", *arguments]) == 2
        said = capsys.readouterr().err.strip()
        assert said.splitlines() == [said]
        assert wanted in said


def test_rates_without_a_load_are_refused(model: Path, tmp_path: Path) -> None:
    rates = saved(tmp_path / "puts.json", [rate("disk-put", MIB, 1e9), rate("host-get", MIB, 0)])
    settings = BreakEvenSettings(model=str(model), rates=rates, prefill_tokens_per_s=100)
    with pytest.raises(ConfigError, match=r"has no load rates; make it with .*,disk-get-hbm"):
        break_even.measure(settings, nothing)


def test_transformers_is_asked_for_where_it_is_needed(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tiered_kv.bench import prefill

    monkeypatch.setattr(prefill, "find_spec", lambda name: None)
    (model.parent / "model.safetensors").touch()
    with pytest.raises(ConfigError, match=r"--prefill-tokens-per-s: is required: .*transformers"):
        prefill.layout_and_model(BreakEvenSettings(model=str(model.parent)))
    with pytest.raises(ConfigError, match="--model tiny-qwen3: needs transformers"):
        prefill.layout_and_model(BreakEvenSettings(model="tiny-qwen3"))
