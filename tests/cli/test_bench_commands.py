"""`tiered-kv bench` from its arguments to exit code, stdout, stderr and files."""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from tiered_kv.bench import tiers
from tiered_kv.bench.report import BenchReport
from tiered_kv.bench.settings import Show, TiersSettings
from tiered_kv.bench.tables import print_report
from tiered_kv.cli import main

ROOT = Path(__file__).parents[2]
PATIENCE_S = 60.0
SMALL = ["--smoke", "--page-bytes", "64KiB", "--device", "cpu"]

FOUND = BenchReport(
    "tiers",
    {
        "cpu": "some CPU",
        "cores": 2,
        "gpu": None,
        "disk": {"fs": "ext4", "model": None, "source": "/dev/x"},
    },
    {"smoke": True},
    [
        {"path": "host-put", "page_bytes": 65536, "bytes_per_s": 5e9, "ratio": 0.9, "n": 15}
        | {"ci95": [0.8, 1.0], "limit": "memcpy", "limit_bytes_per_s": 5.5e9, "cold": False}
        | {"p50_s": 0.0012, "p95_s": 0.0013, "p99_s": None, "cpu_s_per_gb": 0.2}
    ],
    notes=["a note"],
    checksum={"verified": 7, "failed": 0},
)


@pytest.fixture
def finds(monkeypatch: pytest.MonkeyPatch) -> Callable[[BenchReport], None]:
    """Make `bench tiers` find what it is told."""

    def set_found(found: BenchReport) -> None:
        def measure(settings: TiersSettings, show: Show) -> BenchReport:
            return found

        monkeypatch.setattr(tiers, "measure", measure)

    set_found(FOUND)
    return set_found


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[TiersSettings]:
    """What `bench tiers`, which measures nothing then, is told: the settings of each call."""
    seen: list[TiersSettings] = []

    def measure(settings: TiersSettings, show: Show) -> BenchReport:
        seen.append(settings)
        return FOUND

    monkeypatch.setattr(tiers, "measure", measure)
    return seen


def bench(*arguments: str) -> int:
    return main(["bench", "tiers", *arguments])


def refused(capsys: pytest.CaptureFixture[str]) -> str:
    """Nothing on stdout and one line on stderr, which is returned."""
    out, error = capsys.readouterr()
    assert out == ""
    assert error.startswith("tiered-kv: error: ") and error.count("\n") == 1, error
    return error


# -- a real run ----------------------------------------------------------------------------------


