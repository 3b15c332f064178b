"""Whole replays against a server that streams, reports, and fails on request."""

from __future__ import annotations

import asyncio
import json
import signal
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from openai_stub import BLOCK_TOKENS, MODEL, Fate, Stub

from tiered_kv.errors import ConfigError
from tiered_kv.replay.engines.openai import OpenAIEngine
from tiered_kv.replay.live.report import LiveReport
from tiered_kv.replay.live.session import run_live_replay
from tiered_kv.replay.settings import ReplaySettings


def replay(stub: Stub, **more: Any) -> LiveReport:
    """Three short conversations without pauses, with what a test wants different."""
    values: dict[str, Any] = {
        "engine": "openai",
        "url": stub.url,
        "speed_up": 1e9,
        "conversations": 3,
        "turns": 3,
        "kind": "chat",
        "context_tokens": 300,
        "system_tokens": 64,
        "reply_tokens": 6,
        "page_tokens": BLOCK_TOKENS,
    }
    return run_live_replay(ReplaySettings.model_validate({**values, **more}))


def fails(*numbers: int, fate: Fate) -> Callable[[int, dict[str, Any]], Fate]:
    """A stub's `fate`: these of the replay's requests fail so; the first, short one does not."""
    return lambda number, body: fate if number - 1 in numbers else "answer"


def test_every_turn_repeats_its_conversation_token_for_token() -> None:
    with Stub() as stub:
        report = replay(stub)
    assert report.is_passed and not report.interrupted
    assert report.facts["prompts"] == "ids" and report.facts["model"] == MODEL
    prompts = {tuple(prompt) for prompt in stub.prompts}
    assert len(prompts) == 9
    for prompt in prompts:
        reply = [(sum(prompt) + at) % 200 for at in range(6)]
        followed = [longer for longer in prompts if longer[: len(prompt)] == prompt != longer]
        assert all(list(longer[len(prompt) : len(prompt) + 6]) == reply for longer in followed)
    assert sum(len(longer) > 200 for longer in prompts) >= 3
    (one,) = report.rounds
    assert {turn: len(found) for turn, found in one.by_turn.items()} == {0: 3, 1: 3, 2: 3}


def test_requests_are_greedy_of_full_length_and_carry_their_ids() -> None:
    with Stub() as stub:
        report = replay(stub)
    for body in stub.bodies:
        assert body["temperature"] == 0 and body["stream"] is True
        assert body["ignore_eos"] is True and body["model"] == MODEL
        assert body["stream_options"] == {"include_usage": True}
    sent = {record.request_id for record in report.rounds[0].records}
    assert sent == set(stub.request_ids[1:]) and len(sent) == 9
    assert all(name.startswith(report.run_id) for name in sent)


def test_cached_tokens_are_those_the_server_reports() -> None:
    with Stub() as stub:
        report = replay(stub)
    (one,) = report.rounds
    assert report.says_cached_tokens
    cached = sum(record.cached_tokens or 0 for record in one.done)
    assert cached == stub.hits > 0
    for record in one.returning:
        assert record.cached_tokens == record.repeated_tokens


def test_the_servers_own_counters_are_of_the_round_alone() -> None:
    """The first, short request of the client came before the first reading."""
    with Stub() as stub:
        report = replay(stub)
    counted = report.rounds[0].counted
    assert counted is not None
    asked = sum(record.prompt_tokens or 0 for record in report.rounds[0].done)
    assert counted.pair("prefix_cache") == (asked, stub.hits)
    assert counted.pair("external_prefix_cache") == (asked, stub.external_hits)
    assert stub.queries > asked


def test_clients_run_at_the_same_time() -> None:
    """The stub answers nobody before four requests are in flight at once."""
    with Stub(company=4) as stub:
        report = replay(stub, conversations=4, turns=1, clients=4)
    assert report.is_passed and stub.in_flight_max == 4
    assert report.rounds[0].in_flight_max == 4


