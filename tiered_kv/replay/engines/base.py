"""The contracts of engines: over a store of ours, and with a cache of their own."""

from __future__ import annotations

from typing import Any, Protocol

from tiered_kv.replay.live.answer import Answer, LiveRequest
from tiered_kv.replay.live.counters import Counters
from tiered_kv.replay.requests import Outcome, Request
from tiered_kv.replay.tokenizer import Tokenizer


class Engine(Protocol):
    """Answers requests one at a time, reusing what a store has of their prompts.

    Single-threaded. When `serve` returns, the store has taken (or declined) all it was given, so
    that the next request's decisions do not depend on how fast this machine is.
    """

    name: str

    def serve(self, request: Request) -> Outcome:
        """Answer one prompt; blocks."""


class LiveEngine(Protocol):
    """Answers many requests at once, from a cache that is its own. Used on one event loop.

    Attributes:
        name: as in `--engine`.
        takes_ids: whether prompts are token ids (and answers come with theirs); known once open.
        vocabulary: ids of prompts lie below this; known once open.
        tokenizer: turns text into ids where it takes ids alone; None where it takes text too.
        max_tokens: the longest prompt and answer together; None where it does not say.
    """

    name: str
    takes_ids: bool
    vocabulary: int
    tokenizer: Tokenizer | None
    max_tokens: int | None

    async def open(self) -> None:
        """Make it ready to answer, one short request included that shares no prefix with others.

        Raises:
            ConfigError: it cannot be used as it was told to.
        """

    async def answer(self, request: LiveRequest) -> Answer:
        """Answer one prompt. Cancelling gives it up, in the engine too.

        Raises:
            RequestFailedError: it was not answered in full.
        """

    async def counters(self) -> Counters | None:
        """Its own counters so far; None where it shows none."""

    async def begin_round(self, number: int) -> None:
        """Called before each round, from 0; an engine that can be started anew is, from 1 on."""

    async def close(self) -> None:
        """Give back what it holds. Called once, also after a failed `open`."""

    def facts(self) -> dict[str, Any]:
        """What the report says of it, as JSON values; known once open."""
