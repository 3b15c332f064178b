"""Reports: what is kept of a run, read again, and compared with a later one."""

from __future__ import annotations

import json
import math
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiered_kv.bench.baseline import LESS_IS_BETTER, MORE_IS_BETTER, compare, save
from tiered_kv.bench.report import (
    SCHEMA_VERSION,
    BenchReport,
    finished,
    load_note,
    machine,
    refuse_bad_target,
    row_id,
    write_whole,
)
from tiered_kv.errors import ConfigError

MACHINE = {"cpu": "some CPU", "cores": 2, "gpu": None, "load_average": {"before": 0.1}}


def report(*rows: dict[str, Any], **changes: Any) -> BenchReport:
    """A small report."""
    made = BenchReport("tiers", dict(MACHINE), {"repeats": 15}, list(rows))
    return replace(made, **changes)


def row(path: str = "host-put", page_bytes: int = 65536, **figures: Any) -> dict[str, Any]:
    return {"path": path, "page_bytes": page_bytes, **figures}


def test_a_report_is_the_same_after_it_was_kept(tmp_path: Path) -> None:
    made = report(
        row(ratio=0.9, ci95=[0.8, 1.0]), notes=["a note"], samples={"x": [1.0]}, failures=["bad"]
    )
    save(made, tmp_path / "kept.json")
    assert BenchReport.from_json(tmp_path / "kept.json", "tiers") == made
    assert [path.name for path in tmp_path.iterdir()] == ["kept.json"]
    assert json.loads((tmp_path / "kept.json").read_text())["schema_version"] == SCHEMA_VERSION


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "is not JSON"),
        pytest.param("[" * 100_000, "is not JSON", id="nested-too-deeply"),
        ("[]", "is not a report"),
        ("{}", "is not a report"),
        ('{"schema_version": 1, "kind": "replay"}', "is not a report"),
        ('{"schema_version": 7, "kind": "tiers"}', "schema_version 7; this version reads 1"),
        ('{"schema_version": 1, "kind": "index"}', "is of `bench index`, not of `bench tiers`"),
        ('{"schema_version": 1, "kind": "tiers"}', "machine is missing or bad"),
    ],
)
def test_a_file_that_is_no_such_report_is_one_line(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "f.json").write_text(text)
    with pytest.raises(ConfigError) as caught:
        BenchReport.from_json(tmp_path / "f.json", "tiers")
    assert words in str(caught.value) and str(tmp_path / "f.json") in str(caught.value)
    assert "\n" not in str(caught.value)


def test_rows_that_are_not_objects_are_refused(tmp_path: Path) -> None:
    found = report().to_json() | {"rows": [1]}
    (tmp_path / "f.json").write_text(json.dumps(found))
    with pytest.raises(ConfigError, match="rows is missing or bad"):
        BenchReport.from_json(tmp_path / "f.json")


def test_a_file_that_is_not_there_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        BenchReport.from_json(tmp_path / "absent")


def test_a_target_that_cannot_be_written_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "taken").mkdir()
    with pytest.raises(ConfigError, match="cannot be written"):
        write_whole(tmp_path / "taken", "x")
    assert [path.name for path in tmp_path.iterdir()] == ["taken"]


@pytest.mark.parametrize("name", ["pipe", "folder", "no/such", "loop"])
def test_what_is_no_file_is_not_replaced_by_one(tmp_path: Path, name: str) -> None:
    """A pipe, as a device such as /dev/null would be."""
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    (tmp_path / "loop").symlink_to("loop")
    for write in (refuse_bad_target, report(row()).write):
        with pytest.raises(ConfigError, match=f"{name}: cannot be written"):
            write(tmp_path / name)
    assert (tmp_path / "pipe").is_fifo() and (tmp_path / "loop").is_symlink()
    assert len(list(tmp_path.iterdir())) == 3


