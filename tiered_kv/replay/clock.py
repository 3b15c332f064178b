"""The clock of a replay without a model: computing takes simulated time, a user's pause none."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ComputeSpeed:
    """How fast the engine stood in for computes; linear, without attention's quadratic part."""

    prefill_tokens_per_s: float = 8000.0
    decode_tokens_per_s: float = 40.0

    def prefill_s(self, tokens: int) -> float:
        """Seconds to the first token with so many tokens missing; the last is always computed."""
        return max(1, tokens) / self.prefill_tokens_per_s

    def decode_s(self, tokens: int) -> float:
        """Seconds for the tokens of an answer after its first."""
        return max(0, tokens - 1) / self.decode_tokens_per_s


class SimulatedClock:
    """Time as the served users would see it, if requests ran one at a time."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def wait_until(self, arrival_s: float) -> None:
        """Jump to an arrival; one in the past has queued, and nothing happens."""
        self.now_s = max(self.now_s, arrival_s)

    def advance(self, seconds: float) -> None:
        """Let so much time pass."""
        self.now_s += seconds
