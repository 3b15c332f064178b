"""One request to a live engine, and what came of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tiered_kv.replay.messages import Message
from tiered_kv.replay.requests import IdArray

Messages = tuple[Message, ...]
Prompt = IdArray | Messages
"""Token ids, or messages: which of them a server may be sent is found out when it is opened."""

FailureReason = Literal[
    "unreachable",
    "timeout",
    "context_too_long",
    "refused",
    "overloaded",
    "server_error",
    "stream_broken",
    "no_tokens",
]
FAILURE_REASONS: dict[FailureReason, str] = {
    "unreachable": "no connection to the server, or an engine that has died",
    "timeout": "not answered in full within --request-timeout-s",
    "context_too_long": "prompt and answer are longer than the model's context",
    "refused": "the server refused the request (HTTP 4xx)",
    "overloaded": "the server had no room (HTTP 429 or 503)",
    "server_error": "the server failed (HTTP 5xx, or an error in the stream)",
    "stream_broken": "the answer broke off, or was not a stream of JSON events",
    "no_tokens": "the answer ended without a token",
}


class RequestFailedError(Exception):
    """A request that was not answered in full: counted and reported, never the end of a replay."""

    def __init__(self, reason: FailureReason, message: str) -> None:
        super().__init__(message)
        self.reason = reason
        self.message = message


@dataclass(frozen=True, slots=True)
class LiveRequest:
    """One prompt to be answered greedily with `reply_tokens` tokens.

    `request_id` is sent along (HTTP header ``X-Request-Id``), so that a server's log can be joined
    with ours.
    """

    prompt: Prompt
    reply_tokens: int
    request_id: str


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer and its times, by `time.perf_counter` of this process.

    Attributes:
        sent_s: just before the request was sent.
        first_s: when the chunk with the first token was here.
        last_s: when the chunk with the last token was here.
        prompt_tokens: as the engine counts them; None where it does not say.
        completion_tokens: as the engine counts them, else as many as came.
        cached_tokens: prompt tokens that the engine did not compute; None where it does not say.
        ids: the answer's tokens; None where the engine gives text alone.
        text: the answer's text; "" where the engine gives tokens alone.
        finish_reason: the engine's word.
    """

    sent_s: float
    first_s: float
    last_s: float
    prompt_tokens: int | None
    completion_tokens: int
    cached_tokens: int | None
    ids: IdArray | None
    text: str
    finish_reason: str | None

    @property
    def ttft_s(self) -> float:
        """Time to first token."""
        return self.first_s - self.sent_s

    @property
    def tpot_s(self) -> float | None:
        """Time per output token after the first; None for an answer of one token."""
        if self.completion_tokens < 2:
            return None
        return (self.last_s - self.first_s) / (self.completion_tokens - 1)
