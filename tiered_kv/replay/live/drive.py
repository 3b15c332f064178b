"""Drives a live engine: every conversation at its own pace, so many requests in flight at once."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tiered_kv.replay.engines.base import LiveEngine
from tiered_kv.replay.live.answer import Answer, LiveRequest, Prompt, RequestFailedError
from tiered_kv.replay.live.record import LiveRecord
from tiered_kv.replay.live.repeats import RepeatCounter
from tiered_kv.replay.live.script import Conversation, Step

Watch = Callable[[LiveRecord, int], None]
"""Told of every record, and how many requests are in flight now."""

_GONE_AFTER = 8
"""Requests in a row without a connection after which the engine counts as gone for good."""


@dataclass(frozen=True, slots=True)
class Pace:
    """How fast requests are sent.

    Attributes:
        clients: most requests in flight at once.
        speed_up: recorded times are divided by this.
        timeout_s: a request not answered in full by then has failed.
    """

    clients: int = 16
    speed_up: float = 1.0
    timeout_s: float = 600.0


@dataclass(slots=True)
class Driven:
    """A round so far."""

    records: list[LiveRecord] = field(default_factory=list)
    wall_s: float = 0.0
    in_flight_max: int = 0
    is_gone: bool = False
    interrupted: bool = False


class Driver:
    """One round: sends every step of every conversation when it is due.

    A turn is due at its recorded time or when its conversation's last answer has come, whichever
    is later; it is sent as soon as fewer than `Pace.clients` requests are in flight. A turn that
    fails leaves its question in the conversation, without an answer, and the next one is sent all
    the same; only an engine that has gone (no connection, several times in a row) ends the round.

    Args:
        engine: open.
        conversations: what is said; shared with no other driver meanwhile.
        pace: how fast.
        run_id: starts every request id.
        number: of the round.
        page_tokens: repeated tokens are counted in whole pages of this size.
        watch: called after every request.
    """

    def __init__(
        self,
        engine: LiveEngine,
        conversations: Sequence[Conversation],
        pace: Pace,
        *,
        run_id: str,
        number: int,
        page_tokens: int,
        watch: Watch,
    ) -> None:
        self._engine = engine
        self._conversations = conversations
        self._pace = pace
        self._name = f"{run_id}-{number}"
        self._number = number
        self._repeats = RepeatCounter(page_tokens)
        self._watch = watch
        self._free = asyncio.Semaphore(pace.clients)
        self._gone = asyncio.Event()
        self._unreachable_in_a_row = 0
        self._in_flight = 0
        self._sent = 0
        self._start_s = 0.0
        self.done = Driven()

    async def run(self, stop: asyncio.Event) -> Driven:
        """Run to the end, until `stop` is set, or until the engine has gone.

        Requests in flight are then given up: they are neither done nor failed.
        """
        first_s = min((found.steps[0].arrival_s for found in self._conversations), default=0.0)
        self._start_s = time.perf_counter()
        ends: list[asyncio.Future[Any]] = [
            asyncio.ensure_future(event.wait()) for event in (stop, self._gone)
        ]
        talks: list[asyncio.Future[Any]] = [
            asyncio.ensure_future(self._talk(conversation, first_s))
            for conversation in self._conversations
        ]
        everything: asyncio.Future[Any] = asyncio.gather(*talks)
        try:
            await asyncio.wait({everything, *ends}, return_when=asyncio.FIRST_COMPLETED)
            is_complete = everything.done()
            if is_complete:
                everything.result()
        finally:
            for one in (*talks, *ends):
                one.cancel()
            await asyncio.gather(everything, *talks, *ends, return_exceptions=True)
        self.done.interrupted = stop.is_set() and not is_complete
        self.done.is_gone = self._gone.is_set()
        self.done.wall_s = time.perf_counter() - self._start_s
        return self.done

    async def _talk(self, conversation: Conversation, first_s: float) -> None:
        conversation.begin()
        ready_s = 0.0
        for at, step in enumerate(conversation.steps):
            due_s = max(ready_s, (step.arrival_s - first_s) / self._pace.speed_up)
            await asyncio.sleep(max(0.0, due_s - self._now_s()))
            async with self._free:
                if self._gone.is_set():
                    return
                prompt = conversation.prompt(at)
                answer = await self._ask(conversation, step, prompt, due_s)
            if answer is not None:
                conversation.answered(answer)
            ready_s = self._now_s()

    async def _ask(
        self, conversation: Conversation, step: Step, prompt: Prompt, due_s: float
    ) -> Answer | None:
        """Send one prompt, and record what came of it."""
        position, self._sent = self._sent, self._sent + 1
        ids = None if isinstance(prompt, tuple) else prompt
        known: dict[str, Any] = {
            "round": self._number,
            "index": step.index,
            "position": position,
            "session": conversation.session,
            "turn": step.turn,
            "request_id": f"{self._name}-{step.index}",
            "due_s": due_s,
            "sent_s": max(due_s, self._now_s()),
            "prompt_tokens": None if ids is None else len(ids),
            "repeated_tokens": None if ids is None else self._repeats.repeated_tokens(ids),
        }
        request = LiveRequest(prompt, step.reply_tokens, known["request_id"])
        answer, failure = await self._answer(request)
        known["end_s"] = self._now_s()
        if answer is None:
            assert failure is not None
            self._note(LiveRecord(**known, failure=failure.reason, message=failure.message))
            return None
        if ids is not None and answer.ids is not None:
            self._repeats.saw(ids, answer.ids)
        self._note(LiveRecord(**{**known, **_of_answer(answer, known["prompt_tokens"])}))
        return answer

    async def _answer(
        self, request: LiveRequest
    ) -> tuple[Answer | None, RequestFailedError | None]:
        self._in_flight += 1
        self.done.in_flight_max = max(self.done.in_flight_max, self._in_flight)
        try:
            timeout_s = self._pace.timeout_s
            return await asyncio.wait_for(self._engine.answer(request), timeout_s), None
        except RequestFailedError as error:
            return None, error
        except (asyncio.TimeoutError, TimeoutError):
            message = f"not answered in full within {self._pace.timeout_s:g} s"
            return None, RequestFailedError("timeout", message)
        finally:
            self._in_flight -= 1

    def _note(self, record: LiveRecord) -> None:
        self.done.records.append(record)
        if record.failure == "unreachable":
            self._unreachable_in_a_row += 1
            if self._unreachable_in_a_row >= _GONE_AFTER:
                self._gone.set()
        else:
            self._unreachable_in_a_row = 0
        self._watch(record, self._in_flight)

    def _now_s(self) -> float:
        return time.perf_counter() - self._start_s


def _of_answer(answer: Answer, prompt_tokens: int | None) -> dict[str, Any]:
    counted = answer.prompt_tokens
    return {
        "prompt_tokens": prompt_tokens if counted is None else counted,
        "cached_tokens": answer.cached_tokens,
        "completion_tokens": answer.completion_tokens,
        "ttft_s": answer.ttft_s,
        "tpot_s": answer.tpot_s,
        "reply_digest": _digest(answer),
        "finish_reason": answer.finish_reason,
    }


def _digest(answer: Answer) -> str:
    data = answer.text.encode() if answer.ids is None else np.asarray(answer.ids, "<u4").tobytes()
    return hashlib.sha256(data).hexdigest()[:16]
