"""Every bench runs at its smoke size here: that it runs and that what it keeps is well formed.

No figure is looked at. The races of `bench.gpu` are: they are right or wrong on any machine.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from bench import gpu, replay, rows, tiers
from bench.gpu_checks import races, rig

FIELDS = ["name", "metric", "unit", "params", "p20", "p50", "p80"]
FIELDS += ["gpu", "host", "torch", "triton", "commit", "timestamp"]
ROOT = Path(__file__).resolve().parent.parent


def read_rows(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


@pytest.mark.parametrize("wanted", [(0.0, 1.0), (0.5, 3.0), (0.2, 1.8), (1.0, 5.0)])
def test_quantiles_are_interpolated_between_samples(wanted: tuple[float, float]) -> None:
    made = rows.Log().add("a", "b", "s", [5, 1, 4, 2, 3])
    assert made.quantile(wanted[0]) == pytest.approx(wanted[1])


def test_rows_are_appended_with_every_field_and_never_rewritten(tmp_path: Path) -> None:
    log, path = rows.Log(), tmp_path / "results" / "x.jsonl"
    log.add("copy", "rate", "B/s", [1.0, 2.0, 3.0], page_bytes=64)
    where = rows.origin(gpu="some GPU", commit="abc")
    assert rows.append(path, log.measured, where) == 1
    first = path.read_bytes()
    rows.append(path, log.measured, where)
    assert path.read_bytes() == first * 2
    (row, _) = read_rows(path)
    assert list(row) == FIELDS
    assert row["params"] == {"page_bytes": 64, "repeats": 3}
    assert (row["p50"], row["gpu"], row["commit"]) == (2.0, "some GPU", "abc")


def test_every_row_in_the_repository_is_complete() -> None:
    for path in rows.RESULTS.glob("*.jsonl"):
        for row in read_rows(path):
            assert list(row) == FIELDS, path
            low, middle, high = (float(str(row[f"p{percent}"])) for percent in (20, 50, 80))
            assert low <= middle <= high, path


def test_gpu_bench_passes_and_says_first_that_a_cpu_stands_in(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "rows.jsonl"
    assert gpu.main(["--smoke", "--cpu", "--rows", str(path)]) == 0
    out = capsys.readouterr().out
    assert out.startswith("NO GPU FOUND")
    assert out.rstrip().endswith("all passed")
    kept = read_rows(path)
    assert {row["name"] for row in kept} >= {"race_put", "race_into", "race_lease", "copies"}
    assert all(row["gpu"] is None for row in kept)


def test_gpu_bench_keeps_no_rows_of_a_cpu_unless_asked(tmp_path: Path) -> None:
    before = sorted(rows.RESULTS.glob("*"))
    assert gpu.main(["--smoke", "--cpu", "--only", "straddling"]) == 0
    assert sorted(rows.RESULTS.glob("*")) == before


def test_gpu_bench_needs_only_torch_numpy_and_xxhash() -> None:
    """A machine with a GPU and no set-up: the store's other packages cannot be had there."""
    script = """
import sys
for name in ("pydantic", "pydantic_settings", "lmdb", "zstandard", "aiofiles", "rich"):
    sys.modules[name] = None  # importing it raises ModuleNotFoundError
from bench.gpu import main
sys.exit(main(["--smoke", "--cpu", "--only", "races", "copies"]))
"""
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("name", races.RACES)
def test_each_race_is_real_without_waiting_and_lost_with_it(name: str) -> None:
    on_cpu = rig.Rig(torch.device("cpu"), is_smoke=True)
    layout = on_cpu.layout(32 << 10)
    store = rig.open_store(layout, 3, 12, on_cpu.device)
    caller = races.ThreadCaller()
    stage = races.Stage(on_cpu, store, layout, caller, pages=3)
    _, race = races.RACES[name]
    assert race(stage, False) == 3
    assert race(stage, True) == 0
    caller.close()
    store.close()


def test_a_check_that_breaks_is_a_failure_and_the_others_still_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(_: rig.Rig) -> None:
        raise RuntimeError("no such kernel")

    monkeypatch.setitem(gpu.CHECKS, "copies", broken)
    assert gpu.main(["--smoke", "--cpu", "--only", "copies", "straddling"]) == 1
    out = capsys.readouterr().out
    assert "no such kernel" in out
    assert "straddling  page" in out


def test_tiers_bench_keeps_every_metric_of_every_path(tmp_path: Path) -> None:
    path, disk = tmp_path / "rows.jsonl", tmp_path / "disk"
    disk.mkdir()
    assert tiers.main(["--smoke", "--dir", str(disk), "--rows", str(path)]) == 0
    found = read_rows(path)
    assert [row["metric"] for row in found if not row["unit"]] == []
    params = [row["params"] for row in found if row["metric"] == "bytes_per_s"]
    paths = {param["path"] for param in params if isinstance(param, dict)}
    assert paths >= {"host-put", "host-get", "disk-put", "disk-get", "disk-mixed"}
    metrics = {row["metric"] for row in found}
    assert metrics >= {"limit_bytes_per_s", "latency_s", "cpu_s_per_gb", "s_per_page"}
    assert {row["name"] for row in found} == {"tiers", "index"}
    assert list(disk.iterdir()) == []


def test_tiers_bench_keeps_no_rows_of_a_run_that_failed(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    absent = str(tmp_path / "absent")
    assert tiers.main(["--smoke", "--only", "tiers", "--dir", absent, "--rows", str(path)]) == 2
    assert not path.exists()


def test_replay_bench_compares_turns_restored_and_recomputed(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    assert replay.main(["--smoke", "--repeats", "1", "--rows", str(path)]) == 0
    metrics = {row["metric"] for row in read_rows(path)}
    assert metrics == {"reused_tokens", "ttft_store_s", "ttft_recompute_s", "ttft_ratio"}