def test_a_smoke_run_prints_json_alone_on_stdout_and_leaves_no_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    disk, baseline = tmp_path / "disk", tmp_path / "baseline.json"
    disk.mkdir()
    arguments = [*SMALL, "--dir", str(disk), "--paths", "host-put,disk-get"]
    assert bench(*arguments, "--json", "--save-baseline", str(baseline)) == 0
    out, error = capsys.readouterr()
    report = json.loads(out)
    assert report["schema_version"] == 1 and report["kind"] == "tiers"
    assert {row["path"] for row in report["rows"]} == {"memcpy-large", "host-put", "disk-get"}
    assert report["checksum"]["verified"] > 0 and report["checksum"]["failed"] == 0
    assert json.loads(baseline.read_text()) == report
    assert list(disk.iterdir()) == []
    for words in ("GB/s", "ratio", "disk-get", "64 KiB", "read back and compared, 0 wrong"):
        assert words in error


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_run_that_is_stopped_leaves_no_files(tmp_path: Path, number: signal.Signals) -> None:
    command = [sys.executable, "-m", "tiered_kv", "bench", "tiers", "--dir", str(tmp_path)]
    process = subprocess.Popen(
        [*command, "--page-bytes", "64KiB", "--set-bytes", "16MiB", "--paths", "disk-put"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        end = time.monotonic() + PATIENCE_S
        while not list(tmp_path.rglob("*.seg")) and time.monotonic() < end:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(0.02)
        process.send_signal(number)
        out, error = process.communicate(timeout=PATIENCE_S)
    finally:
        process.kill()
        process.communicate()
    assert process.returncode == (130 if number == signal.SIGINT else 143), error
    assert out == "" and "Traceback" not in error
    assert list(tmp_path.iterdir()) == []


# -- what becomes of a report --------------------------------------------------------------------


def test_the_table_shows_rate_limit_ratio_and_interval(
    finds: object, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench() == 0
    out, error = capsys.readouterr()
    assert out == ""
    (line,) = [line for line in error.splitlines() if line.startswith("host-put")]
    assert line.split()[:8] == [
        "host-put",
        "64",
        "KiB",
        "5.00",
        "5.50",
        "memcpy",
        "0.90",
        "0.80..1.00",
    ]
    assert "1.2 ms" in line and "1.3 ms" in line
    assert "note: a note" in error and "7 pages read back" in error


@pytest.mark.parametrize(
    "wrong",
    [{"failures": ["something was wrong"]}, {"checksum": {"verified": 7, "failed": 1}}],
    ids=["failure", "checksum"],
)
def test_a_run_in_which_something_was_wrong_is_exit_code_one(
    finds: Callable[[BenchReport], None], wrong: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    finds(replace(FOUND, **wrong))
    assert bench("--json") == 1
    out, error = capsys.readouterr()
    assert json.loads(out)["checksum"]["verified"] == 7
    assert "FAILED: something was wrong" in error or "1 wrong" in error


def slower(by: float) -> BenchReport:
    """What was found, with all rates lower."""
    rows = [{**row, "bytes_per_s": row["bytes_per_s"] * (1 - by)} for row in FOUND.rows]
    return replace(FOUND, rows=rows)


@pytest.mark.parametrize(
    ("by", "tolerance", "code"),
    [(0.2, [], 1), (0.05, [], 0), (-0.5, [], 0), (0.05, ["0.01"], 1), (0.2, ["0.3"], 0)],
)
def test_compare_fails_past_the_tolerance(
    by: float,
    tolerance: list[str],
    code: int,
    tmp_path: Path,
    finds: Callable[[BenchReport], None],
    capsys: pytest.CaptureFixture[str],
) -> None:
    kept = tmp_path / "baseline.json"
    assert bench("--save-baseline", str(kept)) == 0
    finds(slower(by))
    flags = ["--tolerance", *tolerance] if tolerance else []
    assert bench("--compare", str(kept), *flags) == code
    error = capsys.readouterr().err
    assert ("WORSE: host-put page_bytes=65536: bytes_per_s" in error) == bool(code)
    assert f"figures compared with the baseline, {code} worse" in error


def test_a_baseline_with_nothing_in_common_is_a_failed_comparison(
    tmp_path: Path, finds: Callable[[BenchReport], None], capsys: pytest.CaptureFixture[str]
) -> None:
    kept = tmp_path / "baseline.json"
    assert bench("--save-baseline", str(kept)) == 0
    finds(replace(FOUND, rows=[{**FOUND.rows[0], "path": "host-get"}]))
    assert bench("--compare", str(kept)) == 1
    assert "no figure in common" in capsys.readouterr().err


def test_a_baseline_may_be_replaced_by_the_run_that_is_compared_with_it(
    tmp_path: Path, finds: Callable[[BenchReport], None]
) -> None:
    kept = tmp_path / "baseline.json"
    assert bench("--save-baseline", str(kept)) == 0
    finds(slower(0.2))
    assert bench("--compare", str(kept), "--save-baseline", str(kept)) == 1
    assert BenchReport.from_json(kept).rows[0]["bytes_per_s"] == 4e9


class Gone(io.StringIO):
    """A stream that nobody reads any more, or whose disk is full."""

    def __init__(self, error: OSError) -> None:
        super().__init__()
        self.error = error

    def write(self, text: str) -> int:
        raise self.error


@pytest.mark.parametrize(
    ("stream", "error", "code"),
    [
        ("stdout", BrokenPipeError(), 130),
        ("stdout", OSError(28, "No space left on device"), 2),
        ("stderr", BrokenPipeError(), 130),
    ],
)
def test_files_are_kept_where_nobody_reads_the_rest(
    stream: str,
    error: OSError,
    code: int,
    tmp_path: Path,
    finds: object,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kept = tmp_path / "kept.json"
    monkeypatch.setattr(sys, "stderr", io.StringIO())  # the command closes it
    monkeypatch.setattr(sys, stream, Gone(error))
    assert bench("--json", "--save-baseline", str(kept)) == code
    assert BenchReport.from_json(kept) == FOUND


def test_a_run_without_stderr_prints_its_json(
    finds: object, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stderr", None)
    assert bench("--json") == 0
    assert json.loads(capsys.readouterr().out) == FOUND.to_json()


def test_a_narrow_terminal_cuts_no_figure_off() -> None:
    said = Console(file=io.StringIO(), width=40)
    print_report(FOUND, said)
    assert isinstance(said.file, io.StringIO)
    (line,) = [line for line in said.file.getvalue().splitlines() if line.startswith("host-put")]
    for words in ("64 KiB", "5.00", "memcpy", "0.80..1.00", "1.3 ms", "0.200"):
        assert words in line
    assert said.width == 40


# -- bad input -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["tires"], ["bench tires", "did you mean tiers?"]),
        (["tiers", "--page-byte", "1"], ["--page-byte", "did you mean --page-bytes?"]),
        (["tiers", "--page-bytes", "64KX"], ["--page-bytes", "64KX"]),
        (["tiers", "--page-bytes", "1000"], ["--page-bytes 1000", "multiple of 256"]),
        (["tiers", "--page-bytes="], ["--page-bytes", "give at least one"]),
        (["tiers", "--set-bytes", "0"], ["--set-bytes 0", "greater than 0"]),
        (["tiers", "--repeats", "0"], ["--repeats 0", "greater than or equal to 1"]),
        (["tiers", "--paths", "host-putt"], ["--paths", "host-put"]),
        (["tiers", "--device", "gpu"], ["--device gpu", "cuda:N"]),
        (["tiers", "--device", "cuda:99"], ["--device cuda:99", "not on this machine"]),
        (["tiers", "--dir", "/no/such"], ["--dir /no/such", "is not a directory"]),
        (["tiers", "--set-bytes", "100TiB"], ["MiB of memory are needed"]),
        (["tiers", "--tolerance", "1.5"], ["--tolerance 1.5", "less than 1"]),
        (["tiers", "--tolerance", "nan"], ["--tolerance"]),
        (["tiers", "--compare", "/no/such"], ["--compare /no/such: ", "No such file"]),
        (
            ["tiers", "--save-baseline", "/no/such/f"],
            ["--save-baseline /no/such/f: ", "cannot be written"],
        ),
        (["tiers", "--html", "/"], ["--html /: ", "cannot be written"]),
        (["tiers", "--html", "/dev/null"], ["/dev/null", "cannot be written"]),
        (["tiers", "--html", "x", "--save-baseline", "./x"], ["--html x", "--save-baseline too"]),
        (["index", "--pages", "999999999999"], ["--pages 999999999999", "there is room for"]),
        (["index", "--pages", "many"], ["--pages", "integer"]),
        (["break-even", "--prefill-tokens-per-s", "0"], ["--prefill-tokens-per-s 0"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_bad_input_is_one_line_and_exit_code_two(
    arguments: list[str], words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", *arguments]) == 2
    error = refused(capsys)
    for word in words:
        assert word in error


def test_a_report_of_another_benchmark_is_no_baseline(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = tmp_path / "f.json"
    replace(FOUND, kind="index").write(kept)
    assert bench("--compare", str(kept)) == 2
    assert "is of `bench index`, not of `bench tiers`" in refused(capsys)


def test_settings_come_from_the_environment_and_a_file_too(
    told: list[TiersSettings], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TIERED_KV_PATHS", "host-put,host-get")
    monkeypatch.setenv("TIERED_KV_DIRECTORY", str(tmp_path))
    (tmp_path / "b.toml").write_text('page_bytes = ["64KiB", "1MiB"]\nrepeats = 3\nhbm = "1MiB"\n')
    assert bench("--config", str(tmp_path / "b.toml"), "--repeats", "7") == 0
    (settings,) = told
    assert settings.page_bytes == (65536, 1 << 20) and settings.repeats == 7
    assert settings.paths == ("host-put", "host-get") and settings.directory == tmp_path
    assert "set_bytes" not in settings.model_fields_set


@pytest.mark.parametrize(
    ("line", "variable"),
    [("page_bytes = 65536", "131072"), ('page_bytes = "64KiB"', '["128KiB"]')],
)
def test_a_single_size_may_be_a_number_and_a_list_may_be_json(
    line: str,
    variable: str,
    told: list[TiersSettings],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "b.toml").write_text(line)
    assert bench("--config", str(tmp_path / "b.toml")) == 0
    monkeypatch.setenv("TIERED_KV_PAGE_BYTES", variable)
    assert bench() == 0
    assert [settings.page_bytes for settings in told] == [(64 << 10,), (128 << 10,)]


def test_settings_of_a_benchmark_may_stay_in_the_environment_of_other_commands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TIERED_KV_TOLERANCE", "0.2")
    monkeypatch.setenv("TIERED_KV_PATHS", "host-put")
    assert main(["stats", str(tmp_path)]) == 2
    assert "holds no tiered-kv store" in refused(capsys)


@pytest.mark.parametrize("arguments", [["--help"], ["tiers", "--help"], ["index", "-h"]])
def test_help_goes_to_stdout(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", *arguments]) == 0
    assert "usage: tiered-kv bench" in capsys.readouterr().out


def test_without_a_benchmark_the_usage_is_shown_and_nothing_done(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["bench"]) == 2
    assert "break-even" in capsys.readouterr().out
