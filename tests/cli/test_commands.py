"""The commands from their arguments to exit code, stdout and stderr."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tiered_kv.cli import main
from tiered_kv.cli.progress import Progress
from tiered_kv.keys import PageKey
from tiered_kv.storage.base import Page
from tiered_kv.storage.disk import DiskTier

ROOT = Path(__file__).parents[2]
SMALL = ["--page-bytes", "4KiB", "--hbm", "64KiB", "--host", "160KiB", "--page-tokens", "16"]
SHORT = ["--conversations", "3", "--turns", "3", "--context-tokens", "500", "--kind", "chat"]
DISK_SIZE = ["--disk-size", "8MiB"]


def replay(*arguments: str) -> int:
    """`tiered-kv replay` on a small store."""
    return main(["replay", *SMALL, *SHORT, *arguments])


@pytest.fixture
def disk(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    """A directory with a store that a replay has left."""
    assert replay("--disk", str(tmp_path / "kv"), *DISK_SIZE) == 0
    capsys.readouterr()
    return tmp_path / "kv"


def assert_refused(capsys: pytest.CaptureFixture[str], *words: str) -> None:
    """Nothing on stdout, and one line on stderr with these words."""
    out, error = capsys.readouterr()
    assert out == ""
    assert error.startswith("tiered-kv: error: ") and error.count("\n") == 1, error
    for word in words:
        assert word in error


def test_json_is_the_only_thing_on_stdout(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert replay("--json", "--disk", str(tmp_path / "kv"), *DISK_SIZE) == 0
    out, error = capsys.readouterr()
    report = json.loads(out)
    assert report["schema_version"] == 1
    assert report["outputs_equal"] is True
    assert report["hit_tokens"] == report["hit_tokens_decided"]
    assert len(report["turns"]) == 9
    assert "outputs equal" in error


def test_without_json_nothing_is_on_stdout(capsys: pytest.CaptureFixture[str]) -> None:
    assert replay() == 0
    out, error = capsys.readouterr()
    assert out == "" and "hit tokens" in error


def test_check_and_stats_read_what_a_replay_left(
    disk: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check", str(disk), "--json"]) == 0
    checked = json.loads(capsys.readouterr().out)
    assert checked["is_clean"] and checked["pages"] > 0 and checked["problems"] == []
    assert main(["stats", str(disk), "--json"]) == 0
    stats = json.loads(capsys.readouterr().out)
    assert stats["pages"] == checked["pages"]
    assert stats["page_bytes"] == 4096
    assert stats["used_bytes"] <= stats["capacity_bytes"] == 8 << 20
    assert len(stats["layout"]) == 64
    assert main(["stats", str(disk)]) == 0
    assert "capacity_pages" in capsys.readouterr().err


def test_a_flipped_byte_is_found_fixed_and_never_served(
    disk: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A byte of one page rots on disk: check says so, --fix drops it, and replay misses it."""
    segment = next(path for path in sorted((disk / "segments").iterdir()) if path.stat().st_size)
    middle = 64 * 1024 + 1000
    with segment.open("r+b") as file:
        file.seek(middle)
        byte = file.read(1)
        file.seek(middle)
        file.write(bytes([byte[0] ^ 0xFF]))
    assert main(["check", str(disk)]) == 1
    assert "does not agree with its checksum" in capsys.readouterr().err
    assert main(["check", str(disk), "--fix", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["fixed"] >= 1
    assert main(["check", str(disk)]) == 0
    assert replay("--disk", str(disk), *DISK_SIZE) == 0


def test_a_damaged_root_is_one_problem_and_its_descendants_stay(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One bad page was reported, and dropped, together with all that hangs from it."""
    tier = DiskTier.open(tmp_path / "kv", 16384, 4 << 20, "layout")
    keys = [PageKey(bytes([number]) * 32) for number in range(1, 7)]
    pages = [
        Page(key, parent, np.zeros(16384, np.uint8))
        for key, parent in zip(keys, [None, *keys], strict=False)
    ]
    slots = tier.reserve(6)
    assert slots is not None
    tier.write(slots, pages)
    tier.close()
    with (tmp_path / "kv" / "segments" / "00000.seg").open("r+b") as file:
        file.seek(4096 + 100)
        file.write(b"x")
    assert main(["check", str(tmp_path / "kv")]) == 1
    assert "5 pages hang from pages that are damaged" in capsys.readouterr().err
    assert main(["check", str(tmp_path / "kv"), "--fix", "--json"]) == 0
    out, error = capsys.readouterr()
    fixed = json.loads(out)
    assert (len(fixed["problems"]), fixed["fixed"], fixed["hanging_pages"]) == (1, 1, 5)
    assert "1 problems, 1 fixed" in error
    assert main(["check", str(tmp_path / "kv"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["pages"] == 5


@pytest.mark.parametrize("command", ["check", "stats"])
def test_a_directory_without_a_store_is_left_alone(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine").write_text("x")
    assert main([command, str(tmp_path)]) == 2
    assert_refused(capsys, str(tmp_path), "no tiered-kv store")
    assert main([command, str(tmp_path / "absent")]) == 2
    assert_refused(capsys, "absent")
    for text in ("{}", "[" * 60_000, '{"page_bytes": 1e999}'):
        (tmp_path / "format.json").write_text(text)
        assert main([command, str(tmp_path)]) == 2
        assert_refused(capsys, "not a tiered-kv marker")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["format.json", "mine"]


def test_a_directory_in_use_is_refused_by_all_commands(
    disk: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from tiered_kv.cli.stored import opened

    with opened(disk):
        for arguments in (["check", str(disk)], ["stats", str(disk)]):
            assert main(arguments) == 2
            assert_refused(capsys, "in use")
        assert replay("--disk", str(disk), *DISK_SIZE) == 2
        assert_refused(capsys, "in use")


def test_a_foreign_directory_is_refused_and_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "thesis.txt").write_text("x")
    assert replay("--disk", str(tmp_path), *DISK_SIZE) == 2
    assert_refused(capsys, str(tmp_path), "not a tiered-kv store")
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


def test_a_store_of_another_layout_is_refused(
    disk: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert replay("--disk", str(disk), *DISK_SIZE, "--page-bytes", "8KiB") == 2
    assert_refused(capsys, "4096", "8192")


def test_a_path_that_cannot_be_written_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("x")
    assert replay("--disk", str(tmp_path / "file" / "kv"), *DISK_SIZE) == 2
    assert_refused(capsys, str(tmp_path / "file" / "kv"))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--hbm", "4095"], ["--hbm 4095", "4096"]),
        (["--host", "4095"], ["--host 4095", "4096"]),
        (["--page-bytes", "0"], ["--page-bytes 0"]),
        (["--trace", "/no/such/trace"], ["--trace /no/such/trace"]),
        (["--page-bytes", "100GiB"], ["--hbm 65536", "107374182400"]),
        (["--device", "gpu"], ["--device gpu", "cuda:N"]),
        (["--device", "cuda:99"], ["--device cuda:99", "not on this machine"]),
        (["--seed", "9223372036854775808"], ["--seed"]),
    ],
    ids=["hbm", "host", "page", "trace", "huge-page", "device", "number", "seed"],
)
def test_impossible_sizes_and_inputs_are_refused(
    arguments: list[str], words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert replay(*arguments) == 2
    assert_refused(capsys, *words)


def test_a_truncated_trace_is_refused_before_anything_is_made(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = {"timestamp": 0, "input_length": 5, "output_length": 1, "hash_ids": [0]}
    (tmp_path / "t").write_text(json.dumps(whole) + "\n" + json.dumps(whole)[:30])
    assert replay("--trace", str(tmp_path / "t"), "--disk", str(tmp_path / "kv"), *DISK_SIZE) == 2
    assert_refused(capsys, "line 2", "complete JSON")
    assert not (tmp_path / "kv").exists()


def test_the_module_runs_as_a_program_with_its_exit_codes() -> None:
    program = [sys.executable, "-m", "tiered_kv"]
    done = subprocess.run([*program, "--version"], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    bad = subprocess.run([*program, "replay", "--hbn"], cwd=ROOT, capture_output=True, text=True)
    assert bad.returncode == 2 and bad.stdout == "" and bad.stderr.count("\n") == 1


def test_the_command_line_starts_without_torch_or_an_engine() -> None:
    code = (
        "import sys\nfrom tiered_kv.cli import bench, check, replay, stats\n"
        "print([m for m in ('torch', 'transformers', 'lmdb') if m in sys.modules])"
    )
    found = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert found.stdout.strip() == "[]", found.stderr


def test_ctrl_c_reports_what_was_done_and_exits_130(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(self: Progress, done: int, total: int, text: str) -> None:
        if done == 4:
            raise KeyboardInterrupt

    monkeypatch.setattr(Progress, "show", interrupt)
    assert replay("--json") == 130
    out, error = capsys.readouterr()
    report = json.loads(out)
    assert report["interrupted"] is True
    assert report["requests"] == {"planned": 9, "done": 4}
    assert "interrupted" in error
