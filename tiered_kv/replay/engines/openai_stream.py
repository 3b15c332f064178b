"""Streamed answers of OpenAI-compatible servers: from the lines of a response to an `Answer`."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator
from typing import Any

from tiered_kv.replay.live.answer import Answer, FailureReason, RequestFailedError
from tiered_kv.replay.requests import as_ids

_TOO_LONG = re.compile(
    r"context.length|too long|max_model_len|longer than the model", re.IGNORECASE
)
_FAILED = ("abort", "error")
_MESSAGE_CHARACTERS = 300


def failure_of_status(status: int, body: str) -> RequestFailedError:
    """What an HTTP status of 400 or more, and the body that came with it, mean."""
    message = f"HTTP {status}: {error_message(body)}"
    reason: FailureReason = "refused"
    if status in (429, 503):
        reason = "overloaded"
    elif status >= 500:
        reason = "server_error"
    elif _TOO_LONG.search(body):
        reason = "context_too_long"
    return RequestFailedError(reason, message)


def error_message(body: str) -> str:
    """The server's own words in an error body, in one line of bounded length."""
    try:
        found: Any = json.loads(body)
    except (json.JSONDecodeError, RecursionError):
        found = body
    for name in ("error", "message", "detail", "type"):
        if isinstance(found, dict) and found.get(name):
            found = found[name]
    line = " ".join(str(found).split())
    return line[:_MESSAGE_CHARACTERS] or "(no words)"


class AnswerStream:
    """Takes a streamed answer chunk by chunk.

    The first chunk that carries a token is the first token, whether or not its text is empty: a
    token may end in the middle of a character, or the server may run without a tokenizer. The last
    such chunk is the last token.

    Args:
        sent_s: when the request was sent.
    """

    def __init__(self, sent_s: float) -> None:
        self._sent_s = sent_s
        self._first_s: float | None = None
        self._last_s = sent_s
        self._chunks = 0
        self._ids: list[int] = []
        self._texts: list[str] = []
        self._usage: dict[str, Any] = {}
        self._finish_reason: str | None = None
        self.is_ended = False

    def take(self, line: str, now_s: float) -> None:
        """Take one line of the response, which had come by `now_s`.

        Raises:
            RequestFailedError: an error of the server, or no JSON.
        """
        if not line.startswith("data:"):
            return  # an empty line between events, a comment, or a field that is not used
        data = line[len("data:") :].strip()
        if data == "[DONE]":
            self.is_ended = True
            return
        try:
            chunk: Any = json.loads(data)
        except (json.JSONDecodeError, RecursionError) as error:
            raise RequestFailedError("stream_broken", f"not JSON: {data[:80]!r}") from error
        if not isinstance(chunk, dict):
            raise RequestFailedError("stream_broken", f"not a JSON object: {data[:80]!r}")
        if chunk.get("error"):
            raise RequestFailedError("server_error", error_message(data))
        if isinstance(chunk.get("usage"), dict):
            self._usage = chunk["usage"]
        for choice in chunk.get("choices") or []:
            self._take_choice(choice, now_s)

    def _take_choice(self, choice: dict[str, Any], now_s: float) -> None:
        delta = choice.get("delta") or {}
        ids = choice.get("token_ids")
        text = choice.get("text") or delta.get("content") or ""
        thought = delta.get("reasoning_content") or delta.get("reasoning")
        self._finish_reason = choice.get("finish_reason") or self._finish_reason
        if ids is not None:
            self._ids += ids
        self._texts.append(text)
        is_empty_text = ids is None and choice.get("text") == "" and not choice.get("finish_reason")
        if ids or text or thought or is_empty_text:
            self._chunks += 1
            self._first_s = now_s if self._first_s is None else self._first_s
            self._last_s = now_s

    def answer(self) -> Answer:
        """The answer, when the response has ended.

        Raises:
            RequestFailedError: it ended too early, or without a token.
        """
        if not self.is_ended and self._finish_reason is None:
            raise RequestFailedError("stream_broken", "the stream ended before the answer did")
        if self._finish_reason in _FAILED:
            raise RequestFailedError(
                "server_error",
                f"the server ended the answer with finish_reason {self._finish_reason}",
            )
        if self._first_s is None:
            raise RequestFailedError("no_tokens", "the answer ended without a token")
        counted = _count(self._usage.get("completion_tokens"))
        details = self._usage.get("prompt_tokens_details")
        cached = details.get("cached_tokens") if isinstance(details, dict) else None
        return Answer(
            sent_s=self._sent_s,
            first_s=self._first_s,
            last_s=self._last_s,
            prompt_tokens=_count(self._usage.get("prompt_tokens")),
            completion_tokens=counted or len(self._ids) or self._chunks,
            cached_tokens=_count(cached),
            ids=as_ids(self._ids) if self._ids else None,
            text="".join(self._texts),
            finish_reason=self._finish_reason,
        )


def _count(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


async def read_answer(lines: AsyncIterator[tuple[str, float]], sent_s: float) -> Answer:
    """The answer in the lines of a response, each with the time it came.

    Raises:
        RequestFailedError: an error of the server, an end too early, or lines of another form.
    """
    stream = AnswerStream(sent_s)
    async for line, now_s in lines:
        try:
            stream.take(line, now_s)
        except (AttributeError, TypeError) as error:
            raise RequestFailedError("stream_broken", f"not of the form: {line[:80]!r}") from error
    try:
        return stream.answer()
    except (TypeError, ValueError, OverflowError) as error:
        raise RequestFailedError("stream_broken", f"token_ids hold no ids: {error}") from error
