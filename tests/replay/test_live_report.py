"""The report of a live replay: its JSON schema, its verdict, and what rounds have in common."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from tiered_kv.replay.live.answer import FAILURE_REASONS
from tiered_kv.replay.live.counters import CounterChange
from tiered_kv.replay.live.record import LiveRecord
from tiered_kv.replay.live.report import LiveReport, Round, Tokens
from tiered_kv.replay.live.tables import print_live_report
from tiered_kv.replay.settings import ReplaySettings

DISTRIBUTION = {"n": int, "mean": float, "p50": float, "p50_ci95": list, "p90": float, "p99": float}
TIMES = {"ttft_s": DISTRIBUTION, "tpot_s": DISTRIBUTION, "latency_s": DISTRIBUTION}
TOKENS = {
    "prompt_tokens": int,
    "cached_tokens": int,
    "repeated_tokens": int,
    "completion_tokens": int,
    "cached_share": float,
}
PAIR = {"queries": int, "hits": int}
ROUND = {
    "interrupted": bool,
    "engine_gone": bool,
    "wall_s": float,
    "requests": {"planned": int, "done": int, "failed": int, "unfinished": int},
    "failures": dict,
    **TOKENS,
    "cached_share_halves": list,
    "throughput": {
        "requests_per_s": float,
        "prompt_tokens_per_s": float,
        "completion_tokens_per_s": float,
    },
    "in_flight_max": int,
    "waited_s": DISTRIBUTION,
    **TIMES,
    "returning": TIMES,
    "by_turn": list,
    "engine_counters": {
        "was_reset": bool,
        "prefix_cache": PAIR,
        "external_prefix_cache": PAIR,
        "cached_by_source": dict,
        "counters": dict,
    },
}
BY_TURN = {"turn": int, "done": int, "failed": int, **TOKENS, **TIMES}
REPORT = {
    "schema_version": int,
    "engine": str,
    "run": str,
    "settings": dict,
    "host": dict,
    "server": dict,
    "input": dict,
    "interrupted": bool,
    "answers_compared": int,
    "answers_differing": int,
    "rounds": list,
    "turns": list,
}
TURN = {
    "round": int,
    "index": int,
    "position": int,
    "session": int,
    "turn": int,
    "request_id": str,
    "due_s": float,
    "sent_s": float,
    "waited_s": float,
    "prompt_tokens": int,
    "repeated_tokens": int,
    "cached_tokens": int,
    "completion_tokens": int,
    "ttft_s": float,
    "tpot_s": float,
    "latency_s": float,
    "reply_digest": str,
    "finish_reason": str,
    "failure": str,
    "message": str,
}


def record(index: int = 0, **more: Any) -> LiveRecord:
    """An answered request, two turns a session, with what a test wants different."""
    values: dict[str, Any] = {
        "round": 0,
        "index": index,
        "position": index,
        "session": index // 2,
        "turn": index % 2,
        "request_id": f"run-0-{index}",
        "due_s": 1.0,
        "sent_s": 1.25,
        "end_s": 3.25,
        "prompt_tokens": 100,
        "repeated_tokens": 64,
        "cached_tokens": 48,
        "completion_tokens": 5,
        "ttft_s": 0.5,
        "tpot_s": 0.25,
        "reply_digest": f"{index:016x}",
        "finish_reason": "length",
    }
    return LiveRecord(**{**values, **more})


def failed(index: int, **more: Any) -> LiveRecord:
    """A request that the server refused."""
    lost = dict.fromkeys(("ttft_s", "tpot_s", "reply_digest", "cached_tokens", "finish_reason"))
    return record(index, **{**lost, "failure": "refused", "message": "HTTP 400: no", **more})


def one_round(*records: LiveRecord, **more: Any) -> Round:
    """A round of these requests."""
    values: dict[str, Any] = {"planned": len(records), "wall_s": 2.0, "in_flight_max": 2}
    return Round(records=records, **{**values, **more})


def report(*rounds: Round, **facts: Any) -> LiveReport:
    """A report of these rounds."""
    told: dict[str, Any] = {"model": "m", "url": "http://x/v1", "prompts": "ids"}
    return LiveReport("openai", rounds, {**told, "fixed_reply_length": True, **facts}, {}, {}, "r")


def assert_schema(found: Any, schema: Any) -> None:
    """Every name is there, no other is, and each has its type or is null."""
    if isinstance(schema, dict):
        assert set(found) == set(schema)
        for name, kind in schema.items():
            assert_schema(found[name], kind)
    else:
        assert found is None or isinstance(found, schema), (found, schema)


def test_json_has_the_schema_that_is_documented() -> None:
    names = [
        f"vllm:{cache}_{what}_total"
        for cache in ("prefix_cache", "external_prefix_cache")
        for what in ("queries", "hits")
    ]
    counted = CounterChange.between(dict.fromkeys(names, 0.0), dict.fromkeys(names, 8.0))
    first = one_round(*(record(index) for index in range(300)), counted=counted)
    found = json.loads(json.dumps(report(first, one_round(failed(0))).as_json()))
    assert_schema(found, REPORT)
    assert_schema(found["rounds"][0], ROUND)
    assert_schema(found["rounds"][0]["by_turn"][0], BY_TURN)
    assert_schema(found["turns"][0], TURN)
    assert found["rounds"][0]["engine_counters"]["external_prefix_cache"] == {
        "queries": 8,
        "hits": 8,
    }


def test_every_field_and_every_failure_is_documented() -> None:
    page = (Path(__file__).parents[2] / "docs/cli.md").read_text()
    names = {*REPORT, *ROUND, *BY_TURN, *TURN, *DISTRIBUTION, *TOKENS, *PAIR, *FAILURE_REASONS}
    names |= {*ROUND["requests"], *ROUND["throughput"], *ROUND["engine_counters"]}  # type: ignore[misc]
    assert sorted(name for name in names if f"`{name}`" not in page) == []


def test_every_setting_of_a_live_replay_is_documented() -> None:
    from tiered_kv.replay.live.settings import LiveSettings

    page = (Path(__file__).parents[2] / "docs/cli.md").read_text()
    flags = ["--" + name.replace("_", "-") for name in LiveSettings.model_fields]
    assert [flag for flag in flags if flag not in page] == []


def test_times_and_tokens_are_of_answers_alone() -> None:
    found = one_round(record(0), record(1), failed(2), planned=5).as_json()
    assert found["requests"] == {"planned": 5, "done": 2, "failed": 1, "unfinished": 2}
    assert found["prompt_tokens"] == 200 and found["cached_share"] == 0.48
    assert found["throughput"]["completion_tokens_per_s"] == 5.0
    assert found["latency_s"]["mean"] == 2.0 and found["waited_s"]["p50"] == 0.25
    assert found["returning"]["ttft_s"]["n"] == 1
    by_turn = [(turn["turn"], turn["done"], turn["failed"]) for turn in found["by_turn"]]
    assert by_turn == [(0, 1, 1), (1, 1, 0)]


def test_halves_part_the_cold_start_from_the_rest() -> None:
    records = [record(index, cached_tokens=0 if index < 2 else 80) for index in range(4)]
    assert one_round(*reversed(records)).as_json()["cached_share_halves"] == [0.0, 0.8]


def test_an_engine_that_does_not_say_has_no_share() -> None:
    tokens = Tokens.of([record(0, cached_tokens=None, repeated_tokens=None)])
    assert (tokens.cached, tokens.repeated, tokens.cached_share) == (None, None, None)
    assert not report(one_round(record(0, cached_tokens=None))).says_cached_tokens


@pytest.mark.parametrize(
    ("one", "is_passed", "interrupted"),
    [
        (one_round(record()), True, False),
        (one_round(record(), failed(1)), False, False),
        (one_round(record(), interrupted=True, planned=9), True, True),
        (one_round(record(), is_gone=True), False, False),
    ],
)
def test_the_verdict(one: Round, is_passed: bool, interrupted: bool) -> None:
    found = report(one)
    assert (found.is_passed, found.interrupted) == (is_passed, interrupted)


def test_answers_are_compared_up_to_a_conversations_first_difference() -> None:
    first = one_round(*(record(index, session=0, turn=index) for index in range(4)))
    differing = [record(index, session=0, turn=index) for index in range(4)]
    differing[1] = record(1, session=0, turn=1, reply_digest="other")
    assert report(first).answers is None
    assert report(first, first).answers == (4, 0)
    assert report(first, one_round(*differing)).answers == (2, 1)
    broken = [record(0, session=0), failed(1, session=0), record(2, session=0)]
    assert report(first, one_round(*broken)).answers == (1, 0)
    assert report(one_round(*broken), first).answers == (1, 0)


def test_answers_without_sessions_are_compared_one_by_one() -> None:
    first = one_round(*(record(index, session=None, turn=None) for index in range(3)))
    other = [record(index, session=None, turn=None) for index in range(3)]
    other[0] = record(0, session=None, turn=None, reply_digest="other")
    assert report(first, one_round(*other)).answers == (3, 1)


def printed(found: LiveReport) -> str:
    """What people read."""
    stream = io.StringIO()
    print_live_report(found, Console(file=stream, width=130))
    return stream.getvalue()


def test_people_are_shown_every_round_and_whether_answers_were_equal() -> None:
    text = printed(report(one_round(record(0), record(1)), one_round(record(0), record(1))))
    assert "round 1: " in text and "round 2: " in text
    assert "2 compared with round 1: all equal" in text
    assert "first turns 500.0 ms (n 1); returning turns 500.0 ms (n 1)" in text


def test_people_are_shown_failures_with_the_servers_words() -> None:
    text = printed(report(one_round(record(0), failed(1), is_gone=True)))
    assert "1 of 2, 1 failed" in text
    assert "failed: refused" in text and "HTTP 400: no" in text
    assert "engine gone" in text


def test_people_are_told_of_waiting_of_missing_words_and_of_counters_that_fell() -> None:
    fell = CounterChange.between({"vllm:a_total": 2.0}, {"vllm:a_total": 1.0})
    text = printed(
        report(one_round(record(0, cached_tokens=None), counted=fell), fixed_reply_length=False)
    )
    assert "raise --clients" in text
    assert "--enable-prompt-tokens-details" in text
    assert "started anew meanwhile" in text
    assert "takes no ignore_eos" in text


def test_a_servers_words_are_not_taken_for_markup() -> None:
    text = printed(report(one_round(failed(0, message="[bold]no[/bold]"))))
    assert "[bold]no[/bold]" in text


def test_nothing_done_is_shown_too() -> None:
    text = printed(report(one_round(planned=4, interrupted=True)))
    assert "0 of 4, 4 unfinished" in text and "no request was answered" in text


def test_quantiles_are_shown_from_the_n_on_that_they_need() -> None:
    few = printed(report(one_round(*(record(index) for index in range(20)))))
    many = printed(report(one_round(*(record(index) for index in range(60)))))
    assert "TTFT p90" not in few and "TTFT p90" in many and "TTFT p99" not in many


def test_settings_of_other_engines_stay_out_of_the_report() -> None:
    told = ReplaySettings.model_validate({"engine": "openai", "api_key": "secret"}).told()
    assert "hbm" not in told and "engine_args" not in told and "api_key" not in told
    assert told["url"].endswith("/v1") and told["clients"] == 16
    timed = ReplaySettings.model_validate({}).told()
    assert "url" not in timed and "clients" not in timed and timed["hbm"] == 64 << 20
