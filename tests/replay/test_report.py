"""The report: its JSON schema, its verdict, and its table."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from tiered_kv.replay.report import MemoryUse, ReplayReport, TurnRecord, budget_bytes
from tiered_kv.replay.requests import Outcome, Request, as_ids
from tiered_kv.replay.tables import grouped, print_report

SCHEMA = {
    "schema_version": int,
    "engine": str,
    "settings": dict,
    "interrupted": bool,
    "requests": {"planned": int, "done": int},
    "outputs_equal": bool,
    "logit_difference_max": float,
    "prompt_tokens": int,
    "hit_tokens": {"hbm": int, "host": int, "disk": int},
    "hit_tokens_decided": dict,
    "ttft_ratio_median": float,
    "ttft_ratio_median_2000_tokens": float,
    "checksums": {"verified": int, "failed": int},
    "pages_compared": {"verified": int, "wrong": int},
    "bytes_read": {"hbm": int, "host": int, "disk": int},
    "bytes_written": {"hbm": int, "host": int, "disk": int},
    "peak_bytes": int,
    "budget_bytes": int,
    "peak_measure": str,
    "failed_writes": int,
    "why_miss": dict,
    "wall_s": float,
    "turns": list,
}
TURN_SCHEMA = {
    "position": int,
    "session": int,
    "turn": int,
    "arrival_s": float,
    "prompt_tokens": int,
    "reused_tokens": {"hbm": int, "host": int, "disk": int},
    "ttft_store_s": float,
    "ttft_recompute_s": float,
    "outputs_equal": bool,
    "logit_difference": float,
}


def turn(position: int = 0, **more: Any) -> TurnRecord:
    """A turn that reused 2,100 of 3,000 tokens, with what a test wants different."""
    values: dict[str, Any] = {
        "position": position,
        "session": 0,
        "turn": position,
        "arrival_s": 1.0,
        "prompt_tokens": 3000,
        "reused_tokens": {"hbm": 1000, "host": 1000, "disk": 100},
        "ttft_store_s": 0.25,
        "ttft_recompute_s": 1.0,
        "outputs_equal": True,
        "logit_difference": 1e-7,
    }
    return TurnRecord(**{**values, **more})


def report(*turns: TurnRecord, **more: Any) -> ReplayReport:
    """A report on these turns."""
    values: dict[str, Any] = {
        "engine": "hf",
        "turns": turns,
        "bytes_read": {"disk": 5},
        "bytes_written": {"host": 7, "disk": 5},
        "checksums_verified": 3,
        "checksums_failed": 0,
        "why_miss": {"never_stored": 4},
        "memory": MemoryUse(1000, 2000, "store"),
        "requests_planned": len(turns),
        "wall_s": 1.5,
        "decided_tokens": None,
    }
    return ReplayReport(**{**values, **more})


def assert_schema(found: Any, schema: Any) -> None:
    """Every name is there, no other is, and each has its type."""
    if isinstance(schema, dict):
        assert set(found) == set(schema)
        for name, kind in schema.items():
            assert_schema(found[name], kind)
    else:
        assert isinstance(found, schema), (found, schema)


def test_json_has_the_schema_that_is_documented() -> None:
    hits = {"hbm": 2000, "host": 2000, "disk": 200}
    found = json.loads(json.dumps(report(turn(0), turn(1), decided_tokens=hits).as_json()))
    assert_schema(found, SCHEMA)
    assert_schema(found["turns"][0], TURN_SCHEMA)
    assert found["schema_version"] == 1
    assert found["hit_tokens"] == found["hit_tokens_decided"] == hits


def test_every_field_is_documented() -> None:
    page = (Path(__file__).parents[2] / "docs/cli.md").read_text()
    assert [name for name in {**SCHEMA, **TURN_SCHEMA} if f"`{name}`" not in page] == []


def test_a_record_takes_over_request_and_outcome() -> None:
    request = Request(4, 2, 9.0, as_ids([1]), 50, 3)
    outcome = Outcome({"hbm": 1}, 0.1, 0.2, True, as_ids([]), 0.0)
    record = TurnRecord.of(7, request, outcome)
    assert (record.position, record.session, record.turn, record.reused) == (7, 4, 2, 1)


def test_ratios_are_of_returning_turns_only() -> None:
    found = report(
        turn(0, ttft_store_s=1.0),
        turn(1, ttft_store_s=0.4, reused_tokens={"hbm": 100}),
        turn(2, ttft_store_s=0.2),
        turn(3, ttft_store_s=0.1),
    )
    assert found.ttft_ratio_median == pytest.approx(0.2)
    assert found.ttft_ratio_median_long == pytest.approx(0.15)
    assert report(turn(0)).ttft_ratio_median is None


def test_a_request_of_an_unknown_turn_returns_if_it_reused_any() -> None:
    assert turn(turn=None).is_returning
    assert not turn(turn=None, reused_tokens={"hbm": 0}).is_returning


@pytest.mark.parametrize(
    ("more", "is_passed"),
    [
        ({}, True),
        ({"turns": [turn(outputs_equal=False)]}, False),
        ({"checksums_failed": 1}, False),
        ({"pages_wrong": 1}, False),
        ({"decided_tokens": {"hbm": 1, "host": 0, "disk": 0}}, False),
        ({"interrupted": True}, True),
    ],
    ids=["clean", "outputs", "checksum", "bytes", "decisions", "interrupted"],
)
def test_anything_wrong_fails_the_replay(more: dict[str, Any], is_passed: bool) -> None:
    assert report(turn(), **more).is_passed == is_passed


def test_the_budget_is_both_tiers_five_per_cent_and_the_index() -> None:
    assert budget_bytes(1000, 1000, 4) == 2100 + 1000


def printed(found: ReplayReport) -> str:
    """What people read."""
    stream = io.StringIO()
    print_report(found, Console(file=stream, width=200))
    return stream.getvalue()


def test_people_read_the_verdict_tiers_and_reasons() -> None:
    text = printed(report(turn(0), turn(1), pages_compared=9))
    for words in ("yes, all 2", "hbm 2,000, host 2,000, disk 200", "3 verified, 0 failed"):
        assert words in text
    for words in ("never_stored 4", "1,000 B of 2.0 KiB allowed", "median 0.25", "9 byte for byte"):
        assert words in text


def test_people_are_told_what_is_wrong() -> None:
    decided = {"hbm": 1, "host": 0, "disk": 0}
    bad = report(turn(0, outputs_equal=False), decided_tokens=decided, interrupted=True)
    text = printed(bad)
    for words in ("NO: 1 of 1 differ", "1 NOT", "NO: hbm 1", "interrupted"):
        assert words in text


def test_an_empty_report_prints_too() -> None:
    text = printed(report(memory=MemoryUse(None, 5, "process_rss"), why_miss={}))
    assert "not measurable" in text and "no page missed" in text


def test_few_turns_get_a_row_each() -> None:
    turns = [turn(i, turn=i % 3) for i in range(9)]
    assert [(group.label, len(group.turns)) for group in grouped(turns)] == [
        ("1", 3),
        ("2", 3),
        ("3", 3),
    ]


def test_many_turns_are_put_together_and_none_is_lost() -> None:
    turns = [turn(i, turn=i % 100) for i in range(500)]
    groups = grouped(turns)
    assert 8 <= len(groups) <= 13
    assert sum(len(group.turns) for group in groups) == 500
    assert groups[0].label.startswith("1-")
    assert groups[-1].label.endswith("100")


def test_unknown_turns_are_shown_in_tenths_of_the_trace() -> None:
    groups = grouped([turn(i, turn=None) for i in range(2000)])
    assert len(groups) == 10
    assert groups[0].label == "1-200"
    assert grouped([]) == []
