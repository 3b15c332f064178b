"""`bench index` at smoke size: its rows, how growth is judged, what it refuses."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from tiered_kv.bench import index, reopening
from tiered_kv.bench.deciding import FANOUT, Load, chains, measure, measure_apart
from tiered_kv.bench.index_table import index_table
from tiered_kv.bench.report import BenchReport
from tiered_kv.bench.settings import IndexSettings
from tiered_kv.cli import main
from tiered_kv.errors import ConfigError, TieredKVError

WANTED = {
    "pages",
    "keys_tokens_per_s",
    "match_pages_per_s",
    "plan_get_s",
    "plan_get_disk_s",
    "evict_p50_us",
    "evict_p99_us",
    "rss_bytes_per_page",
    "reopen_s",
    "scan_s",
    "reopen_ratio",
}
SMALL = Load(pages=512, long_pages=64, page_tokens=64, key_tokens=1 << 12, repeats=2, evictions=20)


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> BenchReport:
    folder = tmp_path_factory.mktemp("bench")
    told: list[tuple[int, int, str]] = []
    settings = IndexSettings(directory=folder, smoke=True)
    found = index.measure(settings, lambda *step: told.append(step))
    assert [done for done, _, _ in told] == list(range(len(told)))
    assert told[-1][0] == told[-1][1] == len(told) - 1
    assert not list(folder.iterdir()), "no file is left"
    return found


def test_a_row_a_size_with_every_figure(report: BenchReport) -> None:
    assert report.kind == "index"
    assert len(report.rows) == 2
    for row in report.rows:
        assert row.keys() >= WANTED
        figures = [row[name] for name in WANTED]
        assert all(isinstance(one, int | float) and one > 0 for one in figures)
        assert set(row["n"]) >= set(row["ci95"])
        assert row["n"]["evict_p99_us"] >= 299


def test_every_figure_has_its_samples(report: BenchReport) -> None:
    for row in report.rows:
        of_row = {name for name in report.samples if f"pages={row['pages']}" in name.split()}
        metrics = {name.split()[-1] for name in of_row}
        assert {"keys_s", "match_s", "plan_get_s", "evict_s", "reopen_s", "scan_s"} <= metrics
        assert len(of_row) == len(metrics)


def test_growth_is_judged_from_the_smallest_size_on(report: BenchReport) -> None:
    small, large = report.rows
    assert small["growth"] is None
    assert set(large["growth"]) == set(index.COSTS)
    assert set(large["growth"].values()) <= {"flat", "log", "linear"}


@pytest.mark.parametrize(
    ("costs", "wanted"),
    [
        ([5.0, 5.2, 4.9], "flat"),
        ([4.0, 5.0, 6.0], "log"),
        ([1.0, 10.0, 100.0], "linear"),
        ([1.0, 40.0, 900.0], "linear"),
        ([1.0, 1.1, 1.1], "flat"),
    ],
)
def test_growth_names_the_nearest_shape(costs: list[float], wanted: str) -> None:
    assert index.growth([10_000, 100_000, 1_000_000], costs) == wanted


def test_growth_does_not_depend_on_the_unit() -> None:
    sizes = [10_000, 1_000_000]
    costs = [math.log(size) for size in sizes]
    for unit in (1e-9, 1.0, 1e9):
        assert index.growth(sizes, [unit * cost for cost in costs]) == "log"


def test_the_report_is_one_json_object_that_reads_back(report: BenchReport, tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    report.write(path)
    again = BenchReport.from_json(path, "index")
    assert again.rows == json.loads(json.dumps(report.rows))


def test_the_table_has_a_line_a_metric_and_a_column_a_size(report: BenchReport) -> None:
    table = index_table(report.rows)
    heads = [str(column.header) for column in table.columns]
    assert heads == ["gets of 64..256 pages", "512 pages", "2,048 pages", "n", "growth"]
    first = list(table.columns[0].cells)
    assert "match, pages/s" in first
    assert len(first) == table.row_count


@pytest.mark.parametrize(
    ("pages", "message"),
    [
        ((100,), "pages=100"),
        ((1000, 1000), "given twice"),
        ((1000, 10**12), "takes 800 bytes of memory a page"),
    ],
)
def test_sizes_that_say_nothing_are_refused(pages: tuple[int, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        index.measure(IndexSettings(pages=pages), lambda *_: None)


def test_a_directory_that_is_not_there_is_refused(tmp_path: Path) -> None:
    settings = IndexSettings(directory=tmp_path / "nowhere", smoke=True)
    with pytest.raises(ConfigError, match="nowhere"):
        index.measure(settings, lambda *_: None)


def test_a_wrong_size_is_one_line_and_exit_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "index", "--pages", "17"]) == 2
    said = capsys.readouterr().err.strip()
    assert said.splitlines() == [said]
    assert "--pages 17: give 256 or more" in said


@pytest.mark.parametrize("pages", [256, 1000, 5000])
def test_conversations_have_as_many_pages_as_asked_for_and_hang_together(pages: int) -> None:
    known: set[bytes] = set()
    total = long = 0
    for keys in chains(pages, 100):
        assert keys.parent is None or keys.parent in known
        known.update(keys)
        total += len(keys)
        long += len(keys) == 100
    assert total == len(known) == pages
    assert long >= pages // 100 // 3


def test_short_conversations_share_their_first_pages() -> None:
    heads = [keys.parent for keys in chains(8 * 16 * FANOUT, 10) if keys.parent is not None]
    assert len(heads) > 2 * FANOUT
    assert max(heads.count(head) for head in set(heads)) == FANOUT - 1


def test_the_deciding_side_is_measured_with_every_page_known_and_nothing_broken() -> None:
    found = measure(SMALL)
    assert found["known_pages"] == [512.0]
    assert len(found["evict_s"]) == len(found["evict_batch_s"]) == 20
    for name in ("plan_get_s", "plan_get_full_s", "plan_get_disk_s", "keys_s", "keys_array_s"):
        assert len(found[name]) == 2


def test_a_failure_of_the_process_apart_is_one_line() -> None:
    broken = Load(pages=512, long_pages=64, page_tokens=0, key_tokens=64, repeats=1, evictions=1)
    with pytest.raises(TieredKVError, match="512 pages failed: ValueError: page_tokens") as caught:
        measure_apart(broken)
    assert "\n" not in str(caught.value)


def test_the_directory_is_a_store_that_holds_what_it_says(tmp_path: Path) -> None:
    """What is opened is what a store would have left: nothing to repair, every page in place."""
    made = reopening.make_directory(tmp_path / "store", 1500, 100, 16)
    with made.open_store() as store:
        assert store.stats().resident_pages["disk"] == 1500
        for keys in made.long:
            assert store.match(keys).disk_pages == len(keys)
    tier = made.open()
    try:
        assert tier.recovered_pages == 1500
        assert not tier.was_rebuilt
        assert [page.sequence for page in tier.pages()] == sorted(
            page.sequence for page in tier.pages()
        )
    finally:
        tier.close()


def test_scans_and_openings_come_in_pairs(tmp_path: Path) -> None:
    made = reopening.make_directory(tmp_path / "store", 600, 60, 16)
    found = reopening.reopen(made, 4, within_s=0.0)
    counts = {len(getattr(found, name)) for name in found.__slots__}
    assert counts == {3}, "as many as fit in no time, but three"
    assert len(reopening.reopen(made, 4, within_s=600.0).scan_s) == 4


def test_a_file_system_without_sparse_files_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def filled(path: Path, n_bytes: int) -> None:
        path.write_bytes(bytes(n_bytes))
        checked(path, n_bytes)

    checked = reopening.refuse_unless_sparse
    monkeypatch.setattr(reopening, "refuse_unless_sparse", filled)
    with pytest.raises(ConfigError, match="keeps no sparse files"):
        reopening.make_directory(tmp_path / "store", 300, 30, 16)