def test_clients_are_no_more_than_asked_for() -> None:
    with Stub(company=2) as stub:
        report = replay(stub, conversations=6, turns=1, clients=2)
    assert report.is_passed and stub.in_flight_max == 2


def test_a_second_round_says_the_same_again_and_hits() -> None:
    with Stub() as stub:
        report = replay(stub, rounds=2)
    first, second = report.rounds
    assert report.answers == (9, 0)
    assert stub.prompts and len(stub.prompts) == 18
    hits = [sum(record.cached_tokens or 0 for record in one.done) for one in (first, second)]
    assert hits[1] > hits[0]
    assert second.counted is not None and second.counted.pair("prefix_cache") == (
        sum(record.prompt_tokens or 0 for record in second.done),
        hits[1],
    )


@pytest.mark.parametrize(
    ("fate", "reason"),
    [
        ("break", "stream_broken"),
        ("hang up", "stream_broken"),
        ("no json", "stream_broken"),
        ("odd form", "stream_broken"),
        ("empty", "no_tokens"),
        ("error event", "server_error"),
        ("abort", "server_error"),
        ("500", "server_error"),
        ("429", "overloaded"),
        ("400", "refused"),
        ("too long", "context_too_long"),
    ],
)
def test_a_failed_request_is_counted_and_the_others_go_on(fate: Fate, reason: str) -> None:
    with Stub(fate=fails(2, 5, fate=fate)) as stub:
        report = replay(stub)
    (one,) = report.rounds
    assert one.failures == Counter({reason: 2})
    assert len(one.done) == 7 and not report.is_passed and not one.is_gone
    assert all(record.message for record in one.records if record.failure)
    found = one.as_json()
    assert found["requests"] == {"planned": 9, "done": 7, "failed": 2, "unfinished": 0}
    assert found["ttft_s"]["n"] == 7, "times are of answers alone"


def test_a_request_past_its_deadline_has_failed_and_the_server_is_told() -> None:
    with Stub(fate=fails(0, fate="stall")) as stub:
        report = replay(stub, conversations=1, request_timeout_s=0.3)
        assert report.rounds[0].failures == Counter({"timeout": 1})
        assert len(report.rounds[0].done) == 2
    assert stub.given_up == 1, "the connection was closed"


def test_a_server_that_dies_ends_the_replay_with_a_report() -> None:
    stub = Stub()

    def die(number: int, body: dict[str, Any]) -> Fate:
        if number == 3:
            stub._loop.create_task(stub.cut())
        return "stall" if number == 3 else "answer"

    stub.fate = die
    with stub:
        report = replay(stub, conversations=1, turns=40, context_tokens=3000)
    (one,) = report.rounds
    assert one.is_gone and not report.is_passed
    assert len(one.done) == 2
    assert one.failures == Counter({"unreachable": 8, "stream_broken": 1})
    assert one.as_json()["requests"]["unfinished"] == 40 - 11


def test_a_server_without_token_ids_is_sent_text_that_grows() -> None:
    with Stub(returns_ids=False) as stub:
        report = replay(stub)
    assert report.facts["prompts"] == "text"
    assert all("return_token_ids" not in body for body in stub.bodies[1:])
    for prompt in stub.prompts:
        assert prompt.startswith("<|system|>\n") and prompt.endswith("<|assistant|>\n")
    first = min(stub.prompts, key=len)
    reply = "".join(f"w{(sum(first.encode()) + at) % 200} " for at in range(6))
    assert sum(prompt.startswith(f"{first}{reply}\n<|user|>\n") for prompt in stub.prompts) == 2
    returning = report.rounds[0].returning
    assert all(record.repeated_tokens is None for record in returning)
    assert all((record.cached_tokens or 0) > 0 for record in returning)


@pytest.mark.parametrize("more", [{"takes_extras": False}, {"takes_ids": False}])
def test_a_plain_server_is_asked_in_plain_words(more: dict[str, bool]) -> None:
    """It refuses the fields, or the prompt, that only engines know."""
    with Stub(**more) as stub:  # type: ignore[arg-type]
        report = replay(stub)
    assert report.is_passed and report.facts["prompts"] == "text"
    assert report.facts["fixed_reply_length"] is False
    assert "ignore_eos" not in stub.bodies[-1]