def test_a_link_stays_a_link_and_asking_writes_nothing(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("kept.json")
    refuse_bad_target(tmp_path / "link")
    assert not (tmp_path / "kept.json").exists()
    report(row()).write(tmp_path / "link")
    assert (tmp_path / "link").is_symlink()
    assert BenchReport.from_json(tmp_path / "kept.json") == report(row())


def test_checksums_that_are_no_numbers_are_refused(tmp_path: Path) -> None:
    (tmp_path / "f.json").write_text(json.dumps(report().to_json() | {"checksum": {}}))
    with pytest.raises(ConfigError, match="checksum is missing or bad"):
        BenchReport.from_json(tmp_path / "f.json")


def test_a_report_passes_unless_something_was_wrong() -> None:
    assert report().is_passed
    assert not report(failures=["x"]).is_passed
    assert not report(checksum={"verified": 9, "failed": 1}).is_passed


def test_the_machine_says_what_the_minimum_report_needs(tmp_path: Path) -> None:
    found = machine(tmp_path)
    assert {"cpu", "cores", "ram_bytes", "gpu", "disk", "kernel", "python", "torch"} <= set(found)
    assert found["cores"] >= 1 and found["ram_bytes"] > 0
    assert set(found["disk"]) >= {"mount", "fs", "model"}
    ended = finished(report(machine=found)).machine["load_average"]
    assert ended["before"] == found["load_average"]["before"]
    assert ended["after"] is not None
    assert machine()["disk"] is None


def test_a_busy_machine_is_noted() -> None:
    assert load_note(MACHINE) is None
    busy = {**MACHINE, "load_average": {"before": 1.5, "after": None}}
    assert "load average was 1.5 on 2 cores" in str(load_note(busy))


# -- comparing -----------------------------------------------------------------------------------


@pytest.mark.parametrize("metric", [*MORE_IS_BETTER, *LESS_IS_BETTER])
@given(was=st.floats(1e-6, 1e12), tolerance=st.floats(0, 0.5))
def test_a_figure_is_worse_past_the_tolerance_on_its_bad_side_alone(
    metric: str, was: float, tolerance: float
) -> None:
    bad = -1 if metric in MORE_IS_BETTER else 1

    def regressions(change: float) -> int:
        before, now = (report({**row(), metric: value}) for value in (was, was * (1 + change)))
        return len(compare(now, before, tolerance).regressions)

    assert regressions(bad * (tolerance + 0.01)) == 1
    assert regressions(bad * max(0, tolerance - 0.01)) == 0
    assert regressions(-bad * 0.9) == 0


def test_a_regression_says_which_row_and_figure() -> None:
    found = compare(
        report(row(ratio=0.5, space="steady"), row("host-get", ratio=1.0)),
        report(row(ratio=1.0, space="steady"), row("host-get", ratio=1.0)),
        0.1,
    )
    assert found.compared == 2
    (regression,) = found.regressions
    assert regression.ratio == 0.5
    text = str(regression)
    for words in ("host-put page_bytes=65536 space=steady", "ratio was 1", "is 0.5", "x 0.50"):
        assert words in text


def test_rows_are_the_same_only_if_all_that_names_them_is() -> None:
    names = {row_id(row()), row_id(row(page_bytes=1)), row_id(row(space="fresh"))}
    names |= {row_id(row(batch=16)), row_id(row("host-get")), row_id({"pages": 10})}
    assert len(names) == 6


def test_rows_of_one_side_alone_are_named_and_no_regression() -> None:
    found = compare(report(row(ratio=1.0)), report(row("host-get", ratio=1.0)), 0.1)
    assert found.compared == 0 and not found.regressions
    assert found.notes == [
        "not in this run: host-get page_bytes=65536",
        "not in the baseline: host-put page_bytes=65536",
    ]


def test_another_machine_and_other_settings_are_noted() -> None:
    other = report(machine={**MACHINE, "cpu": "another"}, settings={"repeats": 3})
    notes = compare(report(), other, 0.1).notes
    assert any("another machine: cpu was 'another', is 'some CPU'" in note for note in notes)
    assert any("other settings: repeats was 3, is 15" in note for note in notes)


def test_figures_that_were_not_measured_are_not_compared() -> None:
    found = compare(
        report(row(ratio=None, bytes_per_s=2.0, p50_s=True)),
        report(row(ratio=1.0, bytes_per_s=0.0, p50_s=1.0)),
        0.1,
    )
    assert found.compared == 0


def test_a_load_that_has_ceased_to_pay_is_worse_than_one_that_paid_late() -> None:
    was, never = row(break_even_tokens=64), row(break_even_tokens=None)
    (worse,) = compare(report(never), report(was), 0.5).regressions
    assert worse.metric == "break_even_tokens" and worse.now == math.inf
    assert compare(report(was), report(never), 0.5).regressions == []
    assert compare(report(never), report(never), 0.5).regressions == []


def test_what_the_machine_does_alone_is_not_compared() -> None:
    fast, slow = (row("memcpy-large", bytes_per_s=rate) for rate in (9e9, 1e9))
    found = compare(report(slow, row(ratio=0.9)), report(fast, row(ratio=0.9)), 0.1)
    assert found.regressions == [] and found.compared == 1


@pytest.mark.parametrize("bad", [math.nan, math.inf, -1.0, 0.0])
def test_a_figure_nothing_can_be_compared_with_is_left_out(bad: float) -> None:
    assert compare(report(row(ratio=0.9)), report(row(ratio=bad)), 0.1).compared == 0
