"""One request of a live replay in numbers: a line of the log, an element of the report."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tiered_kv.replay.live.answer import FailureReason


@dataclass(frozen=True, slots=True)
class LiveRecord:
    """What became of one request that was sent.

    Attributes:
        round: from 0.
        index: its place in the input, from 0, the same in every round.
        position: order of sending within its round, from 0.
        session: its conversation; None in a trace that does not say.
        turn: its place in the conversation, from 0; None in a trace that does not say.
        request_id: sent to the server as ``X-Request-Id``.
        due_s: when it was due: its arrival, or the end of its conversation's last answer if that
            was later. Seconds since the round began.
        sent_s: when it was sent.
        end_s: when its answer was complete, or had failed.
        prompt_tokens: as the engine counts them, else as sent; None where neither is known.
        repeated_tokens: leading tokens that this round had sent or received before, in whole
            pages; None for prompts in text.
        cached_tokens: prompt tokens that the engine did not compute; None where it does not say.
        completion_tokens: tokens of the answer.
        ttft_s: time to first token; None if it failed.
        tpot_s: time per output token after the first; None for fewer than two.
        reply_digest: 16 hex digits that are equal for equal answers.
        finish_reason: the engine's word.
        failure: why it failed; None if it did not.
        message: what the engine or the connection said of the failure.
    """

    round: int
    index: int
    position: int
    session: int | None
    turn: int | None
    request_id: str
    due_s: float
    sent_s: float
    end_s: float
    prompt_tokens: int | None = None
    repeated_tokens: int | None = None
    cached_tokens: int | None = None
    completion_tokens: int = 0
    ttft_s: float | None = None
    tpot_s: float | None = None
    reply_digest: str | None = None
    finish_reason: str | None = None
    failure: FailureReason | None = None
    message: str | None = None

    @property
    def is_done(self) -> bool:
        """Whether it was answered in full."""
        return self.failure is None

    @property
    def latency_s(self) -> float:
        """From sending to the end of the answer, or to its failure."""
        return self.end_s - self.sent_s

    @property
    def waited_s(self) -> float:
        """How long it was held back because all clients were busy."""
        return self.sent_s - self.due_s

    def as_json(self) -> dict[str, Any]:
        """The record as JSON values; seconds to the microsecond."""
        found: dict[str, Any] = {
            "round": self.round,
            "index": self.index,
            "position": self.position,
            "session": self.session,
            "turn": self.turn,
            "request_id": self.request_id,
            "due_s": self.due_s,
            "sent_s": self.sent_s,
            "waited_s": self.waited_s,
            "prompt_tokens": self.prompt_tokens,
            "repeated_tokens": self.repeated_tokens,
            "cached_tokens": self.cached_tokens,
            "completion_tokens": self.completion_tokens,
            "ttft_s": self.ttft_s,
            "tpot_s": self.tpot_s,
            "latency_s": self.latency_s,
            "reply_digest": self.reply_digest,
            "finish_reason": self.finish_reason,
            "failure": self.failure,
            "message": self.message,
        }
        return {
            name: round(value, 6) if isinstance(value, float) else value
            for name, value in found.items()
        }
