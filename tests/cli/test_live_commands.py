"""`tiered-kv replay --engine openai` from its arguments to exit code, stdout and stderr."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from openai_stub import GATE_S, Fate, Stub

from tiered_kv.cli import main

ROOT = Path(__file__).parents[2]
SHORT = ["--conversations", "3", "--turns", "3", "--context-tokens", "300", "--system-tokens", "64"]
FAST = ["--speed-up", "1e9", "--reply-tokens", "6"]


def arguments(stub: Stub, *more: str) -> list[str]:
    """A short replay against the stub."""
    return ["replay", "--engine", "openai", "--url", stub.url, *SHORT, *FAST, *more]


@contextmanager
def program(stub: Stub, *more: str) -> Iterator[subprocess.Popen[str]]:
    """The replay as a program of its own; killed at the end if it still runs."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tiered_kv", *arguments(stub, *more)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def stalls_from(first: int) -> Any:
    """A stub's `fate`: requests from this one on are begun and never finished."""

    def fate(number: int, body: dict[str, Any]) -> Fate:
        return "stall" if number >= first else "answer"

    return fate


def test_json_is_the_only_thing_on_stdout(capsys: pytest.CaptureFixture[str]) -> None:
    with Stub() as stub:
        assert main(arguments(stub, "--json")) == 0
    out, error = capsys.readouterr()
    report = json.loads(out)
    assert report["schema_version"] == 1 and report["engine"] == "openai"
    assert report["rounds"][0]["requests"]["done"] == 9
    for words in ("9 of 9", "cached tokens", "external cache hits", "TTFT p50", "prompts as ids"):
        assert words in error


def test_the_table_shows_cached_tokens_and_ttft_by_turn(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with Stub() as stub:
        assert main(arguments(stub)) == 0
    out, error = capsys.readouterr()
    assert out == ""
    lines = [line.split() for line in error.splitlines()]
    head = next(line for line in lines if line[:2] == ["turn", "n"])
    assert head[:4] == ["turn", "n", "prompt", "cached"]
    rows = {line[0]: line for line in lines if len(line) > 6 and line[0] in "123"}
    assert [row[1] for row in rows.values()] == ["3", "3", "3"]
    assert int(rows["3"][3]) > int(rows["1"][3])
    assert "p90 from 29 requests on, p99 from 299" in error


def test_a_server_that_does_not_say_cached_tokens_is_told_how_to(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with Stub(says_cached=False) as stub:
        assert main(arguments(stub)) == 0
    error = capsys.readouterr().err
    assert "--enable-prompt-tokens-details" in error and "--enable-cache-report" in error


def test_failed_requests_are_exit_code_one_and_named(capsys: pytest.CaptureFixture[str]) -> None:
    with Stub(fate=lambda number, body: "500" if number == 4 else "answer") as stub:
        assert main(arguments(stub, "--json")) == 1
    out, error = capsys.readouterr()
    assert json.loads(out)["rounds"][0]["failures"] == {"server_error": 1}
    assert "8 of 9, 1 failed" in error
    assert "failed: server_error" in error and "EngineCore encountered an issue" in error


def test_a_server_that_is_not_there_is_one_line_and_exit_code_two(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with Stub() as stub:
        pass
    assert main(arguments(stub, "--json")) == 2
    out, error = capsys.readouterr()
    assert out == "" and error.count("\n") == 1
    assert error.startswith(f"tiered-kv: error: --url {stub.url}: no server answers there")


def test_a_key_comes_from_the_environment(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with Stub(api_key="k3y") as stub:
        assert main(arguments(stub)) == 2
        assert "TIERED_KV_API_KEY" in capsys.readouterr().err
        monkeypatch.setenv("TIERED_KV_API_KEY", "k3y")
        assert main(arguments(stub, "--json")) == 0
    out, error = capsys.readouterr()
    assert "k3y" not in out + error


def test_settings_of_a_store_may_stay_in_the_environment(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """They are meant for other commands; only a flag that would do nothing is a mistake."""
    monkeypatch.setenv("TIERED_KV_HBM", "1MiB")
    with Stub() as stub:
        assert main(arguments(stub, "--json")) == 0
    assert "hbm" not in json.loads(capsys.readouterr().out)["settings"]


def test_ctrl_c_writes_the_report_of_what_was_done(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    stub = Stub(fate=stalls_from(5))
    with stub, program(stub, "--json", "--clients", "1", "--request-log", str(log)) as process:
        assert stub.stalled.wait(GATE_S)
        process.send_signal(signal.SIGINT)
        out, error = process.communicate(timeout=GATE_S)
    assert process.returncode == 130, error
    report = json.loads(out)
    assert report["interrupted"] is True
    (one,) = report["rounds"]
    assert one["requests"] == {"planned": 9, "done": 4, "failed": 0, "unfinished": 5}
    assert one["ttft_s"]["n"] == 4
    assert "interrupted" in error and "4 of 9, 5 unfinished" in error
    assert "Traceback" not in error
    assert len(log.read_text().splitlines()) == 4
    assert stub.given_up == 1, "the server was told"


def test_ctrl_c_before_the_first_answer_leaves_nothing_to_report() -> None:
    with Stub(fate=stalls_from(0)) as stub, program(stub, "--json") as process:
        assert stub.stalled.wait(GATE_S)
        process.send_signal(signal.SIGINT)
        out, error = process.communicate(timeout=GATE_S)
    assert (process.returncode, out) == (130, "")
    assert error == "tiered-kv: interrupted\n"


def test_a_live_replay_needs_no_torch() -> None:
    code = (
        "import sys\nfrom tiered_kv.cli import replay\n"
        "import tiered_kv.replay.live.session, tiered_kv.replay.engines.openai\n"
        "print([m for m in ('torch', 'transformers', 'lmdb', 'vllm') if m in sys.modules])"
    )
    found = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert found.stdout.strip() == "[]", found.stderr


def test_vllm_that_is_not_installed_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = importlib.util.find_spec

    def find(name: str, package: str | None = None) -> Any:
        return None if name == "vllm" else found(name, package)

    monkeypatch.setattr(importlib.util, "find_spec", find)
    assert main(["replay", "--engine", "vllm"]) == 2
    out, error = capsys.readouterr()
    assert out == "" and error.count("\n") == 1
    assert "vllm is not installed" in error and "--engine openai" in error
