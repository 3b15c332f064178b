"""Whole replays: bytes that are verified, decisions that repeat, and what survives."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tiered_kv.errors import ConfigError, LayoutMismatchError
from tiered_kv.replay.report import ReplayReport
from tiered_kv.replay.session import run_replay
from tiered_kv.replay.settings import ReplaySettings

MOONCAKE = Path(__file__).parents[2].parent / "shared/traces/mooncake_conversation_trace.jsonl"
PAGE = 4096


def timed(**more: Any) -> ReplayReport:
    """A small replay on engine timed, with what a test wants different."""
    values: dict[str, Any] = {
        "page_bytes": PAGE,
        "hbm": 16 * PAGE,
        "host": 40 * PAGE,
        "conversations": 4,
        "turns": 4,
        "context_tokens": 640,
        "system_tokens": 64,
        "page_tokens": 16,
        "kind": "chat",
        "device": "cpu",
    }
    return run_replay(ReplaySettings.model_validate({**values, **more}))


def small_store(disk: Path, **more: Any) -> ReplaySettings:
    """Settings of a replay over three small tiers, with what a test wants different."""
    values: dict[str, Any] = {
        "page_bytes": PAGE,
        "hbm": 16 * PAGE,
        "host": 40 * PAGE,
        "disk": disk,
        "disk_size": 8 << 20,
        "device": "cpu",
    }
    return ReplaySettings.model_validate({**values, **more})


def branching_trace(path: Path, requests: int = 60) -> Path:
    """Sessions that share a block and come back longer, taking turns; last blocks are partial."""
    lines = []
    for number in range(requests):
        session, turn = number % 6, number // 6
        ids = [0] + [1 + session * 1000 + block for block in range(3 * turn + 2)]
        tokens = 512 * (len(ids) - 1) + 100
        lines.append(
            {"timestamp": number, "input_length": tokens, "output_length": 5, "hash_ids": ids}
        )
    path.write_text("\n".join(map(json.dumps, lines)))
    return path


@pytest.mark.parametrize("policy", ["lru", "fifo"])
@pytest.mark.parametrize("write_policy", ["back", "through"])
def test_hits_from_all_tiers_are_verified_and_are_those_decided_without_bytes(
    tmp_path: Path, policy: str, write_policy: str
) -> None:
    trace = branching_trace(tmp_path / "trace")
    report = timed(
        trace=trace,
        disk=tmp_path / "disk",
        disk_size=8 << 20,
        policy=policy,
        write_policy=write_policy,
    )
    assert report.is_passed and report.outputs_equal
    assert all(tokens > 0 for tokens in report.hit_tokens.values())
    assert report.decided_tokens == report.hit_tokens
    assert report.checksums_verified > 0 and report.checksums_failed == 0
    assert report.pages_compared > 0 and report.pages_wrong == 0
    assert len(report.turns) == 60


def test_the_public_trace_hits_as_decided() -> None:
    if not MOONCAKE.exists():
        pytest.skip(f"{MOONCAKE.name} is not beside the project")
    report = timed(trace=MOONCAKE, limit=50, hbm=300 * PAGE, host=900 * PAGE)
    assert report.is_passed
    assert report.decided_tokens == report.hit_tokens
    assert sum(report.hit_tokens.values()) >= 49 * 512, "all requests share their first block"


def test_two_runs_decide_the_same() -> None:
    assert timed().hit_tokens == timed().hit_tokens


def test_a_prompt_longer_than_hbm_comes_back_whole(tmp_path: Path) -> None:
    """One conversation of 40 pages over an HBM of 4: loaded and stored in rounds."""
    report = timed(
        conversations=1,
        turns=3,
        hbm=4 * PAGE,
        host=100 * PAGE,
        disk=tmp_path / "disk",
        disk_size=8 << 20,
    )
    last = report.turns[-1]
    before = report.turns[-2].prompt_tokens
    assert before // 16 > 4
    assert last.reused >= (before + 15) // 16 * 16
    assert report.is_passed
    assert set(report.why_miss) == {"never_stored"}, "no page counts as missed and hit"


def test_ttft_counts_what_is_missing_by_the_clock() -> None:
    report = timed(prefill_tokens_per_s=100.0)
    for turn in report.turns:
        assert turn.ttft_recompute_s == turn.prompt_tokens / 100
        assert turn.ttft_store_s >= (turn.prompt_tokens - turn.reused) / 100


def test_a_store_found_again_hits_and_same_seeds_give_same_keys(tmp_path: Path) -> None:
    disk: dict[str, Any] = {"disk": tmp_path / "disk", "disk_size": 8 << 20}
    first = timed(**disk)
    again = timed(**disk)
    assert sum(again.hit_tokens.values()) > sum(first.hit_tokens.values())
    assert again.turns[0].reused_tokens["disk"] > 0, "the very first prompt is there already"
    assert again.decided_tokens is None, "what was found is not part of the decisions"
    assert again.is_passed
    other = timed(seed=1, **disk)
    assert other.turns[0].reused == 0


def test_another_page_size_is_refused_and_the_store_kept(tmp_path: Path) -> None:
    disk: dict[str, Any] = {"disk": tmp_path / "disk", "disk_size": 8 << 20}
    timed(**disk)
    with pytest.raises(LayoutMismatchError):
        timed(**disk, page_bytes=2 * PAGE, hbm=64 * PAGE, host=64 * PAGE)
    assert timed(**disk).turns[0].reused > 0


def test_an_interrupt_reports_what_was_done_and_closes_the_store(tmp_path: Path) -> None:
    """Ctrl-C in the middle of a replay."""

    def interrupt(done: int, total: int, text: str) -> None:
        if done == 5:
            raise KeyboardInterrupt

    settings = small_store(tmp_path / "disk")
    report = run_replay(settings, interrupt)
    assert report.interrupted and len(report.turns) == 5
    assert report.requests_planned == 36
    assert report.is_passed and report.decided_tokens == report.hit_tokens
    run_replay(settings.model_copy(update={"limit": 1}))  # the directory is free again


KILLED = """
import os, signal, sys
from tiered_kv.replay.session import run_replay
from tiered_kv.replay.settings import ReplaySettings

