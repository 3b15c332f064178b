"""Streamed answers: which chunk is the first token, and what is no answer."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from tiered_kv.replay.engines.openai_stream import error_message, failure_of_status, read_answer
from tiered_kv.replay.live.answer import FAILURE_REASONS, Answer, RequestFailedError

DONE = "data: [DONE]"


def event(**choice: Any) -> str:
    """A chunk with one choice."""
    return "data: " + json.dumps({"choices": [{"index": 0, **choice}]})


def usage(**counts: Any) -> str:
    """The last chunk, which has no choice."""
    return "data: " + json.dumps({"choices": [], "usage": counts})


def read(*lines: str) -> Answer:
    """The answer of a response sent at 10 s whose lines come at 11, 12, ... s."""

    async def timed() -> AsyncIterator[tuple[str, float]]:
        for at, line in enumerate(lines):
            yield line, 11.0 + at

    return asyncio.run(read_answer(timed(), 10.0))


def test_times_are_those_of_the_first_and_the_last_token() -> None:
    found = read(
        event(text="", token_ids=[5]),
        event(text="", token_ids=[6, 7]),
        event(text="x", token_ids=[8], finish_reason="length"),
        usage(prompt_tokens=9, completion_tokens=4, prompt_tokens_details={"cached_tokens": 0}),
        DONE,
    )
    assert found.ttft_s == 1.0
    assert found.tpot_s == pytest.approx(2 / 3)
    assert found.ids is not None and found.ids.tolist() == [5, 6, 7, 8]
    assert (found.prompt_tokens, found.completion_tokens, found.cached_tokens) == (9, 4, 0)
    assert found.finish_reason == "length"


def test_a_role_an_empty_chunk_and_a_comment_are_no_token() -> None:
    found = read(
        "",
        ": ping",
        "event: message",
        event(delta={"role": "assistant", "content": ""}),
        event(text="", token_ids=[]),
        event(delta={"content": "hel"}),
        event(delta={"content": "lo"}),
        event(delta={}, finish_reason="stop"),
        DONE,
    )
    assert found.first_s == 16.0 and found.last_s == 17.0
    assert found.text == "hello" and found.ids is None
    assert found.completion_tokens == 2, "without usage, chunks are counted"
    assert found.prompt_tokens is None and found.cached_tokens is None


def test_a_token_in_the_middle_of_a_character_is_a_token() -> None:
    """The server sends empty text until the character is whole."""
    found = read(event(text=""), event(text="é"), event(text="", finish_reason="stop"), DONE)
    assert (found.first_s, found.last_s) == (11.0, 12.0)


def test_thinking_is_a_token_but_no_answer() -> None:
    found = read(event(delta={"reasoning_content": "hm"}), event(delta={"content": "yes"}), DONE)
    assert found.first_s == 11.0 and found.text == "yes"


def test_one_token_has_no_time_per_token() -> None:
    assert read(event(text="a", finish_reason="length"), DONE).tpot_s is None


def test_an_end_without_done_is_an_end_if_the_answer_had_finished() -> None:
    assert read(event(text="a"), event(text="b", finish_reason="stop")).text == "ab"
    with pytest.raises(RequestFailedError) as failed:
        read(event(text="a"), event(text="b"))
    assert failed.value.reason == "stream_broken"


@pytest.mark.parametrize(
    ("lines", "reason", "words"),
    [
        ([DONE], "no_tokens", "without a token"),
        ([event(text="", finish_reason="stop"), DONE], "no_tokens", "without a token"),
        (["data: <html>"], "stream_broken", "not JSON"),
        (["data: [1]"], "stream_broken", "not a JSON object"),
        (['data: {"choices": 5}'], "stream_broken", "not of the form"),
        (['data: {"choices": ["x"]}'], "stream_broken", "not of the form"),
        ([event(text="", token_ids=7)], "stream_broken", "not of the form"),
        ([event(text="", token_ids=["x"]), DONE], "stream_broken", "hold no ids"),
        ([event(text="", token_ids=[-1]), DONE], "stream_broken", "hold no ids"),
        ([event(text="", token_ids=[2**40]), DONE], "stream_broken", "hold no ids"),
        (['data: {"error": {"message": "KV load failed"}}'], "server_error", "KV load failed"),
        ([event(text="a", finish_reason="abort"), DONE], "server_error", "abort"),
    ],
)
def test_what_is_no_answer_says_why(lines: list[str], reason: str, words: str) -> None:
    with pytest.raises(RequestFailedError, match=words) as failed:
        read(*lines)
    assert failed.value.reason == reason
    assert reason in FAILURE_REASONS


@pytest.mark.parametrize(
    ("status", "body", "reason"),
    [
        (400, "This model's maximum context length is 8 tokens.", "context_too_long"),
        (400, "The input (9 tokens) is longer than the model's context length", "context_too_long"),
        (400, "logit_bias", "refused"),
        (404, "The model `x` does not exist", "refused"),
        (429, "slow down", "overloaded"),
        (503, "", "overloaded"),
        (500, "context length", "server_error"),
        (502, "<html>", "server_error"),
        (307, "", "refused"),
    ],
)
def test_a_status_means_a_reason(status: int, body: str, reason: str) -> None:
    found = failure_of_status(status, body)
    assert found.reason == reason
    assert f"HTTP {status}" in found.message


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ('{"error": {"message": "no\\n such  thing", "code": 4}}', "no such thing"),
        ('{"detail": "Not Found"}', "Not Found"),
        ('{"error": "plain"}', "plain"),
        ('{"error": {"message": "", "type": "InternalServerError"}}', "InternalServerError"),
        ("<html>\n<b>bad</b>", "<html> <b>bad</b>"),
        ("", "(no words)"),
        ("x" * 5000, "x" * 300),
    ],
)
def test_the_servers_words_are_one_line_of_bounded_length(body: str, words: str) -> None:
    assert error_message(body) == words