def test_the_chat_endpoint_is_sent_messages_with_the_servers_answers() -> None:
    with Stub() as stub:
        report = replay(stub, endpoint="chat")
    assert report.is_passed and report.facts["prompts"] == "messages"
    longest = max(stub.prompts, key=len)
    roles = [message["role"] for message in longest]
    assert roles == ["system", "user", "assistant", "user", "assistant", "user"]
    before = longest[:2]
    reply = [(sum(json.dumps(before).encode()) + at) % 200 for at in range(6)]
    assert longest[2]["content"] == "".join(f"w{token} " for token in reply)


def test_a_server_that_does_not_say_cached_tokens_is_reported_so() -> None:
    with Stub(says_cached=False, has_metrics=False) as stub:
        report = replay(stub)
    assert report.is_passed and not report.says_cached_tokens
    found = report.as_json()
    assert found["server"]["says_cached_tokens"] is False
    assert found["rounds"][0]["cached_tokens"] is None
    assert found["rounds"][0]["engine_counters"] is None


def test_the_model_is_the_first_or_the_one_asked_for() -> None:
    with Stub() as stub:
        assert replay(stub, model="other").facts["model"] == "other"
        assert {body["model"] for body in stub.bodies} == {"other"}


def test_a_key_is_sent_and_stays_out_of_the_report() -> None:
    with Stub(api_key="s3cret-key") as stub:
        report = replay(stub, api_key="s3cret-key")
        assert report.is_passed
        assert "s3cret" not in json.dumps(report.as_json())
        with pytest.raises(ConfigError, match="TIERED_KV_API_KEY"):
            replay(stub, api_key="wrong")
        with pytest.raises(ConfigError, match="TIERED_KV_API_KEY"):
            replay(stub)


@pytest.mark.parametrize("key", ["", "two\nlines", "schlüssel"])
def test_a_key_that_no_header_can_hold_is_refused_without_being_shown(key: str) -> None:
    with Stub() as stub, pytest.raises(ConfigError, match="--api-key") as refused:
        replay(stub, api_key=key)
    assert not key or key not in str(refused.value)


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("127.0.0.1:8000/v1", "must be like http"),
        ("ftp://127.0.0.1/v1", "must be like http"),
        ("http:///v1", "must be like http"),
        ("http://a b/v1", "--url"),
        ("http://me:secret@127.0.0.1/v1", "no user or password"),
        ("http://127.0.0.1/v1?x=1", "must end with its path"),
    ],
)
def test_an_address_that_is_none_is_refused(url: str, words: str) -> None:
    settings = ReplaySettings.model_validate({"engine": "openai", "url": url})
    with pytest.raises(ConfigError, match=words) as refused:
        run_live_replay(settings)
    assert "secret" not in str(refused.value)


def test_no_server_is_one_clear_line() -> None:
    with Stub() as stub:
        pass
    with pytest.raises(ConfigError, match=rf"--url http://127.0.0.1:{stub.port}/v1: no server"):
        replay(stub)


@pytest.mark.parametrize(
    ("stub", "words"),
    [
        (Stub(has_v1=False), "has no /models .HTTP 404.; give the server's base address"),
        (Stub(models_body=b"<html>"), "not as an OpenAI-compatible server does"),
        (Stub(models_body=b'{"data": [1]}'), "not as an OpenAI-compatible server does"),
        (Stub(models_body=b'{"data": []}'), "offers no model"),
        (Stub(max_model_len=250), "--context-tokens 300: .*the model's context is 250"),
        (Stub(fate=lambda number, body: "500"), "EngineCore encountered an issue"),
        (Stub(fate=lambda number, body: "400"), "logit_bias is odd"),
    ],
    ids=["404", "html", "odd", "none", "context", "500", "400"],
)
def test_a_server_that_cannot_be_used_is_one_clear_line(stub: Stub, words: str) -> None:
    with stub, pytest.raises(ConfigError, match=words) as refused:
        replay(stub)
    assert "\n" not in str(refused.value)