def kill(done, total, text):
    if done == 12:
        os.kill(os.getpid(), signal.SIGKILL)

run_replay(ReplaySettings.model_validate_json(sys.argv[1]), kill)
"""


def test_committed_pages_hit_after_sigkill(tmp_path: Path) -> None:
    """Killed in the middle of a replay and started again on the same directory."""
    from tiered_kv.cli import main

    settings = small_store(tmp_path / "disk", write_policy="through")
    command = [sys.executable, "-c", KILLED, settings.model_dump_json()]
    root = str(Path(__file__).parents[2])
    killed = subprocess.run(command, env={**os.environ, "PYTHONPATH": root}, timeout=60)
    assert killed.returncode == -signal.SIGKILL
    assert main(["check", str(tmp_path / "disk")]) == 0
    report = run_replay(settings)
    assert report.is_passed
    assert report.turns[0].reused_tokens["disk"] > 0
    assert len(report.turns) == 36


def test_memory_stays_within_its_budget() -> None:
    report = timed(hbm=8 << 20, host=24 << 20, conversations=40, context_tokens=2000)
    memory = report.memory
    if memory.peak_bytes is None:
        pytest.skip("this system does not tell the resident set's high-water mark")
    fixed_bytes = 2 << 20  # the interpreter's own heap grows by arenas of 1 MiB
    assert memory.peak_bytes <= memory.budget_bytes + fixed_bytes
    assert memory.peak_bytes > 24 << 20


def test_recorded_dialogues_are_replayed_without_a_model(tmp_path: Path) -> None:
    text = "tell me more about pages and tiers, please. " * 4
    talk = [
        {"from": role, "value": f"{turn}: {text}"} for turn in range(4) for role in ("human", "gpt")
    ]
    path = tmp_path / "talks.json"
    path.write_text(json.dumps([{"conversations": talk}, {"conversations": talk[:4]}]))
    report = timed(trace=path)
    assert len(report.turns) == 6
    assert report.is_passed
    assert all(turn.reused > 0 for turn in report.turns[1:])


def test_a_tier_smaller_than_a_page_is_refused() -> None:
    with pytest.raises(ConfigError, match="hbm"):
        timed(hbm=PAGE - 1)
