"""Flags, variables and the TOML file: their order, and one clear line for what is wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from tiered_kv.cli import main
from tiered_kv.cli.options import parse
from tiered_kv.cli.replay import ReplayOptions
from tiered_kv.errors import ConfigError


def options(*arguments: str) -> ReplayOptions:
    """The options of `tiered-kv replay` with these arguments."""
    return parse(ReplayOptions, arguments, "replay")


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TIERED_KV_HBM", "TIERED_KV_CONFIG"):
        monkeypatch.delenv(name, raising=False)


def test_sizes_accept_units_and_names_are_kebab_case() -> None:
    found = options("--hbm", "8GiB", "--page-bytes=64KiB", "--disk", "/d", "--disk-size", "1TiB")
    assert (found.hbm, found.page_bytes, found.disk_size) == (8 << 30, 64 << 10, 1 << 40)
    assert found.disk == Path("/d")
    assert found.print_json is False
    assert options("--json").print_json is True


def test_argument_beats_variable_beats_file_beats_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "kv.toml"
    file.write_text('hbm = "1MiB"\nhost = "2MiB"\nturns = 3\n')
    assert options().hbm == 64 << 20
    found = options("--config", str(file))
    assert (found.hbm, found.host, found.turns) == (1 << 20, 2 << 20, 3)
    monkeypatch.setenv("TIERED_KV_HBM", "5MiB")
    assert options(f"--config={file}").hbm == 5 << 20
    assert options("--config", str(file), "--hbm", "7MiB").hbm == 7 << 20
    monkeypatch.setenv("TIERED_KV_CONFIG", str(file))
    assert options().turns == 3


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--hbn", "1"], ["--hbn", "did you mean --hbm?"]),
        (["--hbm", "8GX"], ["--hbm 8GX", "64KiB"]),
        (["--hbm", "0"], ["--hbm 0", "greater than 0"]),
        (["--hbm"], ["--hbm", "expected one argument"]),
        (["--page-bytes", "0"], ["--page-bytes 0", "greater than 0"]),
        (["--page-bytes", "-5"], ["--page-bytes"]),
        (["--limit", "none"], ["--limit none", "integer"]),
        (["--engine", "vlm"], ["--engine vlm", "'timed', 'hf', 'openai' or 'vllm'"]),
        (["--engine", "openai", "--hbm", "1MiB"], ["--hbm", "timed and hf, not openai"]),
        (["--engine", "openai", "--engine-args={}"], ["--engine-args", "engine vllm, not openai"]),
        (["--engine", "vllm", "--url", "http://x/v1"], ["--url", "engine openai, not vllm"]),
        (["--rounds", "2"], ["--rounds", "openai and vllm, not timed"]),
        (["--speed-up", "0"], ["--speed-up 0", "greater than 0"]),
        (["--speed-up", "inf"], ["--speed-up inf", "finite"]),
        (["--clients", "0"], ["--clients 0", "greater than or equal to 1"]),
        (["--request-timeout-s", "nan"], ["--request-timeout-s"]),
        (["--engine", "vllm", "--engine-args", "[1]"], ["--engine-args [1]", "JSON object"]),
        (["--engine", "vllm", "--kv-transfer-config", "{"], ["--kv-transfer-config", "not JSON"]),
        (["--disk", "/d"], ["--disk needs --disk-size"]),
        (["--disk-size", "1GiB"], ["--disk-size needs disk"]),
        (["--engine", "hf", "--page-bytes", "64KiB"], ["--page-bytes", "--page-tokens"]),
        (["--context-tokens", "100"], ["--system-tokens 256", "--context-tokens 100"]),
        (["--config", "/no/such/file"], ["--config /no/such/file", "No such file"]),
        (["surplus"], ["surplus"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_bad_flags_are_one_line_and_exit_code_two(
    arguments: list[str], words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["replay", *arguments]) == 2
    out, error = capsys.readouterr()
    assert out == ""
    assert error.startswith("tiered-kv: error: ") and error.count("\n") == 1
    for word in words:
        assert word in error


def test_an_unknown_variable_is_refused_with_the_nearest_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TIERED_KV_HOSTS", "1GiB")
    with pytest.raises(ConfigError, match=r"TIERED_KV_HOSTS.*did you mean TIERED_KV_HOST\?"):
        options()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('hbn = "1MiB"', "hbn: no such setting; did you mean hbm"),
        ('page-bytes = "1MiB"', "did you mean page_bytes"),
        ("hbm = ", "not TOML"),
        ('hbm = "8GX"', "--hbm 8GX"),
    ],
)
def test_a_bad_file_is_refused(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "kv.toml").write_text(text)
    with pytest.raises(ConfigError, match=words):
        options("--config", str(tmp_path / "kv.toml"))


def test_a_command_that_is_not_there_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["repaly"]) == 2
    assert "did you mean replay?" in capsys.readouterr().err
    assert main(["x"]) == 2
    assert "expected one of replay, bench, check, stats" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["--help"], ["replay", "--help"], ["check", "-h"]])
def test_help_goes_to_stdout(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 0
    assert "usage: tiered-kv" in capsys.readouterr().out


def test_without_a_command_usage_is_shown_and_nothing_done(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main([]) == 2
    assert "usage: tiered-kv" in capsys.readouterr().out


def test_version_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("tiered-kv ")