def test_a_model_that_is_not_offered_is_refused_with_those_that_are() -> None:
    with Stub() as stub, pytest.raises(ConfigError, match=rf"--model x: .* {MODEL}, other"):
        replay(stub, model="x")


def test_a_first_request_that_is_never_answered_ends_with_one_line() -> None:
    with (
        Stub(fate=lambda number, body: "stall") as stub,
        pytest.raises(ConfigError, match=r"not answered within 0.3 s \(--request-timeout-s\)"),
    ):
        replay(stub, request_timeout_s=0.3)


def test_the_log_holds_a_line_a_request_failed_ones_too(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    with Stub(fate=fails(3, fate="500")) as stub:
        first = replay(stub, request_log=log)
        second = replay(stub, request_log=log)
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert Counter(line["run"] for line in lines) == {first.run_id: 9, second.run_id: 9}
    assert [line.pop("run") for line in lines][:9] == [first.run_id] * 9
    assert lines[:9] == first.as_json()["turns"]
    assert Counter(line["failure"] for line in lines) == {None: 17, "server_error": 1}


def test_a_log_that_cannot_be_written_is_refused_before_any_request(tmp_path: Path) -> None:
    with Stub() as stub, pytest.raises(ConfigError, match=r"--request-log .*cannot be written"):
        replay(stub, request_log=tmp_path / "absent" / "log")
    assert len(stub.bodies) == 1


def test_a_full_disk_costs_the_log_and_not_the_replay(caplog: pytest.LogCaptureFixture) -> None:
    with Stub() as stub:
        report = replay(stub, request_log=Path("/dev/full"))
    assert report.is_passed
    assert [record.message for record in caplog.records if "/dev/full" in record.message] == [
        "--request-log /dev/full: no more is written: No space left on device"
    ]


def test_a_trace_is_replayed_line_by_line(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    lines = [
        {"timestamp": at * 500, "input_length": 40, "output_length": 50, "hash_ids": [7, at + 8]}
        for at in range(5)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    with Stub() as stub:
        report = replay(stub, trace=path, trace_block_tokens=32, clients=1)
    (one,) = report.rounds
    assert len(one.done) == 5 and one.by_turn == {} and one.returning == []
    assert all(len(prompt) == 40 for prompt in stub.prompts)
    assert len({tuple(prompt[:32]) for prompt in stub.prompts}) == 1
    assert {record.completion_tokens for record in one.done} == {6}
    assert [record.cached_tokens for record in one.done] == [0, 32, 32, 32, 32]
    assert report.as_json()["input"]["kind"] == "trace"


class Restarting(OpenAIEngine):
    """Is interrupted while it is started anew, which would take for ever."""

    async def begin_round(self, number: int) -> None:
        signal.raise_signal(signal.SIGINT)
        await asyncio.Event().wait()


def test_ctrl_c_between_two_rounds_keeps_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine that is started anew takes minutes; what was measured before is not lost."""
    monkeypatch.setattr("tiered_kv.replay.engines.openai.OpenAIEngine", Restarting)
    with Stub() as stub:
        report = replay(stub, rounds=2)
    assert report.interrupted and report.is_passed
    (one,) = report.rounds
    assert len(one.done) == 9 and not one.interrupted


def test_progress_says_how_far_and_how_long() -> None:
    shown: list[tuple[int, int, str]] = []
    with Stub(fate=fails(8, fate="500")) as stub:
        settings = ReplaySettings.model_validate(
            {"engine": "openai", "url": stub.url, "speed_up": 1e9, "conversations": 3, "turns": 3}
        )
        run_live_replay(settings, lambda *told: shown.append(told))
    assert [done for done, _, _ in shown] == list(range(1, 10))
    assert {planned for _, planned, _ in shown} == {9}
    assert shown[-1][2] == "0 in flight, 1 failed"
