"""The contract of an engine."""

from __future__ import annotations

from typing import Protocol

from tiered_kv.replay.requests import Outcome, Request


class Engine(Protocol):
    """Answers requests one at a time, reusing what a store has of their prompts.

    Single-threaded. When `serve` returns, the store has taken (or declined) all it was given, so
    that the next request's decisions do not depend on how fast this machine is.
    """

    name: str

    def serve(self, request: Request) -> Outcome:
        """Answer one prompt; blocks."""
